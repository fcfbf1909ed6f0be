"""Train an encoder-decoder Transformer on sentence pairs. The loop shows the whole optimizer step.

A run ends at its last step, by early stopping or divergence (training/state.py), or at a signal (training/signals.py).

accelerate launch train.py                                                      # the sample recipe
accelerate launch --mixed_precision bf16 train.py --config recipes/multi30k_en_de.yaml --d_model 128
accelerate launch train.py --help                                               # every option
"""

import contextlib
import copy
import json
import sys
from pathlib import Path

import torch
from filelock import FileLock
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer.data.batches import training_batches
from vanilla_transformer.data.pairs import load_pairs
from vanilla_transformer.errors import UserError, escape_output
from vanilla_transformer.evaluation.scores import make_bleu
from vanilla_transformer.evaluation.splits import evaluate_split
from vanilla_transformer.evaluation.tuning import tune_on_split, use_best
from vanilla_transformer.files import remove_file, replacing_files, write_text
from vanilla_transformer.hub.model_card import write_model_card
from vanilla_transformer.hub.upload import check_native, check_push, push
from vanilla_transformer.inspection.attention import attention_maps, draw_attention
from vanilla_transformer.training import builders, checkpoint, distributed, memory
from vanilla_transformer.training import optimization as optim
from vanilla_transformer.training.arguments import parse_arguments, recipe_to_yaml, resolved_recipe
from vanilla_transformer.training.distillation import add_soft_targets
from vanilla_transformer.training.plots import plot_training_curves
from vanilla_transformer.training.reports import describe_run, describe_step, dry_run_report, scalars
from vanilla_transformer.training.signals import GracefulShutdown, Stopped
from vanilla_transformer.training.state import Meter, TrainerState, Triggers
from vanilla_transformer.training.trackers import start_trackers


def main():
    args = parse_arguments(sys.argv[1:])
    output_dir = Path(args.output_dir)
    make_bleu(args.target_lang or args.target_column, args.bleu_tokenize)  # raises now, not at the first evaluation
    if args.push_to_hub:
        check_push(args.hub_model_id, output_dir, private=args.hub_private_repo, native=args.native)
    accelerator = distributed.make_accelerator(args)
    if accelerator.device.type == "cpu":
        memory.configure_cpu(accelerator)
    disable_progress_bar()  # of transformers, for saving models
    resume_from = distributed.run_on_main(accelerator, checkpoint.resolve_resume_checkpoint, args)

    # -------------------------------------------------------------------------------------------------- data, model
    # One process per machine prepares what the others then read from its disk.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pairs = load_pairs(args)
    tokenizer = distributed.run_on_main(accelerator, builders.make_tokenizer, args, pairs["train"], resume_from)
    torch.manual_seed(args.seed)
    model = builders.make_model(args, tokenizer, accelerator.device)
    if args.native:
        check_native(model.config)
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        splits = builders.tokenize_splits(pairs, tokenizer, args, model.config, accelerator)
        if args.teacher:
            splits["train"] = add_soft_targets(splits["train"], tokenizer, model.config, args, accelerator)
    model.to(accelerator.device)
    accelerator.print(f"{model.num_parameters():,} parameters, vocabulary size {model.config.vocab_size:,}")
    args = builders.resolve_defaults(args, model, splits["train"], resume_from, accelerator)

    # ------------------------------------------------------------------------------------ copies, shards, optimizer
    # `model` is trained; `wrapped`, around it, runs its forward passes. `scored` has the weights to score: its own, or
    # their moving average. `full_model` gets them and is scored and saved: `model` itself, or a plain copy of it.
    is_sharded = distributed.number_of_shards(accelerator) > 1
    full_model = copy.deepcopy(model) if is_sharded or args.ema_decay or args.torch_compile else model
    ema = AveragedModel(model) if args.ema_decay else None
    scored = model if ema is None else ema.module
    if is_sharded:
        distributed.shard(model)
        if ema is not None:
            distributed.shard(ema.module)
    if args.torch_compile:
        model.compile(dynamic=True)
    optimizer = accelerator.prepare_optimizer(optim.make_optimizer(model, args))
    wrapped = accelerator.prepare_model(model, evaluation_mode=is_sharded)  # DDP; a sharded model only gets autocast

    # ------------------------------------------------------------------------------------ batches, schedule, resume
    batches_per_step = args.gradient_accumulation_steps * accelerator.num_processes
    recipe = resolved_recipe(args, model.config)
    settings = checkpoint.run_settings(recipe, splits, batches_per_step, accelerator)
    state = TrainerState(settings=settings)
    if resume_from is not None:
        state = checkpoint.resume(resume_from, settings, output_dir, model, ema, optimizer.optimizer, accelerator)
    share = (state.position, accelerator.process_index, accelerator.num_processes)
    batches = training_batches(splits["train"], tokenizer, args, *share, stream_state=state.stream)
    max_steps = builders.count_steps(args, batches, batches_per_step, state.step, accelerator)
    schedule = optim.learning_rate_schedule(args.lr_scheduler_type, args.learning_rate, args.warmup_steps, max_steps)
    triggers = Triggers(args, max_steps)
    if args.dry_run:
        dry_run_report(args, model, splits["train"], batches, batches_per_step, recipe, accelerator)
        return distributed.end_processes(accelerator)
    lock = FileLock(output_dir / checkpoint.LOCK, timeout=10)  # held by the main process until it ends
    distributed.run_on_main(accelerator, checkpoint.prepare_output_dir, lock, resume_from, recipe_to_yaml(recipe))
    is_shared = (output_dir / "recipe.yaml").exists()
    distributed.check_same_everywhere({"--output_dir": is_shared, "The training data": settings["data"]})
    distributed.run_on_main(accelerator, start_trackers, accelerator, args.run_name, recipe)

    # -------------------------------------------------------------------------------------------------------- train
    loader, meter, stopping, saved_step = iter(batches), Meter(), False, state.step
    bar = tqdm(desc="Training", total=max_steps, initial=state.step, disable=not accelerator.is_local_main_process)
    with GracefulShutdown(accelerator) as shutdown, bar:
        while True:
            # Save before evaluating, so that a run killed during an evaluation loses nothing.
            if (triggers.should_save(state.step) or stopping) and state.step != saved_step:
                state.stream = batches.state
                checkpoint.save(output_dir, model, full_model, ema, optimizer.optimizer, tokenizer, state, accelerator)
                saved_step = state.step
            if stopping:
                raise Stopped(state.step, shutdown.signal_number)
            if triggers.should_evaluate(state.step) and not state.is_evaluated:
                distributed.copy_weights(scored, full_model)
                scores = evaluate_split(full_model, tokenizer, splits["validation"], "eval", args, accelerator)
                state.log_scores(scores)
                accelerator.log(scalars(scores), step=state.step)
            if triggers.should_save(state.step) and accelerator.is_main_process:
                checkpoint.prune_checkpoints(output_dir, state, triggers)
            if triggers.is_done(state):
                break

            # One optimizer step over the batches of all processes, as if they were one large batch.
            meter.start()
            micro_batches = [next(loader) for _ in range(args.gradient_accumulation_steps)]
            tokens = optim.count_tokens(micro_batches, accelerator)  # target, source, padded
            step_loss = torch.zeros((), device=accelerator.device)
            wrapped.train()
            for i, batch in enumerate(micro_batches):
                optim.seed_batch(args.seed, state.position + i * accelerator.num_processes + accelerator.process_index)
                batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
                is_last = i == len(micro_batches) - 1  # processes exchange gradients once a step
                with contextlib.nullcontext() if is_last else accelerator.no_sync(wrapped):
                    loss = optim.compute_loss(wrapped, batch, tokens[0].clamp(min=1), args)
                    accelerator.backward(loss * accelerator.num_processes)  # DDP and FSDP average gradients; we sum
                step_loss += loss.detach()
            grad_norm = optim.clip_grad_norm(wrapped, optimizer, args.max_grad_norm, accelerator)
            optim.set_learning_rate(optimizer, schedule(state.step + 1))
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                optim.update_average(ema, model, args.ema_decay, updates=state.step)
            state.advance(batches_per_step)
            meter.add(state, schedule(state.step), step_loss, tokens, grad_norm)
            bar.update()
            stopping = shutdown.should_stop(may_ask_others=triggers.should_log(state.step))
            if triggers.should_log(state.step) or stopping:
                detect_spikes = args.on_divergence == "stop"
                entry = meter.flush(state, accelerator, batches.pairs, detect_spikes)  # raises Diverged
                bar.set_postfix_str(describe_step(entry))
                accelerator.log(entry, step=state.step)

    # ------------------------------------------------------------------------------------------------ final scores
    if state.step < max_steps:
        accelerator.print(f"early stopping after step {state.step}")
    distributed.copy_weights(scored, full_model)
    chosen = distributed.run_on_main(accelerator, checkpoint.final_checkpoints, output_dir, state, triggers)
    if chosen:
        checkpoint.load_weights(full_model, checkpoint.average_checkpoints(chosen, use_ema=ema is not None))
        accelerator.print(f"using the weights of {', '.join(one.name for one in chosen)}")
    results = state.results() | {"num_parameters": full_model.num_parameters()}
    if args.tune_decoding:
        given = (full_model, tokenizer, splits["validation"], args, accelerator)
        results["tuned_decoding"] = tried = distributed.run_on_main(accelerator, tune_on_split, *given)
        accelerator.print(f"tuned on the validation split: {use_best(tried, full_model.generation_config)}")
    for split, prefix in [("validation", "eval"), ("test", "test")]:
        if split in splits:
            results |= evaluate_split(full_model, tokenizer, splits[split], prefix, args, accelerator)
    if not state.is_evaluated:
        state.log_scores(results)
    accelerator.log(scalars(results), step=state.step)
    if accelerator.is_main_process:
        results |= describe_run(args, splits, accelerator)
        lowest_loss = optim.lowest_loss(args, full_model.config.decoder_vocab_size)
        save_model(output_dir, full_model, tokenizer, results, state.history, lowest_loss)
        print(f"The model is in {output_dir}.")
        if args.push_to_hub:
            commit = push(output_dir, args.hub_model_id, args.hub_private_repo, native=args.native)
            print(f"Pushed to {commit.commit_url}")
    distributed.end_processes(accelerator)


def save_model(output_dir: Path, model, tokenizer, results: dict, history: list[dict], lowest_loss: float | None):
    """Writes the model, tokenizer, results, pictures and model card."""
    with replacing_files(output_dir) as folder:
        model.save_pretrained(folder)
        checkpoint.copy_permissions(folder)
        tokenizer.save_pretrained(folder)
    write_text(output_dir / "all_results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    plot_training_curves(history, output_dir / "training_curves.png", lowest_loss)
    remove_file(output_dir / "attention.png")  # from before the run was resumed
    for shortest in sorted(results["examples"], key=lambda example: len(example["source"]))[:1]:
        with contextlib.suppress(UserError):  # an empty translation has no attention
            maps = attention_maps(model, tokenizer, shortest["source"], shortest["translation"])
            draw_attention(maps, output_dir / "attention.png")
    write_model_card(output_dir)


if __name__ == "__main__":
    escape_output()
    with distributed.exit_on_error():
        main()
