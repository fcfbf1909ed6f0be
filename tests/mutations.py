"""Changes a saved model as a stranger might: other values, files, headers, links, and code in many places."""

import json
import pickle
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import torch

NESTED = {"a": [{"b": None}] * 3}
NUMBERS = [10**6, 10**9, 2**63, 10**30, -1, 0, 0.5, "3", "x", NESTED, [1, [2]], True]
VALUES = [*NUMBERS, None, [], {}, "", float("nan"), float("inf"), -(10**18), "../outside", "/etc/passwd", "a/b", "\0"]
VALUES += [[[[]]] * 3, "é" * 1000, "\u202e\x1b[31m", {"__float__": "NaN"}, ["os", "system"], False, 1e308]
KEYS = {  # that a config may have, or that a library reads
    "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.C", "AutoModelForSeq2SeqLM": "evil.C"},
    "custom_pipelines": {"vanilla-translation": {"impl": "evil.P", "pt": ["AutoModelForSeq2SeqLM"]}},
    "trust_remote_code": True,
    "transformers_weights": "other.safetensors",
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "_attn_implementation": "stranger/kernel",
    "attn_implementation": "flash_attention_2",
    "fusion_config": {"patch_embeddings": True},
    "_name_or_path": "../outside",
    "architectures": ["Evil"],
    "dtype": "int8",
    "torch_dtype": "no",
    "custom_generate": "stranger/code",
    "watermarking_config": {"context_width": 10**9},
    "assistant_early_exit": 1,
    "prompt_lookup_num_tokens": 3,
    "sequence_bias": [[[5], 1e9]],
    "stop_strings": ["a"],
    "tokenizer_class": "MarianTokenizer",
    "tokenizer_file": "/etc/passwd",
    "vocab_file": "/etc/passwd",
    "chat_template": "{{ ''.__class__ }}",
    "extra_special_tokens": ["<evil>"],
    "added_tokens_decoder": {"1000000000": {"content": "<a>"}},
    "model_max_length": 10**30,
    "split_special_tokens": "x",
    "padding": {"strategy": {"Fixed": 10**9}, "pad_id": 0, "pad_token": "", "direction": "Right", "pad_type_id": 0},
    "truncation": {"max_length": 10**18, "stride": 10**18, "strategy": "LongestFirst", "direction": "Right"},
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": {"type": "ByteFallback"},
}
AUTO_TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"}
TEXTS = [b"[" * 200_000, b'{"a":' * 100_000, b"", b"null", b"[]", b"7", b'"x"', b"\xff\xfe\x00", b"9" * 5000]
TEXTS += [b'{"vocab_size": ' + b"9" * 6000 + b"}"]


def update(file: Path, **values):
    """Changes values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def read_header(file: Path) -> tuple[dict, bytes]:
    """The header of a safetensors file, and the bytes after it."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(file: Path, header: dict | str, data: bytes, length: int | None = None):
    """Writes a safetensors file, with any `length` of the header."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


class Evil:
    """Unpickled, it runs code."""

    def __init__(self, code: str):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


class Mutator:
    """Changes the model in `folder`; code that it plants would write into the file `canary` of `outside`."""

    def __init__(self, folder: Path, outside: Path, generator: random.Random):
        self.folder, self.outside, self.random = folder, outside, generator
        self.weights = folder / "model.safetensors"
        self.code = f"open({str(outside / 'canary')!r}, 'a').write('it ran')\n"

    def mutate(self) -> str:
        """Changes one thing, and says which."""
        kinds = [self.value] * 6 + [self.key] * 5 + [self.text] * 4 + [self.header] * 4 + [self.bytes] * 2
        kinds += [self.scripts, self.pickles, self.link, self.index, self.adapter, self.remove]
        kind = self.random.choice(kinds)
        return f"{kind.__name__} {kind()}"

    def file(self, pattern: str = "*") -> Path:
        """Any file that is not a link."""
        files = [file for file in self.folder.rglob(pattern) if file.is_file() and not file.is_symlink()]
        return self.random.choice(sorted(files))

    def plant(self, name: str, content: str | bytes):
        file = self.folder / name
        self.delete(file)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def value(self):
        """Changes or removes a value at any depth of a JSON file."""
        file = self.file("*.json")
        try:
            whole = {"": json.loads(file.read_text(encoding="utf-8"))}
        except (RecursionError, ValueError):  # mutated before
            return None
        parent, key = whole, ""
        while isinstance(parent[key], dict | list) and parent[key] and (key == "" or self.random.random() < 0.8):
            parent = parent[key]
            key = self.random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if key != "" and self.random.random() < 0.1:
            del parent[key]
        else:
            parent[key] = self.random.choice(VALUES)
        file.write_text(json.dumps(whole[""]), encoding="utf-8")
        return file.name, key

    def key(self):
        """Adds a key to a JSON file, and the module that it may name."""
        file, name = self.file("*.json"), self.random.choice([*KEYS, *["tokenizer"] * 5])
        self.plant("evil.py", f"{self.code}C = P = T = None\n")
        try:
            update(file, **(AUTO_TOKENIZER if name == "tokenizer" else {name: KEYS[name]}))
        except (RecursionError, TypeError, ValueError):  # mutated before
            return None
        return file.name, name

    def text(self):
        """Replaces or cuts the text of a JSON file."""
        file = self.file("*.json")
        content = file.read_bytes()
        at = self.random.randrange(len(content) + 1)
        cut = [content[:at], content[:at] + b"\0" + content[at:], content + content, self.random.randbytes(500)]
        new = self.random.choice(TEXTS + cut)
        file.write_bytes(new)
        return file.name, new[:9], len(new)

    def header(self):
        """Changes the header of the weights, or what follows it."""
        if not self.weights.is_file():
            return None
        try:
            (header, data), length = read_header(self.weights), None
        except (ValueError, struct.error):  # mutated before
            return None
        name = self.random.choice(sorted(header))
        kind = self.random.choice(["dtype", "shape", "data_offsets", "length", "cut", "number", "extra", "names"])
        pick = self.random.choice
        if kind == "dtype":
            header[name]["dtype"] = pick(["F64", "BF16", "I64", "BOOL", "F8_E4M3", "C64", "x", 5])
        elif kind == "shape":
            header[name]["shape"] = pick([[], [0], [2**40], [-1], [1, 384], "x", [10**30], [0, 10**12]])
        elif kind == "data_offsets":
            header[name]["data_offsets"] = pick([[0, 2**50], [8, 0], [0, 0], [-1, 4], "x"])
        elif kind == "length":
            length = pick([0, 1, 2**62, 2**64 - 1, len(data), 10**8])
        elif kind == "cut":
            data = pick([b"", data[:-1], data + b"\0", data[:100]])
        elif kind == "number":
            data = np.full(len(data) // 4, pick([np.nan, np.inf, -np.inf, 1e38, 0]), np.float32).tobytes()
        elif kind == "extra":
            header["extra"] = {"dtype": "F32", "shape": [0, 10**12], "data_offsets": [len(data), len(data)]}
        else:
            header = {f"{key}.": value for key, value in header.items()}
        self.delete(self.weights)
        write_header(self.weights, header, data, length)
        return kind, name

    def bytes(self):
        """Changes bytes of any file, and may cut it."""
        file = self.file()
        content = bytearray(file.read_bytes())
        for _ in range(self.random.choice([1, 10, 1000]) if content else 0):
            content[self.random.randrange(len(content))] = self.random.randrange(256)
        file.write_bytes(content[: self.random.choice([len(content), len(content) // 2])])
        return file.name

    def scripts(self):
        """Plants code in every place where somebody might look for it."""
        places = ["evil.py", "custom_generate/generate.py", "__init__.py", "sitecustomize.py", "torch.py", "setup.py"]
        for name in [*places, *(file.name for file in self.folder.glob("*.py"))]:
            self.plant(name, self.code)

    def pickles(self):
        """Plants pickles that run code; they may replace the weights."""
        for name in ["training_args.bin", "optimizer.pt", "adapter_model.bin", ".metadata"]:
            self.plant(name, pickle.dumps(Evil(self.code)))
        self.delete(self.folder / "pytorch_model.bin")
        torch.save({"lm_head.weight": Evil(self.code)}, self.folder / "pytorch_model.bin")
        if self.random.random() < 0.7:
            self.weights.unlink(missing_ok=True)

    def link(self):
        """Replaces a file, or the cache of CTranslate2, by a symbolic link to something else."""
        cache = self.random.choice([["ctranslate2"], []])  # in half of all cases
        name = self.random.choice(cache or sorted(file.name for file in self.folder.iterdir()))
        target = self.random.choice([self.outside, self.outside / "canary", Path("/dev/zero"), Path("."), Path(name)])
        self.delete(self.folder / name)
        (self.folder / name).symlink_to(target)
        return name, target.name

    def index(self) -> dict:
        """Plants an index of weights that are elsewhere, or pickles."""
        names = ["../outside/canary", "pytorch_model.bin", "/etc/passwd", "x.safetensors", 5, None, ["a"]]
        index = {"metadata": {"total_size": 10**18}, "weight_map": {"lm_head.weight": self.random.choice(names)}}
        self.plant("model.safetensors.index.json", json.dumps(index))
        if self.random.random() < 0.7:
            self.weights.unlink(missing_ok=True)
        return index

    def adapter(self):
        """Plants an adapter of huge rank, of another model."""
        config = {"peft_type": "LORA", "base_model_name_or_path": str(self.outside / "base"), "r": 10**9}
        self.plant("adapter_config.json", json.dumps(config))
        self.plant("adapter_model.bin", pickle.dumps(Evil(self.code)))

    def remove(self):
        file = self.random.choice(sorted(self.folder.iterdir()))
        self.delete(file)
        return file.name

    @staticmethod
    def delete(path: Path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
