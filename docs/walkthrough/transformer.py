"""The Transformer of *Attention Is All You Need* in plain PyTorch, as the notebooks of this folder write it.

The names of modules and parameters, and their shapes, are those of vanilla_transformer: weights load both ways. Built
from the sources of the notebooks by build.py.

Letters: B sentences, S source length, T target length, d model width, h heads, k = d / h width of a head, f inner
width of the feed-forward network, V vocabulary size, N target tokens without padding.
"""

import math
from collections import Counter

import torch
from torch import nn

PAD, START, END = 0, 1, 2  # token ids: padding, the decoder's first token, the end of a sentence


# 1. Scaled dot-product attention -------------------------------------------------------------------------------------


def attention(queries, keys, values, mask=None):
    """Scaled dot-product attention (Equation 1).

    Queries (...,T,k), keys (...,S,k) and values (...,S,k) -> the output (...,T,k) and the weights (...,T,S). A query
    does not see a key where `mask`, which broadcasts to (...,T,S), is False.
    """
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])  # (...,T,S)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return weights @ values, weights


# 2. Heads and masks --------------------------------------------------------------------------------------------------


def padding_mask(ids):
    """Token ids (B,S) -> (B,1,1,S), True where there is no padding."""
    return (ids != PAD)[:, None, None, :]


def causal_mask(length):
    """-> (length,length): row t is True up to column t."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2): `x` (B,T,d) attends to `attended` (B,S,d) -> (B,T,d)."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj = nn.Linear(d, d)
        self.k_proj = nn.Linear(d, d)
        self.v_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)

    def split_heads(self, x):
        """(B,T,d) -> (B,h,T,k)"""
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def join_heads(self, x):
        """(B,h,T,k) -> (B,T,d)"""
        return x.transpose(1, 2).flatten(-2)

    def forward(self, x, attended, mask=None):
        """A query does not see a key where `mask`, which broadcasts to (B,h,T,S), is False."""
        queries = self.split_heads(self.q_proj(x))  # (B,h,T,k)
        keys, values = self.split_heads(self.k_proj(attended)), self.split_heads(self.v_proj(attended))  # (B,h,S,k)
        output, _ = attention(queries, keys, values, mask)
        return self.out_proj(self.join_heads(output))


# 3. Positions --------------------------------------------------------------------------------------------------------


def sinusoids(length, d):
    """The positions 0 to length - 1 (section 3.5) -> (length,d), in float32."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]  # in float32, large angles would be inexact
    angles = positions * 10000 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)  # (length,d/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()


def embed(embed_tokens, ids):
    """Token ids (B,T) -> (B,T,d): rows of the nn.Embedding `embed_tokens`, scaled (section 3.4), plus positions."""
    length, d = ids.shape[1], embed_tokens.embedding_dim
    return embed_tokens(ids) * math.sqrt(d) + sinusoids(length, d)


# 4. Layer norm, feed-forward and the residual ------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """Layer normalization: (...,d) -> (...,d), each vector by itself."""

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))
        self.eps = eps

    def forward(self, x):
        variance = x.var(dim=-1, correction=0, keepdim=True)
        return (x - x.mean(dim=-1, keepdim=True)) / (variance + self.eps).sqrt() * self.weight + self.bias


class Layer(nn.Module):
    """What encoder and decoder layers share: the feed-forward network and the residual around each sublayer."""

    def __init__(self, d, f, dropout=0.1):
        super().__init__()
        self.fc1 = nn.Linear(d, f)
        self.fc2 = nn.Linear(f, d)
        self.final_layer_norm = LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def feed_forward(self, x):
        """Equation 2: (B,T,d) -> (B,T,d)."""
        return self.fc2(self.fc1(x).relu())

    def residual(self, x, norm, sublayer):
        """`norm(x + dropout(sublayer(x)))`, where `sublayer` is a function: (B,T,d) -> (B,T,d)."""
        return norm(x + self.dropout(sublayer(x)))


# 5. Layers and stacks ------------------------------------------------------------------------------------------------


class EncoderLayer(Layer):
    """Self-attention, then the feed-forward network (Figure 1, left): (B,S,d) -> (B,S,d)."""

    def __init__(self, d, h, f, dropout=0.1):
        super().__init__(d, f, dropout)
        self.self_attn = MultiHeadAttention(d, h)
        self.self_attn_layer_norm = LayerNorm(d)

    def forward(self, x, mask):
        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, x, mask))
        return self.residual(x, self.final_layer_norm, self.feed_forward)


class DecoderLayer(Layer):
    """Causal self-attention, attention to the encoder's output, feed-forward network (Figure 1, right)."""

    def __init__(self, d, h, f, dropout=0.1):
        super().__init__(d, f, dropout)
        self.self_attn = MultiHeadAttention(d, h)
        self.self_attn_layer_norm = LayerNorm(d)
        self.encoder_attn = MultiHeadAttention(d, h)
        self.encoder_attn_layer_norm = LayerNorm(d)

    def forward(self, x, encoded, causal, mask):
        """x (B,T,d) and the encoder's output (B,S,d) -> (B,T,d); `mask` (B,1,1,S) is that of the source."""
        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, x, causal))
        x = self.residual(x, self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, encoded, mask))
        return self.residual(x, self.final_layer_norm, self.feed_forward)


class Encoder(nn.Module):
    """A stack of encoder layers on embeddings and positions: (B,S) -> (B,S,d)."""

    def __init__(self, embed_tokens, h, f, layers, dropout=0.1):
        super().__init__()
        d = embed_tokens.embedding_dim
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList([EncoderLayer(d, h, f, dropout) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids, mask):
        x = self.dropout(embed(self.embed_tokens, ids))
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Decoder(nn.Module):
    """A stack of decoder layers on embeddings and positions: (B,T) and the encoder's output (B,S,d) -> (B,T,d)."""

    def __init__(self, embed_tokens, h, f, layers, dropout=0.1):
        super().__init__()
        d = embed_tokens.embedding_dim
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList([DecoderLayer(d, h, f, dropout) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids, encoded, mask):
        x = self.dropout(embed(self.embed_tokens, ids))
        causal = causal_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, encoded, causal, mask)
        return x


class EncoderDecoder(nn.Module):
    """Both stacks, with one embedding matrix: source ids (B,S) and target ids (B,T) -> (B,T,d)."""

    def __init__(self, V, d, h, f, layers, dropout=0.1):
        super().__init__()
        self.shared = nn.Embedding(V, d)
        self.encoder = Encoder(self.shared, h, f, layers, dropout)
        self.decoder = Decoder(self.shared, h, f, layers, dropout)

    def forward(self, source, target):
        mask = padding_mask(source)
        return self.decoder(target, self.encoder(source, mask), mask)


class Transformer(nn.Module):
    """The whole model (Figure 1): source ids (B,S) and target ids (B,T) -> logits (B,T,V)."""

    def __init__(self, V, d, h, f, layers, dropout=0.1):
        super().__init__()
        self.model = EncoderDecoder(V, d, h, f, layers, dropout)
        self.lm_head = nn.Linear(d, V, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:  # a matrix; not a bias, nor a parameter of a norm
                nn.init.xavier_uniform_(parameter, gain=layers**-0.5)
        nn.init.normal_(self.model.shared.weight, std=d**-0.5)
        self.lm_head.weight = self.model.shared.weight

    def forward(self, source, target):
        return self.lm_head(self.model(source, target))


# 6. Training and decoding --------------------------------------------------------------------------------------------


def shift_right(labels):
    """The decoder's input (B,T) for predicting `labels` (B,T): START, then all labels but the last, PAD for -100.

    Leaves `labels` as they are.
    """
    start = torch.full_like(labels[:, :1], START)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, PAD)


def smoothed_loss(logits, labels, smoothing=0.1):
    """Label-smoothed cross-entropy (section 5.4) of logits (B,T,V), the mean over the labels (B,T) that are not -100."""
    log_probs = logits.log_softmax(dim=-1)[labels != -100]  # (N,V)
    correct = log_probs.gather(1, labels[labels != -100][:, None])[:, 0]  # (N)
    return -((1 - smoothing) * correct + smoothing * log_probs.mean(dim=-1)).mean()


def learning_rate(step, peak, warmup):
    """Equation 3, for steps that count from 1, as a number."""
    return peak * min(step / warmup, math.sqrt(warmup / step))


def train_step(model, optimizer, source, labels, rate, smoothing=0.1):
    """Makes one step on a batch, source ids (B,S) and labels (B,T), at the learning rate `rate`.

    Returns the loss as a number (`.item()`).
    """
    loss = smoothed_loss(model(source, shift_right(labels)), labels, smoothing)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return loss.item()


@torch.no_grad()
def greedy_search(model, source, max_length):
    """Source ids (B,S) -> target ids (B,T): START, the likeliest next token each time, and PAD after END."""
    target = torch.full((len(source), 1), START)
    is_finished = torch.zeros(len(source), 1, dtype=torch.bool)
    while target.shape[1] < max_length and not is_finished.all():
        token = model(source, target)[:, -1:].argmax(dim=-1).masked_fill(is_finished, PAD)  # (B,1)
        target = torch.cat([target, token], dim=1)
        is_finished = is_finished | (token == END)
    return target


# 8. Tokenization -----------------------------------------------------------------------------------------------------


def count_pairs(words):
    """How often each pair of neighboring tokens occurs: words {tokens: count} -> Counter {(token, token): count}."""
    pairs = Counter()
    for tokens, count in words.items():
        for pair in zip(tokens, tokens[1:], strict=False):
            pairs[pair] += count
    return pairs


def merge(tokens, pair):
    """Joins each occurrence of `pair` in a tuple of tokens, from left to right, and returns a tuple."""
    merged = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)


def learn_merges(counts, first, vocab_size):
    """Learns merges from words {text: count} until the vocabulary, which begins with the tokens `first`, is full.

    Returns the merges in the order in which they were learned, and the vocabulary {token: id}.
    """
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


def encode_word(word, rank):
    """The tokens of a word, as a tuple, by the merges {(token, token): number}, of which the lowest number comes first."""
    tokens = tuple(word)
    while possible := [pair for pair in zip(tokens, tokens[1:], strict=False) if pair in rank]:
        tokens = merge(tokens, min(possible, key=rank.get))
    return tokens
