"""Seq2SeqTrainer and PEFT work with this model. Run: pytest -m slow tests/model/test_trainer_and_peft.py"""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import (
    AutoPeftModelForSeq2SeqLM,
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
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
COLUMNS = {"input_ids", "attention_mask", "labels"}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
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
    """make_trainer(model, compute_metrics=..., **training_arguments) -> a Seq2SeqTrainer on the data, on the CPU."""
    own = ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "train_dataset"]

    def make(model, **options) -> Seq2SeqTrainer:
        given = {name: options.pop(name) for name in own if name in options}
        options = {"output_dir": str(tmp_path / "run"), "use_cpu": True, "disable_tqdm": True, **options}
        return Seq2SeqTrainer(
            model,
            Seq2SeqTrainingArguments(**{"save_strategy": "no", **options}),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            processing_class=tokenizer,
            eval_dataset=data,
            **{"train_dataset": data, **given},
        )

    return make


@pytest.fixture
def batch(data, tokenizer) -> dict:
    """All pairs in one batch, without decoder inputs."""
    rows = [{name: row[name] for name in COLUMNS} for row in data]
    return dict(DataCollatorForSeq2Seq(tokenizer)(rows))


def closed_form(model: nn.Module, batch: dict, smoothing: float = 0.0) -> torch.Tensor:
    """Section 5.4 by hand: per target token, `(1 - e) * -log p(label) + e * mean over the vocabulary of -log p`."""
    logits = model.eval()(**batch).logits
    real = batch["labels"] != -100
    log_p = logits[real].log_softmax(-1)  # (N,V)
    likelihood = log_p.gather(1, batch["labels"][real][:, None])[:, 0]
    return -((1 - smoothing) * likelihood + smoothing * log_p.mean(1)).mean()


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return grads(model)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def distance(ours: dict, theirs: dict) -> float:
    """The largest difference of two sets of tensors."""
    assert ours.keys() == theirs.keys() and ours
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append(grads(model))


def first_gradients(trainer: Seq2SeqTrainer) -> dict[str, torch.Tensor]:
    """Trains and gives the gradients of the first optimizer step."""
    kept = Gradients()
    trainer.add_callback(kept)
    trainer.train()
    return kept.steps[0]


# In the order of the data, plain gradients.
ONE_STEP = {"max_steps": 1, "max_grad_norm": 0, "train_sampling_strategy": "sequential", "optim": "sgd"}

# ---------------------------------------------------------------------------------------------------- Seq2SeqTrainer


def decoded(tokenizer, ids) -> list[str]:
    return tokenizer.batch_decode(np.where(ids == -100, tokenizer.pad_token_id, ids), skip_special_tokens=True)


def exact_match(tokenizer):
    def compute(prediction) -> dict:
        found, wanted = decoded(tokenizer, prediction.predictions), decoded(tokenizer, prediction.label_ids)
        return {"exact_match": np.mean([a == b for a, b in zip(found, wanted, strict=True)])}

    return compute


def test_pairs_are_learned_saved_and_translated(make, make_trainer, tokenizer, tmp_path):
    trainer = make_trainer(
        VanillaTransformerForConditionalGeneration(make().config),
        num_train_epochs=60,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=60,
        compute_metrics=exact_match(tokenizer),
    )
    before = trainer.evaluate()
    assert before["eval_loss"] > 3 and before["eval_exact_match"] == 0
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.1 and after["eval_exact_match"] == 1
    trainer.save_model(tmp_path / "saved")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    source = saved(list(PAIRS), return_tensors="pt", padding=True)
    for num_beams in [1, 3]:
        output = model.generate(**source, max_new_tokens=60, num_beams=num_beams)
        assert decoded(saved, output) == list(PAIRS.values())


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(make, make_trainer, tmp_path):
    """From the middle of an epoch, with dropout."""
    options = {"max_steps": 7, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    trainer = make_trainer(make(dropout=0.1), save_strategy="steps", save_steps=3, **options)
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    resumed = make_trainer(make(dropout=0.1), output_dir=str(tmp_path / "resumed"), **options)
    assert distance(weights(resumed.model), weights(trainer.model)) > 0.1
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 7
    assert distance(weights(resumed.model), weights(trainer.model)) == 0
    written = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)
    assert distance(weights(written), weights(trainer.model)) > 1e-3
    assert resumed.model.lm_head.weight is resumed.model.model.shared.weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("batch_size, steps", [(8, 1), (1, 8), (3, 3)])
def test_accumulated_gradients_and_loss_are_those_of_one_batch(
    make, make_trainer, data, batch, batch_size, steps, smoothing
):
    model = make()
    trainer = make_trainer(
        model,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=steps,
        label_smoothing_factor=smoothing,
        **ONE_STEP,
    )
    loss = closed_form(model, batch, smoothing)
    expected = gradients(model, loss)
    parts = [
        trainer.data_collator([{name: data[row][name] for name in COLUMNS} for row in range(start, min(start + 3, 8))])
        for start in range(0, 8, 3)
    ]
    mean_of_means = gradients(model, sum(closed_form(model, part, smoothing) for part in parts) / len(parts))
    assert distance(mean_of_means, expected) > 0.01  # else the test could not tell
    model.zero_grad()
    assert distance(first_gradients(trainer), expected) < 1e-6
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_evaluation_equals_the_closed_form(make, make_trainer, batch, smoothing):
    trainer = make_trainer(make(), label_smoothing_factor=smoothing)
    assert trainer.label_names == ["labels"]
    assert (
        set(trainer.eval_dataset.column_names) > COLUMNS
    )  # the texts are there too, and the model does not read them
    for loader in [trainer.get_train_dataloader(), trainer.get_eval_dataloader()]:
        assert set(next(iter(loader))) == {*COLUMNS, "decoder_input_ids"}
    expected = closed_form(trainer.model, batch, smoothing).item()
    assert abs(expected - closed_form(trainer.model, batch, 0.1 - smoothing).item()) > 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    trainer.args.predict_with_generate = True
    assert trainer.evaluate(max_length=5)["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_a_custom_loss_gets_logits_and_the_number_of_tokens(make, make_trainer, batch):
    calls = []

    def twice(outputs, labels, num_items_in_batch=None):
        calls.append((outputs.logits.shape[:2], labels.shape, int(num_items_in_batch)))
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return 2 * loss / num_items_in_batch

    model = make()
    trainer = make_trainer(
        model,
        compute_loss_func=twice,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        **ONE_STEP,
    )
    loss = 2 * closed_form(model, batch)
    expected = gradients(model, loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert distance(first_gradients(trainer), expected) < 2e-6
    assert len(calls) == 3 and all(logits == labels for logits, labels, _ in calls)
    assert {number for _, _, number in calls} == {int((batch["labels"] != -100).sum())}


def test_generation_in_evaluation_takes_its_options(make, make_trainer, tokenizer, batch):
    model = make()
    source = {name: batch[name] for name in ["input_ids", "attention_mask"]}
    greedy, expected = (model.generate(**source, max_length=9, num_beams=beams) for beams in [1, 3])
    assert not torch.equal(greedy, expected)
    trainer = make_trainer(
        model,
        predict_with_generate=True,
        generation_num_beams=3,
        generation_max_length=9,
        per_device_eval_batch_size=4,
    )
    found = torch.tensor(trainer.predict(trainer.eval_dataset).predictions)
    assert torch.equal(found[:, :9], expected) and (found[:, 9:] == tokenizer.pad_token_id).all()
    found = torch.tensor(trainer.predict(trainer.eval_dataset, num_beams=1).predictions)
    assert torch.equal(found[:, :9], greedy)


@pytest.mark.parametrize("batch_eval_metrics", [False, True])
def test_metrics_are_computed_from_preprocessed_logits(make, make_trainer, batch, batch_eval_metrics):
    counts = []

    def argmax(logits, labels):
        return logits[0].argmax(-1)

    def accuracy(prediction, compute_result=True) -> dict:
        found, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
        real = labels != -100
        counts.append(((found[real] == labels[real]).sum().item(), real.sum().item()))
        return {"accuracy": sum(right for right, _ in counts) / sum(all_ for _, all_ in counts)}

    model = make()
    with torch.no_grad():
        batch["labels"][:, 1] = model(**batch).logits[:, 0].argmax(-1)  # here the model is often right
        real = batch["labels"] != -100
        expected = (model(**batch).logits.argmax(-1) == batch["labels"])[real].float().mean().item()
    trainer = make_trainer(
        model,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=argmax,
        batch_eval_metrics=batch_eval_metrics,
        per_device_eval_batch_size=3,
    )
    rows = [{name: batch[name][row].tolist() for name in COLUMNS} for row in range(len(PAIRS))]
    found = trainer.evaluate(Dataset.from_list(rows))["eval_accuracy"]
    assert 0 < expected < 1 and found == pytest.approx(expected)
    assert len(counts) == (3 if batch_eval_metrics else 1)


# --------------------------------------------------------------------------------------------------------------- PEFT

TASK = {"task_type": "SEQ_2_SEQ_LM"}
ADAPTERS = {
    "LoRA of two projections": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **TASK),
    "LoRA of all": lambda: LoraConfig(target_modules="all-linear", r=4, **TASK),
    "LoRA of all and the head": lambda: LoraConfig(target_modules=["q_proj", "fc1", "lm_head"], r=4, **TASK),
    "a separate head": lambda: LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **TASK),
    "separate embeddings": lambda: LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], **TASK),
    "DoRA": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=True, **TASK),
    "IA3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"], **TASK),
}
PROMPTS = {
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=3, **TASK),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "p-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK),
}


@pytest.fixture
def base(make, tmp_path) -> Path:
    """A saved model."""
    make().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder: Path) -> VanillaTransformerForConditionalGeneration:
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder)


def train_adapter(model: nn.Module, batch: dict, steps: int = 20) -> tuple[float, float]:
    """Trains what may be trained, checks that nothing else changes, and gives the losses before and after."""
    before = weights(model)
    learnt = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == learnt
        optimizer.step()
        losses.append(loss.item())
    changed = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert changed and changed <= learnt
    model.eval()
    return losses[0], losses[-1]


@torch.no_grad()
def logits_of(model: nn.Module, batch: dict) -> torch.Tensor:
    return model.eval()(**batch).logits


def translations(model: nn.Module, batch: dict) -> list[torch.Tensor]:
    """Greedily and by beam search, with a mask."""
    source = {name: batch[name] for name in ["input_ids", "attention_mask"]}
    return [model.eval().generate(**source, max_new_tokens=8, num_beams=beams) for beams in [1, 3]]


def assert_same_translations(ours: nn.Module, theirs: nn.Module, batch: dict):
    for our, their in zip(translations(ours, batch), translations(theirs, batch), strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_alone_is_trained_saved_and_loaded(base, batch, tmp_path, kind):
    model = get_peft_model(load(base), ADAPTERS[kind]())
    torch.testing.assert_close(logits_of(model, batch), logits_of(load(base), batch))
    first, last = train_adapter(model, batch)
    assert last < first - 0.1
    expected = logits_of(model, batch)
    assert (expected - logits_of(load(base), batch)).abs().max() > 0.1

    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    if kind == "LoRA of two projections":
        saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert len(saved) == 2 * (2 * 2 + 2 * 4)  # A and B, of two projections in each of the two kinds of layer
        assert all(".lora_" in name for name in saved)
    loaded = [PeftModel.from_pretrained(load(base), tmp_path / "adapter")]
    loaded.append(AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter"))
    for other in loaded:
        assert torch.equal(logits_of(other, batch), expected)
        assert_same_translations(other, model, batch)
    with model.disable_adapter():
        torch.testing.assert_close(logits_of(model, batch), logits_of(load(base), batch))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_loss_in_training_is_that_of_the_adapted_model(base, batch, kind):
    """Also where the adapter is on the output projection, whose weight alone the loss in chunks would read."""
    model = get_peft_model(load(base), ADAPTERS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    expected = closed_form(model, batch)
    with model.disable_adapter():
        assert abs(closed_form(model, batch) - expected) > 1e-3
    expected_gradients = gradients(model, expected)
    loss = model.train()(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert distance(gradients(model, loss), expected_gradients) < 2e-6
    assert all(gradient.any() for name, gradient in expected_gradients.items() if "lm_head" in name)


@pytest.mark.parametrize("kind", ["LoRA of two projections", "LoRA of all", "a separate head", "DoRA", "IA3"])
def test_a_merged_adapter_makes_an_ordinary_model(base, batch, tmp_path, kind):
    model = get_peft_model(load(base), ADAPTERS[kind]())
    train_adapter(model, batch)
    expected, translated = logits_of(model, batch), translations(model, batch)
    merged = model.merge_and_unload()
    assert type(merged) is VanillaTransformerForConditionalGeneration
    torch.testing.assert_close(logits_of(merged, batch), expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(loaded, "peft_config")
    assert torch.equal(logits_of(loaded, batch), logits_of(merged, batch))
    for ours, theirs in zip(translations(loaded, batch), translated, strict=True):
        assert torch.equal(ours, theirs)


def test_an_adapter_of_a_head_that_is_not_tied_can_be_merged(make, batch):
    model = get_peft_model(make(tie_word_embeddings=False), ADAPTERS["LoRA of all and the head"]())
    train_adapter(model, batch)
    expected = logits_of(model, batch)
    torch.testing.assert_close(logits_of(model.merge_and_unload(), batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["LoRA of two projections", "LoRA of all", "LoRA of all and the head"])
def test_adapters_added_by_the_model(base, batch, tmp_path, kind):
    """`add_adapter` of transformers, without a PeftModel around the model."""
    model = load(base)
    before = logits_of(model, batch)
    model.add_adapter(ADAPTERS[kind]())
    first, last = train_adapter(model, batch)
    assert last < first - 0.1
    expected = logits_of(model, batch)
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    other = load(base)
    other.load_adapter(str(tmp_path / "adapter"))
    loaded = [other, AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")]
    loaded.append(PeftModel.from_pretrained(load(base), tmp_path / "adapter"))
    for other in loaded:
        assert torch.equal(logits_of(other, batch), expected)
        assert_same_translations(other, model, batch)
    model.disable_adapters()
    torch.testing.assert_close(logits_of(model, batch), before)
    model.enable_adapters()
    assert torch.equal(logits_of(model, batch), expected)
    model.delete_adapter("default")
    assert torch.equal(logits_of(model, batch), before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_adapter_learns_through_gradient_checkpointing(base, batch, use_reentrant):
    found = []
    for gradient_checkpointing in [False, True]:
        torch.manual_seed(0)
        model = load(base)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, **TASK))
        found.append(gradients(model, model.train()(**batch).loss))
    assert all(gradient.any() for gradient in found[0].values())
    assert distance(*found) < 1e-6


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_alone_is_trained_saved_and_loaded(base, batch, tmp_path, kind):
    model = get_peft_model(load(base), PROMPTS[kind]())
    first, last = train_adapter(model, batch)
    assert last < first - 0.05
    expected = logits_of(model, batch)
    model.save_pretrained(tmp_path / "prompt")
    for other in [
        PeftModel.from_pretrained(load(base), tmp_path / "prompt"),
        AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "prompt"),
    ]:
        torch.testing.assert_close(logits_of(other, batch), expected, rtol=1e-5, atol=1e-5)
        assert_same_translations(other, model, batch)


@pytest.mark.parametrize("kind", PROMPTS)
def test_greedy_generation_after_a_prompt_is_the_argmax_of_forward(base, batch, kind):
    model = get_peft_model(load(base), PROMPTS[kind]())
    train_adapter(model, batch)
    written = translations(model, batch)[0]
    source = {name: batch[name] for name in ["input_ids", "attention_mask"]}
    with torch.no_grad():
        best = model(**source, decoder_input_ids=written[:, :-1]).logits.argmax(-1)
    real = (written[:, :-1] == model.config.eos_token_id).cumsum(1) == 0
    assert torch.equal(written[:, 1:][real], best[real])
    single = {name: ids[2:3, : batch["attention_mask"][2].sum()] for name, ids in source.items()}
    alone = model.generate(**single, max_new_tokens=8)
    assert torch.equal(alone[0], written[2, : alone.shape[1]])


@pytest.mark.parametrize("targets, smoothing", [("all-linear", 0.1), (["q_proj", "lm_head"], 0.0)])
def test_accumulated_gradients_of_an_adapter_are_those_of_one_batch(base, make_trainer, batch, targets, smoothing):
    model = get_peft_model(load(base), LoraConfig(target_modules=targets, init_lora_weights=False, **TASK))
    expected = gradients(model, closed_form(model, batch, smoothing))
    model.zero_grad()
    batches = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "label_smoothing_factor": smoothing}
    assert distance(first_gradients(make_trainer(model, **batches, **ONE_STEP)), expected) < 1e-6


def test_seq2seq_trainer_trains_an_adapter(make, make_trainer, tokenizer, data, tmp_path):
    """To exact translations, in checkpoints of the adapter alone, from which a run resumes exactly."""
    base = tmp_path / "base"
    VanillaTransformerForConditionalGeneration(make().config).save_pretrained(base)
    few = data.select([2, 3, 5, 6])
    options = {"max_steps": 60, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 50}
    options |= {"predict_with_generate": True, "generation_max_length": 20, "train_dataset": few}
    options |= {"compute_metrics": exact_match(tokenizer)}

    def adapted() -> PeftModel:
        targets = ["q_proj", "v_proj", "fc1", "fc2", "lm_head"]
        config = LoraConfig(target_modules=targets, r=16, lora_alpha=32, lora_dropout=0.1, **TASK)
        return get_peft_model(load(base), config)

    trainer = make_trainer(adapted(), **options)
    assert trainer.label_names == ["labels"]
    before = trainer.evaluate(few)
    assert before["eval_loss"] > 3 and before["eval_exact_match"] == 0
    trainer.train()
    after = trainer.evaluate(few)
    assert after["eval_loss"] < 0.1 and after["eval_exact_match"] == 1
    checkpoint = tmp_path / "run" / "checkpoint-50"
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    resumed = make_trainer(adapted(), **{**options, "output_dir": str(tmp_path / "resumed")})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert distance(weights(resumed.model), weights(trainer.model)) == 0

    trainer.save_model(tmp_path / "adapter")
    model = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")
    source = tokenizer(list(few["source"]), return_tensors="pt", padding=True)
    for num_beams in [1, 3]:
        output = model.generate(**source, max_new_tokens=20, num_beams=num_beams)
        assert decoded(tokenizer, output) == list(few["target"])
