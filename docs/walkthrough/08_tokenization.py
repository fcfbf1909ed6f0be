# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Tokenization
#
# A model reads numbers. So far they came from a tokenizer; here is one in plain Python. It begins with bytes and an
# empty list of merges, and learns from text which neighbors to join: byte-pair encoding, with a vocabulary that both
# languages share, as in section 5.1 of the paper. At the end it has learned the same merges as the package's tokenizer
# from the training split, and gives every sentence of the sample dataset the same ids.
#
# **You need** Python, and from notebook 1 how the exercises work. **Time:** 75 minutes, 35 of them for the exercises; the
# code runs for half a minute. **You will have** a tokenizer of 40 lines that equals that of a trained model.

# %%
import json
import re
import sys
import unicodedata
import warnings
from collections import Counter
from pathlib import Path

import checks
from matplotlib import pyplot as plt

from vanilla_transformer.data.tokenizer import train_tokenizer, with_bpe_dropout

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")


# %%
def find_sample() -> Path:
    """The sample dataset, from wherever the notebook runs."""
    here = Path(__file__).parent if "__file__" in globals() else Path.cwd()
    return here.parents[1] / "sample_dataset"


def read(split: str) -> list[str]:
    lines = (find_sample() / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[language] for line in lines for language in ("en", "de")]


texts = read("train")
print(f"{len(texts):,} sentences, such as {texts[0]!r} and {texts[1]!r}")

# %% [markdown]
# ## Why neither words nor letters
#
# One token a word gives short sequences, but a word that the training text lacks has no token. One token a letter
# always works, but sequences become five times as long, and attention compares every token with every other. Subwords
# lie between: frequent words are one token, rare ones a few, and nothing is unknown.

# %%
sentence = "The new neighbour sends me a postcard."
print(f"{sentence!r}: {len(sentence.split())} words, {len(sentence)} letters")
known = {word.strip(".,?!") for text in texts for word in text.split()}
print("words that the training split lacks:", [word for word in sentence.rstrip(".").split() if word not in known])

# %% [markdown]
# ## Text in pieces, pieces in bytes
#
# Merges must not cross the border between words, or the vocabulary would fill with pairs of words. So text is first
# split at spaces and punctuation. The space stays with the word that follows it, and each sentence gets one in front:
# then a word has the same tokens at the start of a sentence and inside it, and joining all tokens gives back the text.
#
# The smallest tokens are the 256 bytes of UTF-8, so no character is ever unknown: `ü` is two bytes. GPT-2 writes each
# byte as a visible character, such as `Ġ` for the space, and so do we.


# %%
def byte_letters() -> list[str]:
    """A visible character for each of the 256 bytes: itself if it is visible, else one from 256 on, in order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


LETTERS = byte_letters()
PIECE = re.compile(
    r" ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
)  # letters, digits or punctuation, after a space


def pieces(text: str) -> list[str]:
    """The pieces of a text, each as the letters of its bytes. NFC writes an accent and its letter as one character."""
    text = " " + unicodedata.normalize("NFC", text)
    return ["".join(LETTERS[byte] for byte in piece.encode()) for piece in PIECE.findall(text)]


print(pieces("Does the girl open the door?"))
print(pieces("Der Schüler schläft."))

# %% [markdown]
# Only how often each piece occurs matters from here on, and the sample has few different ones. From here on, a piece
# is called a word. In `counts` it is a text, in `words` a tuple of tokens, at first of its bytes.

# %%
counts = Counter(piece for text in texts for piece in pieces(text))
print(f"{len(counts)} different pieces; the most frequent: {counts.most_common(5)}")

# %% [markdown]
# ## Exercise: counting pairs (5 minutes)
#
# One step of learning: count all neighbors, join the most frequent pair everywhere, and write the merge down. The
# joined pair is a new token. First the counting. The words are given with the number of their occurrences.


# %% tags=["part"]
def count_pairs(words):
    """How often each pair of neighboring tokens occurs: words {tokens: count} -> Counter {(token, token): count}."""
    # SOLUTION
    pairs = Counter()
    for tokens, count in words.items():
        for pair in zip(tokens, tokens[1:], strict=False):
            pairs[pair] += count
    return pairs
    # EXERCISE
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(count_pairs)
# EXERCISE
# checks.keep(count_pairs)
# END

# %%
words = {tuple(piece): count for piece, count in counts.items()}
print(count_pairs(words).most_common(5))

# %% [markdown]
# ## Exercise: merging a pair (10 minutes)
#
# Join each occurrence of the pair, from left to right. No token is used twice: of the two pairs of `aaa`, the left one
# is joined. Two tokens are the pair only if both are equal to its tokens; that they spell the same is not enough.


# %% tags=["part"]
def merge(tokens, pair):
    """Joins each occurrence of `pair` in a tuple of tokens, from left to right, and returns a tuple."""
    # SOLUTION
    merged = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)
    # EXERCISE
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(merge)
# EXERCISE
# checks.keep(merge)
# END

# %%
print(merge(tuple("Ġgehen"), ("e", "n")))
assert merge(tuple("aaaa"), ("a", "a")) == ("aa", "aa")  # overlapping pairs: the left one wins

# %% [markdown]
# What would go wrong if `merge` compared `pair` with `tokens[i]` and `tokens[i + 1]` of the input, and joined both pairs
# of `aaa`? The middle letter would count twice, and the tokens would no longer spell the text.
#
# ## Exercise: from an empty list to the whole vocabulary (10 minutes)
#
# Repeat until the vocabulary is full, or no pair is left. If two pairs are equally frequent, the package's library
# takes the pair whose first token entered the vocabulary earlier, then that whose second one did. The vocabulary
# begins with the special tokens and the letters of the 256 bytes, sorted; this is `first`. Two merges may spell the
# same token; it keeps its first id.


# %% tags=["part"]
def learn_merges(counts, first, vocab_size):
    """Learns merges from words {text: count} until the vocabulary, which begins with the tokens `first`, is full.

    Returns the merges in the order in which they were learned, and the vocabulary {token: id}.
    """
    # SOLUTION
    words = {tuple(word): count for word, count in counts.items()}
    vocabulary = {token: number for number, token in enumerate(first)}
    merges = []
    while len(vocabulary) < vocab_size:
        pairs = count_pairs(words)
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], vocabulary[pair[0]], vocabulary[pair[1]]))
        words = {merge(tokens, best): count for tokens, count in words.items()}
        merges.append(best)
        vocabulary.setdefault("".join(best), len(vocabulary))
    return merges, vocabulary
    # EXERCISE
    # # 1. The words as tuples of letters, and the vocabulary of the first tokens. No merges yet.
    # # 2. While the vocabulary is too small: the best pair, if there is one. min takes a key: a tuple that is smallest for
    # #    the best pair. The more frequent, the smaller; then the ids of its tokens.
    # # 3. Merge it in all words, write it down, and give the new token the next id, unless it has one. (A loop that
    # #    never ends? Then the words have not been replaced by the merged ones.)
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(learn_merges)
# EXERCISE
# checks.keep(learn_merges)
# END

# %%
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
merges, vocabulary = learn_merges(counts, SPECIAL + sorted(LETTERS), 1000)
for number in (0, 1, 2, 9, 99, 739):
    print(f"merge {number + 1}: {merges[number]}")

# %% [markdown]
# The first merges are endings and beginnings that both languages are full of; the last ones are whole words.
#
# The package's tokenizer is trained on the same texts by the `tokenizers` library, in Rust. The merges are the same,
# in the same order, and so is every id of the vocabulary:

# %%
package = train_tokenizer(texts, vocab_size=1000)
theirs = [tuple(pair) for pair in json.loads(package.backend_tokenizer.to_str())["model"]["merges"]]
assert merges == theirs and len(merges) == 740
assert vocabulary == package.get_vocab() and len(vocabulary) == 1000
print(f"equal: {len(merges)} merges and {len(vocabulary)} ids")

# %% [markdown]
# ## Exercise: encoding a word (10 minutes)
#
# To encode a new word, apply the merges in the order in which they were learned. Order matters: many merges join what
# earlier ones have made. So as long as there are neighbors to merge, take those that were learned first.


# %% tags=["part"]
def encode_word(word, rank):
    """The tokens of a word, as a tuple, by the merges {(token, token): number}, of which the lowest number comes first."""
    # SOLUTION
    tokens = tuple(word)
    while possible := [pair for pair in zip(tokens, tokens[1:], strict=False) if pair in rank]:
        tokens = merge(tokens, min(possible, key=rank.get))
    return tokens
    # EXERCISE
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(encode_word)
# EXERCISE
# checks.keep(encode_word)
# END

# %% [markdown]
# A sentence is the tokens of its pieces, and the end token comes last, since the model must learn to write it.

# %%
RANK = {pair: number for number, pair in enumerate(merges)}


def encode(text: str) -> list[int]:
    ids = [vocabulary[token] for piece in pieces(text) for token in encode_word(piece, RANK)]
    return [*ids, vocabulary["</s>"]]


def decode(ids: list[int]) -> str:
    tokens = {number: token for token, number in vocabulary.items()}
    letters = "".join(tokens[number] for number in ids if tokens[number] not in SPECIAL)
    return bytes(LETTERS.index(letter) for letter in letters).decode().removeprefix(" ")


everything = [*texts, *read("validation"), *read("test")]
assert all(encode(text) == package(text).input_ids for text in everything)
assert all(decode(encode(text)) == text for text in everything)
print(f"equal ids, and the text again, for all {len(everything):,} sentences of the sample dataset")

# %%
for text in (sentence, "They don't sleep.", "Das Krokodil schläft 🐊."):
    print(package.convert_ids_to_tokens(encode(text)))
    assert encode(text) == package(text).input_ids and decode(encode(text)) == text

# %% [markdown]
# `Ġ` is the space, and `Ã¤` are the letters of the two bytes of `ä`. Words that the training text lacks become several
# tokens, and the crocodile becomes its four bytes. Nothing is unknown, and decoding gives back exactly the text.
#
# ## How many merges?
#
# More merges make sequences shorter, and the embedding matrix larger; and more of its tokens are seen only a few times
# in training.

# %%
sizes = [260, 300, 400, 600, 800, 1000, 1400, 1800]
lengths, rare = [], []
for size in sizes:
    tokenizer = train_tokenizer(texts, vocab_size=size)
    ids = tokenizer(texts).input_ids
    lengths.append(sum(map(len, ids)) / len(ids))
    used = Counter(number for sentence in ids for number in sentence)
    rare.append(sum(1 for count in used.values() if count < 20))

figure, left = plt.subplots(figsize=(7, 3.5), layout="constrained")
left.plot(sizes, lengths, "o-", color="tab:blue")
left.set(xlabel="tokens in the vocabulary", ylim=(0, None))
left.set_ylabel("tokens per sentence", color="tab:blue")
right = left.twinx()
right.plot(sizes, rare, "s--", color="tab:orange")
right.set_ylabel("tokens seen fewer than 20 times", color="tab:orange")
right.set(ylim=(0, None))
left.set_title("More merges: shorter sentences, more rare tokens")
plt.show()
assert lengths == sorted(lengths, reverse=True)

# %% [markdown]
# Most of the gain comes from the first few hundred merges. The paper uses 37,000 tokens for 4.5 million sentence pairs; the
# recipes of this package use 2,000 for the sample and 8,000 to 10,000 for Multi30k ([recipes](../recipes.md)).
#
# ## Other tokens for the same text
#
# One text has many possible tokenizations, and the model only ever sees one of them. *BPE-dropout* (Provilkov et al.,
# 2020) skips each merge with a small probability, so that the model sees several and learns what tokens consist of.
# It is a regularizer for small corpora; `train.py --bpe_dropout 0.1` uses it, in training only.

# %%
varied = with_bpe_dropout(package, 0.1)
for _ in range(4):
    print(varied.tokenize("Die Kinder spielen im Garten."))

# %% [markdown]
# ## Questions
#
# 1. Models of the sample dataset have one vocabulary for both languages. What do they share, and what would two
#    vocabularies cost?
# 2. Why must the merges be learned from the training split alone?
# 3. `encode_word` looks for the earliest merge again after each one. Would one pass over all 740 merges give the same?

# %% [markdown] tags=["answer"]
# **Answers.** 1. Names, punctuation and many short pieces are shared, and so is their embedding, which tied weights
# use a third time in the output layer; two vocabularies would need two matrices. 2. Otherwise the test would not show
# what happens to text that nobody has seen. 3. Yes, as no two of these merges make the same token: a merge can then
# only create pairs that were learned later, since they contain the token that it makes. One pass is slower for long
# merge lists, as most merges do not occur in a piece.
