"""Seq2SeqTrainer and PEFT work with this model."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from helpers import assert_close, gradients
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer

pytestmark = pytest.mark.slow

# Targets of very unequal lengths: a mean of means is far from the mean.
PAIRS = {
    "A man rides a bike.": "Ein Mann fährt Rad.",
    "Two women sit at a long table and drink coffee.": "Zwei Frauen sitzen an einem langen Tisch und trinken Kaffee.",
    "Go!": "Los!",
    "A dog runs.": "Ein Hund rennt.",
    "Children play in the park.": "Kinder spielen im Park, in dem Männer auf einer Bank sitzen und Kaffee trinken.",
    "No.": "Nein.",
    "It rains.": "Es regnet.",
    "An old man reads on a bench.": "Ein alter Mann liest auf einer Bank.",
}
COLUMNS = ["input_ids", "attention_mask", "labels"]


@pytest.fixture(autouse=True)
def fresh_accelerator_state():
    """A Trainer leaves its precision and its accumulation to the next Accelerator of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*PAIRS, *PAIRS.values()], 320)


@pytest.fixture(scope="module")
def data(tokenizer) -> Dataset:
    texts = Dataset.from_dict({"source": list(PAIRS), "target": list(PAIRS.values())})
    return texts.map(lambda rows: tokenizer(rows["source"], text_target=rows["target"]), batched=True)


@pytest.fixture
def make(make_model, tokenizer):
    """make(**config) -> a small random model for the tokenizer."""
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {"decoder_attention_heads": 4, "max_position_embeddings": 80, **special_token_ids(tokenizer)}
    return lambda **config: make_model(**{**sizes, **config})


@pytest.fixture
def make_trainer(tokenizer, data, tmp_path):
    """make_trainer(model, compute_loss_func=None, **training_arguments) -> a Seq2SeqTrainer on the CPU."""

    def make(model, compute_loss_func=None, **options) -> Seq2SeqTrainer:
        options |= {"output_dir": str(tmp_path / "run"), "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        given = {"processing_class": tokenizer, "train_dataset": data, "eval_dataset": data}
        given |= {"data_collator": DataCollatorForSeq2Seq(tokenizer, model=model)}
        arguments = Seq2SeqTrainingArguments(**options)
        return Seq2SeqTrainer(model, arguments, **given, compute_loss_func=compute_loss_func)

    return make


@pytest.fixture
def batch(data, tokenizer) -> dict:
    """All pairs in one batch, without decoder inputs."""
    return dict(DataCollatorForSeq2Seq(tokenizer)(list(data.select_columns(COLUMNS))))


def closed_form(model: nn.Module, batch: dict, smoothing: float = 0.0) -> torch.Tensor:
    """The loss (section 5.4) of the logits, by torch's own function."""
    logits = model.eval()(**batch).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)


def distance(ours: dict, theirs: dict) -> float:
    """The largest difference of two sets of tensors."""
    assert ours.keys() == theirs.keys() and ours
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


# In the order of the data, by the gradients themselves.
ONE_STEP = {"max_steps": 1, "max_grad_norm": 0, "train_sampling_strategy": "sequential", "optim": "sgd"}
ONE_STEP |= {"learning_rate": 1.0}


def first_gradients(trainer: Seq2SeqTrainer) -> dict[str, torch.Tensor]:
    """What one step takes from the weights."""
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    trainer.train()
    return {name: before[name] - p.detach() for name, p in trained.items()}


# ---------------------------------------------------------------------------------------------------- Seq2SeqTrainer


def test_trainer_learns_saves_and_translates(make, make_trainer, tokenizer, tmp_path):
    model = VanillaTransformerForConditionalGeneration(make().config)
    options = {"predict_with_generate": True, "generation_max_length": 60, "learning_rate": 1e-2}
    trainer = make_trainer(model, num_train_epochs=60, per_device_train_batch_size=4, **options)
    assert trainer.evaluate()["eval_loss"] > 3
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.1
    trainer.save_model(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    output = model.generate(**saved(list(PAIRS), return_tensors="pt", padding=True), max_new_tokens=60)
    assert saved.batch_decode(output, skip_special_tokens=True) == list(PAIRS.values())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("adapter", [None, ["q_proj", "lm_head"]], ids=str)
@pytest.mark.parametrize("batch_size, steps", [(8, 1), (1, 8), (3, 3)])
def test_accumulation_equals_one_batch(make, make_trainer, data, batch, batch_size, steps, adapter, smoothing):
    model = make()
    if adapter is not None:
        model = get_peft_model(model, LoraConfig(target_modules=adapter, init_lora_weights=False, **TASK))
    options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": steps}
    trainer = make_trainer(model, label_smoothing_factor=smoothing, **options, **ONE_STEP)
    loss = closed_form(model, batch, smoothing)
    expected = gradients(model, loss)
    rows = list(data.select_columns(COLUMNS))
    parts = [trainer.data_collator(rows[start : start + 3]) for start in range(0, 8, 3)]
    mean_of_means = gradients(model, sum(closed_form(model, part, smoothing) for part in parts) / len(parts))
    assert distance(mean_of_means, expected) > 0.01  # else the test could not tell
    assert distance(first_gradients(trainer), expected) < 1e-6
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_evaluation_loss_equals_the_closed_form(make, make_trainer, batch, smoothing):
    trainer = make_trainer(make(), label_smoothing_factor=smoothing)
    assert set(trainer.eval_dataset.column_names) > set(COLUMNS)  # also the texts, which the model does not read
    assert set(next(iter(trainer.get_eval_dataloader()))) == {*COLUMNS, "decoder_input_ids"}
    expected = closed_form(trainer.model, batch, smoothing).item()
    assert abs(expected - closed_form(trainer.model, batch, 0.1 - smoothing).item()) > 1e-3
    for predict_with_generate in [False, True]:
        trainer.args.predict_with_generate = predict_with_generate
        assert trainer.evaluate(max_length=5)["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_a_collator_may_decline_the_logits(make, make_trainer, batch):
    trainer = make_trainer(make(), per_device_train_batch_size=8, predict_with_generate=True, **ONE_STEP)
    collate, expected = trainer.data_collator, closed_form(trainer.model, batch)
    trainer.data_collator = lambda rows: {**collate(rows), "output_logits": False}
    assert trainer.evaluate(max_length=5)["eval_loss"] == pytest.approx(expected.item(), abs=1e-5)
    expected = gradients(trainer.model, expected)
    assert distance(first_gradients(trainer), expected) < 1e-6


def test_custom_loss_gets_logits_and_number_of_tokens(make, make_trainer, batch):
    def twice(outputs, labels, num_items_in_batch=None):
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return 2 * loss / num_items_in_batch

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(make(), twice, **options, **ONE_STEP)
    expected = gradients(trainer.model, 2 * closed_form(trainer.model, batch))
    assert distance(first_gradients(trainer), expected) < 2e-6


# --------------------------------------------------------------------------------------------------------------- PEFT

TASK = {"task_type": "SEQ_2_SEQ_LM"}
ADAPTERS = {
    "LoRA of all": {"target_modules": "all-linear", "r": 4},
    "LoRA of the head": {"target_modules": ["q_proj", "fc1", "lm_head"], "r": 4},
    "a separate head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "separate embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


def adapt(model: nn.Module, kind: str) -> nn.Module:
    return get_peft_model(model, LoraConfig(**ADAPTERS[kind], **TASK))


def train_adapter(model: nn.Module, batch: dict):
    """Lowers the loss; only what may be trained has gradients and changes."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(20):
        loss = model.train()(**batch).loss
        assert gradients(model, loss).keys() == trained
        optimizer.step()
        losses.append(loss.item())
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and changed <= trained
    assert losses[-1] < losses[0] - 0.05


@torch.no_grad()
def results(model: nn.Module, batch: dict) -> list[torch.Tensor]:
    """Logits, then translations greedily and by beam search."""
    source = {name: batch[name] for name in ["input_ids", "attention_mask"]}
    translated = [model.eval().generate(**source, max_new_tokens=8, num_beams=beams) for beams in [1, 3]]
    return [model(**batch).logits, *translated]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_is_trained_saved_loaded_and_merged(make, batch, tmp_path, kind):
    make(tie_word_embeddings=kind != "LoRA of the head").save_pretrained(tmp_path / "base")
    base = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "base")
    untrained = results(base, batch)
    model = adapt(base, kind)
    assert_close(results(model, batch), untrained, 1e-5)
    train_adapter(model, batch)
    expected = results(model, batch)
    assert (expected[0] - untrained[0]).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    for auto in [AutoPeftModelForSeq2SeqLM, *([AutoModelForSeq2SeqLM] if kind.startswith("LoRA") else [])]:
        assert_close(results(auto.from_pretrained(tmp_path / "adapter"), batch), expected, 0)

    if kind == "separate embeddings":  # which a model with shared ones cannot keep
        return
    merged = model.merge_and_unload()
    assert_close(results(merged, batch), expected, 1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert_close(results(loaded, batch), results(merged, batch), 0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_training_loss_is_that_of_the_adapted_model(make, batch, kind):
    """Also where the adapter is on the output projection, whose weight alone the chunked loss would read."""
    model = adapt(make(), kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    expected = closed_form(model, batch)
    with model.disable_adapter():
        assert abs(closed_form(model, batch) - expected) > 1e-3
    expected_gradients = gradients(model, expected)
    loss = model.train()(**batch, output_logits=False).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert distance(gradients(model, loss), expected_gradients) < 2e-6
