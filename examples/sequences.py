"""Copy, reverse or sort letters: pairs for the tasks every new sequence model is tried on.

    k d a d f  ->  f d a d k    (reverse)

python examples/sequences.py --task reverse
accelerate launch train.py --config examples/sequences.yaml
vanilla-transformer evaluate --model outputs/reverse --dataset_name outputs/reverse_dataset
"""

import random
import string

from common import Pair, make_parser, write_dataset

TASKS = {"copy": list, "reverse": lambda letters: letters[::-1], "sort": sorted}
LENGTHS = range(3, 11)
SPLIT_SIZES = {"train": 20_000, "validation": 500, "test": 500}


def make_splits(task: str, seed: int) -> dict[str, list[Pair]]:
    """Pairs of space-separated letters; no source occurs twice."""
    rng = random.Random(seed)
    drawn: dict[tuple[str, ...], None] = {}  # a set that keeps the order
    while len(drawn) < sum(SPLIT_SIZES.values()):
        drawn[tuple(rng.choices(string.ascii_lowercase, k=rng.choice(LENGTHS)))] = None
    pairs = iter([(" ".join(letters), " ".join(TASKS[task](letters))) for letters in drawn])
    return {split: [next(pairs) for _ in range(size)] for split, size in SPLIT_SIZES.items()}


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__, "outputs/TASK_dataset")
    parser.add_argument("--task", choices=TASKS, required=True, help="what to do with the letters")
    options = parser.parse_args(argv)
    write_dataset(options.output_dir.replace("TASK", options.task), make_splits(options.task, options.seed))


if __name__ == "__main__":
    main()
