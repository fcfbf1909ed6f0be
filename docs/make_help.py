"""Write the help of train.py and of each verb into the package, so that `--help` need not load torch.

python docs/make_help.py
"""

import os

from vanilla_transformer.__main__ import load_verb
from vanilla_transformer.training.recipe import make_parser
from vanilla_transformer_command import COLUMNS, HELP, VERBS, options_digest


def help_texts() -> dict[str, str]:
    """The files and what is in them, for a terminal as wide as this one."""
    parsers = {"train.py": make_parser()} | {verb: load_verb(verb)[1] for verb in VERBS}
    texts = {f"{name}.txt": parser.format_help() for name, parser in parsers.items()}
    return texts | {"made_for.txt": options_digest()}


if __name__ == "__main__":
    os.environ["COLUMNS"] = str(COLUMNS)  # read by argparse
    for name, text in help_texts().items():
        (HELP / name).write_text(text, encoding="utf-8")
