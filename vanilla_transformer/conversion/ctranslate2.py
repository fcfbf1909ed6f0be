"""Run a model with CTranslate2 (https://github.com/OpenNMT/CTranslate2), a C++ engine: the same text, faster.

`Translator.from_pretrained(..., backend="ctranslate2")` calls [`load_translator`].
"""

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
import torch
from ctranslate2.converters.transformers import BartLoader
from ctranslate2.specs import TransformerSpec, common_spec
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..decoding_vanilla_transformer import end_tokens
from ..files import new_folder, remove_folder, remove_unfinished, write_text
from ..modeling_vanilla_transformer import sinusoidal_positions
from ..translation_vanilla_transformer import TRANSLATOR_OPTIONS, WHERE, Translator, load_model

MAX_POSITIONS = 8192  # rows of sinusoids; CTranslate2 cannot compute more
CONFIG = "vanilla_transformer.json"  # ours; config.json is that of CTranslate2
ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_new": common_spec.Activation.GELUTanh,
    "gelu_pytorch_tanh": common_spec.Activation.GELUTanh,
    "quick_gelu": common_spec.Activation.GELUSigmoid,
    "silu": common_spec.Activation.SWISH,
    "swish": common_spec.Activation.SWISH,
}

# Options of `generate` that CTranslate2 treats the same way, or that have no effect there. EXACT: in every search.
# GREEDY: in greedy search only. MASKS: they mask tokens, which transformers does after the softmax and CTranslate2
# before it; beam search is the same only with `renormalize_logits`.
EXACT = {"num_beams", "length_penalty", "max_length", "forced_eos_token_id", "renormalize_logits", "top_k", "top_p"}
EXACT |= {"num_return_sequences", "pad_token_id", "bos_token_id", "use_cache", "transformers_version", "temperature"}
GREEDY = {"repetition_penalty", "early_stopping"}
MASKS = {"min_length", "min_new_tokens", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids"}


def to_ctranslate2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike,
    quantization: str | None = None,
    source: str | list | None = None,
):
    """Writes `model` as a CTranslate2 model, with tokenizer and configs, into the new directory `output_dir`.

    Args:
        quantization: Of the weights: `int8`, `int8_float16`, `int16`, `float16`, `bfloat16`, ...; None: float32.
        source: Identifies the weights, to tell later whether they have changed.

    Raises ValueError for an activation function or quantization that CTranslate2 does not have, and FileExistsError
    if the directory exists.
    """
    config, spec = model.config, make_spec(model)
    generation_config = copy.deepcopy(model.generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = config.eos_token_id
    start = generation_config.decoder_start_token_id
    start = config.decoder_start_token_id if start is None else start
    if start is None or not end_tokens(generation_config):
        raise ValueError("CTranslate2 needs a `decoder_start_token_id` and an `eos_token_id`; set them in the config.")
    names = token_names(tokenizer, config.decoder_vocab_size)
    spec.register_source_vocabulary(token_names(tokenizer, config.vocab_size))
    spec.register_target_vocabulary(names)
    spec.config.decoder_start_token = names[start]
    spec.config.eos_token = names[end_tokens(generation_config)[0]]
    spec.config.bos_token = spec.config.decoder_start_token
    spec.config.unk_token = tokenizer.unk_token or names[0]  # only for sources given as text, not by us
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True)
    spec.save(str(output_dir))
    tokenizer.save_pretrained(output_dir)
    generation_config.save_pretrained(output_dir)
    ours = {"source": source, "quantization": quantization, "config": config.to_dict()}
    write_text(output_dir / CONFIG, json.dumps(ours, indent=2))


def token_names(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """The unique names of the tokens 0 to `size` - 1; ids beyond the tokenizer have one too."""
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    return [f"<unused {index}>" if name is None else name for index, name in enumerate(names)]


def make_spec(model: PreTrainedModel) -> TransformerSpec:
    """CTranslate2's description of the model, with its weights in float32."""
    config = model.config
    activation, specs = config.activation_function, []
    if activation not in ACTIVATIONS:
        raise ValueError(f"CTranslate2 has no activation function {activation!r}, only {', '.join(ACTIVATIONS)}.")
    for side, kind in [("encoder", TransformerEncoderSpec), ("decoder", TransformerDecoderSpec)]:
        heads = getattr(config, f"{side}_attention_heads")
        options = {"pre_norm": config.norm_first, "activation": ACTIVATIONS[activation]}
        if config.position_embedding_type == "rotary":
            options |= {"rotary_dim": config.d_model // heads, "rotary_interleave": True}
        specs.append(kind(getattr(config, f"{side}_layers"), heads, **options))
    model, loader = copy.deepcopy(model).requires_grad_(False).float().cpu(), Loader()
    loader.set_encoder(specs[0], model.model.encoder)
    loader.set_decoder(specs[1], model.model.decoder)
    loader.set_linear(specs[1].projection, model.lm_head)
    return TransformerSpec(*specs)


class Loader(BartLoader):
    """Extends CTranslate2's loader for BART, whose layers have the same names as ours."""

    def set_common_layers(self, spec, stack):
        """Copies what an encoder or a decoder has outside its layers: embeddings, positions and the last norm."""
        config = stack.config
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        self.set_embeddings(embeddings, stack.embed_tokens)
        spec.scale_embeddings = stack.embed_scale
        if config.position_embedding_type == "learned":
            spec.position_encodings.encodings = stack.embed_positions.weight
        elif config.position_embedding_type == "sinusoidal":
            rows = torch.arange(MAX_POSITIONS)
            spec.position_encodings.encodings = sinusoidal_positions(rows, config.d_model)
        elif hasattr(spec, "position_encodings"):
            del spec.position_encodings
        if config.norm_first:
            self.set_layer_norm(spec.layer_norm, stack.layer_norm)


class CTranslate2Translator(Translator):
    """A [`Translator`] that runs a directory written by [`to_ctranslate2`], in the same way and with the same errors.

    Options that CTranslate2 does not have, or not with the same outcome, raise ValueError.
    """

    def __init__(self, directory: Path, device: torch.device, trust_remote_code: bool = False, **kwargs):
        config = VanillaTransformerConfig(**read_config(directory)["config"])
        if max(config.vocab_size, config.decoder_vocab_size) > (directory / "model.bin").stat().st_size:
            raise ValueError(f"{directory}/{CONFIG} does not match model.bin; convert the model again.")
        generation_config = GenerationConfig.from_pretrained(directory)
        model = SimpleNamespace(config=config, generation_config=generation_config, device=torch.device("cpu"))
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        super().__init__(model, tokenizer, **kwargs)
        if config.position_embedding_type == "sinusoidal":
            self.max_positions = MAX_POSITIONS
            self.longest_source = min(self.longest_source, self.max_positions)
        # Many workers of one thread are faster than one worker of many: the matrices are too small to split.
        self.workers = torch.get_num_threads() if device.type == "cpu" else 1
        options = {"inter_threads": self.workers, "intra_threads": 1} if device.type == "cpu" else {}
        options |= {"device": device.type, "device_index": device.index or 0}
        self.engine = ctranslate2.Translator(str(directory), **options)
        self.names = token_names(self.tokenizer, max(config.vocab_size, config.decoder_vocab_size))
        self.ids = {name: index for index, name in enumerate(self.names)}
        self.end_sequences = [[end] for end in end_tokens(generation_config)]
        self.end_names = [self.names[end] for (end,) in self.end_sequences]
        saved = generation_config.to_diff_dict()  # once, since it is slow
        self.saved_options = {name: value for name, value in saved.items() if name[0] != "_"}

    def translate_batches(self, batches: Iterable[list[list[int]]], generation: dict) -> Iterator[list[str]]:
        running = (self.submit(sources, generation, asynchronous=True) for sources in batches)
        for results, _ in pairwise(chain(running, [None])):  # the next is submitted before one is awaited
            ids = [[self.ids[name] for name in result.result().hypotheses[0]] for result in results]
            yield self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def n_best_batches(
        self, batches: Iterable[list[list[int]]], n: int, streamer, generation: dict
    ) -> Iterator[list[list[tuple[list[int], float]]]]:
        """As in [`Translator`]; the scores are CTranslate2's."""
        callback = None
        if streamer is not None:
            streamer.put(torch.tensor([self.model.config.decoder_start_token_id]))  # the prompt, as from transformers
            callback = lambda step: streamer.put(torch.tensor([step.token_id]))  # noqa: E731
        options = {"num_hypotheses": n, "return_scores": True, "callback": callback}
        for sources in batches:
            results = self.submit(sources, generation, **options)
            ids = [[[self.ids[name] for name in names] for names in result.hypotheses] for result in results]
            yield [list(zip(best, one.scores, strict=True)) for best, one in zip(ids, results, strict=True)]
        if streamer is not None:
            streamer.end()

    def submit(self, sources: list[list[int]], generation: dict, **options) -> list:
        """The results of CTranslate2 for each of `sources`, which the workers share."""
        return self.engine.translate_batch(
            [[self.names[index] for index in source] for source in sources],
            max_batch_size=-(-sum(map(len, sources)) // self.workers),
            batch_type="tokens",
            max_input_length=0,  # no limit
            end_token=self.end_names,
            **self.engine_options({**generation, **self.defaults(max(map(len, sources)), generation)}),
            **options,
        )

    def engine_options(self, generation: dict) -> dict:
        """The options of `generate` in the words of CTranslate2."""
        options = self.saved_options | generation
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
            "length_penalty": options.get("length_penalty", 1.0),
            "max_decoding_length": max(max_length, 1),
            "min_decoding_length": max(options.get("min_new_tokens", 0), options.get("min_length", 1) - 1),
            "no_repeat_ngram_size": options.get("no_repeat_ngram_size", 0),
            "repetition_penalty": options.get("repetition_penalty", 1.0),
            "suppress_sequences": [[self.names[token] for token in tokens] for tokens in banned] or None,
        }


def load_translator(
    name_or_path: str | os.PathLike, quantization: str | None, device: torch.device, dtype="auto", **kwargs
) -> CTranslate2Translator:
    """Loads a converted directory, or converts a model on first use, and again when its weights have changed.

    A local model is converted into its subfolder `ctranslate2`, one of the Hub into a cache folder.
    """
    if dtype != "auto":
        raise ValueError(f"`dtype={dtype!r}` is for the backend torch; give `quantization` to ctranslate2.")
    if quantization not in (None, *ACCEPTED_MODEL_TYPES):
        known = ", ".join(ACCEPTED_MODEL_TYPES)
        raise ValueError(f"`quantization` is {quantization!r}; CTranslate2 knows {known}.")
    own = {name: kwargs.pop(name) for name in TRANSLATOR_OPTIONS if name in kwargs}
    own["trust_remote_code"] = kwargs.get("trust_remote_code", False)
    name_or_path, directory = str(name_or_path), Path(name_or_path)
    if not read_config(directory):
        directory = convert_once(name_or_path, quantization, **kwargs)
    found = read_config(directory)["quantization"]
    if quantization not in (None, found):
        raise ValueError(f"{directory} was converted with `quantization={found!r}`, not {quantization!r}.")
    return CTranslate2Translator(directory, device, **own)


def convert_once(name_or_path: str, quantization: str | None, **kwargs) -> Path:
    """The directory of the converted model."""
    config = cached_file(name_or_path, "config.json", **{name: kwargs[name] for name in WHERE if name in kwargs})
    folder, which = Path(config).parent, [kwargs.get("subfolder"), kwargs.get("variant")]
    if Path(name_or_path).is_dir():
        files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json"))
        source = [*which, *([file.name, file.stat().st_mtime_ns] for file in files)]
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
            Translator(model, tokenizer)  # raises ValueError for a model of another kind
            remove_folder(target, CONFIG)  # converted from other weights
            with new_folder(target) as made:
                to_ctranslate2(model, tokenizer, made, quantization, source)
    return target


def read_config(directory: Path) -> dict:
    """What [`to_ctranslate2`] noted in the directory of a converted model; of any other, an empty dictionary."""
    file = directory / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
