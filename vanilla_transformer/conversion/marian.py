"""Models of transformers with the same layers: Marian, Pegasus and Blenderbot, converted in both directions.

model           norm         positions     source in transformers 5.23, under transformers/models
Marian          post-norm    sinusoidal    marian/modeling_marian.py; Junczys-Dowmunt et al., 2018, arXiv 1804.00344
Pegasus         pre-norm     sinusoidal    pegasus/modeling_pegasus.py; Zhang et al., 2020, arXiv 1912.08777
Blenderbot      pre-norm     learned       blenderbot/modeling_blenderbot.py; Roller et al., 2021, arXiv 2004.13637

A model of this package in one of these forms loads with transformers alone, without this package and without
`trust_remote_code`. Logits, loss and translations stay equal.
"""

import copy
import json
from pathlib import Path

import torch
from transformers import (
    BlenderbotForConditionalGeneration,
    MarianMTModel,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..errors import UserError
from ..files import write_text
from ..modeling_vanilla_transformer import sinusoidal_positions
from .tensors import Changed, build, check_modules, check_unchanged, check_unquantized, interleave, on_meta, table_rows

FIELDS = """d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim
decoder_ffn_dim dropout attention_dropout activation_dropout activation_function max_position_embeddings
scale_embedding use_cache pad_token_id bos_token_id eos_token_id decoder_start_token_id"""
# The model class of the transformers library, and the values of our config fields that it implements.
FAMILIES = {
    "marian": (MarianMTModel, {"norm_first": False, "position_embedding_type": "sinusoidal"}),
    "pegasus": (PegasusForConditionalGeneration, {"norm_first": True, "position_embedding_type": "sinusoidal"}),
    "blenderbot": (BlenderbotForConditionalGeneration, {"norm_first": True, "position_embedding_type": "learned"}),
}


def from_native(model: PreTrainedModel) -> VanillaTransformerForConditionalGeneration:
    """Converts a Marian, Pegasus or Blenderbot model of transformers to one of this package.

    It has the same logits, loss, gradients and translations. Where the architectures differ:

    - Sinusoidal positions hold all sines and then all cosines in transformers; in this package they alternate, as in
      the paper. So the residual stream is permuted once, see [`interleave`].
    - The constant `final_logits_bias` becomes a trainable bias of `lm_head`; if all of it is 0, there is no bias.
    - The embedding of the padding token, with which Marian's decoder starts, gets gradients; in transformers it gets
      none.
    - Without an attention mask, padding is masked; the models of transformers attend to it.
    - Only learned positions end at `max_position_embeddings`; LayerDrop, a kind of dropout, is ignored.

    The generation config is copied unchanged, including its `bad_words_ids`, `forced_eos_token_id`, `num_beams` and
    `max_length`. The weights are copies, in the dtype of the given model and on its device. Raises RuntimeError if a
    tensor is missing, unknown or does not fit, and ValueError if a module is of another class, positions are not
    sinusoidal, or weights are quantized.
    """
    kind, implemented = FAMILIES[model.config.model_type]
    check_unquantized(model)
    check_modules(model, on_meta(kind, model))
    is_sinusoidal = implemented["position_embedding_type"] == "sinusoidal"
    theirs = model.state_dict(keep_vars=True)
    source, target = theirs["model.encoder.embed_tokens.weight"], theirs["model.decoder.embed_tokens.weight"]
    if source is not target:
        theirs.pop("model.shared.weight", None)  # declared, but used only if it is tied to both
    bias = theirs.pop("final_logits_bias")
    if bias.any():
        theirs["lm_head.bias"] = bias.flatten()  # (1,V) -> (V,)
    if is_sinusoidal:
        for side in ("encoder", "decoder"):
            table = theirs.pop(f"model.{side}.embed_positions.weight")  # the paper's, but for their order
            expected = sinusoidal_positions(torch.arange(len(table), device=table.device), table.shape[1])
            expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)
            if not torch.allclose(table.float(), expected, atol=0.01):  # they may be in bfloat16
                raise Changed(model, f"`model.{side}.embed_positions.weight` is not sinusoidal")

    config = VanillaTransformerConfig(
        **{name: getattr(model.config, name, None) for name in FIELDS.split()},
        vocab_size=source.shape[0],
        decoder_vocab_size=target.shape[0],
        **implemented,
        share_encoder_decoder_embeddings=source is target,
        tie_word_embeddings=theirs["lm_head.weight"] is target,
        lm_head_bias="lm_head.bias" in theirs,
        layer_norm_eps=model.model.encoder.layers[0].final_layer_norm.eps,
    )
    weights = interleave(theirs) if is_sinusoidal else theirs
    ours = build(config, weights, model.dtype, model.device)
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours


def native_family(config: VanillaTransformerConfig) -> str:
    """The family whose models can have this config. Raises UserError, naming the field, if none can."""
    name = "pegasus" if config.norm_first else "marian"
    if config.position_embedding_type == "learned":
        name = "blenderbot"
    model, implemented = FAMILIES[name]
    fixed = implemented | {"layer_norm_eps": 1e-5}
    if name != "marian":
        fixed["decoder_vocab_size"] = config.vocab_size
    for field, value in fixed.items():
        if getattr(config, field) != value:
            raise UserError(
                f"`{field}={getattr(config, field)!r}` cannot be converted: {model.__name__} supports only {value!r}. "
                "Load this model with `trust_remote_code=True`, or run it with CTranslate2."
            )
    return name


def to_native(model: VanillaTransformerForConditionalGeneration) -> PreTrainedModel:
    """The Marian, Pegasus or Blenderbot model of transformers that computes the same; the inverse of [`from_native`].

    Marian is post-norm with sinusoidal positions, Pegasus pre-norm with sinusoidal, Blenderbot pre-norm with learned
    ones. The result is in evaluation mode.

    Where the architectures differ:

    - A bias of `lm_head` becomes their `final_logits_bias`, which is not trained.
    - The limit in tokens is `max_position_embeddings`; with sinusoidal positions, it is at least 1,024 and at most
      8,192. It also becomes `max_length` if the generation config has no limit. On the left, padding would shift the
      positions.
    - Pegasus and Blenderbot tie all three embedding matrices or none. If only some of ours are tied, each is a copy.

    The weights are copies, in the dtype of the model and on its device. Raises UserError, naming the field, if none
    of the three supports its value, and, naming weight or module, for a model that was changed or quantized.
    """
    check_unchanged(model)
    ours, name = model.config, native_family(model.config)
    kind, implemented = FAMILIES[name]
    # The defaults of their configs would force an end, which ours does not.
    fields = {field: getattr(ours, field) for field in FIELDS.split()} | {"forced_eos_token_id": None}
    fields |= {"vocab_size": ours.vocab_size, "tie_word_embeddings": ours.tie_word_embeddings}
    if name == "marian":
        fields["decoder_vocab_size"] = ours.decoder_vocab_size
        fields["share_encoder_decoder_embeddings"] = ours.share_encoder_decoder_embeddings
    else:
        fields["tie_word_embeddings"] &= ours.share_encoder_decoder_embeddings
    if name == "blenderbot":
        fields["encoder_no_repeat_ngram_size"] = 0
    is_sinusoidal = implemented["position_embedding_type"] == "sinusoidal"
    if is_sinusoidal:
        fields["max_position_embeddings"] = table_rows(ours)

    native = kind._from_config(kind.config_class(**fields), dtype=model.dtype)
    weights = interleave(model.state_dict(), undo=True) if is_sinusoidal else dict(model.state_dict())
    if "lm_head.bias" in weights:
        weights["final_logits_bias"] = weights.pop("lm_head.bias")[None]  # (V,) -> (1,V)
    theirs = native.state_dict()  # has their position tables, which ours equal, and zeros as `final_logits_bias`
    if "model.shared.weight" in theirs:
        weights["model.shared.weight"] = weights["model.encoder.embed_tokens.weight"]
    native.load_state_dict(theirs | weights)
    native.generation_config = copy.deepcopy(model.generation_config)
    if native.generation_config.max_length is None and native.generation_config.max_new_tokens is None:
        native.generation_config.max_length = native.config.max_position_embeddings
    return native.to(model.device).eval()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, output_dir: str | Path):
    """Saves a tokenizer so that transformers 4 loads it too, where the class of fast tokenizers has another name."""
    tokenizer.save_pretrained(output_dir)
    path = Path(output_dir) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_text(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
