"""Word alignments from attention to the source, and their error rate."""

import re

import torch

from ..errors import UserError
from .attention import AttentionMaps, Token, index_of


def align_words(maps: AttentionMaps, layer: int = -1) -> list[tuple[int, int]]:
    """For each target word, the source word with the largest attention weight: (source, target) index pairs from 0.

    The weight is averaged over the heads of the layer, and summed over the tokens of both words. Words are separated
    by spaces.
    """
    weights = maps.cross[index_of("layer", layer, len(maps.cross))].mean(dim=0)  # (T,S)
    source, target = word_membership(maps.source), word_membership(maps.target)
    words = target @ weights @ source.T
    return [(int(row.argmax()), number) for number, row in enumerate(words) if row.numel()]


def word_membership(tokens: list[Token]) -> torch.Tensor:
    """Shape (words, tokens): 1 where a token belongs to a word."""
    words = torch.tensor([-1 if token.word is None else token.word for token in tokens])
    return (words == torch.arange(int(words.max()) + 1)[:, None]).float()


def alignment_error_rate(predicted: list[set], reference: list[set]) -> float:
    """1 - 2 |A and S| / (|A| + |S|), counted over all sentences (Och and Ney, 2003, section 5.1).

    A are the predicted links, and S the reference links, all of them taken as sure.
    """
    both = sum(len(a & s) for a, s in zip(predicted, reference, strict=True))
    count = sum(map(len, predicted)) + sum(map(len, reference))
    return 1 - 2 * both / count if count else 0.0


def read_links(text: str | None, number: int) -> set[tuple[int, int]]:
    """The links in a text like "0-0 1-2"; none if it is None. For other texts, UserError names pair `number`."""
    if not isinstance(text, str | None) or not re.fullmatch(r"\s*(\d+-\d+(\s+|$))*", text or ""):
        raise UserError(f"The alignment of pair {number} is {text!r}; it must have the form '0-0 1-2'.")
    return {tuple(map(int, link.split("-"))) for link in (text or "").split()}
