"""A web page that translates and shows how: the n best with their scores, word alignment and attention."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html import escape
from pathlib import Path

import gradio as gr
from matplotlib.figure import Figure
from transformers import MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList, TextIteratorStreamer

from ..errors import UserError, explaining, one_line
from ..inspection.alignment import align_words
from ..inspection.attention import KINDS, AttentionMaps, attention_figure, attention_maps
from ..loading import load_results
from ..sentences_vanilla_transformer import InputError, Segments, TextTooLong
from ..translation_vanilla_transformer import BaseTranslator, Hypothesis, TorchEngine

N_BEST = 5  # rows of the table, if there are as many beams
MOST_BEAMS = 10
MOST_LABELS = 400  # in a picture; matplotlib takes up to 10 ms for each
CHARACTERS_PER_TOKEN = 20  # a text with more characters is refused before it is tokenized
MOST_WAITING = 20  # visitors, or requests of one; the next is told that the queue is full
MOST_SECONDS = 60  # of a request to torch; after that, each of its batches stops at its next token
# Fonts of the visitor's system, so that the page loads nothing from elsewhere.
THEME = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
CSS = """
.gradio-container {max-width: 1100px !important; margin: 0 auto !important}
#n_best table {width: 100%; margin: 0}
#n_best :is(table, tr, th, td) {border: 0 !important; vertical-align: top; padding: 6px}
#n_best td {border-top: 1px solid var(--border-color-primary) !important}
#n_best :is(th, td):first-child {white-space: nowrap; width: 4em}
#n_best td:last-child {overflow-wrap: anywhere}
#n_best, #alignment {background: var(--block-background-fill); padding: var(--block-padding)}
#alignment svg {width: 100%; max-width: 420px; display: block; margin: auto; color: var(--body-text-color)}
#alignment {max-height: 560px; overflow-y: auto}
.outdated :is(#alignment, #attention) {opacity: 0.3; transition: opacity 0.2s}
"""
# Dims what is shown of the last text, from the click until the new results are there.
OUTDATE = "(...inputs) => {document.querySelector('.gradio-container').classList.add('outdated'); return inputs}"
RENEW = "() => document.querySelector('.gradio-container').classList.remove('outdated')"
# Tasks that run the model wait for one another, so that two visitors do not share its processors.
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "model"}


def make_app(name: str, translator: BaseTranslator, model: PreTrainedModel | None, revision: str | None) -> gr.Blocks:
    """The page of a model.

    Args:
        name: The directory or Hub id that the model is from; of a directory only the last part is shown.
        model: The model whose attention is shown. None: no attention and no word alignment.
        revision: Of the Hub id.
    """
    languages, examples = read_results(name, revision)
    title = Path(name).resolve().name if Path(name).is_dir() else name
    page = Page(translator, model)
    with gr.Blocks(title=f"{title}: translation", analytics_enabled=False) as app:
        gr.HTML(f"<h1>{escape(': '.join([title, ' → '.join(languages)]) if len(languages) == 2 else title)}</h1>")
        page.build(examples)
    return app.queue(max_size=MOST_WAITING, api_open=False)  # an open API would not wait in the queue


def launch(app: gr.Blocks, **options) -> gr.Blocks:
    """Serves the page in a thread of its own; `options` go to Gradio's `launch`. Errors show no paths or traces."""
    options |= {"theme": THEME, "css": CSS, "footer_links": ["api"], "run_history": False}
    options |= {"share": False, "ssr_mode": False, "show_error": False, "prevent_thread_lock": True, "quiet": True}
    options |= {"max_file_size": 0}  # so Gradio stores no file of a visitor
    for name in ("no_proxy", "NO_PROXY"):  # Gradio asks its own page whether it is up, which no proxy can reach
        hosts = [os.environ.get(name), "localhost", "127.0.0.1", options.get("server_name")]
        os.environ[name] = ",".join(filter(None, hosts))
    app.launch(**options)
    return app


def read_results(name: str, revision: str | None) -> tuple[list[str], list[str]]:
    """The languages of a model, and sources of example translations, those that equal their reference first.

    Empty lists if it has no `all_results.json`. Raises UserError if that file is damaged.
    """
    results = load_results(name, revision)
    with explaining(f"all_results.json of {name} cannot be read", Exception):  # it may hold anything
        languages = [results[key] + "" for key in ("source_lang", "target_lang") if results.get(key)]
        examples = sorted(results.get("examples", []), key=lambda one: one["translation"] != one.get("reference"))
        return languages, [example["source"] for example in examples]


class Page:
    """The parts of the page, and what they do."""

    def __init__(self, translator: BaseTranslator, model: PreTrainedModel | None):
        self.translator = translator
        self.model = model
        self.threads = ThreadPoolExecutor(max_workers=1)
        self.has_time_limit = isinstance(translator.engine, TorchEngine)

    def build(self, examples: list[str]):
        """Lays the page out; columns stand below each other on a narrow screen."""
        saved = self.translator.engine.generation_config
        longest = self.translator.segmenter.longest
        count = saved.num_beams or 4  # section 6.1
        exponent = 1.0 if saved.length_penalty is None else saved.length_penalty
        first = self.translated(examples, count, exponent)
        with gr.Row():
            with gr.Column(min_width=300):
                source = gr.Textbox(
                    first["source"],
                    label="Text",
                    placeholder="Type a text; Shift+Enter translates it",
                    lines=3,
                    max_length=CHARACTERS_PER_TOKEN * longest,
                    autofocus=True,
                    elem_id="source",
                )
                button = gr.Button("Translate", variant="primary", elem_id="translate")
            with gr.Column(min_width=300):
                target = gr.Textbox(
                    first["target"], label="Translation", lines=3, buttons=["copy"], elem_id="translation"
                )
                speed = gr.Markdown(first["speed"], label="Speed", elem_id="speed")
        with gr.Row():
            with gr.Column(min_width=300):
                beams = gr.Slider(1, max(MOST_BEAMS, count), count, step=1, label="Beams")
            with gr.Column(min_width=300):
                label = "Length penalty, with several beams"
                penalty = gr.Slider(min(0, exponent), max(2, exponent), exponent, step=0.1, label=label)
        if examples:
            chosen = gr.Examples(examples, source, label="Examples", elem_id="examples")
        shown = gr.State(first["shown"])  # the pair whose alignment and attention are shown
        with gr.Row():
            with gr.Column(min_width=300, scale=2):
                gr.Markdown("### Best translations")
                table = gr.HTML(first["table"], label="Best translations", elem_id="n_best")
                alignment = gr.HTML(first["alignment"], elem_id="alignment")
            with gr.Column(min_width=300, scale=3):
                inspection = (
                    self.build_inspection(shown, alignment, first["picture"]) if self.model is not None else {}
                )
        call = {"fn": self.translate, "inputs": [source, beams, penalty], "outputs": [target, speed, table, shown]}
        call |= {"show_progress": "minimal", **ONE_AT_A_TIME}
        events = [gr.on([button.click, source.submit], **call, js=OUTDATE, api_name="translate")]
        if examples:
            events.append(chosen.load_input_event.success(**call, js=OUTDATE, api_visibility="private"))
        for event in events:
            event.failure(None, js=RENEW)
            (event.success(**inspection) if inspection else event).then(None, js=RENEW)

    def translated(self, texts: list[str], num_beams: int, length_penalty: float) -> dict:
        """What the page opens with: the first text and all that is shown of it, or empty boxes if there is none."""
        first = dict.fromkeys(("source", "target", "table", "alignment", "picture"))
        first |= {"speed": f"Up to {self.translator.segmenter.longest} tokens at a time.", "shown": ("", "")}
        with suppress(gr.Error):  # of a text that is too long for this page
            for text in texts[:1]:
                *_, found = self.translate(text, num_beams, length_penalty)
                first |= {"source": text, **dict(zip(("target", "speed", "table", "shown"), found, strict=True))}
                if self.model is not None:
                    first["alignment"], first["picture"] = self.inspect(first["shown"], "cross", -1, -1)
        return first

    def build_inspection(self, shown: gr.State, alignment: gr.HTML, figure: Figure | None) -> dict:
        """Adds the attention menus and plot to the page; returns the arguments of the Gradio event that redraws them.

        `shown` holds the pair to draw, `alignment` is the place of the word alignment, which is redrawn too, and the
        plot shows `figure` at first.
        """
        config = self.model.config
        layers = range(max(config.encoder_layers, config.decoder_layers))
        heads = range(max(config.encoder_attention_heads, config.decoder_attention_heads))
        kinds = [(title, kind) for kind, (title, *_) in KINDS.items()]
        gr.Markdown("### Attention")
        with gr.Row():
            kind = gr.Dropdown(kinds, value="cross", label="Kind", min_width=220, scale=2, elem_id="kind")
            layer = gr.Dropdown(list(layers), value=config.decoder_layers - 1, label="Layer", min_width=90)
            head = gr.Dropdown([("all", -1), *((str(n), n) for n in heads)], value=-1, label="Head", min_width=90)
        picture = gr.Plot(figure, show_label=False, elem_id="attention")
        call = {"fn": self.inspect, "inputs": [shown, kind, layer, head], "outputs": [alignment, picture]}
        call |= {"show_progress": "hidden", "api_visibility": "private", **ONE_AT_A_TIME}
        gr.on([kind.change, layer.change, head.change], **call)
        return call

    def translate(self, text: str, num_beams: float, length_penalty: float) -> Iterator[tuple]:
        """Translation, speed, table and the pair to inspect, which is the first piece with its translation.

        With one beam, also each word as it is written.
        """
        if not (text or "").strip():
            raise gr.Error("Type a text first.", print_exception=False)
        longest = self.translator.segmenter.longest
        if len(text) > CHARACTERS_PER_TOKEN * longest:
            raise gr.Error(f"The text has {len(text):,} characters; shorten it.", print_exception=False)
        streamer = TextIteratorStreamer(self.translator.tokenizer, skip_prompt=True, skip_special_tokens=True)
        running = self.threads.submit(self.search, text, num_beams, length_penalty, streamer)
        written = ""
        for part in filter(None, streamer):
            written += part
            yield written, gr.skip(), gr.skip(), gr.skip()
        try:
            segments, best, seconds = running.result()
        except TextTooLong as error:
            piece = (
                f"A piece of the text has {error.tokens} tokens, more than the {error.limit} that are translated at "
            )
            raise gr.Error(f"{piece}a time; shorten it.", print_exception=False) from error
        except InputError as error:  # an option that the backend does not have, a lone surrogate, ...
            raise gr.Error(one_line(error), print_exception=False) from error
        tokens = sum(hypotheses[0].tokens for hypotheses in best)
        speed = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s"
        if self.has_time_limit and seconds > MOST_SECONDS:
            speed += f". Stopped after {MOST_SECONDS} s, so the end may be missing."
        written = [hypotheses[0].text for hypotheses in best]
        shown = (segments.pieces[0], written[0]) if written else ("", "")
        yield segments.join(written)[0], speed, "".join(map(draw_table, best)), shown

    def search(
        self, text: str, num_beams: float, length_penalty: float, streamer: TextIteratorStreamer
    ) -> tuple[Segments, list[list[Hypothesis]], float]:
        """The pieces of a text, the n best translations of each, and the seconds that they took.

        Always ends `streamer`, even after an error, because the page waits for that.
        """
        start = time.perf_counter()
        try:
            if num_beams != num_beams:  # NaN, which the slider lets pass
                raise InputError("Choose a number of beams.")
            segments, num_beams = self.translator.split([text]), int(num_beams)
            options = {"num_beams": num_beams, **self.limit(segments)}
            if num_beams > 1:
                options["length_penalty"] = length_penalty
            elif len(segments.sources) == 1:
                options["streamer"] = streamer
            best = self.translator.n_best_of_pieces(segments.sources, min(N_BEST, num_beams), **options)
            return segments, best, time.perf_counter() - start
        finally:
            streamer.end()

    def limit(self, segments: Segments) -> dict:
        """The option that ends the searches of a request that would go on, even after the visitor has left."""
        if self.has_time_limit:  # from now, where `max_time` would be that of each batch
            limit = MaxTimeCriteria(MOST_SECONDS, initial_timestamp=time.time())
            return {"stopping_criteria": StoppingCriteriaList([limit])}
        longest = max(map(len, segments.sources), default=1)
        of_model = self.translator.engine.stopping_options(longest, {})["max_length"]
        return {"max_length": min(of_model, 1 + 2 * longest + 50)}  # with the start token

    def inspect(self, shown: tuple[str, str], kind: str, layer: int, head: int) -> tuple[str, Figure | None]:
        """The word alignment of a pair, and a picture of its attention."""
        source, target = shown
        if not target.strip():
            return "", None
        try:
            maps = attention_maps(self.model, self.translator.tokenizer, source, target)
            labels = getattr(maps, kind).shape[1] * sum(map(len, maps.axes(kind)))
            if head < 0 and labels > MOST_LABELS:
                gr.Info("The text is long, so one head is drawn at a time; this is head 0.")
                head = 0
            figure = attention_figure(maps, kind, layer, None if head < 0 else head)
        except UserError as error:
            raise gr.Error(one_line(error), print_exception=False) from error
        figure.set_dpi(min(100, 1600 / figure.get_figwidth()))
        return draw_alignment(source.split(), target.split(), maps), figure


def draw_table(best: list[Hypothesis]) -> str:
    """The n best with their scores, as HTML."""
    rows = [f"<tr><td>{one.score:.3f}</td><td>{escape(one.text)}</td></tr>" for one in best]
    title = "log-probability, divided by the number of tokens to the power of the length penalty"
    return f'<table><tr><th title="{title}">Score</th><th>Translation</th></tr>{"".join(rows)}</table>'


def draw_alignment(source: list[str], target: list[str], maps: AttentionMaps) -> str:
    """The words of both sides in two columns, with a line between those that are aligned, as SVG."""
    links = [(i, j) for i, j in align_words(maps) if i < len(source) and j < len(target)]
    spoken = ", ".join(f"{target[j]} from {source[i]}" for i, j in links)
    height = 26 * max(len(source), len(target))
    size = f'viewBox="0 0 360 {height}" font-size="15"'
    parts = [f'<h3>Word alignment</h3><svg {size} role="img" aria-label="{escape(spoken)}">']
    for i, j in links:
        line = f'x1="140" y1="{26 * i + 13}" x2="220" y2="{26 * j + 13}"'
        parts.append(f'<line {line} stroke="var(--color-accent)" stroke-width="2"/>')
    for words, x, anchor in [(source, 132, "end"), (target, 228, "start")]:
        for number, word in enumerate(words):
            place = f'x="{x}" y="{26 * number + 18}" text-anchor="{anchor}" fill="currentColor"'
            parts.append(f"<text {place}>{escape(word if len(word) <= 16 else word[:15] + '…')}</text>")
    return "".join([*parts, "</svg>"])
