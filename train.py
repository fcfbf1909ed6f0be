"""Train an encoder-decoder Transformer on sentence pairs.

accelerate launch train.py                                                      # the sample recipe
accelerate launch --mixed_precision bf16 train.py --config recipes/multi30k_en_de.yaml --d_model 128
accelerate launch train.py --help                                               # every option
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Sized
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from filelock import FileLock
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, __version__
from vanilla_transformer.commands.translate import Translator
from vanilla_transformer.conversion.marian import load_foreign
from vanilla_transformer.data.batches import evaluation_batches, lengths_of, padding_fraction, training_batches
from vanilla_transformer.data.pairs import fingerprint, load_pairs, sentences, tokenize_pairs
from vanilla_transformer.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation.scores import TranslationQuality, evaluate_loss, translate_split
from vanilla_transformer.hub.model_card import public_name, write_model_card
from vanilla_transformer.hub.upload import check_token, push
from vanilla_transformer.inspection.attention import attention_maps, draw_attention
from vanilla_transformer.training.arguments import model_fields, parse_options, resolved_recipe
from vanilla_transformer.training.checkpoint import (
    LOCK,
    SCORING,
    Checkpoint,
    average_checkpoints,
    begin_output,
    compare_settings,
    delete_old_checkpoints,
    find_beginning,
    list_checkpoints,
    newest_whole,
    settings_of,
)
from vanilla_transformer.training.distributed import (
    Learner,
    by_main_process,
    check_launch,
    load_weights,
    number_of_shards,
)
from vanilla_transformer.training.memory import bytes_of_state, estimate, free_memory, largest_batch
from vanilla_transformer.training.optimization import (
    Calendar,
    RunState,
    Trouble,
    keep_freed_memory,
    learning_rate_schedule,
    paper_learning_rate,
)
from vanilla_transformer.training.plots import plot_training_curves
from vanilla_transformer.training.signals import Interrupted, StopSignal, end_launcher

EXAMPLES = 3  # translations that each evaluation prints
SAMPLES = {"train": "train_samples", "validation": "eval_samples", "test": "test_samples"}


def main():
    args = parse_options(sys.argv[1:])
    output_dir = Path(args.output_dir)
    if args.push_to_hub:
        check_token(args.hub_model_id, output_dir)
    accelerator = make_accelerator(args)
    lock = FileLock(output_dir / LOCK, timeout=10)  # held by the main process until it ends
    checkpoint = by_main_process(accelerator, find_beginning, args, lock)
    check_is_shared(checkpoint, accelerator)

    # ------------------------------------------------------------------------------------------------------------ data
    # One process of each machine prepares what the others then find on its disk; the first, on one that all share.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pairs = load_pairs(args)
    tokenizer = by_main_process(accelerator, make_tokenizer, args, pairs["train"], checkpoint)
    config = make_config(args, tokenizer)
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        splits = tokenize_splits(pairs, tokenizer, args, config, accelerator)

    # ------------------------------------------------------------------------------------------------ model, optimiser
    torch.manual_seed(args.seed)
    model = make_model(args, config, accelerator.device)
    model.generation_config = make_generation_config(args, model)
    accelerator.print(f"{model.num_parameters():,} parameters, {model.config.vocab_size:,} token types")
    if args.per_device_train_max_tokens == "auto":
        args.per_device_train_max_tokens = choose_budget(args, model, splits["train"], checkpoint, accelerator)
    learner = Learner(model, args, accelerator)

    # ----------------------------------------------------------------------------------------------- resume, schedule
    if args.learning_rate is None:
        args.learning_rate = paper_learning_rate(model.config.d_model, args.warmup_steps)
    batches_per_step = args.gradient_accumulation_steps * accelerator.num_processes
    data = {split: fingerprint(splits[split]) for split in ("train", "validation")}
    settings = settings_of(args, model.config, data, batches_per_step, accelerator.mixed_precision)
    state = RunState(settings=settings) if checkpoint is None else resume(learner, checkpoint, settings)
    batches = next_batches(splits["train"], tokenizer, args, state, accelerator)
    max_steps = args.max_steps or steps_of(args.num_train_epochs, batches, batches_per_step)
    if state.step > max_steps:
        raise UserError(
            f"The run ends at step {max_steps}, and {checkpoint} is after step {state.step}; raise --max_steps or "
            "--num_train_epochs to train on."
        )
    peak = args.learning_rate
    learning_rate = learning_rate_schedule(args.lr_scheduler_type, peak, args.warmup_steps, max_steps)
    calendar = Calendar(args, max_steps)
    accelerator.print(f"steps {state.step:,} to {max_steps:,}, {describe_schedule(args, max_steps)}")
    if args.dry_run:
        print_plan(args, learner, splits["train"], batches, batches_per_step)
        return end_processes(accelerator)

    # ----------------------------------------------------------------------------------------------------------- train
    recipe = resolved_recipe(args, model.config)
    by_main_process(accelerator, begin_output, lock, checkpoint, recipe)
    compare_machines(output_dir, recipe, data["train"], accelerator)
    accelerator.init_trackers("vanilla-transformer", config={k: v for k, v in vars(args).items() if v is not None})
    there = [saved.step for saved in by_main_process(accelerator, list_checkpoints, output_dir)]
    saved_step = state.step if state.step in there and not state.is_interrupted else None  # or in another directory
    window, clock, is_stopping = [], time.perf_counter(), False  # what is not logged yet, and since when
    progress = {"total": max_steps, "initial": state.step, "disable": not accelerator.is_local_main_process}
    with StopSignal(accelerator) as stop, tqdm(desc="Training", **progress) as bar:
        micro_batches = iter(batches)
        # What follows a step stands before it, so that a run that is resumed begins with what was not done any more.
        while True:
            if calendar.evaluates(state.step) and not state.is_evaluated and not is_stopping:
                try:
                    with stop.breaking_off():
                        scores = evaluate(learner.scored(), tokenizer, splits["validation"], "eval", args, accelerator)
                    state.log_scores(scores)
                    saved_step = None
                    accelerator.log(numbers_of(scores), step=state.step)
                except Interrupted:
                    is_stopping = True
            if (calendar.saves(state.step) or is_stopping) and state.step != saved_step:
                state.stream = batches.state_at(state.position)
                state.is_interrupted = is_stopping
                learner.save(output_dir / f"checkpoint-{state.step}", tokenizer, state)
                saved_step = state.step
                if accelerator.is_main_process and not is_stopping:
                    delete_checkpoints(args, output_dir, state)
            is_over = calendar.is_over(state)
            if is_stopping or is_over and stop.is_agreed(may_ask_others=True):
                accelerator.end_training()
                raise Stopped(state.step, stop)
            if is_over:
                break

            clock = clock if window else time.perf_counter()
            batch = [next(micro_batches) for _ in range(args.gradient_accumulation_steps)]
            window.append(learner.step(batch, learning_rate(state.step + 1), state))
            bar.update()
            is_stopping = stop.is_agreed(may_ask_others=calendar.logs(state.step))
            if calendar.logs(state.step) or is_stopping:
                if trouble := state.find_trouble(window, spikes=args.on_divergence != "ignore"):
                    state = roll_back(args, trouble, state, batches, learner, checkpoint)
                    batches = next_batches(splits["train"], tokenizer, args, state, accelerator)
                    micro_batches, saved_step, is_stopping = iter(batches), state.step, False
                    bar.n = state.step
                else:
                    entry = state.log(window, time.perf_counter() - clock)
                    bar.set_postfix_str(describe(entry))
                    accelerator.log(entry, step=state.step)
                window.clear()
    if state.step < max_steps:
        waited = state.evaluations_without_improvement(args.metric_for_best_model)
        accelerator.print(f"Stopped early, {waited} evaluations after the best.")

    evaluate_and_save(args, learner, tokenizer, splits, state)
    end_processes(accelerator)


def evaluate_and_save(args, learner: Learner, tokenizer, splits: dict, state: RunState):
    """The end of a run: scores what it hands out, and writes it; raises UserError for a model that came apart."""
    output_dir, accelerator = Path(args.output_dir), learner.accelerator
    final = learner.scored()
    load_final_weights(final, args, output_dir, state, accelerator)
    results = state.results() | {"num_parameters": final.num_parameters()}
    results |= evaluate(final, tokenizer, splits["validation"], "eval", args, accelerator)
    if not math.isfinite(results["eval_loss"]):
        raise UserError(
            f"The loss of the validation pairs is {results['eval_loss']} after step {state.step}: training has come "
            "apart, and no model is saved. Lower --learning_rate, lengthen --warmup_steps or clip harder by "
            "--max_grad_norm."
        )
    if not state.is_evaluated:
        state.log_scores(results)
    shown = results["examples"]
    if "test" in splits:
        results |= evaluate(final, tokenizer, splits["test"], "test", args, accelerator)
    accelerator.log(numbers_of(results), step=state.step)
    if accelerator.is_main_process:
        results |= describe_run(args, splits, accelerator)
        save_run(output_dir, final, tokenizer, results, state)
        draw_shortest_example(final, tokenizer, shown, output_dir / "attention.png")
        write_model_card(output_dir)
        print(f"The model is in {output_dir}.")
        if args.push_to_hub:
            push_run(output_dir, args.hub_model_id)


# -------------------------------------------------------------------------------------------------- the parts of a run


def check_is_shared(checkpoint: Checkpoint | None, accelerator: Accelerator):
    """Raises UserError, on all processes, if the checkpoint that the main one has found is not there for all."""
    is_there = checkpoint is None or (checkpoint.folder / "trainer_state.json").exists()
    if not all(gather_object([is_there])):
        raise UserError(f"{checkpoint} is not there on all machines; give --output_dir a place that they share.")


def compare_machines(output_dir: Path, recipe: str, data: str | None, accelerator: Accelerator):
    """Raises UserError, on all processes, if they do not see the same output directory or have not the same pairs.

    The pairs of a stream, which have no fingerprint, are not compared.
    """
    accelerator.wait_for_everyone()

    def sees() -> bool:
        path = output_dir / "recipe.yaml"
        return path.exists() and path.read_text(encoding="utf-8") == recipe

    deadline = time.monotonic() + 60  # a network disk may say for a while that what is new is not there
    while not sees() and time.monotonic() < deadline:
        time.sleep(1)
    seen, fingerprints = zip(*gather_object([(sees(), data)]), strict=True)
    if not all(seen):
        raise UserError(
            f"--output_dir {output_dir} is not the same directory on all machines; give it a place that they share."
        )
    if len(set(fingerprints)) > 1:
        raise UserError("The training pairs are not the same on all machines; copy the dataset of one to the others.")


def make_accelerator(args) -> Accelerator:
    """Accelerate as it was launched, with the trackers of `--report_to`; on a CPU also with all cores and memory kept.

    Raises UserError for a tracker that does not exist or is not installed, and for a launch that is not supported.
    """
    check_launch()
    trackers = [name for name in args.report_to.split(",") if name != "none"]
    try:
        # The main process may tokenise for hours while the others wait.
        patience = InitProcessGroupKwargs(timeout=timedelta(hours=24))
        with warnings.catch_warnings():  # of trackers that are not there, which is told by what follows
            warnings.simplefilter("ignore", UserWarning)
            accelerator = Accelerator(
                log_with=trackers or None, project_dir=args.output_dir, kwargs_handlers=[patience]
            )
    except ValueError as error:
        raise UserError(
            f"Accelerate cannot be set up as it was launched, with --report_to {args.report_to}: {error}"
        ) from error
    if trackers and not accelerator.log_with:
        raise UserError(f"--report_to {args.report_to} is not installed; pip install it, or choose another.")
    if accelerator.device.type == "cpu":
        use_all_cores(accelerator.num_processes)
        keep_freed_memory()
    disable_progress_bar()  # of transformers, which saves these models in no time
    return accelerator


def use_all_cores(num_processes: int):
    """Undoes the single thread that `accelerate launch` gives a process on a CPU unless it is told of more."""
    if torch.get_num_threads() == 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // num_processes))


def make_tokenizer(args, dataset, checkpoint: Checkpoint | None):
    """The tokenizer of the run that is resumed, of the model that is tuned, the one that is named, or a new one."""
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint), "--resume_from_checkpoint")
    if args.model_name_or_path is not None:
        return load_tokenizer(args.model_name_or_path, "--model_name_or_path")
    if args.tokenizer_name is not None:
        return load_tokenizer(args.tokenizer_name)
    texts, length = sentences(dataset)
    return train_tokenizer(texts, args.vocab_size or VanillaTransformerConfig().vocab_size, length)


def make_config(args, tokenizer) -> VanillaTransformerConfig:
    """The config of the model that is tuned, or the options that are given and what follows from the tokenizer.

    Raises UserError if a model cannot be tuned, or is to have other sizes than it has.
    """
    fields = model_fields(args)
    if args.model_name_or_path:
        return tuned_config(args, fields)
    asked = fields.get("vocab_size", len(tokenizer))
    if asked < len(tokenizer) or args.tokenizer_name and asked != len(tokenizer):  # few texts give fewer types
        whose = f"--tokenizer_name {args.tokenizer_name}" if args.tokenizer_name else "the tokenizer"
        raise UserError(f"--vocab_size is {asked}, and {whose} has {len(tokenizer)} types; leave --vocab_size out.")
    config = VanillaTransformerConfig(**fields | {"vocab_size": len(tokenizer)} | special_token_ids(tokenizer))
    longest = max(args.max_source_length, args.max_target_length)
    if config.position_embedding_type == "learned" and longest > config.max_position_embeddings:
        raise UserError(
            f"--max_position_embeddings is {config.max_position_embeddings}, and sentences may have {longest} tokens; "
            "learned positions do not reach beyond their table: raise it, or lower --max_source_length and "
            "--max_target_length."
        )
    return config


def tuned_config(args, fields: dict) -> VanillaTransformerConfig:
    """The config of `--model_name_or_path`, one of these models or a Marian one, with the dropout that is given."""
    name = args.model_name_or_path
    dropouts = {field: value for field, value in fields.items() if "dropout" in field}
    try:
        if VanillaTransformerConfig.get_config_dict(name)[0].get("model_type") == VanillaTransformerConfig.model_type:
            config = VanillaTransformerConfig.from_pretrained(name, **dropouts)
        else:  # that of a Marian model follows from its weights, too
            config = load_foreign(name, use_safetensors=True, **dropouts).config
    except (OSError, ValueError, RuntimeError, SafetensorError, HTTPError) as error:
        raise UserError(f"--model_name_or_path {name} cannot be tuned: {' '.join(str(error).split())}") from error
    for field, value in fields.items():
        # A tokenizer may have fewer types than it was asked for.
        if value != getattr(config, field) and not (field == "vocab_size" and value > config.vocab_size):
            raise UserError(f"--{field} is {value}, and {getattr(config, field)} in --model_name_or_path {name}.")
    if args.tokenizer_name:
        raise UserError(f"--tokenizer_name cannot be given with --model_name_or_path {name}, which has its own.")
    return config


def tokenize_splits(pairs: dict, tokenizer, args, config: VanillaTransformerConfig, accelerator: Accelerator) -> dict:
    """Token ids of all splits; says how many pairs each has and why others were dropped.

    The limits of length are for training: evaluation leaves out only what the model was not made for, more than
    `max_position_embeddings` tokens, which would also take memory by the square of their number.
    """
    reach = config.max_position_embeddings
    if config.position_embedding_type != "learned":
        reach = max(reach, args.max_source_length, args.max_target_length)
    splits = {}
    for split, dataset in pairs.items():
        limits = (args.max_source_length, args.max_target_length) if split == "train" else (reach, reach)
        splits[split], drops = tokenize_pairs(dataset, tokenizer, *limits, split, args.preprocessing_num_workers)
        if drops is None:
            accelerator.print(f"{split}: a stream, of which empty and too long pairs are left out")
        else:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in drops.items())
            accelerator.print(f"{split}: {len(splits[split]):,} pairs (dropped: {reasons})")
    return splits


def make_model(args, config: VanillaTransformerConfig, device: torch.device):
    """A new model, or the one that is tuned."""
    # On a CPU eager attention is the fastest to train with, where sentences are short.
    attention = args.attn_implementation or ("eager" if device.type == "cpu" else None)
    if attention == "flex_attention" and device.type == "cpu":
        raise UserError("--attn_implementation flex_attention cannot be trained on a CPU; choose eager or sdpa.")
    options = {"attn_implementation": attention, "dtype": torch.float32}
    try:
        if args.model_name_or_path is None:
            model = VanillaTransformerForConditionalGeneration._from_config(config, **options)
        else:
            dropouts = {field: value for field, value in vars(config).items() if field.endswith("dropout")}
            model = load_foreign(args.model_name_or_path, use_safetensors=True, **dropouts, **options)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, HTTPError) as error:
        name = f"--model_name_or_path {args.model_name_or_path}" if args.model_name_or_path else "A model"
        reason = " ".join(str(error).split())
        raise UserError(f"{name} with --attn_implementation {attention} cannot be made: {reason}") from error
    if args.gradient_checkpointing:
        # The second is its name in older transformers.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.to(device)


# What a Marian model that is tuned may write: no padding, for one, which its decoder starts with.
KEPT = ("bad_words_ids", "forced_eos_token_id", "renormalize_logits")


def make_generation_config(args, model: VanillaTransformerForConditionalGeneration) -> GenerationConfig:
    """What `generate` does by default with the trained model: the beams it was scored with, up to a length."""
    config = model.config
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    kept = {name: getattr(model.generation_config, name) for name in KEPT}
    beams = {"num_beams": args.num_beams, "length_penalty": args.length_penalty} if args.num_beams > 1 else {}
    longest = args.max_target_length + 1
    if config.position_embedding_type == "learned":
        longest = min(longest, config.max_position_embeddings)
    return GenerationConfig(max_length=longest, **beams, **ids, **kept)


def choose_budget(args, model, train, checkpoint: Checkpoint | None, accelerator: Accelerator) -> int:
    """The token budget of `auto`: that of the run that is resumed, or as many tokens as fit."""
    if checkpoint is not None:
        with checkpoint.explaining():
            return checkpoint.state().settings["per_device_train_max_tokens"]
    budget = largest_batch(model, args, accelerator, longest_sides(train, args), number_of_shards(accelerator))
    accelerator.print(f"--per_device_train_max_tokens auto: {budget:,} tokens")
    return budget


def longest_sides(train, args) -> np.ndarray:
    """The length of the longer side of each pair; of a stream, which is not known, the limit."""
    if isinstance(train, Sized):
        return np.maximum(*lengths_of(train))
    return np.array([max(args.max_source_length, args.max_target_length)])


def resume(learner: Learner, checkpoint: Checkpoint, settings: dict) -> RunState:
    """The state of the checkpoint, loaded; says what has changed since, and raises UserError for what must not."""
    with checkpoint.explaining():
        before = checkpoint.state().settings
    for change in compare_settings(checkpoint, before, settings, learner.model.config.vocab_size):
        learner.accelerator.print(f"changed since {checkpoint}: {change}")
    state = learner.load(checkpoint)
    state.settings = settings
    if any(before.get(name) != settings[name] for name in (*SCORING, "validation")) and state.evaluations():
        learner.accelerator.print("the scores so far are not compared with those to come")
        state.scores_count_from = len(state.history)
    if not checkpoint.is_in(Path(learner.args.output_dir)):
        learner.accelerator.print(f"what was saved before {checkpoint} is not averaged, nor taken for the best")
        state.scores_count_from = len(state.history)
    return state


def next_batches(train, tokenizer, args, state: RunState, accelerator: Accelerator):
    """The training batches of this process from where the run is."""
    share = {"process_index": accelerator.process_index, "num_processes": accelerator.num_processes}
    skipped = frozenset(state.skipped)
    return training_batches(train, tokenizer, args, state.position, skipped, state=state.stream, **share)


def steps_of(num_train_epochs: float, batches, batches_per_step: int) -> int:
    """How many steps so many epochs are."""
    return math.ceil(num_train_epochs * len(batches.epoch()) / batches_per_step)


def roll_back(
    args, trouble: Trouble, state: RunState, batches, learner: Learner, begun: Checkpoint | None
) -> RunState:
    """The state of the last checkpoint, or the one that the run was begun from, without the batches of the step that
    went wrong, where that is asked for.

    Raises:
        UserError: It is not asked for, or is of no use: this is the fifth time after the same checkpoint.
    """
    what = trouble.describe(batches, state.settings["batches_per_step"])
    remedy = "Lower --learning_rate, lengthen --warmup_steps or clip harder by --max_grad_norm"
    if args.on_divergence != "rollback":
        raise UserError(
            f"{what}; no checkpoint was overwritten. {remedy}, or leave such batches out by --on_divergence rollback."
        )
    checkpoint = by_main_process(learner.accelerator, newest_whole, Path(args.output_dir)) or begun
    if checkpoint is None:
        raise UserError(f"{what}, and there is no whole checkpoint to go back to. {remedy}.")
    before = learner.load(checkpoint)
    before.settings, skipped_since = state.settings, state.skipped[len(before.skipped) :]
    if len(skipped_since) >= 4 * state.settings["batches_per_step"]:
        raise UserError(f"{what}, the fifth time after {checkpoint}, which is whole. {remedy}.")
    before.skipped += skipped_since
    before.skip(trouble.position, state.settings["batches_per_step"])
    learner.accelerator.print(f"{what}. Going back to {checkpoint} and leaving these batches out.")
    return before


def delete_checkpoints(args, output_dir: Path, state: RunState):
    """Deletes old checkpoints, but not those that an average or the best weights are taken from at the end."""
    is_by_score = args.average_checkpoints_by == "score"
    best = state.ranking(args.metric_for_best_model)[: max(1, args.average_checkpoints if is_by_score else 1)]
    keep = args.save_total_limit if is_by_score else max(args.save_total_limit, args.average_checkpoints)
    delete_old_checkpoints(output_dir, keep, best)


def describe_schedule(args, max_steps: int) -> str:
    """The peak of the learning rate, and whether the run does not reach it."""
    text = f"learning rate up to {args.learning_rate:.2e} at step {args.warmup_steps:,}"
    if max_steps < args.warmup_steps:
        text += "; the run ends while the learning rate still rises: lower --warmup_steps, or train longer"
    return text


def print_plan(args, learner: Learner, train, batches, batches_per_step: int):
    """What `--dry_run` tells, besides what is printed on the way."""
    show = learner.accelerator.print
    shards = number_of_shards(learner.accelerator)
    if isinstance(train, Sized):
        plan, lengths = batches.epoch(), lengths_of(train)
        show(f"{len(plan):,} batches an epoch, {padding_fraction(*lengths, plan):.1%} padding")
        show(f"{len(plan) / batches_per_step:,.1f} steps an epoch, of {batches_per_step} batches each")
    longest = longest_sides(train, args)
    needed = estimate(learner.whole, args, learner.accelerator, args.per_device_train_max_tokens, longest, shards)
    there = bytes_of_state(learner.model, args, shards, with_gradients=False)
    free = free_memory(learner.accelerator) + there
    show(f"about {needed / 2**30:.2f} GiB of memory for training, of {free / 2**30:.1f} GiB on each process")
    show(f"the recipe, resolved:\n\n{resolved_recipe(args, learner.model.config)}")
    show("This was a dry run: nothing is trained and nothing written to --output_dir.")


def describe(entry: dict) -> str:
    """What the progress bar shows of a log entry."""
    return (
        f"loss {entry['loss']:.3f}, {entry['target_tokens_per_second']:,.0f} target tokens/s, "
        f"padding {entry['padding_fraction']:.1%}, lr {entry['learning_rate']:.1e}"
    )


def numbers_of(results: dict) -> dict:
    """What a tracker can draw of the results."""
    return {key: value for key, value in results.items() if isinstance(value, int | float)}


def evaluate(model, tokenizer, split, name: str, args, accelerator: Accelerator) -> dict:
    """Loss, BLEU and chrF of a split under the names `{name}_loss` ..., printed with some translations."""
    model.eval()
    share = {"process_index": accelerator.process_index, "num_processes": accelerator.num_processes}
    batches = evaluation_batches(split, tokenizer, args.per_device_eval_max_tokens, **share)
    loss = evaluate_loss(model, batches, accelerator)
    sources, references = list(split["source"]), list(split["target"])
    translator = Translator(model, tokenizer, args.per_device_eval_max_tokens)
    with accelerator.autocast():
        translations = translate_split(translator, sources, accelerator, f"Translating {len(sources):,}")
    scores = TranslationQuality().compute(predictions=translations, references=references)
    triples = list(zip(sources, references, translations, strict=True))[:EXAMPLES]
    examples = [dict(zip(("source", "reference", "translation"), triple, strict=True)) for triple in triples]
    if accelerator.is_main_process:
        tqdm.write(f"{name}: loss {loss:.3f}, BLEU {scores['bleu']:.2f}, chrF {scores['chrf']:.2f}")
        tqdm.write("\n".join(f"  {what:<12} {text}" for example in examples for what, text in example.items()))
    return {
        f"{name}_loss": loss,
        f"{name}_bleu": scores["bleu"],
        f"{name}_chrf": scores["chrf"],
        "bleu_signature": scores["bleu_signature"],
        "chrf_signature": scores["chrf_signature"],
        "examples": examples,
    }


def load_final_weights(model, args, output_dir: Path, state: RunState, accelerator: Accelerator):
    """Leaves in `model` what the run hands out: averaged, moving-average, best (if stopping early) or last weights."""
    saved = by_main_process(accelerator, list_checkpoints, output_dir)
    there = {checkpoint.step: checkpoint for checkpoint in saved}
    best = [there[step] for step in state.ranking(args.metric_for_best_model) if step in there]
    if args.average_checkpoints:
        chosen = best if args.average_checkpoints_by == "score" else list(reversed(there.values()))
        chosen = [checkpoint for checkpoint in chosen if checkpoint.step > 0][: args.average_checkpoints]
        chosen = sorted(chosen, key=lambda checkpoint: checkpoint.step)
        names = ", ".join(checkpoint.folder.name for checkpoint in chosen)
        done = f"Averaged the weights of {names}."
    elif args.early_stopping_patience and best:
        chosen = best[:1]
        done = f"Took the best weights, those of step {best[0].step}."
    else:
        return
    load_weights(model, average_checkpoints(chosen, is_average=bool(args.ema_decay)))
    accelerator.print(done)


def save_run(output_dir: Path, model, tokenizer, results: dict, state: RunState):
    """Writes what the run hands out: model and tokenizer, results and their curves."""
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    text = json.dumps(results, indent=2, ensure_ascii=False)
    (output_dir / "all_results.json").write_text(text + "\n", encoding="utf-8")
    plot_training_curves(state.history, output_dir / "training_curves.png")


def draw_shortest_example(model, tokenizer, examples: list[dict], path: Path):
    """A picture of what the last layer looks at in the shortest of the sentences that an evaluation shows.

    There is none where its translation is empty, or longer than the model is for.
    """
    with contextlib.suppress(UserError):
        shortest = min(examples, key=lambda example: len(example["source"]))
        draw_attention(attention_maps(model, tokenizer, shortest["source"], shortest["translation"]), path)


def push_run(output_dir: Path, repo_id: str | None):
    """Pushes what was trained; raises UserError that tells how to do it later, if it cannot be done now."""
    try:
        print(f"It is on the Hub: {push(output_dir, repo_id).commit_url}")
    except UserError as error:
        later = f"python push_to_hub.py {output_dir}" + (f" --repo_id {repo_id}" if repo_id else "")
        raise UserError(f"{error} The model itself is whole; push it later by {later}") from error


def describe_run(args, splits: dict, accelerator: Accelerator) -> dict:
    """What, where and with which versions was trained, for the model card."""
    kind = accelerator.device.type
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if kind == "cpu" else kind
    if kind == "cuda":
        device = torch.cuda.get_device_name()
    packages = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    versions = {name: importlib.metadata.version(name) for name in packages}
    sizes = {SAMPLES[name]: len(split) for name, split in splits.items() if isinstance(split, Sized)}  # not a stream's
    return sizes | {
        "dataset": public_name(args.dataset_name or args.train_file),
        "source_lang": args.source_lang or args.source_column,
        "target_lang": args.target_lang or args.target_column,
        "hardware": f"{accelerator.num_processes} x {device}",
        "mixed_precision": accelerator.mixed_precision,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"vanilla-transformer": __version__} | versions,
    }


class Stopped(Exception):
    """The run was asked to stop, and has saved where it is."""

    def __init__(self, step: int, stop: StopSignal):
        super().__init__(f"stopped after step {step}, which is saved; go on by: {stop.command}")
        self.exit_status = stop.exit_status


def is_of_another_process(error: RuntimeError) -> bool:
    """Whether it tells that a process of the run cannot be reached; gloo has no kind of error for that."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def end_processes(accelerator: Accelerator):
    """Ends the trackers and the group of processes, before what holds the group is dropped."""
    accelerator.end_training()
    give_gloo_the_gil()


def give_gloo_the_gil():
    """Lets the threads of gloo, which need the GIL for that, drop what they worked on last.

    DistributedDataParallel drops the group with the GIL held and waits for these threads: for ever, if they still wait
    for the GIL (https://github.com/pytorch/pytorch/issues/56297).
    """
    time.sleep(0.1)


def end(reason, exit_status: int = 2, is_found_by_all: bool = True):
    """Ends with one sentence on stderr and no traceback, neither ours nor the launcher's."""
    give_gloo_the_gil()
    traceback.clear_frames(sys.exc_info()[2])  # what main still holds: processes that load data, which end by that
    # What every process finds is said once on each machine.
    if os.environ.get("LOCAL_RANK", "0") == "0" or not is_found_by_all:
        print(f"train.py: {reason}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(10)  # or less: torchrun ends all processes when one has ended, and the first must have said why
    end_launcher()
    sys.exit(exit_status)


if __name__ == "__main__":
    try:
        main()
    except Stopped as stopped:
        end(stopped, stopped.exit_status)
    except StrictDataclassError as error:
        end(f"error: {error.__cause__}")
    except UserError as error:
        end(f"error: {error}")
    except (OSError, SafetensorError) as error:  # a full disk, a directory that is gone
        is_found_by_all = getattr(error, "is_found_by_all", False)
        reason = f"error: {error}; checkpoints that were written are whole: go on by --resume_from_checkpoint."
        end(reason, is_found_by_all=is_found_by_all)
    except RuntimeError as error:
        if not is_of_another_process(error):
            raise
        reason = f"error: another process of the run is gone: {str(error).split('. ')[0].strip()}"
        end(f"{reason}; go on from the last checkpoint by --resume_from_checkpoint.", is_found_by_all=False)
    except KeyboardInterrupt:
        end("stopped; --resume_from_checkpoint goes on from the newest checkpoint, if there is one.", 130)
