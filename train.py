# /// script
# requires-python = ">=3.11"
# dependencies = ["vanilla-transformer"]
# tool.uv.sources.vanilla-transformer = {path = ".", editable = true}
# ///
"""Train an encoder-decoder Transformer on sentence pairs: set up, loop, score. `optimizer_step` is one step.

A run ends at its last step, by early stopping or divergence (training/state.py), or at a signal (training/signals.py).

accelerate launch train.py                                                      # the sample recipe
uv run train.py                                                                 # the same, if only uv is installed
accelerate launch --mixed_precision bf16 train.py --config recipes/multi30k_en_de.yaml --d_model 128
python train.py --help                                                          # every option
"""

import contextlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from vanilla_transformer_command import show_help

if __name__ == "__main__":
    show_help("train.py", sys.argv[1:])  # at once: what is imported below takes seconds

import torch
from accelerate import Accelerator
from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.marian import native_family
from vanilla_transformer.data.batches import training_batches
from vanilla_transformer.data.encoding import tokenize_splits
from vanilla_transformer.data.joined import longest_side_of
from vanilla_transformer.data.rows import hide_bars
from vanilla_transformer.data.splits import Splits, load_pairs
from vanilla_transformer.data.tokenizer import make_tokenizer, named_tokenizer, note_source_form
from vanilla_transformer.errors import configure_messages
from vanilla_transformer.evaluation.further_metrics import Metrics
from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.evaluation.splits import SplitEvaluator, prepare_scorer, references_of
from vanilla_transformer.evaluation.tuning import use_best
from vanilla_transformer.hub import upload
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training import checkpoint, hardware, memory, processes, report, resume, run_folder
from vanilla_transformer.training import optimization as optim
from vanilla_transformer.training.choosing import decide_tokens, decide_training, decided_before
from vanilla_transformer.training.distillation import add_soft_targets
from vanilla_transformer.training.final_weights import final_model
from vanilla_transformer.training.model import make_model
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.processes import run_on_main
from vanilla_transformer.training.recipe import Options, parse_arguments, recipe_to_yaml, resolved_recipe
from vanilla_transformer.training.signals import GracefulShutdown, Stopped, held_back
from vanilla_transformer.training.state import Meter, TrainerState, Triggers
from vanilla_transformer.training.weights import Weights


def main():
    given = parse_arguments(sys.argv[1:])
    data_options, options = given.data, given.training
    output_dir, metrics = options.output_dir, Metrics(options.metrics, options.metric_kwargs)
    scorer = Scorer(
        data_options.target_language, options.bleu_tokenize, normalization=options.score_normalization, metrics=metrics
    )
    accelerator = processes.make_accelerator(options)
    shutdown = GracefulShutdown(accelerator)
    processes.check_temporary_folder(data_options, accelerator.device)
    hardware.configure(accelerator.device, accelerator.mixed_precision)
    resume_from = run_on_main(resume.find_checkpoint, output_dir, options.resume_from_checkpoint)
    pairs, tokenizer, model, splits, decided = prepare(given, resume_from, accelerator)
    data_options, options = decided.data, decided.training
    run_on_main(prepare_scorer, scorer, tokenizer, splits, options.metric_for_best_model)
    longest = longest_side_of(splits["train"], data_options)
    options = with_defaults(options, model, longest, resume_from, accelerator)
    fits = memory.step_fits(model, options, longest, accelerator)

    # --------------------------------------------------------------- weights, optimizer, state, batches, learning rate
    weights = Weights(model, accelerator, options.torch_compile, options.ema_decay)
    optimizer = accelerator.prepare_optimizer(optim.make_optimizer(model, options))  # Weights may shard it
    batches_per_step = options.gradient_accumulation_steps * accelerator.num_processes
    recipe = resolved_recipe(data_options, options, model.config)
    settings = resume.run_settings(recipe, splits, batches_per_step, accelerator.mixed_precision)
    state = TrainerState(settings=settings)
    if resume_from is not None:
        state = resume.resume(resume_from, settings, output_dir, weights, optimizer)
    batches = training_batches(
        splits["train"],
        tokenizer,
        data_options,
        max_tokens=options.per_device_train_max_tokens,
        seed=options.seed,
        start=state.position,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        stream_state=state.stream,
    )
    max_steps = optim.count_steps(options, batches, batches_per_step, state.step)
    schedule = optim.learning_rate_schedule(  # step, from 1 on -> learning rate
        options.lr_scheduler_type, options.learning_rate, options.warmup_steps, max_steps
    )
    triggers = Triggers(options, max_steps)
    report.compare_rates(state, schedule)
    report.check_average(triggers)
    if options.dry_run:
        try_step = partial(optimizer_step, weights, optimizer, options, accelerator, state=state, learning_rate=0.0)
        steps_left = max_steps - state.step
        report.dry_run(try_step if fits else None, batches, options.gradient_accumulation_steps, steps_left, recipe)
        return processes.end_processes(accelerator)

    # The main process holds the lock until the run ends. filelock's soft lock is a plain file, which outlives a kill.
    lock = FileLock(output_dir / run_folder.LOCK, timeout=10, fallback_to_soft=False)
    run_on_main(run_folder.prepare_output_dir, lock, resume_from, recipe_to_yaml(recipe))
    processes.check_same_everywhere("--output_dir", (output_dir / "recipe.yaml").exists())
    processes.check_same_everywhere("The training data", settings["data"])
    run_on_main(report.start_trackers, accelerator, options.run_name, recipe)
    evaluator = SplitEvaluator(
        tokenizer, scorer, accelerator, options.per_device_eval_max_tokens, options.num_examples
    )

    # -------------------------------------------------------------------------------------------------------- train
    with held_back():
        loader = iter(batches)
    meter, saved_step, is_overdue, stopping = Meter(), state.step, False, False
    bar = report.progress_bar(state.step, max_steps, accelerator.is_local_main_process)
    with run_folder.offering_resume(output_dir), shutdown, bar:
        while True:
            # What is due after step N is done at the top of the loop, so that a run resumed from checkpoint N does it,
            # too. Saving comes first: a run killed during an evaluation loses nothing.
            if (triggers.should_save(state.step) or is_overdue or stopping) and state.step != saved_step:
                state.stream = batches.state
                checkpoint.save(output_dir, weights, optimizer, tokenizer, state)
                saved_step, is_overdue = state.step, False
                triggers.note_save()
            if stopping:
                raise Stopped(state.step, shutdown.signal_number)
            if triggers.should_evaluate(state.step):
                scores = evaluator.evaluate(weights.to_score(), splits["validation"], "eval", step=state.step)
                state.log_scores(scores)
                accelerator.log(report.scalars(scores), step=state.step)
                if shutdown.should_stop():
                    raise Stopped(state.step, shutdown.signal_number)
            if state.step == saved_step and accelerator.is_main_process:
                run_folder.prune_checkpoints(state, triggers)
            if triggers.is_done(state):
                break

            meter.start()
            micro_batches = [next(loader) for _ in range(options.gradient_accumulation_steps)]
            learning_rate = schedule(state.step + 1)
            loss, tokens, grad_norm = optimizer_step(
                weights, optimizer, options, accelerator, micro_batches, state, learning_rate
            )
            state.advance(batches_per_step)
            meter.add(state, learning_rate, loss, tokens, grad_norm)
            bar.update()
            stopping = shutdown.should_stop(may_ask_others=triggers.should_log(state.step))
            if triggers.should_log(state.step) or stopping:
                # Raises Diverged if asked to stop then.
                entry = meter.flush(state, accelerator, batches.pairs, options.on_divergence == "stop")
                report.show_progress(bar, entry, state, max_steps, accelerator.is_local_main_process)
                accelerator.log(entry, step=state.step)
                is_overdue = run_on_main(triggers.is_overdue)

    # ------------------------------------------------------------------------------------------------ final scores
    final = final_model(weights, state, triggers)  # the last, averaged or best weights
    results = state.results() | {"num_parameters": final.num_parameters()}
    if options.tune_decoding:
        by, is_better = options.metric_for_best_model, options.greater_is_better
        tried = run_on_main(evaluator.tune, final, splits["validation"], by, is_better)
        results["tuned_decoding"] = tried
        best = use_best(tried, final.generation_config)
        accelerator.print(f"tuned on the validation split: {best}")
    for split, prefix in [("validation", "eval"), ("test", "test")]:
        if split in splits:
            results |= evaluator.evaluate(final, splits[split], prefix)
    if not state.is_evaluated:
        state.log_scores(results)
    accelerator.log(report.scalars(results), step=state.step)
    if accelerator.is_main_process:
        results |= report.describe_run(data_options, pairs, splits) | {"metrics": metrics.describe()}
        lowest_loss = optim.lowest_loss(options, final.config.decoder_vocab_size)
        with run_folder.offering_resume(output_dir):
            run_folder.save_model(output_dir, final, tokenizer, results, state.history, lowest_loss)
        report.name_better_checkpoint(state, options)
        if not scorer.advise_tokenizer(references_of(splits["validation"])):  # else BLEU says nothing
            report.advise_on_low_scores(results, options)
        if options.push_to_hub:
            commit = upload.push(output_dir, options.hub_model_id, options.hub_private_repo, native=options.native)
            print(f"Pushed to {commit.commit_url}")
    processes.end_processes(accelerator)


def optimizer_step(
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    options: TrainingOptions,
    accelerator: Accelerator,
    batches: list[dict],
    state: TrainerState,
    learning_rate: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step (section 5.3) over the `batches` of this process and those of all others, as if they were one.

    Returns:
        This process's share of the loss (), the counts of `count_tokens` over all processes (3,), and the gradient
        norm ().
    """
    tokens = optim.count_tokens(batches, accelerator)
    total = torch.zeros((), device=accelerator.device)
    # From pinned memory, CUDA copies while the host goes on; on other devices a step might read what is not there yet.
    is_cuda = accelerator.device.type == "cuda"
    weights.wrapped.train()
    for i, batch in enumerate(batches):
        optim.seed_batch(options.seed, state.position + i * accelerator.num_processes + accelerator.process_index)
        batch = {name: tensor.to(accelerator.device, non_blocking=is_cuda) for name, tensor in batch.items()}
        is_last = i == len(batches) - 1  # processes exchange gradients once a step
        with contextlib.nullcontext() if is_last else accelerator.no_sync(weights.wrapped):
            loss = optim.compute_loss(weights.wrapped, batch, tokens[0].clamp(min=1), options)
            accelerator.backward(loss * accelerator.num_processes)  # since DDP and FSDP average over the processes
        total += loss.detach()
    grad_norm = optim.clip_grad_norm(weights.model, optimizer, options.max_grad_norm, accelerator)
    optim.set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    optimizer.zero_grad()
    weights.update_average(updates=state.step)
    return total, tokens, grad_norm


def prepare(
    options: Options, resume_from: Path | None, accelerator: Accelerator
) -> tuple[Splits, PreTrainedTokenizerBase, VanillaTransformerForConditionalGeneration, dict[str, Dataset], Options]:
    """Loads the pairs, makes the tokenizer and the model, tokenizes the pairs, and chooses the options that are free.

    One process per machine prepares the data first; the others then read from the disk what it has written there.

    Returns:
        The pairs, the tokenizer, the model on its device, the pairs as token ids, and all options.
    """
    model_name, teachers = options.training.model_name_or_path, options.training.teacher
    native, seed = options.training.native, options.training.seed
    if options.training.push_to_hub:
        private = options.training.hub_private_repo
        upload.check_push(options.training.hub_model_id, options.training.output_dir, private=private, native=native)
    hide_bars()
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pairs = load_pairs(options.data)
    if resume_from is not None:
        before = run_on_main(decided_before, options, resume_from)
        options = options.with_values(before)._replace(free=frozenset())
    options = options.with_values(run_on_main(decide_tokens, options, pairs))
    tokenizer = run_on_main(
        make_tokenizer,
        named_tokenizer(resume_from, model_name, options.data.tokenizer_name, teachers),
        pairs["train"],
        options.model.vocab_size,
        options.data.train_file_tags,
        options.data.verbatim,
        options.data.letters,
        options.data.tokenizer_type,
        options.data.split_digits,
    )
    options = options.with_values(run_on_main(decide_training, options, pairs, tokenizer, accelerator))
    torch.manual_seed(seed)
    model = make_model(options.model, options.training, options.data, tokenizer, accelerator.device)
    if native:
        native_family(model.config)  # raises UserError if there is none
    is_fine_tuning = model_name is not None
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        splits = tokenize_splits(pairs, tokenizer, options.data, model.config, is_fine_tuning=is_fine_tuning)
        if teachers:
            train = add_soft_targets(splits["train"], tokenizer, model.config, options.training, accelerator.device)
            splits["train"] = train
    note_source_form(tokenizer, run_on_main(lambda: pairs.survey["train"]), options.data, is_fine_tuning)
    accelerator.print(f"{model.num_parameters():,} parameters, vocabulary size {model.config.vocab_size:,}")
    return pairs, tokenizer, model.to(accelerator.device), splits, options


def with_defaults(
    options: TrainingOptions,
    model: VanillaTransformerForConditionalGeneration,
    longest: int,
    resume_from: Path | None,
    accelerator: Accelerator,
) -> TrainingOptions:
    """The options with a learning rate and a batch size: as given, or else as in the resumed run, or chosen."""
    before = {} if resume_from is None else checkpoint.load_state(resume_from).settings
    peak = optim.choose_learning_rate(options, model.config.d_model, before)
    max_tokens = hardware.choose_batch_size(model, options, accelerator, longest, before)
    return replace(options, learning_rate=peak, per_device_train_max_tokens=max_tokens)


if __name__ == "__main__":
    configure_messages()
    with processes.exit_on_error():
        main()
