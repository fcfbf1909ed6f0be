// node translate.cjs [beams] < in.txt > out.txt
const fs = require("fs"), path = require("path"), vm = require("vm");
const read = (file) => fs.promises.readFile(path.join(__dirname, file));
const run = async (file) => vm.runInThisContext(await read(file).then(String));
require("./engine.js");
const beams = process.argv[2], text = fs.readFileSync(0, "utf8");
if (beams !== undefined && !/^[1-9]\d*$/.test(beams)) {
  console.error(`beams are ${beams}; give a whole number from 1`);
  process.exit(1);
}
if (!text) process.exit();
const lines = text.replace(/\n$/, "").split("\n");
loadTranslator("model", { read, run, beams })
  .then((translate) => console.log(translate(lines).join("\n")))
  .catch((error) => { console.error(String(error)); process.exit(1); });
