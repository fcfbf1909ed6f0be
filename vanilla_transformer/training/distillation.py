"""Word-level distillation (Hinton et al., 2015; Kim & Rush, 2016): what teachers predict for the training pairs.

Teachers read each training pair once, before training. Soft targets are the mean of their predicted distributions. The
`top_k` most probable tokens at each target position are kept with their probabilities, as two more columns of the
training pairs. The loss is in loss_vanilla_transformer.py.
"""

from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from datasets.fingerprint import Hasher
from pyarrow import ArrowInvalid

from ..data.batches import SOFT_TARGETS, PairCollator, fill_batches, lengths_of
from ..data.encoding import PAIR_FEATURES, fingerprint
from ..data.tokenizer import tokenizer_for_training
from ..errors import UserError, explaining, noting
from ..loading import load_foreign
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .options import TrainingOptions

# Flat lists of T x k numbers, which are read several times faster than lists of lists.
FEATURES = {"teacher_tokens": datasets.List(datasets.Value("int32"))}
FEATURES |= {"teacher_probabilities": datasets.List(datasets.Value("float32"))}
PAIRS_AT_A_TIME = 1000  # sorted by length together


def add_soft_targets(pairs: Dataset, tokenizer, config, options: TrainingOptions, device: torch.device) -> Dataset:
    """The tokenized training pairs with the soft targets of `--teacher`, from the cache if they are there.

    The cache is a file that `datasets` writes under a temporary name and renames when it is complete. Its name is a
    digest of the token ids of all pairs, the teachers' configs and weights, and k: different data or teachers get a
    different file.

    Raises:
        UserError: A teacher cannot be loaded, its vocabulary differs from that of the student (`config` is the
            student's), or a pair is too long for its learned positions. Or the cache cannot be written or read.
    """
    longest = max(side.max() for side in lengths_of(pairs))
    teachers = [load_teacher(name, tokenizer, config, longest).to(device) for name in options.teacher]

    def read(columns: dict) -> dict:
        """The soft targets of a batch of pairs, read by the teachers in smaller batches of similar length."""
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found = {name: [None] * len(rows) for name in SOFT_TARGETS}
        lengths = (np.array(columns[name]) for name in ("source_length", "target_length"))
        for indices in fill_batches(*lengths, options.per_device_eval_max_tokens):
            batch = PairCollator(tokenizer)([rows[i] for i in indices])
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            for name, values in zip(SOFT_TARGETS, soft_targets(teachers, batch, options.teacher_top_k), strict=True):
                for i, row in zip(indices, values.cpu().numpy(), strict=True):
                    found[name][i] = row[: len(rows[i]["labels"])].ravel()
        return found

    models = [(teacher.config.to_json_string(), teacher.state_dict()) for teacher in teachers]
    key = Hasher.hash([fingerprint(pairs), options.teacher_top_k, models])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "soft_targets"
    file, remedy = folder / f"{key}.arrow", "delete it and tmp* beside it, or set HF_DATASETS_CACHE to another folder"
    with explaining(f"Soft targets cannot be written to or read from {file}", OSError, ArrowInvalid, remedy=remedy):
        folder.mkdir(parents=True, exist_ok=True)
        pairs = pairs.map(
            read,
            batched=True,
            batch_size=PAIRS_AT_A_TIME,
            features=datasets.Features(PAIR_FEATURES | FEATURES),
            cache_file_name=str(file),
            new_fingerprint=key,
            desc=f"Soft targets of {len(teachers)} teacher(s)",
        )
    sample = pairs.take(PAIRS_AT_A_TIME)
    mass = sum(map(sum, sample["teacher_probabilities"])) / sum(sample["target_length"])
    top = f"the {options.teacher_top_k} most probable tokens"
    PartialState().print(f"soft targets: {top} have {mass:.1%} of probability")
    return pairs


def load_teacher(name: str, tokenizer, config, longest: int) -> VanillaTransformerForConditionalGeneration:
    """A model of this package, or one that can be converted to it; see [`add_soft_targets`].

    `longest` is the length in tokens of the longest side of any pair.
    """
    with noting(f"while loading --teacher {name}"):
        teacher = load_foreign(name, use_safetensors=True, dtype=torch.float32)
    is_same = tokenizer_for_training(name, "--teacher").get_vocab() == tokenizer.get_vocab()
    if not is_same or teacher.config.decoder_vocab_size != config.decoder_vocab_size:
        raise UserError(
            f"--teacher {name} has a different vocabulary from the student, and cannot teach it token by token; use "
            "sequence-level distillation instead: train on its translations, as docs/training.md shows."
        )
    limit = teacher.config.longest_sequence
    if longest > limit:
        raise UserError(
            f"--teacher {name} has learned positions up to {limit}, and the longest side of a pair has {longest} "
            "tokens; lower --max_source_length and --max_target_length."
        )
    return teacher


@torch.no_grad()
def soft_targets(teachers: list, batch: dict[str, torch.Tensor], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` most probable tokens (B,T,k) at each target position and their probabilities (B,T,k).

    The teachers' distributions are averaged first. The k probabilities are not normalized again: their sum is at
    most 1.
    """
    mean = 0
    for teacher in teachers:
        logits = teacher(**batch).logits  # (B,T,V)
        # Marian models give the padding token an arbitrary probability, and ban it from the output.
        forbidden = [ids[0] for ids in teacher.generation_config.bad_words_ids or [] if len(ids) == 1]
        logits[..., forbidden] = -torch.inf
        mean = mean + logits.softmax(dim=-1) / len(teachers)
    probabilities, tokens = mean.topk(min(top_k, mean.shape[-1]))
    return tokens, probabilities
