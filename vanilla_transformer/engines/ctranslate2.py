"""CTranslate2 (https://github.com/OpenNMT/CTranslate2), an engine in C++: the same texts, faster."""

import hashlib
import json
import os
import re
from itertools import chain, pairwise
from pathlib import Path

import ctranslate2
import torch
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion.ctranslate2 import CONFIG, MAX_POSITIONS, to_ctranslate2, token_names
from ..decoding_vanilla_transformer import end_tokens
from ..files import new_folder, remove_folder, remove_unfinished
from ..translation_vanilla_transformer import WHERE, Engine, TorchEngine, load_model

# Options of `generate` that CTranslate2 treats the same way, or that have no effect there. EXACT: in every search.
# GREEDY: in greedy search only. MASKS: they mask tokens, which transformers does after the softmax and CTranslate2
# before it; beam search is the same only with `renormalize_logits`.
EXACT = {"num_beams", "length_penalty", "max_length", "forced_eos_token_id", "renormalize_logits", "top_k", "top_p"}
EXACT |= {"num_return_sequences", "pad_token_id", "bos_token_id", "use_cache", "transformers_version", "temperature"}
GREEDY = {"repetition_penalty", "early_stopping"}
MASKS = {"min_length", "min_new_tokens", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids"}


class CTranslate2Engine(Engine):
    """Runs a directory written by [`to_ctranslate2`].

    Options that CTranslate2 does not have, or not with the same outcome, raise ValueError.
    """

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device):
        config = VanillaTransformerConfig(**read_config(directory)["config"])
        if max(config.vocab_size, config.decoder_vocab_size) > (directory / "model.bin").stat().st_size:
            raise ValueError(f"{directory}/{CONFIG} does not match model.bin; convert the model again.")
        super().__init__(config, GenerationConfig.from_pretrained(directory))
        is_sinusoidal = config.position_embedding_type == "sinusoidal"
        self.max_positions = MAX_POSITIONS if is_sinusoidal else config.longest_sequence
        self.default_positions = config.max_position_embeddings
        # Many workers of one thread are faster than one worker of many: the matrices are too small to split.
        self.workers = torch.get_num_threads() if device.type == "cpu" else 1
        options = {"inter_threads": self.workers, "intra_threads": 1} if device.type == "cpu" else {}
        options |= {"device": device.type, "device_index": device.index or 0}
        self.translator = ctranslate2.Translator(str(directory), **options)
        self.names = token_names(tokenizer, max(config.vocab_size, config.decoder_vocab_size))
        self.ids = {name: index for index, name in enumerate(self.names)}
        self.end_sequences = [[end] for end in end_tokens(self.generation_config)]
        self.end_names = [self.names[end] for (end,) in self.end_sequences]
        saved = self.generation_config.to_diff_dict()  # once, since it is slow
        self.saved_options = {name: value for name, value in saved.items() if name[0] != "_"}

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
                raise ValueError(f"CTranslate2 does not support {what}; use the backend torch.")
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


def load(
    names: list[str | os.PathLike], quantization: str | None, device: torch.device, dtype="auto", **kwargs
) -> tuple[CTranslate2Engine, PreTrainedTokenizerBase]:
    """Loads a converted directory, or converts a model on first use, and again when its weights have changed.

    A local model is converted into its subfolder `ctranslate2`, one of the Hub into a cache folder.
    """
    if len(names) > 1:
        raise ValueError("CTranslate2 runs one model at a time; an ensemble needs `backend='torch'`.")
    if dtype != "auto":
        raise ValueError(f"`dtype={dtype!r}` is for the backend torch; give `quantization` to ctranslate2.")
    if quantization not in (None, *ACCEPTED_MODEL_TYPES):
        known = ", ".join(ACCEPTED_MODEL_TYPES)
        raise ValueError(f"`quantization` is {quantization!r}; CTranslate2 knows {known}.")
    name_or_path, directory = str(names[0]), Path(names[0])
    if not read_config(directory):
        directory = convert_once(name_or_path, quantization, **kwargs)
    found = read_config(directory)["quantization"]
    if quantization not in (None, found):
        raise ValueError(f"{directory} was converted with `quantization={found!r}`, not {quantization!r}.")
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=kwargs.get("trust_remote_code", False))
    return CTranslate2Engine(directory, tokenizer, device), tokenizer


def convert_once(name_or_path: str, quantization: str | None, **kwargs) -> Path:
    """The directory of the converted model."""
    config = cached_file(name_or_path, "config.json", **{name: kwargs[name] for name in WHERE if name in kwargs})
    folder, which = Path(config).parent, [kwargs.get("subfolder"), kwargs.get("variant")]
    if Path(name_or_path).is_dir():
        files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json"))
        source = [*which, *([file.name, digest(file)] for file in files)]
        home, name = folder / "ctranslate2", str(folder.resolve())
    else:
        source = [*which, extract_commit_hash(config, None)]
        home, name = None, name_or_path
    if home is None or not os.access(folder, os.W_OK) or home.is_symlink():  # a link may lead anywhere
        home = Path(HF_HOME) / "vanilla_transformer" / "ctranslate2" / re.sub(r"[\\/:]+", "--", name.strip("/"))
    target = home / (quantization or "float32")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{home} cannot be written: {error.strerror}; set HF_HOME to a directory that can be."
        raise OSError(reason) from error
    with FileLock(home / ".lock"):  # held while another process converts
        remove_unfinished(home)
        if read_config(target).get("source") != source:
            model = load_model(name_or_path, dtype=torch.float32, **kwargs).eval()
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
            TorchEngine([model])  # raises ValueError for a model of another kind
            remove_folder(target, CONFIG)  # converted from other weights
            with new_folder(target) as made:
                to_ctranslate2(model, tokenizer, made, quantization, source)
    return target


def digest(file: Path) -> str:
    """Tells files apart by what is in them, whatever their times."""
    found = hashlib.sha256()
    with open(file, "rb") as opened:
        while part := opened.read(2**20):
            found.update(part)
    return found.hexdigest()


def read_config(directory: Path) -> dict:
    """What [`to_ctranslate2`] noted in the directory of a converted model; of any other, an empty dictionary."""
    file = directory / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
