"""Tokenizers: train one for both languages, or make an existing one fit for sequence-to-sequence training."""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice, pairwise

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import is_sentencepiece_available

from ..errors import UserError

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CACHED_WORDS = 2**15  # how many words [`BpeDropout`] remembers the merges of


def train_tokenizer(texts: Iterable[str], vocab_size: int, length: int | None = None) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer (section 5.1: byte-pair encoding with a shared vocabulary).

    Every text comes back exactly from encoding and decoding, after NFC normalisation: its bytes are the alphabet, so
    that nothing is unknown, and text that looks like a special token stays text.

    Args:
        texts: The sentences of both languages.
        vocab_size: The number of token types at most; a small corpus gives fewer.
        length: How many texts there are, for the progress bar.

    Raises:
        UserError: `vocab_size` does not hold the special tokens and the 256 bytes, or there is no text.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise UserError(
            f"--vocab_size is {vocab_size}, smaller than the alphabet; it must be at least {smallest}: "
            f"{len(alphabet)} bytes and {len(SPECIAL_TOKENS)} special tokens."
        )
    tokenizer = Tokenizer(models.BPE())
    # The space put before each text makes its first word the same token as inside a sentence; decoding takes it off.
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS.values()), initial_alphabet=alphabet
    )
    texts = iter(texts)
    first = list(islice(texts, 1))
    if not first:
        raise UserError("There is no text to train a tokenizer on; check the dataset and its columns.")
    tokenizer.train_from_iterator(chain(first, texts), trainer, length=length)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )
    end_with_eos(wrapped)
    return wrapped


def end_with_eos(tokenizer: PreTrainedTokenizerFast):
    """Makes `tokenizer(text)` the tokens of the text and the end-of-sentence token, nothing else."""
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B:1 {eos}:1", special_tokens=[(eos, tokenizer.eos_token_id)]
    )


def load_tokenizer(name_or_path: str, option: str = "--tokenizer_name") -> PreTrainedTokenizerBase:
    """Loads an existing tokenizer and makes it end every sentence with its end-of-sentence token.

    A tokenizer that has a separator but no end-of-sentence token (BERT's) uses it as one, and one without a padding
    token (GPT-2's) pads with the end of sentence. What is saved with the model then encodes as training did. One that
    is not fast (Marian's) stays what it is.

    Args:
        name_or_path: A Hub id or a directory.
        option: Which option named it, for the message.

    Raises:
        UserError: There is no such tokenizer, it needs code of its own or a package that is not installed, or it has
            no token that could end a sentence.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)  # None would ask
    except Exception as error:  # a damaged file can make the library raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        # Where a Marian model does not name the class of its tokenizer, the library complains of the config's.
        needs_sentencepiece = "SentencePiece" in reason or "configuration_marian" in reason
        if needs_sentencepiece and not is_sentencepiece_available():
            raise UserError(
                f"The tokenizer of {option} {name_or_path} needs sentencepiece, which is not installed; install it by "
                "`pip install sentencepiece`."
            ) from error
        raise UserError(f"No tokenizer could be loaded from {option} {name_or_path}: {reason}") from error
    if tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise UserError(
                f"The tokenizer {name_or_path} has no end-of-sentence token, without which no translation ends; "
                "choose another, or give it an `eos_token`."
            )
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.cls_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.is_fast:
        return plain(tokenizer)
    if tokenizer("x").input_ids[-1] != tokenizer.eos_token_id:
        raise UserError(
            f"The tokenizer {name_or_path} does not end a sentence with its end-of-sentence token, and is not one "
            "whose template can be changed; choose a fast tokenizer."
        )
    return tokenizer


def plain(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokens without what a class of its own does: build its template anew, or add token types."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        split_special_tokens=tokenizer.split_special_tokens,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        **tokenizer.special_tokens_map,
    )
    end_with_eos(wrapped)
    return wrapped


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """The config fields that follow from the tokenizer; the decoder starts with bos, or eos where there is none."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }


class BpeDropout:
    """Token ids with merges left out at random (Provilkov et al., 2020, "BPE-Dropout", algorithm 1).

    At every step of merging a word, each merge that is possible is left out with probability `dropout`, and the one
    that was learnt first is made of those that remain; where none remains, the word is done. The `dropout` of
    tokenizers' BPE model draws from a generator that cannot be seeded, so that no run could be resumed as it was, and
    leaves out fewer merges than the algorithm.

    The tokenizer without its merges splits the texts: normalisation, words, added tokens and template are the
    tokenizer's own, and only what it would merge is merged here. An instance can be pickled.

    Args:
        tokenizer: A fast tokenizer with a BPE model. What is changed of it later is not noticed.
        dropout: The probability p of leaving out a merge; in the paper 0.1, and 0.6 for Chinese and Japanese.

    Raises:
        UserError: `dropout` is no probability, or the tokenizer is not one whose merges can be left out: it is not a
            fast one, its model is not BPE or has a dropout of its own, a part of it is written in Python, or it has
            `ignore_merges` without being byte-level.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dropout: float):
        if not 0 <= dropout <= 1:
            raise UserError(f"--bpe_dropout is {dropout}; it must be a probability, from 0 to 1.")
        state = state_of(tokenizer)
        model = state["model"]
        vocab, prefix = model["vocab"], model["continuing_subword_prefix"] or ""
        self.dropout = dropout
        self.ranks = {(vocab[a], vocab[b]): rank for rank, (a, b) in enumerate(model["merges"])}
        self.merged = [vocab[a + b[len(prefix) :]] for a, b in model["merges"]]
        self.vocab = vocab if model["ignore_merges"] else {}
        self.words = {}
        model |= {"merges": [], "ignore_merges": False}
        self.splitter = Tokenizer.from_str(json.dumps(state | {"truncation": None, "padding": None}))
        self.split_special_tokens = tokenizer.split_special_tokens

    def __call__(self, texts: list[str], generator: np.random.Generator) -> list[list[int]]:
        """The ids that `tokenizer(texts)` gives, except for the merges left out; equal states give equal ids."""
        self.splitter.encode_special_tokens = self.split_special_tokens  # pickling loses it
        runs = self.runs(generator)
        run = next(runs)
        rows = []
        for encoding in self.splitter.encode_batch(texts):
            symbols, row, start = encoding.ids, [], 0
            for word, group in groupby(encoding.word_ids):
                stop = start + len(list(group))
                ids = symbols[start:stop]
                start = stop
                if word is not None:  # the template's tokens are of no word
                    whole, merges = self.whole(tuple(ids))
                    if merges <= run:
                        ids, run = whole, run - merges
                    else:
                        ids, run = self.merge(ids, run, runs)
                row += ids
            rows.append(row)
        return rows

    def runs(self, generator: np.random.Generator) -> Iterator[float]:
        """How many merges are made until one is left out, again and again: fewer draws than one for each merge."""
        if self.dropout == 0:
            yield math.inf
        while True:
            yield from (generator.geometric(self.dropout, 256) - 1).tolist()

    def whole(self, symbols: tuple[int, ...]) -> tuple[list[int], int]:
        """The ids of a word of which no merge is left out, and how many merges it takes."""
        if symbols not in self.words:
            if len(self.words) == CACHED_WORDS:
                self.words.clear()
            ids, _ = self.merge(symbols, math.inf, iter(()))
            merges = len(symbols) - len(ids)
            if self.vocab:
                word = "".join(map(self.splitter.id_to_token, symbols))
                ids = [self.vocab[word]] if word in self.vocab else ids
            self.words[symbols] = ids, merges
        return self.words[symbols]

    def merge(self, symbols: Iterable[int], run: float, runs: Iterator[float]) -> tuple[list[int], float]:
        """The ids of a word, with a merge left out when `run` have been made, and what then remains of the run.

        Of the possible merges, whether one is left out is asked in the order of learning until one is made: the
        answers for those after it would change nothing.
        """
        ids = list(symbols)
        never = len(self.merged)
        ranks = [self.ranks.get(pair, never) for pair in pairwise(ids)]
        left_out = []
        while (rank := min(ranks, default=never)) < never:
            i = ranks.index(rank)
            if run == 0:
                run = next(runs)
                left_out.append((i, rank))
                ranks[i] = never
                continue
            run -= 1
            for j, left_out_rank in left_out:  # in the next step they are possible again
                ranks[j] = left_out_rank
            left_out.clear()
            ids[i : i + 2] = [self.merged[rank]]
            del ranks[i]
            if i > 0:
                ranks[i - 1] = self.ranks.get((ids[i - 1], ids[i]), never)
            if i < len(ranks):
                ranks[i] = self.ranks.get((ids[i], ids[i + 1]), never)
        return ids, run


def state_of(tokenizer: PreTrainedTokenizerBase) -> dict:
    """What tokenizer.json holds of a tokenizer whose merges can be left out; UserError says why they cannot."""
    remedy = "choose another tokenizer, or leave --bpe_dropout out"
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"--bpe_dropout needs a fast tokenizer, which {type(tokenizer).__name__} is not; {remedy}.")
    try:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # the library raises nothing more exact
        raise UserError(f"--bpe_dropout needs a tokenizer that can be saved: {error}; {remedy}.") from error
    model = state["model"]
    if model["type"] != "BPE":
        raise UserError(f"--bpe_dropout needs a tokenizer whose model is BPE, not {model['type']}; {remedy}.")
    if model["dropout"]:
        raise UserError(
            f"--bpe_dropout needs a tokenizer without a dropout of its own, which no seed governs, and this one's is "
            f"{model['dropout']}; set it to null in its tokenizer.json."
        )
    if model["ignore_merges"] and not spells_words(state):
        raise UserError(
            f"--bpe_dropout needs a tokenizer that is byte-level or does not set `ignore_merges`; {remedy}."
        )
    return state


def spells_words(state: dict) -> bool:
    """Whether the symbols of a word always make up its text: all its characters are bytes, and each is a token."""
    model = state["model"]
    plain_symbols = not model["continuing_subword_prefix"] and not model["end_of_word_suffix"]
    all_bytes = model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return plain_symbols and all_bytes and "ByteLevel" in str(state["pre_tokenizer"])
