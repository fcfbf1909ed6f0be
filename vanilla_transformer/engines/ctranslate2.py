"""CTranslate2 (https://github.com/OpenNMT/CTranslate2), an engine in C++: the same texts, faster."""

import ctypes
import hashlib
import json
import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import ctranslate2
import torch
from filelock import FileLock
from huggingface_hub import constants
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion.ctranslate2 import check_quantization, to_ctranslate2, token_names
from ..conversion.tensors import table_rows
from ..decoding_vanilla_transformer import end_tokens
from ..errors import UserError
from ..files import CONVERTED, new_folder, remove_folder, remove_unfinished
from ..sentences_vanilla_transformer import InputError
from ..translation_vanilla_transformer import Engine

# Options of `generate` that CTranslate2 treats the same way, or that have no effect there. EXACT: in every search.
# GREEDY: in greedy search only. MASKS: they mask tokens, which transformers does after the softmax and CTranslate2
# before it; beam search is the same only with `renormalize_logits`.
EXACT = {"num_beams", "length_penalty", "max_length", "forced_eos_token_id", "renormalize_logits", "top_k", "top_p"}
EXACT |= {"num_return_sequences", "pad_token_id", "bos_token_id", "use_cache", "transformers_version", "temperature"}
GREEDY = {"repetition_penalty", "early_stopping"}
MASKS = {"min_length", "min_new_tokens", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids"}
# What transformers reads of a model besides its weights; tokenizers of different classes have different files.
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
FILES += ["added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "source.spm", "target.spm", "spiece.model"]
FILES += ["sentencepiece.bpe.model", "tokenizer.model"]

ENGINES = weakref.WeakSet()


def leave_threads_to_parent():
    """Lets the engines of a forked process open their models again, since CTranslate2's threads stay in its parent.

    Old translators are never freed, since deleting one would wait for its threads.
    """
    for engine in ENGINES:
        if translator := vars(engine).pop("translator", None):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(translator))


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=leave_threads_to_parent)


class CTranslate2Engine(Engine):
    """Runs a directory written by [`to_ctranslate2`].

    Options that CTranslate2 lacks or treats differently raise InputError. Pickled, or in a process
    that was forked, the engine opens the directory again.
    """

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device):
        self.directory, self.converted = directory.absolute(), read_config(directory)
        config = VanillaTransformerConfig(**self.converted["config"])
        check_variables(directory, config)
        super().__init__(config, GenerationConfig.from_pretrained(directory))
        self.max_positions = sys.maxsize if config.position_embedding_type == "rotary" else table_rows(config)
        self.default_positions = config.max_position_embeddings
        # Many workers of one thread are faster than one worker of many: the matrices are too small to split.
        self.workers = torch.get_num_threads() if device.type == "cpu" else 1
        self.options = {"inter_threads": self.workers, "intra_threads": 1} if device.type == "cpu" else {}
        self.options |= {"device": device.type, "device_index": device.index or 0}
        self.names = token_names(tokenizer, max(config.vocab_size, config.decoder_vocab_size))
        self.ids = {name: index for index, name in enumerate(self.names)}
        self.end_sequences = [[end] for end in end_tokens(self.generation_config)]
        self.end_names = [self.names[end] for (end,) in self.end_sequences]
        saved = self.generation_config.to_diff_dict()  # once, since it is slow
        self.saved_options = {name: value for name, value in saved.items() if name[0] != "_"}
        self.translator  # noqa: B018  opened now, so that an error does not wait for the first text

    @cached_property
    def translator(self) -> ctranslate2.Translator:
        """The model as CTranslate2 runs it, opened once in each process."""
        if read_config(self.directory) != self.converted:
            raise InputError(f"{self.directory} was converted again since it was loaded; load the model again.")
        ENGINES.add(self)
        return ctranslate2.Translator(str(self.directory), **self.options)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "translator"}

    def translate(self, batches, options):
        running = (self.submit(sources, options, asynchronous=True) for sources in batches)
        for results, _ in pairwise(chain(running, [None])):  # the next is submitted before one is awaited
            yield [[self.ids[name] for name in result.result().hypotheses[0]] for result in results]

    def n_best(self, batches, options, n, streamer=None):
        """As in [`Engine`]; with a streamer, each token is handed on as CTranslate2 writes it."""
        callback = None
        if streamer is not None:
            streamer.put(torch.tensor([self.config.decoder_start_token_id]))  # the prompt, as from transformers
            callback = lambda step: streamer.put(torch.tensor([step.token_id]))  # noqa: E731
        more = {"num_hypotheses": n, "return_scores": True, "callback": callback}
        for sources in batches:
            results = self.submit(sources, options, **more)
            ids = [[[self.ids[name] for name in names] for names in result.hypotheses] for result in results]
            yield [list(zip(best, one.scores, strict=True)) for best, one in zip(ids, results, strict=True)]
        if streamer is not None:
            streamer.end()

    def submit(self, sources: list[list[int]], options: dict, **more) -> list:
        """The results of CTranslate2 for each of `sources`, which the workers share."""
        return self.translator.translate_batch(
            [[self.names[index] for index in source] for source in sources],
            max_batch_size=-(-sum(map(len, sources)) // self.workers),
            batch_type="tokens",
            max_input_length=0,  # no limit
            end_token=self.end_names,
            **self.engine_options({**options, **self.stopping_options(max(map(len, sources)), options)}),
            **more,
        )

    def engine_options(self, given: dict) -> dict:
        """The options of `generate` in the words of CTranslate2."""
        options = self.saved_options | given
        options = {name: value for name, value in options.items() if value is not None}
        exact = EXACT
        if options.get("num_beams", 1) == 1:
            exact = EXACT | GREEDY | MASKS
        elif options.get("renormalize_logits"):
            exact = EXACT | MASKS
        only = {name: self.saved_options.get(name) for name in ("eos_token_id", "decoder_start_token_id")}
        only["early_stopping"] = True
        for name, value in options.items():
            if name not in exact and value != only.get(name, False):
                what = f"`{name}={value!r}` in this search"
                raise InputError(f"CTranslate2 does not support {what}; use the backend torch.")
        bad_words = [words for words in options.get("bad_words_ids", []) if words not in self.end_sequences]
        banned = [*([token] for token in options.get("suppress_tokens", [])), *bad_words]
        # The start token counts in `max_length`, and so does a forced end; translations that end before are the same.
        max_length = options["max_length"] - 1 - ("forced_eos_token_id" in options)
        return {
            "beam_size": options.get("num_beams", 1),
            "length_penalty": options.get("length_penalty", 1.0) or 1e-9,  # at 0, CTranslate2 ends a search earlier
            "max_decoding_length": max(max_length, 1),
            "min_decoding_length": max(options.get("min_new_tokens", 0), options.get("min_length", 1) - 1),
            "no_repeat_ngram_size": options.get("no_repeat_ngram_size", 0),
            "repetition_penalty": options.get("repetition_penalty", 1.0),
            "suppress_sequences": [[self.names[token] for token in tokens] for tokens in banned] or None,
        }


def convert_once(
    name: str,
    source: list,
    quantization: str | None,
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
) -> Path:
    """The directory of the converted model `name`, which is made from what `load` returns.

    It is made again when `source`, which tells the version of the model, is another than before. Raises UserError if
    CTranslate2 does not know the quantization.
    """
    check_quantization(quantization)
    # A hash in place of the path, which may be too long for a name.
    home = f"{Path(name).name[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    home = Path(constants.HF_HOME) / "vanilla_transformer" / "ctranslate2" / home
    target = home / (quantization or "float32")
    if read_config(target).get("source") == source:  # maybe made by another user, where we cannot lock
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / ".lock").acquire()  # waits while another process converts
    except OSError as error:
        reason = f"{home} cannot be written: {error.strerror}; set HF_HOME to a directory that can be."
        raise UserError(reason) from error
    with lock:
        remove_unfinished(home)
        if read_config(target).get("source") != source:
            model, tokenizer = load()
            remove_folder(target, CONVERTED)  # converted from other weights
            with new_folder(target) as made:
                to_ctranslate2(model, tokenizer, made, quantization, source)
    return target


def digests(files: Iterable[Path]) -> list[list[str]]:
    """The names of the files that exist, each with a hash of its content, since times do not tell versions apart."""
    found = []
    for file in filter(Path.is_file, files):
        with open(file, "rb") as opened:
            found.append([file.name, hashlib.file_digest(opened, "sha256").hexdigest()])
    return found


def read_config(directory: Path) -> dict:
    """What [`to_ctranslate2`] noted in the directory of a converted model; of any other, an empty dictionary."""
    file = directory / CONVERTED
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def check_variables(directory: Path, config: VanillaTransformerConfig):
    """Raises ValueError unless model.bin has an embedding for each token, and as many heads as the config.

    CTranslate2 checks neither, and would read beyond its arrays.
    """
    tokens = {"source": config.vocab_size, "target": config.decoder_vocab_size, "shared": config.vocab_size}
    expected = {
        "encoder/embeddings_0/weight": config.vocab_size,
        "decoder/embeddings/weight": config.decoder_vocab_size,
        "decoder/projection/weight": config.decoder_vocab_size,
        "encoder/num_heads": config.encoder_attention_heads,
        "decoder/num_heads": config.decoder_attention_heads,
    }
    try:
        found = read_variables(directory / "model.bin")
        wrong = [name for name, size in expected.items() if found[name] != size]
        for file in directory.glob("*_vocabulary.*"):
            names = json.loads(file.read_text(encoding="utf-8"))
            wrong += [] if len(names) == tokens[file.name.partition("_")[0]] else [file.name]
        if wrong:
            raise ValueError(f"{wrong[0]} does not match {CONVERTED}")
    except (struct.error, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{directory} is damaged: {error}; convert the model again.") from error


def read_variables(file: Path) -> dict[str, int]:
    """The first dimension of each variable in a model.bin or, of a scalar, its value as a short number; by name."""
    with open(file, "rb") as opened:

        def read(types: str) -> tuple[int, ...]:
            return struct.unpack(f"<{types}", opened.read(struct.calcsize(f"<{types}")))

        def read_name() -> str:
            return opened.read(*read("H")).rstrip(b"\0").decode()

        read("I"), read_name(), read("I")  # versions of the format and of the class, and the name of the class
        variables = {}
        for _ in range(*read("I")):
            name, (rank,) = read_name(), read("B")
            shape, (_, size) = read(f"{rank}I"), read("BI")
            data = opened.read(size) if size < 8 else b""
            opened.seek(size - len(data), os.SEEK_CUR)
            variables[name] = shape[0] if shape else int.from_bytes(data[:2], "little")
        for _ in range(*read("I")):  # tensors that are stored under another name
            name = read_name()
            variables[name] = variables[read_name()]
    return variables
