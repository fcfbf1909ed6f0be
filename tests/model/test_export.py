"""Exported to ONNX and torch.export, the model translates as `generate` does."""

import logging

import numpy as np
import onnxruntime
import pytest
import torch
from helpers import TINY, lively_model, randomise
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.exporters import DynamoConfig, DynamoExporter, ExportedModel, OnnxConfig, OnnxExporter
from transformers.integrations.executorch import Seq2SeqLMExportableModule

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

PAD, START, END = 0, 1, 2
SOURCE = torch.tensor(
    [[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, 0, 0], [3, 2, 0, 0, 0, 0], [12, 33, 9, 9, 2, 0], [21, 14, 2, 0, 0, 0]]
)
LEFT = torch.stack([row.roll(6 - int((row != PAD).sum())) for row in SOURCE])
LONG = torch.randint(3, 37, (2, 33), generator=torch.Generator().manual_seed(0))
STEPS = 12
# These models end the translations of SOURCE at different steps; a test says so.
SEEDS = {"sinusoidal": 426, "learned": 125, "rotary": 204}

kinds = ["sinusoidal", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ["learned", "rotary"])]


@pytest.fixture(scope="module", params=kinds)
def model(request):
    """Pre-norm with an untied output projection: it seldom repeats itself and ends its sentences."""
    model = lively_model(SEEDS[request.param], position_embedding_type=request.param, encoder_layers=1)
    ids = {"pad_token_id": PAD, "decoder_start_token_id": START, "eos_token_id": END}
    model.generation_config = GenerationConfig(**ids, max_new_tokens=STEPS)
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


# ---------------------------------------------------------------------------------------------------------- by example


def export(model, exporter, config, folder):
    """Writes `encoder/model`, `decoder/prefill` and `decoder/decode` for any number of sentences of any length.

    A size of one in the example would be fixed at one, hence two sentences and more than one target token.
    """
    source = torch.tensor([[5, 6, 7, 8], [9, 2, 0, 0]])
    inputs = {"input_ids": source, "attention_mask": (source != 0).long()}
    exporter.export(model.get_encoder(), inputs, config).save_pretrained(folder / "encoder")
    inputs["decoder_input_ids"] = torch.tensor([[1, 5, 6], [1, 7, 8]])
    exporter.export_for_generation(model, inputs, config).save_pretrained(folder / "decoder")


class OnnxTranslator:
    """Greedy search by onnxruntime, with neither torch nor transformers."""

    def __init__(self, folder):
        self.encoder, self.prefill, self.decode = (
            onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
            for name in ("encoder/model.onnx", "decoder/prefill.onnx", "decoder/decode.onnx")
        )

    @staticmethod
    def run(session, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = session.run(None, {value.name: feed[value.name] for value in session.get_inputs()})
        return dict(zip([value.name for value in session.get_outputs()], outputs, strict=True))

    def __call__(self, source: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, end: int = END) -> torch.Tensor:
        """Source ids and their mask, 0 at padding, (B,S) -> target ids (B,T), padded after the end of a sentence."""
        feed = {"input_ids": source.numpy(), "attention_mask": mask.numpy()}
        feed["encoder_outputs.last_hidden_state"] = self.run(self.encoder, feed)["last_hidden_state"]
        target, ended = np.full((len(source), 1), START), np.zeros(len(source), dtype=bool)
        session = self.prefill
        for _ in range(max_new_tokens):
            outputs = self.run(session, {**feed, "decoder_input_ids": target[:, -1:]})
            best = np.where(ended, PAD, outputs["logits"][:, -1].argmax(-1))
            target, ended = np.concatenate([target, best[:, None]], axis=1), ended | (best == end)
            if ended.all():
                break
            # The cache that one step returns is an input of the next.
            for name, value in outputs.items():
                feed["input." + name.removeprefix("output.")] = value
            session = self.decode
        return torch.from_numpy(target)


# ---------------------------------------------------------------------------------------------------------------- ONNX


@pytest.fixture(scope="module")
def translator(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onnx")
    export(model, OnnxExporter(), OnnxConfig(dynamic=True), folder)
    return OnnxTranslator(folder)


SOURCES = {
    "several": SOURCE,
    "padded on the left": LEFT,
    "one": SOURCE[:1],
    "one of one token": torch.tensor([[7]]),
    "long": LONG,
    "many": SOURCE.repeat(8, 1),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_onnx_translates_as_generate(model, translator, source):
    mask = (source != PAD).long()
    assert torch.equal(translator(source, mask, STEPS), model.generate(source, attention_mask=mask))


@torch.no_grad()
def test_onnx_ends_where_the_positions_end(model, translator):
    """There are 40 positions, and no token ends the sentence."""
    mask = (SOURCE != PAD).long()
    target = translator(SOURCE, mask, 40, end=-1)
    assert torch.equal(model(SOURCE, mask, target[:, :-1]).logits.argmax(-1), target[:, 1:])
    with pytest.raises(InvalidArgument, match="index|indices"):
        translator(SOURCE, mask, 41, end=-1)


def test_onnx_hides_what_the_mask_hides(model, translator):
    mask = (SOURCE != PAD).long()
    mask[0, 2:4] = 0
    expected = model.generate(SOURCE, attention_mask=mask)
    assert not torch.equal(expected[0], model.generate(SOURCE)[0])
    assert torch.equal(translator(SOURCE, mask, STEPS), expected)


# -------------------------------------------------------------------------------------------------------- torch.export


@pytest.fixture(scope="module")
def programs(model, tmp_path_factory):
    """The programs, saved and loaded again."""
    folder = tmp_path_factory.mktemp("programs")
    export(model, DynamoExporter(), DynamoConfig(dynamic=True), folder)
    assert {path.name for path in folder.glob("*/*.pt2")} == {"model.pt2", "prefill.pt2", "decode.pt2"}
    encoder, decoder = (ExportedModel.from_pretrained(folder / name) for name in ("encoder", "decoder"))
    return encoder, decoder.runners["prefill"], decoder.runners["decode"]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_exported_programs_translate_as_generate(model, programs, source):
    encode, prefill, decode = programs
    mask = (source != PAD).long()
    inputs = {"attention_mask": mask, "encoder_outputs": encode(input_ids=source, attention_mask=mask)}
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    target, ended = torch.full((len(source), 1), START), torch.zeros(len(source), dtype=torch.bool)
    for step in range(STEPS):
        run = prefill if step == 0 else decode
        outputs = run(**inputs, decoder_input_ids=target[:, -1:], past_key_values=cache)
        cache = outputs.past_key_values
        best = outputs.logits[:, -1].argmax(-1).masked_fill(ended, PAD)
        target, ended = torch.cat([target, best[:, None]], dim=1), ended | (best == END)
        if ended.all():
            break
    assert torch.equal(target, model.generate(source, attention_mask=mask))


@torch.no_grad()
def test_one_program_of_the_whole_forward(model):
    inputs = {"input_ids": SOURCE, "attention_mask": (SOURCE != PAD).long(), "decoder_input_ids": SOURCE[:, :4]}
    exported = DynamoExporter().export(model, {**inputs, "use_cache": False}, DynamoConfig(dynamic=True))
    for length in [1, 5, 20]:
        inputs = {"input_ids": LONG, "attention_mask": torch.ones_like(LONG), "decoder_input_ids": LONG[:, :length]}
        inputs["attention_mask"][0, :9] = 0
        torch.testing.assert_close(exported(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_executorch_generates_as_generate():
    """For one sentence, of which the start token is 0, as all of this is built into the module."""
    torch.manual_seed(8)
    config = {**TINY, "decoder_attention_heads": 4, "tie_word_embeddings": False, "norm_first": True}
    model = randomise(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**config))).eval()
    exported = Seq2SeqLMExportableModule(model, max_hidden_seq_length=40, max_cache_length=STEPS).export()
    translations = set()
    for row in [*SOURCE, *LONG]:
        source = row[row != PAD][None]
        (expected,) = model.generate(source, decoder_start_token_id=0, max_new_tokens=STEPS - 1).tolist()
        assert exported.generate(source, STEPS) == expected
        translations.add(tuple(expected))
    assert len(translations) > 4
