"""Translate: text in, text out.

python -m vanilla_transformer.translation --model DIR_OR_ID < in.txt > out.txt
"""

import argparse
import sys
from collections.abc import Iterable

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .data import fill_batches
from .errors import UserError


class Translator:
    """A model and its tokenizer as a function from texts to texts.

        Translator.from_pretrained("outputs/sample")(["The dog sleeps."], num_beams=5)

    Texts are translated in batches of similar length, sentences times source tokens at most `max_tokens`, and come
    back in their order; an empty text stays empty.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 4096):
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    @classmethod
    def from_pretrained(cls, name_or_path: str, max_tokens: int = 4096, **kwargs) -> "Translator":
        """Loads model and tokenizer from a directory or a Hub id; `kwargs` go to `from_pretrained` of both."""
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
        model = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, **kwargs).eval()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device), tokenizer, max_tokens)

    @torch.no_grad()
    def __call__(self, texts: Iterable[str], progress: str | None = None, **generation) -> list[str]:
        """Translates `texts`; `generation` goes to `generate` (`num_beams`, `length_penalty`, `max_new_tokens`, ...).

        Args:
            progress: The label of a progress bar on stderr; None: no bar.

        Raises:
            TypeError: `texts` is one text and not a list of them.
            UserError: A text is longer than the learned positions of the model; names it.
        """
        if isinstance(texts, str):
            raise TypeError("Give a list of texts; one text alone would be translated letter by letter.")
        texts = list(texts)
        filled = [index for index, text in enumerate(texts) if text.strip()]
        translations = [""] * len(texts)
        if not filled:
            return translations
        ids = self.tokenizer([texts[index] for index in filled], return_attention_mask=False).input_ids
        lengths = np.array([len(source) for source in ids])
        self.refuse_too_long(lengths, filled)
        with tqdm(total=len(filled), desc=progress, unit="sentence", disable=progress is None, leave=False) as bar:
            # The longest first, so that a batch that does not fit the memory shows at once.
            for batch in reversed(list(fill_batches(lengths, lengths, self.max_tokens))):
                source = self.tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt")
                bound = self.bound(torch.from_numpy(lengths[batch]), generation)
                output = self.model.generate(**source.to(self.model.device), **bound, **generation)
                for i, text in zip(batch, self.tokenizer.batch_decode(output, skip_special_tokens=True), strict=True):
                    translations[filled[i]] = text
                bar.update(len(batch))
        return translations

    def bound(self, lengths: torch.Tensor, generation: dict) -> dict:
        """Ends each translation at the length of its source plus 50 (section 6.1), unless `generation` has a bound."""
        if {"max_length", "max_new_tokens"} & generation.keys():
            return {}
        longest = lengths + 50
        if self.model.config.position_embedding_type == "learned":
            longest = longest.clamp(max=self.model.config.max_position_embeddings)
        return {"max_length": int(longest.max()), "stopping_criteria": StoppingCriteriaList([LongestOutput(longest)])}

    def refuse_too_long(self, lengths: np.ndarray, numbers: list[int]):
        config = self.model.config
        if config.position_embedding_type == "learned" and lengths.max() > config.max_position_embeddings:
            raise UserError(
                f"Text {numbers[lengths.argmax()] + 1} has {lengths.max()} tokens, and the learned positions of this "
                f"model end at {config.max_position_embeddings}; split it into shorter ones."
            )


class LongestOutput(StoppingCriteria):
    """Ends each output of a batch at a length of its own, `longest` (B)."""

    def __init__(self, longest: torch.Tensor):
        self.longest = longest

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        beams = input_ids.shape[0] // self.longest.shape[0]
        return input_ids.shape[1] >= self.longest.to(input_ids.device).repeat_interleave(beams)


def main():
    """Translates standard input to standard output, line by line."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m vanilla_transformer.translation")
    parser.add_argument("--model", required=True, help="a model directory or a Hub id")
    parser.add_argument("--num_beams", type=int, default=None, help="beams (default: those of the model)")
    parser.add_argument("--length_penalty", type=float, default=None, help="the exponent of the length in beam search")
    parser.add_argument("--max_tokens", type=int, default=4096, help="source tokens in a batch (default: %(default)s)")
    options = parser.parse_args()
    chosen = {"num_beams": options.num_beams, "length_penalty": options.length_penalty}
    sys.stdin.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        lines = [line.rstrip("\r\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        sys.exit(f"translation: the input is not UTF-8: {error}")
    if options.num_beams is not None and options.num_beams < 1:
        sys.exit(f"translation: --num_beams is {options.num_beams}; it must be at least 1.")
    try:
        translator = Translator.from_pretrained(options.model, options.max_tokens)
    except (OSError, ValueError) as error:
        sys.exit(f"translation: {options.model} cannot be loaded: {' '.join(str(error).split())}")
    try:
        translations = translator(lines, "Translating", **{k: v for k, v in chosen.items() if v is not None})
    except UserError as error:
        sys.exit(f"translation: {error}")
    for text in translations:
        print(" ".join(text.split("\n")))  # one line, whatever the model wrote


if __name__ == "__main__":
    main()
