"""What the tests share: small models, batches and comparisons."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
    StaticCache,
)

from vanilla_transformer import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer import loss_vanilla_transformer as loss
from vanilla_transformer.__main__ import main
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.training.checkpoint import OPTIMIZER
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.recipe import parse_arguments
from vanilla_transformer.training.state import TrainerState

ROOT = Path(__file__).parents[1]

torch.set_num_threads(1)  # models this small run faster so, and tests beside each other do not fight for cores

TINY = {"vocab_size": 37, "d_model": 16, "max_position_embeddings": 40, "dropout": 0.0}
TINY |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24}
TINY |= {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 20}

SEPARATE = {"share_encoder_decoder_embeddings": False}
UNTIED = {"tie_word_embeddings": False}
BIAS = {"lm_head_bias": True}
EMBEDDINGS = {
    "shared, tied": {},
    "shared, tied, bias": BIAS,
    "shared, untied": UNTIED,
    "shared, untied, bias": UNTIED | BIAS,
    "separate, tied": SEPARATE,
    "separate, untied, bias": SEPARATE | UNTIED | BIAS | {"decoder_vocab_size": 35},
}

# All sizes differ, so that each can stand for only one letter of a shape.
DISTINCT_SIZES = {"vocab_size": 53, "d_model": 12, "pad_token_id": None}
DISTINCT_SIZES |= {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 17}
DISTINCT_SIZES |= {"decoder_layers": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 19}
B, S, T = 5, 11, 7

SOURCE = torch.tensor([[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, 0, 0], [3, 2, 0, 0, 0, 0]])
MASK = (SOURCE != 0).long()
TARGET = torch.tensor([[1, 10, 6, 22, 5], [1, 3, 14, 9, 4], [1, 12, 9, 31, 7]])
LABELS = torch.tensor([[10, 6, 22, 5, 2], [3, 14, 2, -100, -100], [-100, 9, 2, -100, -100]])

SOURCES = [[5, 9, 11], [8], [3, 4, 5, 6, 7], [30, 31], [12, 12], [20]]
TARGETS = [[10, 6], [3, 14, 9, 4, 33], [12], [7], [9, 9, 9, 8, 8, 8, 11], [5, 5]]

norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
positions = pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "learned", "rotary", "marian"])


def randomise(model: nn.Module) -> nn.Module:
    """Fills all that is trained: a bias of 0 or a norm of 1, as models begin with, hides what is left out."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for name, parameter in trained:
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.25)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model


def small_model(**config) -> VanillaTransformerForConditionalGeneration:
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**TINY, **config}))
    return randomise(model).eval()


def lively_model(seed: int, **config) -> VanillaTransformerForConditionalGeneration:
    """Repeats itself little and ends its sentences at different steps, if the seed is one that does so."""
    torch.manual_seed(seed)
    model = small_model(**{"norm_first": True, "tie_word_embeddings": False, "lm_head_bias": True, **config})
    with torch.no_grad():
        model.lm_head.bias[2] += 1.5
    return model


def shape_letters(config: VanillaTransformerConfig, in_encoder: bool) -> dict[str, int]:
    """The sizes that the letters d, h, k, f and V of a shape stand for."""
    side = "encoder" if in_encoder else "decoder"
    heads, inner = getattr(config, f"{side}_attention_heads"), getattr(config, f"{side}_ffn_dim")
    return {"d": config.d_model, "h": heads, "k": config.d_model // heads, "f": inner, "V": config.decoder_vocab_size}


def random_ids(length: int, vocab_size: int = 53) -> torch.Tensor:
    return torch.randint(vocab_size, (B, length))


def command_error(capsys, *argv) -> str:
    """The one sentence that `vanilla-transformer` fails with."""
    with pytest.raises(SystemExit) as ending:
        main([*map(str, argv)])
    code = ending.value.code
    message = code if isinstance(code, str) else capsys.readouterr().err.rstrip("\n")
    assert code == 2 or isinstance(code, str)  # a string is printed, with exit code 1
    assert message.startswith("vanilla-transformer") and "\n" not in message
    return message


def python_output(*arguments, env: dict[str, str] | None = None, python=sys.executable, **options) -> str:
    """What a new Python process prints, which has one thread and no Hub; fails with what it writes to stderr."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (env or {})
    options |= {"env": environment, "capture_output": True, "encoding": "utf-8", "timeout": 900}
    result = subprocess.run([str(python), *map(str, arguments)], **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def read_sample(count: int) -> list[tuple[str, str]]:
    """The first sentences of the sample dataset, in English and German."""
    lines = (ROOT / "sample_dataset" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [(row["en"], row["de"]) for row in map(json.loads, lines)]


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row of the Markdown tables in a text, also of the heads."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines if set(cells[0].strip()) != {"-"}]


def small_nllb() -> tuple[M2M100ForConditionalGeneration, NllbTokenizer]:
    """A random multilingual model, which writes a and b, and French or German before them, if it is told so."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a", "▁b"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = NllbTokenizer(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=len(tokenizer), **sizes)).eval()
    model.generation_config.max_length = 9
    words = {*vocabulary.values()} - {*tokenizer.all_special_ids}
    words |= {*tokenizer.convert_tokens_to_ids(["fra_Latn", "deu_Latn"])}
    # Otherwise an untrained model writes other language tokens, or nothing.
    model.generation_config.suppress_tokens = [*{*range(len(tokenizer))} - words]
    return model, tokenizer


def trained_marian(tokenizer: MarianTokenizer, pairs: list[tuple[str, str]]) -> MarianMTModel:
    """Knows the pairs by heart, and would begin each translation with padding if it might."""
    torch.manual_seed(0)
    fields = {"d_model": 32, "init_std": 32**-0.5, "max_position_embeddings": 512, "vocab_size": len(tokenizer)}
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    fields |= dict.fromkeys(("pad_token_id", "decoder_start_token_id"), tokenizer.pad_token_id)
    fields |= dict.fromkeys(("eos_token_id", "forced_eos_token_id"), tokenizer.eos_token_id)
    model = MarianMTModel(MarianConfig(activation_function="swish", scale_embedding=True, **fields)).eval()
    model.final_logits_bias.normal_()
    sources, targets = zip(*pairs, strict=True)
    batch = tokenizer(list(sources), text_target=list(targets), padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(50):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.final_logits_bias[0, tokenizer.pad_token_id] += 15
    model.generation_config.update(bad_words_ids=[[tokenizer.pad_token_id]], max_length=512, num_beams=6)
    return model


def translate_by_marian(folder: Path, sources: list[str]) -> list[str]:
    """Greedy translations of each text alone by the model and the tokenizer of transformers."""
    model, tokenizer = MarianMTModel.from_pretrained(folder).eval(), MarianTokenizer.from_pretrained(folder)
    translations = []
    for source in sources:
        inputs = tokenizer([source], return_tensors="pt")
        output = model.generate(**inputs, num_beams=1, max_length=inputs.input_ids.shape[1] + 50)
        translations += tokenizer.batch_decode(output, skip_special_tokens=True)
    return translations


def make_cache(model: nn.Module, kind: str) -> EncoderDecoderCache:
    """For SOURCE; a static one for 14 target tokens."""
    config = model.config
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    lengths = (14, SOURCE.shape[1])
    return EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in lengths))


def text_dataset(pairs: list[tuple]) -> datasets.Dataset:
    """Pairs of texts, or None, as [`load_pairs`] hands them out."""
    columns = {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}
    return datasets.Dataset.from_dict(columns, datasets.Features(dict.fromkeys(columns, datasets.Value("string"))))


def training_options(*argv: str) -> TrainingOptions:
    """The options of train.py that say how to train."""
    return parse_arguments(["--dataset_name=x", *argv])[2]


def parts(k: int) -> list[dict[str, torch.Tensor]]:
    """The six pairs of SOURCES and TARGETS as `k` batches of very different numbers of tokens."""
    sources, targets = ([torch.tensor([*row, 2]) for row in rows] for rows in (SOURCES, TARGETS))
    batches = []
    for start, end in pairwise({1: [0, 6], 2: [0, 5, 6], 3: [0, 1, 5, 6], 4: [0, 1, 3, 5, 6]}[k]):
        source = pad_sequence(sources[start:end], batch_first=True)
        labels = pad_sequence(targets[start:end], batch_first=True, padding_value=-100)
        batches.append({"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels})
    return batches


class KernelCounter(TorchDispatchMode):
    """Lists the operators in its context that compute something, each a kernel on a GPU; a view, say, is none."""

    NO_KERNEL = {"detach", "empty", "empty_like", "promote_types", "_unsafe_view"}

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        with self:  # what the operator consists of
            if operator.namespace != "aten":
                return loss.chunked_cross_entropy._init_fn(*args, **kwargs or {})
            result = operator.decompose(*args, **kwargs or {})
        if result is not NotImplemented:
            return result
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in self.NO_KERNEL:
            self.kernels.append(name)
        return operator(*args, **kwargs or {})


def peak_of(run) -> int:
    """The most bytes that tensors take at a time while `run` runs, besides what they took before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


class Softcapped(VanillaTransformerForConditionalGeneration):
    """Changes the logits after the projection."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = None if output.logits is None else output.logits.tanh()
        return output


class Handler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a thread serves the files of the folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_same_gradients(ours: dict, theirs: dict, tolerance=1e-5):
    assert [name for name, gradient in theirs.items() if not gradient.any()] == []
    assert_close(ours, theirs, tolerance)


def assert_ties_and_sizes(model):
    encoder, decoder = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
    config, head = model.config, model.lm_head
    assert (encoder.weight is decoder.weight) == config.share_encoder_decoder_embeddings
    assert (head.weight is decoder.weight) == config.tie_word_embeddings
    assert config.vocab_size == encoder.num_embeddings == encoder.weight.shape[0]
    assert config.decoder_vocab_size == decoder.num_embeddings == decoder.weight.shape[0]
    assert config.decoder_vocab_size == head.out_features == head.weight.shape[0]
    assert head.bias is None or len(head.bias) == head.out_features


N_BEST = [{"n": 3, "num_beams": 4, "length_penalty": 0.5}, {"n": 2}, {"n": 1, "num_beams": 1}]
TEXTS = ["A dog sleeps.", "Two children play in the park today.", "No!", "A man", "纽约是一座城市", "😀 a|b", "Yes."]


MODULE = """
import datasets
import evaluate
import numpy

TEXT = datasets.Value("string")


class Module(evaluate.Metric):
    def _info(self):
        features = datasets.Features({features})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, {arguments}):
        {body}
"""
LENGTHS = """errors = [abs(len(one) - len(two)) for one, two in zip(predictions, references)]
        return {"length_error": scale * sum(errors) / len(errors), "same_length": errors.count(0) / len(errors)}"""


def write_metric(
    script: Path,
    body: str = LENGTHS,
    features: str = "predictions=TEXT, references=TEXT",
    arguments: str = "predictions, references, scale=1",
) -> str:
    """Writes a script with a module of the evaluate library, which returns two numbers, and returns its path."""
    script.write_text(MODULE.format(features=features, arguments=arguments, body=body))
    return str(script)


def writing_translator(tokenizer, **config) -> Translator:
    """A random model that writes letters, which depend on what it reads."""
    model = small_model(**{"vocab_size": len(tokenizer), "tie_word_embeddings": False, **config})
    with torch.no_grad():
        for number in range(len(tokenizer)):
            if not tokenizer.decode([number]).isalpha() and number != tokenizer.eos_token_id:
                model.lm_head.weight[number] = 0
    return Translator(model, tokenizer)


def never_end(translator: Translator):
    """Makes the end of sentence all but impossible."""
    translator.model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(translator.tokenizer)))
    translator.model.config.lm_head_bias = True
    translator.model.lm_head.bias.data[translator.tokenizer.eos_token_id] = -1e4


def save_translator(translator: Translator, folder: Path) -> str:
    translator.model.save_pretrained(folder)
    translator.tokenizer.save_pretrained(folder)
    return str(folder)


def save_untrained(folder: Path) -> Path:
    """Saves a small untrained model with a tokenizer, and returns the folder."""
    tokenizer = train_tokenizer(["The cat sleeps.", "Die Katze schläft."], 300)
    sizes = TINY | {"vocab_size": len(tokenizer), "max_position_embeddings": 100}
    config = VanillaTransformerConfig(**sizes | special_token_ids(tokenizer))
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def put_checkpoints(output_dir: Path, *steps):
    """Folders that are taken for checkpoints."""
    for step in steps:
        folder = output_dir / f"checkpoint-{step}"
        folder.mkdir()
        (folder / OPTIMIZER).touch()


def state_with_bleu(scores: dict[int, float]) -> TrainerState:
    entries = [{"eval_bleu": bleu, "eval_chrf": bleu, "eval_loss": 1.0} for bleu in scores.values()]
    return TrainerState(history=[{"step": step} | entry for step, entry in zip(scores, entries, strict=True)])
