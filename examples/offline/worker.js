// Translates beside the page, which stays responsive: {text, html} -> {translation} or {error}; first, {isReady}.
importScripts("engine.js");
const read = async (file) => {
  const response = await fetch(file);
  if (!response.ok) throw new Error(`${file}: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
};
const beams = Number(new URL(location).searchParams.get("beams"));
const loaded = loadTranslator("model", { read, run: importScripts, beams });
const answer = (promise) => promise.then(postMessage, (error) => postMessage({ error: String(error) }));
answer(loaded.then(() => ({ isReady: true })));
onmessage = ({ data }) => answer(loaded.then((translate) => ({ translation: translate([data.text], data.html)[0] })));
