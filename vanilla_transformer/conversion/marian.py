"""Converts a `MarianMTModel`, whose modules have the same names as ours."""

import copy

import torch
from transformers import MarianMTModel

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..modeling_vanilla_transformer import sinusoidal_positions
from .weights import build, interleave


def from_marian(model: MarianMTModel) -> VanillaTransformerForConditionalGeneration:
    """Converts a `MarianMTModel`; logits, loss, gradients and translations stay equal.

    Where the two architectures differ:

    - Marian's position embeddings hold all sines and then all cosines, the paper's alternate them: the residual stream
      is permuted once, see [`interleave`].
    - Marian's constant `final_logits_bias` becomes the bias of `lm_head`, which is trainable; zeros give
      no bias.
    - Marian's decoder starts with the padding token, whose embedding gets gradients here but not in Marian.
    - Without an attention mask, padding is masked here and attended to in Marian.
    - Marian's limit of `max_position_embeddings` does not apply here; LayerDrop (training only) is dropped.

    The generation config is copied unchanged, with its `bad_words_ids`, `forced_eos_token_id`, `num_beams` and
    `max_length`. The weights are copies, in the source's dtype and on its device. Raises ValueError if a tensor has no
    counterpart or another shape, or if the position embeddings are not sinusoidal.

    Source: `transformers/models/marian/modeling_marian.py` of transformers 5.23; Marian is by Junczys-Dowmunt et al.,
    2018, arXiv 1804.00344.
    """
    theirs = model.state_dict(keep_vars=True)
    source, target = theirs["model.encoder.embed_tokens.weight"], theirs["model.decoder.embed_tokens.weight"]
    if source is not target:
        theirs.pop("model.shared.weight", None)  # Marian declares it, but uses it only if it is tied to both
    bias = theirs.pop("final_logits_bias")
    if bias.any():
        theirs["lm_head.bias"] = bias.flatten()  # (1,V) -> (V,)
    for side in ["encoder", "decoder"]:
        table = theirs.pop(f"model.{side}.embed_positions.weight").detach().cpu().float()
        alternating = sinusoidal_positions(torch.arange(table.shape[0]), table.shape[1])
        expected = torch.cat([alternating[:, 0::2], alternating[:, 1::2]], dim=1)
        if not torch.allclose(table, expected, rtol=0, atol=1e-2):  # the precision of a bfloat16 table
            raise ValueError(f"`model.{side}.embed_positions.weight` does not hold Marian's sinusoidal positions.")

    fields = ["d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"]
    fields += ["encoder_ffn_dim", "decoder_ffn_dim", "dropout", "attention_dropout", "activation_dropout"]
    fields += ["activation_function", "max_position_embeddings", "scale_embedding", "use_cache"]
    fields += ["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"]
    config = VanillaTransformerConfig(
        **{name: getattr(model.config, name) for name in fields},
        vocab_size=source.shape[0],
        decoder_vocab_size=target.shape[0],
        norm_first=False,
        position_embedding_type="sinusoidal",
        share_encoder_decoder_embeddings=source is target,
        tie_word_embeddings=theirs["lm_head.weight"] is target,
        lm_head_bias="lm_head.bias" in theirs,
        layer_norm_eps=model.model.encoder.layers[0].final_layer_norm.eps,
    )
    ours = build(config, interleave(theirs), model.dtype, model.device)
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours
