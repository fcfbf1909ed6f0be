"""The command line: `vanilla-transformer VERB ...`, or `python -m vanilla_transformer VERB ...`."""

import argparse
import importlib
import sys
from difflib import get_close_matches

from . import __version__
from .commands.options import Parser
from .commands.streams import filter_errors

VERBS = {
    "translate": ("translate text, line by line", "translate --model outputs/sample < in.txt > out.txt"),
    "convert": ("convert a Marian model to one of this package", "convert Helsinki-NLP/opus-mt-en-de opus-mt-en-de"),
    "inspect": ("show shapes, attention maps and word alignments", "inspect shapes --d_model 512 --batch_size 30"),
}


def make_parser(verb: str | None = None) -> Parser:
    """The parser of a verb, whose module is imported only then; without one, that of `vanilla-transformer` itself."""
    if verb is not None:
        command = importlib.import_module(f".commands.{verb}", __package__)
        example = f"example: vanilla-transformer {VERBS[verb][1]}"
        parser = Parser(prog=f"vanilla-transformer {verb}", description=command.__doc__, epilog=example)
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)
        return parser
    lines = [f"  {name:<10} {text}\n{'':13}vanilla-transformer {example}" for name, (text, example) in VERBS.items()]
    parser = Parser(
        prog="vanilla-transformer",
        usage="vanilla-transformer VERB ...",
        description="\n".join(["Use trained translation models.", "", "verbs, each with an example:", *lines]),
        epilog="vanilla-transformer VERB --help lists the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vanilla-transformer {__version__}")
    return parser


def main(argv: list[str] | None = None):
    """Runs the verb that the command line begins with."""
    argv = sys.argv[1:] if argv is None else argv
    verb = argv[0] if argv else "--help"
    if verb not in VERBS:
        parser = make_parser()
        if verb.startswith("-"):
            parser.parse_args([verb])
        parser.error(f"'{verb}' is not a verb; did you mean {get_close_matches(verb, VERBS, n=1, cutoff=0)[0]}?")
    options = make_parser(verb).parse_args(argv[1:])
    run = options.__dict__.pop("run")
    with filter_errors(f"vanilla-transformer {verb}"):
        run(options)


if __name__ == "__main__":
    main()
