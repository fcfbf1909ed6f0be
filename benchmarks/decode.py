"""Translating: ours against MarianMTModel.generate and CTranslate2 with the same weights, on a trained model.

python benchmarks/decode.py --model outputs/multi30k_en_de --data ../multi30k
python benchmarks/decode.py --model outputs/multi30k_en_de --data ../multi30k --sentences 200 --beams 5

The sentences of test.jsonl are translated greedily and by beam search, sorted by length, in batches of as many tokens
as suit each contestant best; then some one by one, for the time that a single sentence takes. What comes out must
agree. Each translates in a process of its own, one after the other; of each, all precisions take part, and of both
models also int8, as the Translator makes it; on a CPU both as `generate` runs by itself and as the Translator's
command runs it, with glibc's allocator set and several batches side by side. CTranslate2, which is optional (pip
install ctranslate2), works on one batch with all threads, or on as many batches as there are threads. Prints a table
and writes a page, with a picture, to benchmarks/results.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import report
from contest import Contestant, median_ratio, per_round, take_turns

MAX_TOKENS = (512, 1024, 4096)  # source tokens in a batch, which are tried
LONGEST = 100  # tokens of a translation
ALONE = 20  # sentences that are translated one by one


class InBatches:
    """Translates token ids in batches of as many source tokens as took it the least time in its first call."""

    def __init__(self):
        self.best = {}  # tokens in a batch, by beams

    def __call__(self, sources: list[list[int]], beams: int, is_alone: bool = False) -> tuple[list[list[int]], int]:
        """The translations and the number of tokens in a batch; of sentences that are alone, each by itself, 0."""
        if is_alone:
            return [ids for source in sources for ids in self.translate_all([source], beams, max(MAX_TOKENS))], 0
        if beams not in self.best:
            self.translate_all(sources[:ALONE], beams, max(MAX_TOKENS))  # to warm up
            seconds = {}
            for max_tokens in MAX_TOKENS:
                begin = time.perf_counter()
                self.translate_all(sources, beams, max_tokens)
                seconds[max_tokens] = time.perf_counter() - begin
            self.best[beams] = min(seconds, key=seconds.get)
        return self.translate_all(sources, beams, self.best[beams]), self.best[beams]


class WithGenerate(InBatches):
    """A model of transformers, that translates token ids by `generate`."""

    def __init__(
        self, kind: str, folder: str, precision: str, attention: str, device: str, at_once: int = 1, cache: str = ""
    ):
        super().__init__()
        import torch
        from peers import to_marian
        from transformers import AutoModelForSeq2SeqLM
        from vanilla_transformer.pipeline_vanilla_transformer import to_int8

        self.torch, self.device, self.cache, self.at_once = torch, device, cache or None, at_once
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation=attention)
        if kind == "MarianMTModel":
            model = to_marian(model, attention)
        self.model = model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32).eval()
        if precision == "int8":
            self.model = to_int8(self.model)

    def translate_all(self, sources: list[list[int]], beams: int, max_tokens: int) -> list[list[int]]:
        from vanilla_transformer.pipeline_vanilla_transformer import (
            TOKENS_OF_A_THREAD,
            batches_by_length,
            side_by_side,
        )

        lengths = list(map(len, sources))
        threads = max(1, min(self.at_once, sum(lengths) // TOKENS_OF_A_THREAD))
        batches = list(batches_by_length(lengths, max_tokens, threads))
        translations = [[]] * len(sources)
        with side_by_side(min(threads, len(batches))) as on_each:
            found = on_each(lambda batch: self.translate([sources[i] for i in batch], beams), batches)
            for batch, ids_of_batch in zip(batches, found, strict=True):
                for index, ids in zip(batch, ids_of_batch, strict=True):
                    translations[index] = ids
        return translations

    def translate(self, sources: list[list[int]], beams: int) -> list[list[int]]:
        torch, config = self.torch, self.model.config
        longest = max(map(len, sources))
        ids = torch.tensor([source + [config.pad_token_id] * (longest - len(source)) for source in sources])
        lengths = torch.tensor([len(source) for source in sources])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        with torch.inference_mode():
            output = self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=LONGEST,
                max_length=None,
                early_stopping=True,
                length_penalty=1.0,
                cache_implementation=self.cache,
            )
        return [until_end(row[1:], config.eos_token_id) for row in output.tolist()]


def until_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids


class WithCTranslate2(InBatches):
    """The same weights in CTranslate2."""

    def __init__(
        self,
        folder: str,
        precision: str,
        workers: int,
        threads: int,
        device: str,
        tokens: list[str],
        eos_token_id: int,
    ):
        super().__init__()
        import ctranslate2

        options = {"compute_type": precision, "device": device}
        self.translator = ctranslate2.Translator(folder, inter_threads=workers, intra_threads=threads, **options)
        self.tokens, self.numbers = tokens, {token: number for number, token in enumerate(tokens)}
        self.end = eos_token_id

    def translate_all(self, sources: list[list[int]], beams: int, max_tokens: int) -> list[list[int]]:
        words = [[self.tokens[i] for i in source] for source in sources]
        options = {"beam_size": beams, "max_decoding_length": LONGEST, "length_penalty": 1.0}
        options |= {"batch_type": "tokens", "max_batch_size": max_tokens}
        results = self.translator.translate_batch(words, **options)
        return [until_end([self.numbers[token] for token in r.hypotheses[0]], self.end) for r in results]


def contestants(model_folder: str, folder: Path, device: str, few: list[list[int]]) -> dict[str, Contestant]:
    """All of them, of both models with the attention that translates a `few` sentences faster."""
    import torch
    from peers import to_ctranslate2
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from vanilla_transformer.pipeline_vanilla_transformer import SIDE_BY_SIDE

    found = {}

    def add(name: str, *arguments, **options):
        found[name] = Contestant(name, *arguments, **options)

    def faster_attention(kind: str, precision: str) -> str:
        seconds = {}
        for attention in ("eager", "sdpa"):
            setting = (kind, model_folder, precision, attention, device)
            one = Contestant(f"{kind}, {precision} {attention}, on trial", WithGenerate, *setting)
            for beams in (1, 5):
                one.turn(few, beams)  # to warm up, and to find the best batches
            seconds[attention] = sum(one.turn(few, beams) for beams in (1, 5))
            one.end()
        return min(seconds, key=seconds.get)

    for precision in ("int8", "bf16", "fp32") if device == "cpu" else ("bf16", "fp32"):
        for kind in ("ours", "MarianMTModel"):
            attention = faster_attention(kind, precision)
            name, setting = f"{kind}, {precision} {attention}", (kind, model_folder, precision, attention, device)
            add(name, WithGenerate, *setting)
            if device == "cpu":
                at_once = min(SIDE_BY_SIDE, torch.get_num_threads())
                add(f"{name}, side by side", WithGenerate, *setting, at_once, keeps_memory=True)
            else:  # which transformers compiles
                add(f"{name}, static cache", WithGenerate, *setting, 1, "static")
    if importlib.util.find_spec("ctranslate2"):
        model, tokenizer = (
            AutoModelForSeq2SeqLM.from_pretrained(model_folder),
            AutoTokenizer.from_pretrained(model_folder),
        )
        tokens = tokenizer.convert_ids_to_tokens(list(range(model.config.vocab_size)))
        to_ctranslate2(model, tokens, folder)
        cores = torch.get_num_threads()
        for precision in ("float32", "int8"):
            for workers, threads in sorted({(1, cores), (cores, 1)} if device == "cpu" else {(1, 1)}):
                more = (workers, threads, device, tokens, model.config.eos_token_id)
                name = f"CTranslate2, {precision}, {workers} x {threads} threads"
                add(name, WithCTranslate2, str(folder), precision, *more)
    return found


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of sentences whose translations are the same, token by token."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


COLUMNS = ["who", "tokens a batch", "sentences/s", "ms a sentence", "tokens/s", "MiB at most", "BLEU", "as ours, fp32"]
COLUMNS += ["ours, its best, is faster by", "in the same precision"]
SAME = {"float32": "fp32"}  # CTranslate2's word for a precision


def rows_of(measured: dict[str, Contestant], references: list[str], tokenizer, rounds: int) -> list[list[str]]:
    from sacrebleu.metrics import BLEU

    all_of_ours = [one for one in measured.values() if one.name.startswith("ours")]
    best = min(all_of_ours, key=lambda one: sum(one.seconds))
    exact, _ = next(one for one in all_of_ours if "fp32" in one.name).answers[-1]
    rows = []
    for name, one in measured.items():
        (found, max_tokens), seconds = one.answers[-1], statistics.median(per_round(one.seconds, rounds))
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        bleu = BLEU().corpus_score(texts, [references]).score
        precision = name.split(", ")[1].split(" ")[0]
        alike = [one for one in all_of_ours if SAME.get(precision, precision) in one.name]
        same = min(alike, key=lambda one: sum(one.seconds))
        rows.append(
            [
                name,
                f"{max_tokens:,}" if max_tokens else "",
                f"{len(found) / seconds:,.1f}",
                f"{1000 * seconds / len(found):,.1f}",
                f"{sum(map(len, found)) / seconds:,.0f}",
                f"{one.memory / 2**20:,.0f}",
                f"{bleu:.2f}",
                f"{agreement(found, exact):.1%}",
                f"{median_ratio(best, one, rounds):.2f}",
                f"{median_ratio(same, one, rounds):.2f}",
            ]
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="a model that train.py trained, en to de")
    parser.add_argument("--data", required=True, metavar="DIR", help="Multi30k, as test.jsonl")
    parser.add_argument(
        "--sentences", type=report.at_least_one, default=1000, help="of the test split, the first ones"
    )
    parser.add_argument("--beams", type=report.at_least_one, nargs="+", default=[1, 5])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=report.at_least_one, default=5)
    report.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.sentences, options.rounds = 8, 1
    from peers import read_pairs, to_marian
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import vanilla_transformer  # noqa: F401

    tokenizer, model = (
        AutoTokenizer.from_pretrained(options.model),
        AutoModelForSeq2SeqLM.from_pretrained(options.model),
    )
    try:
        config = to_marian(model).config
    except ValueError as error:
        sys.exit(f"{options.model} cannot be measured: {error}")
    pairs = read_pairs(options.data, "test")[: options.sentences]
    sources = tokenizer([source for source, _ in pairs]).input_ids
    references = [target for _, target in pairs]
    peers = ["ctranslate2"] if importlib.util.find_spec("ctranslate2") else []
    page = report.heading("Translating", ["torch", "transformers", *peers])
    page += [
        "",
        f"A model with d {config.d_model}, {config.encoder_layers}+{config.decoder_layers} layers and "
        f"{config.vocab_size:,} types; {len(pairs):,} sentences of {statistics.mean(map(len, sources)):.1f} source "
        f"tokens on average, sorted by length, on {options.device}. Each takes batches of as many source tokens, of "
        f"{', '.join(f'{size:,}' for size in MAX_TOKENS)}, as took it the least time before. Medians of "
        f"{options.rounds} rounds in which all translate the same, one after another. A beam search ends when it has "
        "as many translations as beams, as CTranslate2 ends one (`early_stopping=True`). Each model has the attention "
        "that was faster in a trial. Side by side: as `vanilla-transformer translate` translates, with "
        "glibc's allocator set and up to four batches that share the cores, where there are a thousand tokens for "
        "each. Int8 is that of the Translator, with attention in bfloat16 in ours. Memory is what a process takes "
        "beyond its libraries.",
    ]
    picture = {}
    with tempfile.TemporaryDirectory() as folder:
        everyone = contestants(options.model, Path(folder) / "ctranslate2", options.device, sources[:40])
        turns = {f"{beams} beams" if beams > 1 else "greedy": (sources, beams) for beams in options.beams}
        turns["greedy, one sentence at a time"] = (sources[:ALONE], 1, True)
        for title, turn in turns.items():
            for one in everyone.values():
                one.forget()
            take_turns(list(everyone.values()), [turn], options.rounds)
            rows = rows_of(everyone, references[: len(turn[0])], tokenizer, options.rounds)
            page += ["", f"## {title}", "", *report.table(COLUMNS, rows)]
            print("\n".join(page[-4 - len(rows) :]), flush=True)
            picture[title] = {row[0]: float(row[2].replace(",", "")) for row in rows}
        for one in everyone.values():
            one.end()
    report.write_with_bars(options, "decode", page, "Translating", picture, "sentences/s")


if __name__ == "__main__":
    main()
