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
from collections.abc import Sized
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, __version__
from vanilla_transformer.curves import plot_training_curves
from vanilla_transformer.data import evaluation_batches, load_pairs, sentences, tokenize_pairs, training_batches
from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation import TranslationQuality, evaluate_loss, translate_split
from vanilla_transformer.model_card import public_name, write_model_card
from vanilla_transformer.recipe import model_fields, parse_options, write_recipe
from vanilla_transformer.sharing import check_token, push
from vanilla_transformer.tokenization import load_tokenizer, special_token_ids, train_tokenizer
from vanilla_transformer.training import (
    RunState,
    average_checkpoints,
    delete_old_checkpoints,
    keep_freed_memory,
    learning_rate_schedule,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    make_optimizer,
    optimizer_step,
    paper_learning_rate,
    read_weights,
    save_checkpoint,
    seed_step,
)
from vanilla_transformer.translation import Translator

EXAMPLES = 3  # translations that each evaluation prints
SAMPLES = {"train": "train_samples", "validation": "eval_samples", "test": "test_samples"}


def main():
    args = parse_options(sys.argv[1:])
    output_dir = Path(args.output_dir)
    checkpoint = find_checkpoint(args, output_dir)
    if args.push_to_hub:
        check_token(args.hub_model_id, output_dir)
    make_output_dir(output_dir, checkpoint)
    accelerator = make_accelerator(args)

    # ------------------------------------------------------------------------------------------------------------ data
    with accelerator.main_process_first():
        pairs = load_pairs(args)
    tokenizer = make_tokenizer_once(args, pairs["train"], checkpoint, accelerator)
    config = make_config(args, tokenizer)
    with accelerator.main_process_first():
        splits = tokenize_splits(pairs, tokenizer, args, config, accelerator)

    # ----------------------------------------------------------------------------------------------------------- model
    torch.manual_seed(args.seed)
    model = make_model(args, config, accelerator.device)
    model.generation_config = make_generation_config(args, model.config)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay)) if args.ema_decay else None
    scored = model if ema is None else ema.module
    accelerator.print(f"{model.num_parameters():,} parameters, {model.config.vocab_size:,} token types")

    # -------------------------------------------------------------------------------------------- optimiser and resume
    optimizer = make_optimizer(model, args)
    state = RunState() if checkpoint is None else load_checkpoint(checkpoint, model, optimizer, ema)
    if not (output_dir / f"checkpoint-{state.best_step}").exists():
        state.best_bleu, state.best_step = -1.0, 0  # it is elsewhere, or deleted
    batches_per_step = args.gradient_accumulation_steps * accelerator.num_processes
    share = {"process_index": accelerator.process_index, "num_processes": accelerator.num_processes}
    batches = training_batches(splits["train"], tokenizer, args, state.step * batches_per_step, **share)
    max_steps = args.max_steps or math.ceil(args.num_train_epochs * batches.batches_per_epoch() / batches_per_step)
    if state.step > max_steps:
        raise UserError(
            f"--max_steps is {max_steps}, and {checkpoint} is after step {state.step}; raise it to train on."
        )
    peak = args.learning_rate
    if peak is None:
        peak = paper_learning_rate(model.config.d_model, args.warmup_steps)
    learning_rate = learning_rate_schedule(args.lr_scheduler_type, peak, args.warmup_steps, max_steps)
    if args.torch_compile:
        model.compile(dynamic=True)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    accelerator.print(
        f"steps {state.step:,} to {max_steps:,}, learning rate up to {peak:.2e} at step {args.warmup_steps:,}"
    )

    # ----------------------------------------------------------------------------------------------------------- train
    if accelerator.is_main_process:
        write_recipe(args, model.config, output_dir / "recipe.yaml")
    accelerator.init_trackers("vanilla-transformer", config={k: v for k, v in vars(args).items() if v is not None})
    bar = tqdm(total=max_steps, initial=state.step, desc="Training", disable=not accelerator.is_local_main_process)
    micro_batches = iter(batches)
    window, clock = [], time.perf_counter()  # what is not logged yet, and since when
    for step in range(state.step + 1, max_steps + 1):
        seed_step(args.seed, step, accelerator.process_index)
        model.train()
        batch = [next(micro_batches) for _ in range(args.gradient_accumulation_steps)]
        window.append(optimizer_step(wrapped, optimizer, batch, learning_rate(step), args, accelerator))
        if ema is not None:
            ema.update_parameters(model)
        bar.update()

        # The last step is evaluated below, unless it may turn out not to be the best.
        is_due = args.eval_steps and step % args.eval_steps == 0
        must_evaluate = (is_due and step < max_steps) or (args.early_stopping_patience and step == max_steps)
        must_save = must_evaluate or step == max_steps or step % (args.save_steps or max_steps) == 0
        if step % args.logging_steps == 0 or must_save:
            entry = state.log(step, window, time.perf_counter() - clock, learning_rate(step))
            bar.set_postfix_str(describe(entry))
            accelerator.log(entry, step=step)
            window.clear()
            clock = time.perf_counter()
        if must_evaluate:
            scores = evaluate(scored, tokenizer, splits["validation"], "eval", args, accelerator)
            state.log_scores(scores)
            accelerator.log(numbers_of(scores), step=step)
        if must_save:
            if accelerator.is_main_process:
                save_checkpoint(output_dir / f"checkpoint-{step}", model, tokenizer, optimizer.optimizer, state, ema)
                delete_old_checkpoints(
                    output_dir, max(args.save_total_limit, args.average_checkpoints), state.best_step
                )
            accelerator.wait_for_everyone()
            clock = time.perf_counter()
        if args.early_stopping_patience and state.evaluations_without_improvement >= args.early_stopping_patience:
            accelerator.print(f"Stopping early: the best BLEU is {state.best_bleu:.2f}, of step {state.best_step}.")
            break
    bar.close()

    # ----------------------------------------------------------------------------------------------- evaluate and save
    load_final_weights(scored, args, output_dir, state, accelerator)
    results = state.results() | {"num_parameters": model.num_parameters()}
    results |= evaluate(scored, tokenizer, splits["validation"], "eval", args, accelerator)
    state.log_scores(results)
    if "test" in splits:
        results |= evaluate(scored, tokenizer, splits["test"], "test", args, accelerator)
    accelerator.log(numbers_of(results), step=state.step)
    if accelerator.is_main_process:
        results |= describe_run(args, splits, accelerator)
        save_run(output_dir, scored, tokenizer, results, state)
        print(f"The model is in {output_dir}.")
        if args.push_to_hub:
            push_run(output_dir, args.hub_model_id)
    accelerator.end_training()


# -------------------------------------------------------------------------------------------------- the parts of a run


def find_checkpoint(args, output_dir: Path) -> Path | None:
    """The checkpoint to resume from, if that is asked for; raises UserError where there is none to go on from."""
    there = list_checkpoints(output_dir)
    if args.resume_from_checkpoint is None:
        return None
    if args.resume_from_checkpoint == "newest":
        if not there:
            raise UserError(f"--resume_from_checkpoint finds no checkpoint in {output_dir}; leave it out to begin.")
        return there[-1]
    checkpoint = Path(args.resume_from_checkpoint)
    if not (checkpoint / "trainer_state.json").exists():
        raise UserError(f"--resume_from_checkpoint {checkpoint} is no checkpoint-N folder of train.py.")
    if checkpoint.resolve() in [path.resolve() for path in there[:-1]]:
        raise UserError(
            f"--resume_from_checkpoint {checkpoint} is older than {there[-1]}, which the run would mix with its own; "
            "remove what is newer, or choose another --output_dir."
        )
    return checkpoint


def make_output_dir(output_dir: Path, checkpoint: Path | None):
    """Makes the directory, unless it is that of the checkpoint; raises UserError rather than overwrite anything."""
    if checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve():
        return
    if list_checkpoints(output_dir) or (output_dir / "config.json").exists():
        raise UserError(
            f"--output_dir {output_dir} already holds a model; go on with it by --resume_from_checkpoint, or choose "
            "another directory."
        )
    # A run that was stopped before its first checkpoint leaves its recipe.
    if output_dir.is_dir() and {path.name for path in output_dir.iterdir()} - {"recipe.yaml"}:
        raise UserError(f"--output_dir {output_dir} is not empty, and is not overwritten; choose another.")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be made: {error.strerror}.") from error


def make_accelerator(args) -> Accelerator:
    """Accelerate as it was launched, with the trackers of `--report_to`; on a CPU also with all cores and memory kept.

    Raises UserError for a tracker that does not exist or is not installed.
    """
    trackers = [name for name in args.report_to.split(",") if name != "none"]
    try:
        # The main process may tokenise for hours while the others wait.
        patience = InitProcessGroupKwargs(timeout=timedelta(hours=24))
        accelerator = Accelerator(log_with=trackers or None, project_dir=args.output_dir, kwargs_handlers=[patience])
    except ValueError as error:
        raise UserError(f"--report_to {args.report_to}: {error}") from error
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


def make_tokenizer_once(args, dataset, checkpoint: Path | None, accelerator: Accelerator):
    """[`make_tokenizer`] on the main process, for all of them; so is the UserError that it may raise."""
    made = None
    if accelerator.is_main_process:
        try:
            made = make_tokenizer(args, dataset, checkpoint)
        except UserError as error:
            made = error
    made = broadcast_object_list([made])[0]
    if isinstance(made, UserError):
        raise made
    return made


def make_tokenizer(args, dataset, checkpoint: Path | None):
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

    Raises UserError if a model that is tuned is not of this kind, or is to have other sizes than it has.
    """
    fields = model_fields(args)
    if args.model_name_or_path:
        return tuned_config(args, fields)
    if args.tokenizer_name and fields.get("vocab_size", len(tokenizer)) != len(tokenizer):
        raise UserError(
            f"--vocab_size is {fields['vocab_size']}, and --tokenizer_name {args.tokenizer_name} has {len(tokenizer)} "
            "types; leave one of them out."
        )
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
    """The config of `--model_name_or_path`, with the dropout that is given."""
    name = args.model_name_or_path
    try:
        kind = VanillaTransformerConfig.get_config_dict(name)[0].get("model_type")
    except (OSError, HTTPError) as error:
        raise UserError(f"--model_name_or_path {name} cannot be read: {' '.join(str(error).split())}") from error
    if kind != VanillaTransformerConfig.model_type:
        raise UserError(
            f"--model_name_or_path {name} is a {kind} model; convert it by vanilla_transformer.conversion and save it."
        )
    dropouts = {field: value for field, value in fields.items() if "dropout" in field}
    config = VanillaTransformerConfig.from_pretrained(name, **dropouts)
    for field, value in fields.items():
        # A tokenizer may have fewer types than it was asked for.
        if value != getattr(config, field) and not (field == "vocab_size" and value > config.vocab_size):
            raise UserError(f"--{field} is {value}, and {getattr(config, field)} in --model_name_or_path {name}.")
    if args.tokenizer_name:
        raise UserError(f"--tokenizer_name cannot be given with --model_name_or_path {name}, which has its own.")
    return config


def tokenize_splits(pairs: dict, tokenizer, args, config: VanillaTransformerConfig, accelerator: Accelerator) -> dict:
    """Token ids of all splits; says how many pairs each has and why others were dropped.

    The limits of length are for training: what is translated in evaluation is only limited by the model.
    """
    reach = config.max_position_embeddings if config.position_embedding_type == "learned" else sys.maxsize
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
    options = {"attn_implementation": attention, "dtype": torch.float32}
    try:
        if args.model_name_or_path is None:
            return VanillaTransformerForConditionalGeneration._from_config(config, **options).to(device)
        return VanillaTransformerForConditionalGeneration.from_pretrained(
            args.model_name_or_path, config=config, **options
        ).to(device)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, HTTPError) as error:
        model = f"--model_name_or_path {args.model_name_or_path}" if args.model_name_or_path else "A model"
        reason = " ".join(str(error).split())
        raise UserError(f"{model} with --attn_implementation {attention} cannot be made: {reason}") from error


def make_generation_config(args, config: VanillaTransformerConfig) -> GenerationConfig:
    """What `generate` does by default with the trained model: the beams it was scored with, up to a length."""
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    beams = {"num_beams": args.num_beams, "length_penalty": args.length_penalty} if args.num_beams > 1 else {}
    longest = args.max_target_length + 1
    if config.position_embedding_type == "learned":
        longest = min(longest, config.max_position_embeddings)
    return GenerationConfig(max_length=longest, **beams, **ids)


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
    if args.average_checkpoints:
        folders = list_checkpoints(output_dir)[-args.average_checkpoints :]
        load_weights(model, average_checkpoints(folders, is_ema=bool(args.ema_decay)))
        accelerator.print(f"Averaged the weights of {', '.join(folder.name for folder in folders)}.")
    elif args.early_stopping_patience and state.best_step:
        load_weights(model, read_weights(output_dir / f"checkpoint-{state.best_step}", is_ema=bool(args.ema_decay)))
        accelerator.print(f"Took the best weights, those of step {state.best_step}.")


def save_run(output_dir: Path, model, tokenizer, results: dict, state: RunState):
    """Writes what the run hands out: model and tokenizer, results, curves and model card."""
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    text = json.dumps(results, indent=2, ensure_ascii=False)
    (output_dir / "all_results.json").write_text(text + "\n", encoding="utf-8")
    plot_training_curves(state.history, output_dir / "training_curves.png")
    write_model_card(output_dir)


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


def refuse(reason):
    """Ends with one sentence on stderr and no traceback, neither ours nor the launcher's."""
    # Every process finds the same mistake; one of them says it.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train.py: error: {reason}", file=sys.stderr)
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is not None and "LOCAL_RANK" not in os.environ and "launch" in parent.cmdline():
            parent.terminate()  # `accelerate launch` would print a traceback of its own
    sys.exit(2)


if __name__ == "__main__":
    try:
        main()
    except StrictDataclassError as error:
        refuse(error.__cause__)
    except UserError as error:
        refuse(error)
    except OSError as error:  # a full disk, a directory that is gone
        refuse(f"{error}; checkpoints that were written are whole, and --resume_from_checkpoint goes on from them.")
    except KeyboardInterrupt:
        sys.exit("train.py: stopped; --resume_from_checkpoint goes on from the newest checkpoint, if there is one.")
