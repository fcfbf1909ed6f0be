// Bergamot, the engine in Firefox, with a model that `vanilla-transformer convert --to marian-bin` wrote, for a worker of
// a page (worker.js) and for Node (translate.cjs). `read` returns the content of a file, `run` executes a script.
const ENGINE = "node_modules/@browsermt/bergamot-translator/worker/bergamot-translator-worker";
const PRODUCTS = ["prepare_a", "prepare_b", "prepare_b_from_transposed", "prepare_b_from_quantized_transposed"];
PRODUCTS.push("prepare_bias", "multiply_and_add_bias", "select_columns_of_b");

async function startEngine(read, run) {
  const code = await read(`${ENGINE}.wasm`);
  const started = new Promise((resolve, reject) => {
    const engine = (globalThis.Module = {
      print: () => {},
      onAbort: reject,
      onRuntimeInitialized: () => resolve(engine),
      instantiateWasm(imports, done) {
        // The products in 8 bits are imported, and exported by the same file; Firefox has faster ones.
        const exported = (name) => "int8" + name.replace(/(^|_)./g, (start) => start.at(-1).toUpperCase()) + "Fallback";
        const product = (name) => [`int8_${name}`, (...values) => engine.asm[exported(name)](...values)];
        const all = { ...imports, wasm_gemm: Object.fromEntries(PRODUCTS.map(product)) };
        WebAssembly.instantiate(code, all).then(({ instance }) => done(instance), reject);
        return {};
      },
    });
  });
  const [engine] = await Promise.all([started, run(`${ENGINE}.js`)]);
  return engine;
}

// Returns a function that translates a list of texts, whose tags it carries over if `html` is true.
globalThis.loadTranslator = async function (folder, { read, run, beams }) {
  const files = ["model.bin", "vocab.spm", "config.yml"].map((name) => read(`${folder}/${name}`));
  const [engine, model, vocabulary, options] = await Promise.all([startEngine(read, run), ...files]);
  const memory = (content, alignment) => {
    const copy = new engine.AlignedMemory(content.byteLength, alignment);
    copy.getByteArrayView().set(new Uint8Array(content));
    return copy;
  };
  let config = new TextDecoder().decode(options);
  config = config.replace(/^(models|vocabs):\n(- .*\n)+|^relative-paths.*\n/gm, ""); // it gets the contents, no files
  if (!config.includes("gemm-precision")) // in float32, it has Marian's options
    config += "max-length-break: 128\nalignment: soft\ngemm-precision: float32\n";
  if (beams) config = config.replace(/^beam-size:.*/m, `beam-size: ${beams}`);
  const vocabularies = new engine.AlignedMemoryList();
  vocabularies.push_back(memory(vocabulary, 64));
  const noShortlist = new engine.AlignedMemory(0, 64);
  const translator = new engine.TranslationModel(config, memory(model, 256), noShortlist, vocabularies, null);
  const service = new engine.BlockingService({ cacheSize: 0 });
  return (texts, html = false) => {
    const list = new engine.VectorString(), wishes = new engine.VectorResponseOptions();
    for (const text of texts) {
      list.push_back(text);
      wishes.push_back({ html, alignment: html, qualityScores: false });
    }
    const responses = service.translate(translator, list, wishes);
    const translations = texts.map((_, number) => responses.get(number).getTranslatedText());
    for (const object of [list, wishes, responses]) object.delete();
    return translations;
  };
};
