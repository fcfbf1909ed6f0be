// node translate.cjs [beams] < in.txt > out.txt
const fs = require("fs"), path = require("path"), vm = require("vm");
const read = (file) => fs.promises.readFile(path.join(__dirname, file));
const run = async (file) => vm.runInThisContext(await read(file).then(String));
require("./engine.js");
const lines = fs.readFileSync(0, "utf8").replace(/\n$/, "").split("\n");
loadTranslator("model", { read, run, beams: process.argv[2] })
  .then((translate) => console.log(translate(lines).join("\n")))
  .catch((error) => { console.error(String(error)); process.exit(1); });
