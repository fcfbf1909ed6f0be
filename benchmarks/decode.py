"""Translation speed: ours with torch and CTranslate2, MarianMTModel, and CTranslate2 alone, with the same weights.

python benchmarks/decode.py --model outputs/multi30k_en_de --data ../multi30k
python benchmarks/decode.py --model outputs/multi30k_en_de --data ../multi30k --sentences 200 --beams 5

The first sentences of test.jsonl are translated greedily and by beam search, from text to text, in batches of as many
tokens as suit each contestant best; then some one by one. Contestants take turns in separate processes, each with
glibc's allocator set as the command line sets it. Prints tables and writes a page, with a picture, to
benchmarks/results.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time

import report
from contest import Contestant, median_ratio, per_round, take_turns

MAX_TOKENS = (512, 1024, 4096)  # source tokens in a batch, of which each contestant takes the fastest
LONGEST = 100  # tokens of a translation
ALONE = 20  # sentences that are translated one by one


class WithTranslator:
    """Our Translator with one of its backends, or the same one around a MarianMTModel."""

    def __init__(self, folder: str, device: str, is_marian: bool = False, **options):
        from peers import to_marian

        from vanilla_transformer import Translator

        self.translator = Translator.from_pretrained(folder, device=device, **options)
        if is_marian:
            model = self.translator.model
            marian = to_marian(model, model.config._attn_implementation)
            self.translator.model = marian.to(model.device, model.dtype).eval()
        self.best = {}  # tokens in a batch, by beams

    def __call__(self, texts: list[str], beams: int, is_alone: bool = False) -> tuple[list[str], int]:
        """The translations and the tokens in a batch; 0 of sentences that are translated one by one."""
        if is_alone:
            return [self.translate([text], beams, max(MAX_TOKENS))[0] for text in texts], 0
        if beams not in self.best:
            self.translate(texts[:ALONE], beams, max(MAX_TOKENS))  # warms up
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
        import ctranslate2
        from transformers import AutoTokenizer

        self.tokenizer, self.best = AutoTokenizer.from_pretrained(folder), {}
        threads = {"inter_threads": workers, "intra_threads": 1} if device == "cpu" else {}
        self.engine = ctranslate2.Translator(folder, device=device, **threads)

    def translate(self, texts: list[str], beams: int, max_tokens: int) -> list[str]:
        sources = [self.tokenizer.convert_ids_to_tokens(ids) for ids in self.tokenizer(texts).input_ids]
        options = {"batch_type": "tokens", "max_batch_size": max_tokens, "max_input_length": 0}
        results = self.engine.translate_batch(sources, beam_size=beams, max_decoding_length=LONGEST, **options)
        ids = [self.tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def make_translator(options: dict) -> WithTranslator:
    return WithTranslator(**options)


def make_ctranslate2(options: dict) -> WithTranslator:
    return WithCTranslate2(**options)


def contestants(folder: str, converted: str, device: str) -> dict[str, Contestant]:
    """All of them; `converted` is a folder for models of CTranslate2."""
    import torch
    from transformers import AutoTokenizer

    from vanilla_transformer.conversion.ctranslate2 import to_ctranslate2
    from vanilla_transformer.translation_vanilla_transformer import cpu_has_bfloat16, load_model

    found = {}

    def add(name: str, make, **options):
        found[name] = Contestant(name, make, options | {"device": device}, keeps_memory=True)

    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    if device == "cpu" and not cpu_has_bfloat16():
        del dtypes["bf16"]
    for short, dtype in dtypes.items():
        for attention in ("eager", "sdpa"):
            setting = {"folder": folder, "dtype": dtype, "attn_implementation": attention}
            add(f"ours, {short} {attention}", make_translator, **setting)
            add(f"MarianMTModel, {short} {attention}", make_translator, **setting, is_marian=True)
    for short, quantization in {"fp32": None, "int8": "int8"}.items():
        path = f"{converted}/{short}"
        to_ctranslate2(model, tokenizer, path, quantization)
        add(f"ours with CTranslate2, {short}", make_translator, folder=path, backend="ctranslate2")
        add(f"CTranslate2, {short}", make_ctranslate2, folder=path, workers=torch.get_num_threads())
    return found


COLUMNS = ["who", "tokens a batch", "sentences/s", "ms a sentence", "MiB at most", "BLEU", "as ours, fp32"]
COLUMNS += ["ours in torch, its best, is faster by", "ours with CTranslate2, its best, is faster by"]


def rows_of(measured: dict[str, Contestant], references: list[str], rounds: int) -> list[list[str]]:
    from sacrebleu.metrics import BLEU

    def best(kind: str) -> Contestant:
        return min((one for one in measured.values() if one.name.startswith(kind)), key=lambda one: sum(one.seconds))

    with_torch, with_ctranslate2 = best("ours,"), best("ours with CTranslate2,")
    exact, _ = next(one for one in measured.values() if one.name.startswith("ours, fp32")).answers[-1]
    rows = []
    for name, one in measured.items():
        (found, max_tokens), seconds = one.answers[-1], statistics.median(per_round(one.seconds, rounds))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="a model trained by train.py, en to de")
    parser.add_argument("--data", required=True, metavar="DIR", help="Multi30k, as test.jsonl")
    parser.add_argument("--sentences", type=report.at_least_one, default=1000, help="the first ones of the test split")
    parser.add_argument("--beams", type=report.at_least_one, nargs="+", default=[1, 5])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=report.at_least_one, default=5)
    report.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.sentences, options.rounds = 8, 1
    try:
        import ctranslate2  # noqa: F401
    except ImportError:
        sys.exit("This benchmark needs CTranslate2; pip install vanilla-transformer[ctranslate2].")
    from peers import read_pairs, to_marian

    from vanilla_transformer.translation_vanilla_transformer import load_model

    model = load_model(options.model)
    try:
        to_marian(model)
    except ValueError as error:
        sys.exit(f"{options.model} cannot be measured: {error}")
    sources, references = zip(*read_pairs(options.data, "test")[: options.sentences], strict=True)
    sources, references = list(sources), list(references)
    config = json.loads(model.config.to_json_string(use_diff=False))
    page = report.heading("Translating", ["torch", "transformers", "ctranslate2"])
    page += [
        "",
        "A model with d_model {d_model}, {encoder_layers}+{decoder_layers} layers and a vocabulary of "
        "{vocab_size:,}; ".format(**config)
        + f"{len(sources):,} sentences, from text to text, on {options.device}. "
        + "Each contestant takes batches of as many "
        f"source tokens, of {', '.join(f'{size:,}' for size in MAX_TOKENS)}, as took it the least time before; "
        "CTranslate2 divides them among as many workers as there are cores. Medians of "
        f"{options.rounds} rounds in which all take turns. Beam search stops with as many finished translations as "
        "beams (`early_stopping=True`). Memory is that of a process beyond its libraries.",
    ]  # fmt: skip
    picture = {}
    with tempfile.TemporaryDirectory() as converted:
        everyone = contestants(options.model, converted, options.device)
        turns = {f"{beams} beams" if beams > 1 else "greedy": (sources, beams) for beams in options.beams}
        turns["greedy, one sentence at a time"] = (sources[:ALONE], 1, True)
        for title, turn in turns.items():
            for one in everyone.values():
                one.forget()
            take_turns(list(everyone.values()), [turn], options.rounds)
            rows = rows_of(everyone, references[: len(turn[0])], options.rounds)
            page += ["", f"## {title}", "", *report.table(COLUMNS, rows)]
            print("\n".join(page[-4 - len(rows) :]), flush=True)
            picture[title] = {row[0]: float(row[2].replace(",", "")) for row in rows}
        for one in everyone.values():
            one.end()
    report.write_with_bars(options, "decode", page, "Translating", picture, "sentences/s")


if __name__ == "__main__":
    main()
