"""Translation speed: ours with torch and CTranslate2, MarianMTModel, and CTranslate2 alone, with the same weights.

python benchmarks/decode.py --model outputs/multi30k_en_de --data ../multi30k --sentences 200

The first sentences of test.jsonl are translated from text to text, greedily and with five beams. Each contestant uses
its fastest batch size. Then some sentences are translated one at a time. Contestants take turns in separate processes,
each with glibc's allocator set as the command line sets it. Writes a page to benchmarks/results.
"""

import statistics
import sys
import tempfile
import time
from functools import partial

import report
import torch
from contest import Contestant, median_ratio, per_round, take_turns
from peers import read_pairs
from sacrebleu.metrics import BLEU
from transformers import AutoTokenizer

from vanilla_transformer import Translator
from vanilla_transformer.commands.parser import positive
from vanilla_transformer.conversion import to_native
from vanilla_transformer.loading import load_model

try:
    import ctranslate2

    from vanilla_transformer.conversion.ctranslate2 import to_ctranslate2
except ImportError:
    sys.exit("This benchmark needs CTranslate2; pip install ctranslate2.")

MAX_TOKENS = (512, 1024, 4096)  # source tokens per batch; each contestant uses its fastest
LONGEST = 100  # tokens of a translation
ALONE = 50  # sentences translated one at a time


class WithTranslator:
    """Our Translator with one of its backends, or the same one around a MarianMTModel."""

    def __init__(self, folder: str, device: str, is_marian: bool = False, **options):
        self.translator = Translator.from_pretrained(folder, device=device, **options)
        if is_marian:
            model = self.translator.model
            marian = to_native(model)
            marian.set_attn_implementation(model.config._attn_implementation)
            self.translator.engine.model = marian
        self.best = {}  # tokens in a batch, by beams

    def __call__(self, texts: list[str], beams: int, is_alone: bool = False) -> tuple[list[str], int]:
        """The translations, and the tokens in a batch (0 when sentences are translated one at a time)."""
        if is_alone:
            return [self.translate([text], beams, max(MAX_TOKENS))[0] for text in texts], 0
        if beams not in self.best:
            self.translate(texts[:20], beams, max(MAX_TOKENS))  # warms up
            seconds = {}
            for max_tokens in MAX_TOKENS:
                begin = time.perf_counter()
                self.translate(texts, beams, max_tokens)
                seconds[max_tokens] = time.perf_counter() - begin
            self.best[beams] = min(seconds, key=seconds.get)
        return self.translate(texts, beams, self.best[beams]), self.best[beams]

    def translate(self, texts: list[str], beams: int, max_tokens: int) -> list[str]:
        self.translator.max_tokens = max_tokens
        return self.translator(texts, num_beams=beams, max_new_tokens=LONGEST, length_penalty=1.0)


class WithCTranslate2(WithTranslator):
    """CTranslate2 as its documentation recommends: all sentences in one call, one worker of one thread a core."""

    def __init__(self, folder: str, device: str, workers: int):
        self.tokenizer, self.best = AutoTokenizer.from_pretrained(folder), {}
        threads = {"inter_threads": workers, "intra_threads": 1} if device == "cpu" else {}
        self.engine = ctranslate2.Translator(folder, device=device, **threads)

    def translate(self, texts: list[str], beams: int, max_tokens: int) -> list[str]:
        sources = [self.tokenizer.convert_ids_to_tokens(ids) for ids in self.tokenizer(texts).input_ids]
        options = {"batch_type": "tokens", "max_batch_size": max_tokens, "max_input_length": 0}
        results = self.engine.translate_batch(sources, beam_size=beams, max_decoding_length=LONGEST, **options)
        ids = [self.tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def contestants(folder: str, converted: str, device: str) -> dict[str, Contestant]:
    """Starts all contestants; `converted` is a folder for the CTranslate2 models."""
    found = {}

    def add(name: str, make, **options):
        found[name] = Contestant(name, partial(make, device=device, **options), keeps_memory=True)

    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    for short in report.precisions(device):
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[short]
        for attention in ("eager", "sdpa"):
            setting = {"folder": folder, "dtype": dtype, "attn_implementation": attention}
            add(f"ours, {short} {attention}", WithTranslator, **setting)
            add(f"MarianMTModel, {short} {attention}", WithTranslator, **setting, is_marian=True)
    for short, quantization in {"fp32": None, "int8": "int8"}.items():
        path = f"{converted}/{short}"
        to_ctranslate2(model, tokenizer, path, quantization)
        add(f"ours with CTranslate2, {short}", WithTranslator, folder=path, backend="ctranslate2")
        add(f"CTranslate2, {short}", WithCTranslate2, folder=path, workers=torch.get_num_threads())
    return found


COLUMNS = ["who", "tokens a batch", "sentences/s", "ms a sentence", "MiB at most", "BLEU", "as ours, fp32"]
COLUMNS += ["ours in torch is faster by", "ours with CTranslate2 is faster by"]


def rows_of(measured: dict[str, Contestant], references: list[str], rounds: int) -> list[list[str]]:
    with_torch = min(
        (measured[name] for name in measured if name.startswith("ours,")), key=lambda one: sum(one.seconds)
    )
    exact, _ = measured["ours, fp32 eager"].answers[-1]
    rows = []
    for name, one in measured.items():
        (found, max_tokens), seconds = one.answers[-1], statistics.median(per_round(one.seconds, rounds))
        with_ctranslate2 = measured[f"ours with CTranslate2, {'int8' if 'int8' in name else 'fp32'}"]
        same = sum(ours == theirs for ours, theirs in zip(exact, found, strict=True)) / len(found)
        rows.append(
            [
                name,
                f"{max_tokens:,}" if max_tokens else "",
                f"{len(found) / seconds:,.1f}",
                f"{1000 * seconds / len(found):,.1f}",
                f"{one.memory / 2**20:,.0f}",
                f"{BLEU().corpus_score(found, [references]).score:.2f}",
                f"{same:.1%}",
                f"{median_ratio(with_torch, one, rounds):.2f}",
                f"{median_ratio(with_ctranslate2, one, rounds):.2f}",
            ]
        )
    return rows


def main():
    parser = report.make_contest_parser(__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="a model trained by train.py, en to de")
    parser.add_argument("--data", required=True, metavar="DIR", help="English and German, as test.jsonl")
    parser.add_argument("--sentences", type=positive, default=1000, help="the first ones of the test split")
    options = parser.parse_args()
    if options.quick:
        options.sentences, options.rounds = 8, 1

    model = load_model(options.model)
    try:
        to_native(model)
    except ValueError as error:
        sys.exit(f"{options.model} cannot be measured: {error}")
    sources, references = zip(*read_pairs(options.data, "test")[: options.sentences], strict=True)
    sources, references = list(sources), list(references)
    config = model.config
    page = report.heading("Translating", ["torch", "transformers", "ctranslate2"])
    page += [
        "",
        f"A model with d_model {config.d_model}, {config.encoder_layers}+{config.decoder_layers} layers and a "
        f"vocabulary of {config.vocab_size:,}; {len(sources):,} sentences, from text to text, on {options.device}. "
        f"Batches have {', '.join(f'{size:,}' for size in MAX_TOKENS)} source tokens, whichever is fastest for a "
        "contestant; CTranslate2 divides them among one worker per core. Medians of "
        f"{options.rounds} rounds in which all take turns. Beam search stops as soon as it has as many finished "
        "translations as beams (`early_stopping=True`). Memory excludes the libraries. The last two columns are "
        "medians of the ratios of each round: of ours with torch in its fastest setting, and of ours with "
        "CTranslate2 in int8 for the rows in int8, in float32 for all others.",
    ]
    with tempfile.TemporaryDirectory() as converted:
        everyone = contestants(options.model, converted, options.device)
        turns = {"greedy": (sources, 1), "5 beams": (sources, 5)}
        turns["greedy, one sentence at a time"] = (sources[:ALONE], 1, True)
        for title, turn in turns.items():
            for one in everyone.values():
                one.forget()
            take_turns(list(everyone.values()), [turn], options.rounds)
            rows = rows_of(everyone, references[: len(turn[0])], options.rounds)
            page += ["", f"## {title}", "", *report.table(COLUMNS, rows)]
            print("\n".join(page[-4 - len(rows) :]), flush=True)
        for one in everyone.values():
            one.end()
    report.write(options, f"decode-{config.d_model}", page)


if __name__ == "__main__":
    main()
