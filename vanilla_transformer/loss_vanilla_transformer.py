# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The loss: label-smoothed cross-entropy (section 5.4), distillation, R-Drop; in chunks of the logits.

    what                             shapes
    label_smoothed_cross_entropy     (B,T,d) (B,T) -> ()
    chunked_cross_entropy            (B,T,d) (V,d) (B,T) (B,T,K) (B,T,K) -> () and its gradients

Letters: B sentences, T target length, d model width, V vocabulary size, K tokens with a share in a target,
N target tokens without padding, n of them in one chunk (on a GPU with padding).
This file travels with every saved model.
"""

import functools
import re
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

# On a CPU, a chunk holds 16 MiB of float32 logits, but at least 256 rows, since every chunk updates the gradient of
# the whole (V,d) projection; the softmax takes 1 MiB of it at a time, which stays in the processor's cache. A GPU
# wants few and large kernels: there a chunk holds 0.5 GiB of bfloat16 logits.
LOGITS_PER_CHUNK, ROWS_PER_CHUNK = 2**22, 256
LOGITS_PER_SOFTMAX = 2**18
LOGITS_PER_CHUNK_OF_GPU = 2**28


def label_smoothed_cross_entropy(
    hidden: Tensor,
    lm_head: nn.Linear,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: int | Tensor | None = None,
    logits: Tensor | None = None,
    soft_targets: tuple[Tensor, Tensor, float, float] | None = None,
    r_drop_alpha: float = 0.0,
) -> Tensor:
    """Cross-entropy against targets smoothed over the vocabulary (section 5.4), in nats per target token.

    `hidden` (B,T,d) are the decoder's outputs and `labels` (B,T) the tokens that they predict, -100 where nothing is
    predicted. The sum over the N tokens is divided by N, or by `num_items_in_batch` if given: with the number of
    tokens of a whole optimizer step, the gradients of its micro-batches add up to the gradient of one large batch.
    Given the `logits` (B,T,V), the loss is computed from them and not from `hidden`. Returns ().

    `soft_targets` add distillation (Hinton et al., 2015, section 2): tokens (B,T,K) of the teachers, their
    probabilities (B,T,K) at the temperature, which sum to 1, a weight and the temperature. The loss is then 1 - weight
    times that of the labels, plus weight times temperature^2 times the cross-entropy of softmax(logits / temperature)
    against the teachers. The square makes up for gradients that a temperature above 1 makes smaller.

    `r_drop_alpha` adds R-Drop (Liang et al., 2021). The batch holds each pair twice: its second half repeats the
    first, with other dropout masks. Added to the sum: `r_drop_alpha` times the mean of KL(p || q) and KL(q || p),
    summed over the N/2 tokens for which the halves predict p and q. Since N, and `num_items_in_batch`, count both
    halves, the result is half of the paper's Equation 4. If soft targets have a temperature, so have p and q, and the
    divergences are multiplied by temperature^2.
    """
    kept, tokens = labels != -100, labels[..., None]
    precision = torch.promote_types(hidden.dtype, torch.float32)
    probabilities = torch.full_like(tokens, 1 - label_smoothing, dtype=precision)
    soft_tokens, soft_probabilities, weight, temperature = soft_targets or (None, None, 0.0, 1.0)
    if weight and temperature == 1:  # both are targets of one softmax, so they are mixed into one target
        tokens = torch.cat([tokens, soft_tokens], dim=-1)
        probabilities = torch.cat([(1 - weight) * probabilities, weight * soft_probabilities], dim=-1)
        label_smoothing *= 1 - weight
    if weight and temperature != 1:
        hard = cross_entropy(hidden, lm_head, kept, tokens, probabilities, label_smoothing, logits)
        alpha = r_drop_alpha / weight
        soft = cross_entropy(hidden, lm_head, kept, soft_tokens, soft_probabilities, 0.0, logits, alpha, temperature)
        total = (1 - weight) * hard + weight * temperature**2 * soft
    else:
        total = cross_entropy(hidden, lm_head, kept, tokens, probabilities, label_smoothing, logits, r_drop_alpha)
    return total / (kept.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def cross_entropy(
    hidden: Tensor,
    lm_head: nn.Linear,
    kept: Tensor,
    tokens: Tensor,
    probabilities: Tensor,
    uniform: float,
    logits: Tensor | None = None,
    r_drop_alpha: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Cross-entropy of softmax(logits / temperature) at the `kept` positions (B,T) plus R-Drop, summed; ().

    The target distribution gives `probabilities` (B,T,K) to `tokens` (B,T,K), of which some may be the same, and
    `uniform` / V more to every token of the vocabulary. Other arguments as in [`label_smoothed_cross_entropy`].
    """
    # An adapter or a quantizer replaces the layer, its weight or its forward method: then the layer is called, below.
    is_plain = type(lm_head) is nn.Linear and type(lm_head.weight) in (nn.Parameter, Tensor)
    if logits is None and is_plain and "forward" not in vars(lm_head) and not r_drop_alpha:
        device = hidden.device.type
        # torch.compile cannot trace torch.amp.is_autocast_available before torch 2.12; "meta" has no autocast.
        is_autocast = device != "meta" and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else lm_head.weight.dtype
        weight, bias = lm_head.weight, lm_head.bias
        if temperature != 1:
            hidden, bias = hidden / temperature, None if bias is None else bias / temperature
        targets = (kept, tokens, probabilities, uniform)
        return chunked_cross_entropy(hidden, weight, bias, *targets, dtype, torch.is_grad_enabled())[0]
    logits = lm_head(hidden) if logits is None else logits
    precision = torch.promote_types(logits.dtype, torch.float32)
    predicted = (logits.to(precision) / temperature).log_softmax(dim=-1)
    expected = (probabilities * predicted.gather(-1, tokens.clamp(min=0))).sum(dim=-1)  # -100 has no logit
    if uniform:
        expected = expected + uniform * predicted.mean(dim=-1)
    loss = -expected.masked_fill(~kept, 0).sum()
    if r_drop_alpha:
        # Padding is left out where it can be counted at once; elsewhere both halves predict the same for it.
        log_probs = predicted[kept] if is_on_host(kept) else predicted.masked_fill(~kept[..., None], 0)
        log_probs = log_probs.unflatten(0, (2, -1))
        loss = loss + r_drop_alpha / 2 * (log_probs.exp().diff(dim=0) * log_probs.diff(dim=0)).sum()
    return loss


def is_on_host(tensor: Tensor) -> bool:
    """Whether Python can read `tensor` at once; on another device it would wait for all that is queued there."""
    return tensor.device.type == "cpu"


def softmax_gradient(
    chunk: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    shares: Tensor,
    kept: Tensor | None,
    uniform: float,
    loss: Tensor,
    grad_bias: Tensor | None,
):
    """Adds the loss of a `chunk` of logits (n,V) plus `bias` to `loss` (), and writes its gradient over the chunk.

    The targets are those of [`cross_entropy`], with `ids` and `shares` (n,K); rows that are not `kept` (n,1) weigh 0.
    The gradient is also added to `grad_bias` (V,). If that is None, there are no gradients.
    """
    precision, vocab_size = torch.promote_types(chunk.dtype, torch.float32), chunk.shape[1]
    logits = chunk.to(precision) if bias is None else chunk.to(precision) + bias
    # The cross-entropy with a target q is log(sum(exp(logits))) - sum(q logits).
    expected = (shares * logits.gather(1, ids)).sum(dim=1, keepdim=True)
    if uniform:
        expected += uniform * logits.mean(dim=1, keepdim=True)
    predicted = logits.softmax(dim=1)
    # The log-sum-exp, from the largest logit and its probability, which is at least 1/V.
    log_sum_exp = logits.amax(dim=1, keepdim=True) - predicted.amax(dim=1, keepdim=True).log()
    losses = log_sum_exp - expected
    loss += (losses if kept is None else losses.masked_fill(~kept, 0)).sum()
    if grad_bias is None:
        return
    grad = predicted.sub_(uniform / vocab_size)  # softmax minus the targets
    if torch.compiler.is_compiling():  # comparisons become part of one kernel, of which a scatter makes three
        columns = torch.arange(vocab_size, device=chunk.device)
        for token, share in zip(ids.split(1, dim=1), shares.split(1, dim=1), strict=True):
            grad = grad - share * (columns == token)
    else:
        grad.scatter_add_(1, ids, -shares.to(grad.dtype))
    if kept is not None:
        grad.masked_fill_(~kept, 0)
    if bias is not None:
        grad_bias += grad.sum(dim=0)
    chunk.copy_(grad)


@functools.cache
def compiled_softmax_gradient(device: torch.device) -> Callable:
    """[`softmax_gradient`] as one kernel for any number of rows; as it is if torch cannot compile for the device."""
    try:  # it takes Triton, a C compiler and Python's headers, and torch has no function that looks for them
        torch.compile(torch.neg)(torch.zeros(2, device=device))
    except Exception as error:
        warnings.warn(f"torch.compile does not work here, so the loss is slower. {error}", stacklevel=2)
        return softmax_gradient
    return torch.compile(softmax_gradient)  # dynamic=True would make V a variable too: slower by half


# A custom operator, so that torch.compile treats it as one opaque operation for any number of tokens. Its name derives
# from the module's, since a process may hold the package's copy and one that came with a saved model, which is named
# after its directory; torch takes only letters of ASCII.
@torch.library.custom_op(f"{re.sub(r'[^a-zA-Z0-9]', '_', __name__)}::chunked_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    tokens: Tensor,
    probabilities: Tensor,
    uniform: float,
    dtype: torch.dtype,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projection, softmax, loss and its gradient, for a chunk of target tokens at a time.

    The gradient of the loss with respect to the logits has a simple closed form, so it is computed in the forward
    pass, as soon as the logits are there. The (N,V) logits of a large batch, by far the largest tensor of training,
    never exist as a whole. Matrices are multiplied in `dtype`; sums are accumulated in float32, or in float64 if
    `dtype` is.

    The loss is that of [`cross_entropy`], without R-Drop. Returns it () and its gradients with respect to `hidden`
    (B,T,d), `weight` (V,d) and `bias` (V,). The gradients are empty unless `needs_grad`.
    """
    vocab_size, on_cpu = weight.shape[0], is_on_host(kept)
    precision = torch.promote_types(dtype, torch.float32)
    projection = weight.to(dtype)
    taken = kept.flatten() if on_cpu else slice(None)
    inputs = (hidden.to(dtype), tokens.clamp(min=0), probabilities, kept[..., None])  # a label of -100 is no index
    inputs = [t.flatten(0, 1)[taken] for t in inputs]
    loss = torch.zeros((), dtype=precision, device=hidden.device)
    grad_states = [inputs[0][:0]]
    grad_weight = torch.zeros_like(weight if needs_grad else weight[:0], dtype=precision)
    grad_bias = torch.zeros_like(grad_weight[:, 0])
    rows = max(ROWS_PER_CHUNK, (LOGITS_PER_CHUNK if on_cpu else LOGITS_PER_CHUNK_OF_GPU) // vocab_size)
    softmax_rows = max(1, LOGITS_PER_SOFTMAX // vocab_size) if on_cpu else rows
    # Compiling takes some seconds, which large batches make up for in training; many targets make a long kernel.
    pays = needs_grad and kept.numel() * vocab_size >= LOGITS_PER_CHUNK and tokens.shape[-1] <= 16
    is_compiled = hidden.device.type == "cuda" and pays
    softmax = compiled_softmax_gradient(hidden.device) if is_compiled else softmax_gradient
    for x, *targets in zip(*(t.split(rows) for t in inputs), strict=True):
        chunk = x @ projection.T  # (n,V)
        parts = (t.split(softmax_rows) for t in (chunk, *targets))
        for part, ids, shares, is_kept in zip(*parts, strict=True):
            given = (None if on_cpu else is_kept, uniform, loss, grad_bias if needs_grad else None)
            softmax(part, bias, ids, shares, *given)
        if needs_grad:
            grad_states.append(chunk @ projection)
            grad_weight += chunk.T @ x

    grad_hidden = hidden.new_zeros(hidden.shape if needs_grad and on_cpu else (0, *hidden.shape[1:]))
    if needs_grad and on_cpu:
        grad_hidden[kept] = torch.cat(grad_states).to(hidden.dtype)
    elif needs_grad:
        grad_hidden = torch.cat(grad_states).to(hidden.dtype).view(hidden.shape)
    return loss, grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


@chunked_cross_entropy.register_fake
def _(hidden, weight, bias, kept, tokens, probabilities, uniform, dtype, needs_grad):
    """Empty results of the right shapes, for torch.compile."""
    if not needs_grad:
        hidden, weight = hidden[:0], weight[:0]
    loss = hidden.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    return loss, hidden.new_empty(hidden.shape), torch.empty_like(weight), weight.new_empty(weight.shape[0])


def save_gradients(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # allocate no zero gradients for the three outputs that are gradients
    ctx.save_for_backward(*output[1:])
    ctx.has_bias = inputs[2] is not None


def scale_gradients(ctx, grad_loss, *_):
    hidden, weight, bias = ctx.saved_tensors
    scaled = [grad * grad_loss.to(grad.dtype) for grad in (hidden, weight, *[bias] * ctx.has_bias)]
    return *scaled, *[None] * (9 - len(scaled))


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=save_gradients)
