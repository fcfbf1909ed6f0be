"""Serve a web page that translates with a model, and shows its n best, word alignment and attention.

With `--backend ctranslate2`, word alignment and attention are computed by the same model in torch. A directory that
contains only the converted model is served without them. The page needs gradio, the extra `demo`.
"""

import argparse
import socket
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import explaining
from ..files import CONVERTED
from ..loading import Translator
from .parser import add_engine_options, positive


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer demo`."""
    add = parser.add_argument
    add("--model", required=True, help="a model directory or a Hub id")
    add_engine_options(parser)
    add(
        "--max_source_length",
        type=positive,
        help="most tokens of a text that is translated at once; a longer sentence is refused (default: all positions)",
    )
    add("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too (default: %(default)s)")
    add("--port", type=positive, help="(default: the first free one from 7860)")


def run(options: argparse.Namespace):
    """Serves the page until Ctrl-C."""
    with explaining("the demo needs `pip install gradio`", ModuleNotFoundError):
        from ..demo.app import launch, make_app
    app = make_app(options.model, *load(options), options.revision)
    place = options.host if options.port is None else f"{options.host}:{options.port}"
    with explaining(f"cannot serve on {place}; choose another --host or --port", OSError, OverflowError):
        # At a wrong host, Gradio would try a hundred ports, for minutes.
        socket.create_server((options.host, options.port or 0)).close()
        launch(app, server_name=options.host, server_port=options.port)
    print(f"Open {app.local_url} in a browser; Ctrl-C stops.", flush=True)
    app.block_thread()


def load(options: argparse.Namespace) -> tuple[Translator, PreTrainedModel | None]:
    """The translator, and the model whose attention is shown, if it is of a kind that can be."""
    own = {"max_source_length": options.max_source_length, "too_long": "refuse", "revision": options.revision}
    engine = {"backend": options.backend, "quantization": options.quantization}
    translator = Translator.from_pretrained(options.model, **engine, **own)
    if options.backend == "torch":
        # T5 names its layers and heads otherwise.
        return translator, translator.model if hasattr(translator.engine.config, "encoder_layers") else None
    is_converted = (Path(options.model) / CONVERTED).is_file()
    return translator, None if is_converted else Translator.from_pretrained(options.model, **own).model
