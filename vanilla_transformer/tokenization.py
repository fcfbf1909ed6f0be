"""Tokenizers: train one for both languages, or make an existing one fit for sequence-to-sequence training."""

from collections.abc import Iterable
from itertools import chain, islice

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .errors import UserError

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


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
    token (GPT-2's) pads with the end of sentence. What is saved with the model then encodes as training did.

    Args:
        name_or_path: A Hub id or a directory.
        option: Which option named it, for the message.

    Raises:
        UserError: There is no such tokenizer, it needs code of its own, or it has no token that could end a sentence.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)  # None would ask
    except Exception as error:  # a damaged file can make the library raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
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
