"""Serve a web page that translates with a model, and shows its n best, word alignment and attention.

With the backend ctranslate2, word alignment and attention come from the same model in torch; they are left out for a
directory that holds the converted model alone.
"""

import argparse
import socket
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import UserError, loading
from ..translation_vanilla_transformer import Translator
from .options import positive


def add_arguments(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("--model", required=True, help="a model directory or a Hub id")
    add("--revision", help="the commit, branch or tag on the Hub (default: main)")
    add("--backend", choices=["torch", "ctranslate2"], default="torch", help="ctranslate2 is faster, but an extra")
    add("--quantization", help="of the weights with ctranslate2: int8, float16, ... (default: none)")
    add("--max_source_length", type=positive, help="tokens of the longest text (default: as many as in training)")
    add("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too (default: %(default)s)")
    add("--port", type=port, help="(default: the first free one from 7860)")


def port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return int(text)


def run(options: argparse.Namespace):
    """Serves the page until Ctrl-C."""
    try:
        from ..demo.app import launch, make_app
    except ModuleNotFoundError as error:
        raise UserError(f"the demo needs {error.name}; run `pip install vanilla-transformer[demo]`.") from error
    check_address(options.host, options.port or 0)
    app = make_app(*load(options), options.revision)
    launch(app, server_name=options.host, server_port=options.port)
    print(f"Open {app.local_url} in a browser; Ctrl-C stops.", flush=True)
    app.block_thread()


def check_address(host: str, port: int):
    """Raises UserError if the page cannot be served there, before the model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot serve on {host}:{port}: {error.strerror}; choose --host and --port.") from error


def load(options: argparse.Namespace) -> tuple[str, Translator, PreTrainedModel | None]:
    """The name of the model, what translates, and the model whose attention is shown."""
    own = {"max_source_length": options.max_source_length, "too_long": "refuse", "revision": options.revision}
    engine = {"backend": options.backend, "quantization": options.quantization}
    with loading(options.model):
        translator = Translator.from_pretrained(options.model, **engine, **own)
        if options.backend == "torch":
            return options.model, translator, translator.model
        is_converted = (Path(options.model) / "vanilla_transformer.json").is_file()
        return (
            options.model,
            translator,
            None if is_converted else Translator.from_pretrained(options.model, **own).model,
        )
