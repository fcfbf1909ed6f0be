"""Exported to ONNX and torch.export, the model translates as `generate` does."""

import logging

import numpy as np
import onnxruntime
import pytest
import torch
from helpers import lively_model
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from transformers import DynamicCache, EncoderDecoderCache, exporters

from vanilla_transformer.modeling_vanilla_transformer import CACHE

if not hasattr(exporters, "ExportedModel"):
    pytest.skip("before 5.23, transformers cannot load what it exported", allow_module_level=True)

from transformers.exporters import DynamoConfig, DynamoExporter, ExportedModel, OnnxConfig, OnnxExporter  # noqa: E402

PAD, START, END = 0, 1, 2
SOURCE = torch.tensor(
    [[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, 0, 0], [3, 2, 0, 0, 0, 0], [12, 33, 9, 9, 2, 0], [21, 14, 2, 0, 0, 0]]
)
STEPS = 12
# With these seeds, the models end the translations of SOURCE at different steps; a test says so.
FORMS = {"torch.export": (426, "sinusoidal"), "ONNX": (204, "rotary")}  # the others in ONNX: where `to_onnx` is tested

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FORMS)
def form(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(form):
    seed, positions = FORMS[form]
    model = lively_model(seed, position_embedding_type=positions, encoder_layers=1)
    model.generation_config.max_new_tokens = STEPS
    return model


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """torch.onnx prints what it does, and the exporters warn of each size of the example that stays fixed."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_the_translations_compared_below_differ(model):
    translated = model.generate(SOURCE)
    ends = [row.index(END) if END in row else None for row in translated.tolist()]
    assert len(translated.unique()) > 10 and len(set(ends)) > 3 and None in ends


def run(session: onnxruntime.InferenceSession, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    outputs = session.run(None, {value.name: feed[value.name] for value in session.get_inputs()})
    return dict(zip([value.name for value in session.get_outputs()], outputs, strict=True))


class OnnxDecoder:
    """By onnxruntime: `start` with a source, then `step` from the previous tokens (B,1) to logits (B,1,V)."""

    def __init__(self, folder, model):
        self.encoder, self.prefill, self.decode = (
            onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
            for name in ("encoder/model.onnx", "decoder/prefill.onnx", "decoder/decode.onnx")
        )

    def start(self, source, mask):
        self.feed, self.session = {"input_ids": source.numpy(), "attention_mask": mask.numpy()}, self.prefill
        self.feed["encoder_outputs.last_hidden_state"] = run(self.encoder, self.feed)["last_hidden_state"]

    def step(self, tokens):
        outputs = run(self.session, {**self.feed, "decoder_input_ids": tokens.numpy()})
        # The cache that one step returns is an input of the next.
        self.feed |= {"input." + name.removeprefix("output."): value for name, value in outputs.items()}
        self.session = self.decode
        return torch.from_numpy(outputs["logits"])


class ProgramDecoder:
    """The same by torch.export programs, which were saved and loaded again."""

    def __init__(self, folder, model):
        self.encode, decoder = (  # the programs are pickled
            ExportedModel.from_pretrained(folder / name, trust_remote_code=True) for name in ("encoder", "decoder")
        )
        self.prefill, self.decode, self.config = decoder.runners["prefill"], decoder.runners["decode"], model.config

    def start(self, source, mask):
        cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        encoded = self.encode(input_ids=source, attention_mask=mask)
        self.inputs = {"attention_mask": mask, "encoder_outputs": encoded, CACHE: cache}
        self.program = self.prefill

    def step(self, tokens):
        outputs = self.program(**self.inputs, decoder_input_ids=tokens)
        self.inputs[CACHE] = outputs[CACHE]
        self.program = self.decode
        return outputs.logits


ENGINES = {
    "torch.export": (DynamoExporter, DynamoConfig, ProgramDecoder),
    "ONNX": (OnnxExporter, OnnxConfig, OnnxDecoder),
}


@pytest.fixture(scope="module")
def engine(form, model, tmp_path_factory):
    """For any number of sentences of any length.

    A size of one in the example would be fixed at one, hence two sentences and more than one target token.
    """
    exporter, config, decoder = ENGINES[form]
    exporter, config, folder = exporter(), config(dynamic=True), tmp_path_factory.mktemp("exported")
    source = torch.tensor([[5, 6, 7, 8], [9, 2, 0, 0]])
    inputs = {"input_ids": source, "attention_mask": (source != 0).long()}
    exporter.export(model.get_encoder(), inputs, config).save_pretrained(folder / "encoder")
    inputs["decoder_input_ids"] = torch.tensor([[1, 5, 6], [1, 7, 8]])
    exporter.export_for_generation(model, inputs, config).save_pretrained(folder / "decoder")
    return decoder(folder, model)


def greedy_search(engine, source, mask, max_new_tokens: int = STEPS, end: int = END) -> torch.Tensor:
    """Source ids and their mask, 0 at padding, (B,S) -> target ids (B,T), padded after the end of a sentence."""
    engine.start(source, mask)
    target, ended = torch.full((len(source), 1), START), torch.zeros(len(source), dtype=torch.bool)
    for _ in range(max_new_tokens):
        best = engine.step(target[:, -1:])[:, -1].argmax(-1).masked_fill(ended, PAD)
        target, ended = torch.cat([target, best[:, None]], dim=1), ended | (best == end)
        if ended.all():
            break
    return target


SOURCES = {
    "several": SOURCE,
    "padded on the left": torch.stack([row.roll(int((row == PAD).sum())) for row in SOURCE]),
    "one": SOURCE[:1],
    "one of one token": torch.tensor([[7]]),
    "long": torch.randint(3, 37, (2, 33), generator=torch.Generator().manual_seed(0)),
    "many": SOURCE.repeat(8, 1),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_exported_model_translates_as_generate(model, engine, source):
    mask = (source != PAD).long()
    assert torch.equal(greedy_search(engine, source, mask), model.generate(source, attention_mask=mask))


def test_exported_model_hides_what_the_mask_hides(model, engine):
    mask = (SOURCE != PAD).long()
    mask[0, 2:4] = 0
    expected = model.generate(SOURCE, attention_mask=mask)
    assert not torch.equal(expected[0], model.generate(SOURCE)[0])
    assert torch.equal(greedy_search(engine, SOURCE, mask), expected)


@torch.no_grad()
def test_exported_model_ends_where_the_positions_end(model, engine):
    """There are 40 positions, and no token ends the sentence."""
    mask = (SOURCE != PAD).long()
    target = greedy_search(engine, SOURCE, mask, 40, end=-1)
    assert torch.equal(model(SOURCE, mask, target[:, :-1]).logits.argmax(-1), target[:, 1:])
    with pytest.raises((InvalidArgument, AssertionError), match="index|indices|<= 39"):
        greedy_search(engine, SOURCE, mask, 41, end=-1)
