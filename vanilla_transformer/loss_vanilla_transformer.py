# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Label-smoothed cross-entropy (section 5.4) that never holds the logits of a whole batch.

    what                             shapes
    label_smoothed_cross_entropy     (B,T,d) (B,T) -> ()
    chunked_cross_entropy            (B,T,d) (V,d) (B,T) -> () and its gradients

Letters: B sentences, T target length, d model width, V vocabulary size, N target tokens without padding, n rows of one
chunk of them. This file travels with every saved model.
"""

import torch
from torch import nn

# A chunk holds 16 MiB of float32 logits, but at least 256 rows, since every chunk updates the gradient of the whole
# (V,d) projection. On a CPU the softmax takes a quarter of a chunk at a time, which stays in the processor's cache.
LOGITS_PER_CHUNK, ROWS_PER_CHUNK = 2**22, 256
LOGITS_PER_SOFTMAX = 2**20


def label_smoothed_cross_entropy(
    hidden: torch.Tensor,
    lm_head: nn.Linear,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: int | torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy against targets smoothed over the vocabulary (section 5.4), in nats per target token.

    `hidden` (B,T,d) are the decoder's outputs and `labels` (B,T) the tokens that they predict, -100 where nothing is
    predicted. The sum over the N tokens is divided by N, or by `num_items_in_batch` if given: with the number of
    tokens of a whole optimizer step, the gradients of its micro-batches add up to the gradient of one large batch.
    `logits` (B,T,V) are used if the caller has them. Returns ().
    """
    # An adapter or a quantizer replaces the layer, its weight or its forward method: then the layer must be called.
    is_plain = type(lm_head) is nn.Linear and type(lm_head.weight) in (nn.Parameter, torch.Tensor)
    if logits is None and is_plain and "forward" not in vars(lm_head):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else lm_head.weight.dtype
        total, *_ = chunked_cross_entropy(
            hidden, lm_head.weight, lm_head.bias, labels, float(label_smoothing), dtype, torch.is_grad_enabled()
        )
    else:
        logits = (lm_head(hidden) if logits is None else logits).float().flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=label_smoothing)
    return total / ((labels != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


# A custom operator, so that torch.compile treats it as one opaque operation for any number of tokens. Its name derives
# from the module's, since a process may hold the package's copy and one that came with a saved model.
@torch.library.custom_op(f"{__name__.replace('.', '_')}::chunked_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
    dtype: torch.dtype,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projection, softmax, cross-entropy and its gradient, for a chunk of target tokens at a time.

    The gradient of the loss with respect to the logits has a simple closed form, so it is computed in the forward
    pass, as soon as the logits are there. The (N,V) logits of a batch, by far the largest tensor of training, never
    exist as a whole. Matrices are multiplied in `dtype`; sums are accumulated in float32.

    Returns the loss () summed over the N target tokens and its gradients with respect to `hidden` (B,T,d), `weight`
    (V,d) and `bias` (V,). The gradients are empty unless `needs_grad`.
    """
    is_target, vocab_size = labels != -100, weight.shape[0]
    projection = weight.to(dtype)
    states, targets = hidden[is_target].to(dtype), labels[is_target][:, None]  # (N,d), (N,1)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_states = [states[:0]]
    grad_weight = torch.zeros_like(weight if needs_grad else weight[:0], dtype=torch.float32)
    grad_bias = torch.zeros_like(grad_weight[:, 0])
    rows = max(ROWS_PER_CHUNK, LOGITS_PER_CHUNK // vocab_size)
    softmax_rows = max(1, LOGITS_PER_SOFTMAX // vocab_size) if hidden.device.type == "cpu" else rows
    for x, tokens in zip(states.split(rows), targets.split(rows), strict=True):
        chunk = x @ projection.T  # (n,V)
        for part, target in zip(chunk.split(softmax_rows), tokens.split(softmax_rows), strict=True):
            logits = part.float() if bias is None else part.float() + bias
            # -log p(target) = log(sum(exp(logits))) - logits[target], and the mean logit for the smoothed share.
            expected = (1 - label_smoothing) * logits.gather(1, target)
            if label_smoothing:
                expected += label_smoothing * logits.mean(dim=1, keepdim=True)
            probabilities = logits.softmax(dim=1)
            # The log-sum-exp, from the largest logit and its probability, which is at least 1/V.
            log_sum_exp = logits.amax(dim=1, keepdim=True) - probabilities.amax(dim=1, keepdim=True).log()
            loss += (log_sum_exp - expected).sum()
            if needs_grad:  # softmax minus the smoothed targets, written over the logits
                grad = probabilities.sub_(label_smoothing / vocab_size)
                grad.scatter_add_(1, target, torch.full_like(target, label_smoothing - 1, dtype=grad.dtype))
                if bias is not None:
                    grad_bias += grad.sum(dim=0)
                part.copy_(grad)
        if needs_grad:
            grad_states.append(chunk @ projection)
            grad_weight += chunk.T @ x

    grad_hidden = torch.zeros_like(hidden if needs_grad else hidden[:0])
    if needs_grad:
        grad_hidden[is_target] = torch.cat(grad_states).to(hidden.dtype)
    return loss, grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


@chunked_cross_entropy.register_fake
def _(hidden, weight, bias, labels, label_smoothing, dtype, needs_grad):
    """Empty results of the right shapes, for torch.compile."""
    if not needs_grad:
        hidden, weight = hidden[:0], weight[:0]
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(weight.shape[0])


def save_gradients(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # allocate no zero gradients for the three outputs that are gradients
    ctx.save_for_backward(*output[1:])
    ctx.has_bias = inputs[2] is not None


def scale_gradients(ctx, grad_loss, *_):
    hidden, weight, bias = (grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
    return hidden, weight, bias if ctx.has_bias else None, None, None, None, None


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=save_gradients)
