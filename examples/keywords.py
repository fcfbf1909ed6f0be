"""Keywords -> a sentence with them: pairs for generating text, from the English side of sample_dataset.

    table cat sleeps  ->  The cat sleeps under the table.

python examples/keywords.py
accelerate launch train.py --config examples/keywords.yaml
echo "book reads girl" | vanilla-transformer translate --model outputs/keywords
"""

import json
import random
from pathlib import Path

from common import Pair, make_parser, write_dataset

SAMPLE = Path(__file__).parents[1] / "sample_dataset"
LEAST = 2  # keywords per sentence

# Dropped, for the model to restore: pronouns, articles, auxiliaries, prepositions, conjunctions, question words.
FUNCTION_WORDS = """
    i you he she it we they me him her us them my your his our their the a an this these that every no not
    am is are do does has have can cannot may must should want wants to who what where when why
    in on at of for with without behind under next front up than more because if although but and
"""
NAMES = {"Anna", "Julia", "Maria", "Paul", "Peter", "Thomas"}


def keywords_of(sentence: str) -> list[str]:
    """Words without punctuation, in lower case except names; no function words."""
    words = [word.strip(".,?") for word in sentence.split()]
    words = [word if word in NAMES else word.lower() for word in words]
    return [word for word in words if word not in FUNCTION_WORDS.split()]


def make_splits(seed: int) -> dict[str, list[Pair]]:
    """Each sentence with at least two keywords, shuffled; dropped if an earlier split has the same keywords."""
    rng = random.Random(seed)
    splits, seen = {}, set()
    for split in ("train", "validation", "test"):
        lines = (SAMPLE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        sentences = [json.loads(line)["en"] for line in lines]
        found = [(keywords_of(sentence), sentence) for sentence in sentences]
        kept = [(words, text) for words, text in found if len(words) >= LEAST and tuple(sorted(words)) not in seen]
        seen |= {tuple(sorted(words)) for words, _ in kept}
        splits[split] = [(" ".join(rng.sample(words, len(words))), text) for words, text in kept]
    return splits


def main(argv: list[str] | None = None):
    options = make_parser(__doc__, "outputs/keywords_dataset").parse_args(argv)
    write_dataset(options.output_dir, make_splits(options.seed))


if __name__ == "__main__":
    main()
