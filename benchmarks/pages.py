"""Pages that translate in the browser, in headless Chromium: what they load, and sentences/s.

python benchmarks/pages.py --data DIR --languages en de examples/browser examples/offline

Each folder is a page with its library and a model, set up as examples/README.md says. The data have test.jsonl, whose
lines have a text for each language. The sentences are translated one at a time, greedily; the time is that from the
click to the translation. Writes a page to benchmarks/results.
"""

import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import report
import sacrebleu
from peers import read_pairs
from selenium import webdriver
from selenium.webdriver.common.by import By

COLUMNS = ["page", "MB loaded", "of these, in model/", "test BLEU", "sentences/s"]
GREEDY = """const beams = document.querySelector("#beams");
if (beams) { beams.value = 1; beams.dispatchEvent(new Event("change")); }"""
TRANSLATE = """const [text, done] = arguments, output = document.querySelector("output"), start = performance.now();
output.value = "";
document.querySelector("textarea").value = text;
const observer = new MutationObserver(() => {
  if (output.value) { observer.disconnect(); done([output.value, performance.now() - start]); }
});
observer.observe(output, { childList: true, characterData: true, subtree: true });
document.querySelector("button").click();"""


class Server(SimpleHTTPRequestHandler):
    """Serves a folder, and notes the size of each file that is loaded in `loaded`."""

    def __init__(self, *args, loaded: dict[str, int], **kwargs):
        self.loaded = loaded
        super().__init__(*args, **kwargs)

    def log_message(self, *args):
        file = Path(self.translate_path(self.path))
        if file.is_file():
            self.loaded[self.path] = file.stat().st_size


def measure(folder: str, texts: list[str]) -> tuple[dict[str, int], list[str], float]:
    """The bytes of the files that the page loads, the translations, and the seconds that they took."""
    loaded: dict[str, int] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=folder, loaded=loaded))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options)
    try:
        browser.set_script_timeout(120)
        browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
        for script in ("", GREEDY):  # a page with beams starts its engine again
            browser.execute_script(script)
            while not browser.find_element(By.TAG_NAME, "button").is_enabled():
                time.sleep(0.1)
        browser.execute_async_script(TRANSLATE, texts[0])
        found = [browser.execute_async_script(TRANSLATE, text) for text in texts]
    finally:
        browser.quit()
        server.shutdown()
    return loaded, [text for text, _ in found], sum(milliseconds for _, milliseconds in found) / 1000


def main():
    parser = report.make_parser(__doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--languages", nargs=2, default=["en", "de"], metavar=("SOURCE", "TARGET"))
    parser.add_argument("--sentences", type=int, default=100, metavar="N", help="(default: %(default)s)")
    options = parser.parse_args()
    pairs = read_pairs(options.data, "test", options.languages)[: 3 if options.quick else options.sentences]
    texts, references = map(list, zip(*pairs, strict=True))
    rows = []
    for folder in options.folders:
        loaded, translations, seconds = measure(folder, texts)
        bleu = sacrebleu.corpus_bleu(translations, [references]).score
        sizes = [sum(loaded.values()), sum(size for path, size in loaded.items() if path.startswith("/model/"))]
        megabytes = [f"{size / 1e6:.1f}" for size in sizes]
        rows.append([Path(folder).name, *megabytes, f"{bleu:.2f}", f"{len(texts) / seconds:.1f}"])
        print("; ".join(rows[-1]), flush=True)
    lines = report.heading("Pages that translate in the browser", ["selenium"])
    lines += ["", f"{len(texts):,} sentences, one at a time, greedily.", "", *report.table(COLUMNS, rows)]
    report.write(options, "pages", lines)


if __name__ == "__main__":
    main()
