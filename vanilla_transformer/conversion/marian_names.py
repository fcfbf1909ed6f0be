"""Marian's names (https://marian-nmt.github.io; Junczys-Dowmunt et al., 2018) for parameters and options of a model.

The names of parameters are from `models/transformer.h` of marian-dev.
"""

FIXED = {  # fields of our config, with the only values that Marian has
    "norm_first": False,
    "position_embedding_type": "marian",
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}
ONLY = {  # options of Marian, with the only values that this package has
    "type": "transformer",
    "transformer-ffn-depth": 2,
    "transformer-decoder-ffn-depth": 2,
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-pool": False,
    "right-left": False,
    "tied-embeddings-all": True,
}
ACTIVATIONS = {"relu": "relu", "silu": "swish", "swish": "swish"}
MODULES = {  # of a layer, ours -> Marian's, where {} is W or b or, in a norm, scale or bias
    "self_attn.q_proj": "self_{}q",
    "self_attn.k_proj": "self_{}k",
    "self_attn.v_proj": "self_{}v",
    "self_attn.out_proj": "self_{}o",
    "self_attn_layer_norm": "self_Wo_ln_{}",
    "encoder_attn.q_proj": "context_{}q",
    "encoder_attn.k_proj": "context_{}k",
    "encoder_attn.v_proj": "context_{}v",
    "encoder_attn.out_proj": "context_{}o",
    "encoder_attn_layer_norm": "context_Wo_ln_{}",
    "fc1": "ffn_{}1",
    "fc2": "ffn_{}2",
    "final_layer_norm": "ffn_ffn_ln_{}",
}
EMBEDDINGS, BIAS, OPTIONS = "Wemb", "decoder_ff_logit_out_b", "special:model.yml"  # outside of layers
NEVER = -1e4  # the bias of a token that is never written


def marian_name(name: str) -> str:
    """Marian's name of one of our parameters in a layer."""
    _, side, _, layer, rest = name.split(".", 4)
    module, _, kind = rest.rpartition(".")
    kinds = {"weight": "scale", "bias": "bias"} if module.endswith("norm") else {"weight": "W", "bias": "b"}
    return f"{side}_l{int(layer) + 1}_{MODULES[module].format(kinds[kind])}"
