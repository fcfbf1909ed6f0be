"""Serve models over LibreTranslate's HTTP interface, for Weblate, OmegaT and other programs that can call it.

MODEL is a directory or a Hub id. Models of train.py and most of OPUS-MT record which languages they translate; name
those of others: en-de=MODEL, or en:pt-BR=MODEL if a name has a hyphen. Give a multilingual model, such as NLLB,
once for each pair.
"""

import argparse
import os
import socket

from transformers.utils.logging import disable_progress_bar

from ..errors import explaining
from ..serving.batching import CHAR_LIMIT, QUEUE_LIMIT
from ..serving.models import load_models
from ..training.hardware import configure_malloc
from .parser import GENERATION, LOADING, add_translation_options, positive, values_of


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer serve`."""
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="one model for each pair of languages")
    add_translation_options(parser)
    add("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too (default: %(default)s)")
    add("--port", type=positive, default=5000, help="(default: %(default)s)")
    limit = "the most characters in a request, all its texts together (default: %(default)s)"
    add("--char_limit", type=positive, default=CHAR_LIMIT, help=limit)
    limit = "the most requests that may wait; further ones are refused (default: %(default)s)"
    add("--queue_limit", type=positive, default=QUEUE_LIMIT, help=limit)


def run(options: argparse.Namespace):
    """Serves until Ctrl-C or SIGTERM, then answers the requests already received, and ends."""
    with explaining("serve needs `pip install fastapi uvicorn python-multipart`", ModuleNotFoundError):
        import uvicorn

        from ..serving.app import make_app
    is_ipv6 = ":" in options.host
    place = f"[{options.host}]:{options.port}" if is_ipv6 else f"{options.host}:{options.port}"
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)  # uvicorn listens once the models are loaded
    with explaining(f"cannot serve on {place}; choose another --host or --port", OSError, OverflowError):
        if os.name == "posix":  # where it allows the port of a server that has just ended
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((options.host, options.port))
    configure_malloc()
    disable_progress_bar()  # of transformers
    models = load_models(options.models, values_of(options, GENERATION), **values_of(options, LOADING))
    app = make_app(lambda: models, options.char_limit, options.queue_limit)
    directions = ", ".join(f"{source} to {target}" for source, target in models)
    print(f"Translating {directions} at http://{place}; Ctrl-C stops.", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[bound])
