"""What a finished run leaves in its output directory."""

import contextlib
import json
import shlex
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..files import copy_permissions, remove_file, replacing_files, write_text
from ..hub.model_card import write_model_card
from ..inspection.attention import attention_maps, draw_attention
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .report import plot_training_curves

NEXT = """The model is in {0}. Now you can translate, try it in a browser, and publish it:

  vanilla-transformer translate --model {1} < in.txt > out.txt
  vanilla-transformer demo --model {1}
  python push_to_hub.py {1} --repo_id you/name
"""


def save_model(
    output_dir: Path,
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    results: dict,
    history: list[dict],
    lowest_loss: float | None,
):
    """Writes the model, tokenizer, results, pictures and model card."""
    with replacing_files(output_dir) as folder:
        model.save_pretrained(folder)
        copy_permissions(folder)
        tokenizer.save_pretrained(folder)
    write_text(output_dir / "all_results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    plot_training_curves(history, output_dir / "training_curves.png", lowest_loss)
    remove_file(output_dir / "attention.png")  # from before the run was resumed
    for shortest in sorted(results["examples"], key=lambda example: len(example["source"]))[:1]:
        with contextlib.suppress(UserError):  # an empty translation has no attention
            maps = attention_maps(model, tokenizer, shortest["source"], shortest["translation"])
            draw_attention(maps, output_dir / "attention.png")
    write_model_card(output_dir)
    print(NEXT.format(output_dir, shlex.quote(str(output_dir))), end="")
