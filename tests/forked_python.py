"""New Python processes that need not import: forks of one that has imported the libraries, but not this package.

[`programs`] makes a directory with stand-ins for `python` and commands, for the PATH of a shell script. This file is
their client: `forked_python.py SOCKET ARGUMENT...` does what `python ARGUMENT...` does. The server at the socket gets
the arguments, the environment and the standard streams of the client.
"""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time

LIBRARIES = ["accelerate", "datasets", "matplotlib.figure", "sacrebleu", "tabulate", "torch.distributed.fsdp"]
LIBRARIES += ["langcodes", "packaging.requirements", "psutil", "rapidfuzz.distance"]
LIBRARIES += ["transformers", "transformers.generation", "transformers.pipelines", "transformers.trainer_utils"]
# Libraries that read nothing of the environment, for programs to which the Hub is elsewhere.
WITHOUT_HUB = ["matplotlib.pyplot", "pandas", "pyarrow.dataset", "sacrebleu", "sentencepiece", "torch.export"]
WITHOUT_HUB += ["torch._dynamo.convert_frame", "torch.distributed.fsdp", "torch.distributed.tensor"]
WITHOUT_HUB += ["torch.distributed.checkpoint.hf_storage", "trio", "yaml", "jinja2", "regex", "multiprocess"]
WITHOUT_HUB += ["langcodes", "packaging.requirements", "psutil", "rapidfuzz.distance", "filelock", "PIL.Image"]
SERVER = """
import gc, importlib, json, multiprocessing.spawn, os, runpy, signal, socket, sys

address, *libraries = sys.argv[1:]
for library in libraries:
    importlib.import_module(library)
gc.freeze()  # what is there now, no fork need look through
server = socket.socket(socket.AF_UNIX)
server.bind(address)
server.listen()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    connection, _ = server.accept()
    if os.fork():
        connection.close()
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
    if child := os.fork():
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    (first, *others), folder, environment = json.loads(request)
    if first == "-u":  # from torchrun
        first, *others = others
    for number, (name, mode) in enumerate(zip(("stdin", "stdout", "stderr"), "rww")):
        os.dup2(streams[number], number)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)  # what torchrun starts
    if first in ("-c", "-m"):
        (what, *sys.argv[1:]), sys.path[0] = others, ""
        runpy.run_module(what, run_name="__main__", alter_sys=True) if first == "-m" else exec(what)
    else:
        sys.argv, sys.path[0] = [first, *others], os.path.dirname(os.path.abspath(first))
        main = sys.modules["__main__"] = sys.modules["__mp_main__"] = type(sys)("__main__")
        main.__file__ = first
        exec(compile(open(first, "rb").read(), first, "exec"), vars(main))
    sys.exit()
"""


@contextlib.contextmanager
def programs(folder, environment: dict[str, str], libraries: list[str] = LIBRARIES, **commands: str):
    """`folder` with a program for each of `commands`, which are the first arguments of Python in the words of a shell.

    For the time of the context: then the server ends.
    """
    address = str(folder / "socket")
    for name, arguments in commands.items():
        client = shlex.join([sys.executable, "-IS", __file__, address])
        (folder / name).write_text(f'#!/bin/sh\nexec {client} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    server = subprocess.Popen([sys.executable, "-c", SERVER, address, *libraries], env=environment)
    try:
        while not os.path.exists(address):
            assert server.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield folder
    finally:
        server.kill()
        server.wait()


def main():
    address, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [request], [0, 1, 2])
        sys.exit(int(connection.recv(10) or 1) % 256)


if __name__ == "__main__":
    main()
