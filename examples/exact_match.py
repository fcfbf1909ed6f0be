"""Count the sources of a split whose output equals the target exactly, and show the first that differ.

python examples/exact_match.py --model outputs/dates --dataset_name outputs/dates_dataset
"""

import sys

from common import Parser

from vanilla_transformer import Translator
from vanilla_transformer.commands.options import positive
from vanilla_transformer.data.options import DatasetOptions
from vanilla_transformer.data.rows import hide_bars
from vanilla_transformer.data.splits import load_split
from vanilla_transformer.errors import UserError, loading

SHOWN = 3  # wrong outputs


def main(argv: list[str] | None = None):
    parser = Parser(__doc__)
    parser.add_argument("--model", required=True, help="a model directory or a Hub id")
    parser.add_argument("--dataset_name", required=True, help="a Hub id, or a local directory laid out like one")
    parser.add_argument("--split", default="test", help="(default: %(default)s)")
    parser.add_argument("--source_column", default="source", help="(default: %(default)s)")
    parser.add_argument("--target_column", default="target", help="(default: %(default)s)")
    parser.add_argument("--num_beams", type=positive, help="beams (default: those of the model)")
    options = parser.parse_args(argv)
    hide_bars()
    try:
        sides = {"source_column": [options.source_column], "target_column": [options.target_column]}
        pairs = load_split(DatasetOptions(options.dataset_name, **sides), options.split)
        sources, targets = ([text or "" for text in pairs[side]] for side in ("source", "target"))
        with loading(options.model):
            translator = Translator.from_pretrained(options.model)
        outputs = translator(sources, num_beams=options.num_beams)
    except (UserError, ValueError) as error:  # such as a text that is too long
        sys.exit(f"exact_match.py: {error}")
    wrong = [triple for triple in zip(sources, targets, outputs, strict=True) if triple[1] != triple[2]]
    print(f"{len(sources) - len(wrong):,} of {len(sources):,} are exactly right")
    for source, target, output in wrong[:SHOWN]:
        print(f"  {source} -> {output}, and not {target}")


if __name__ == "__main__":
    main()
