"""The shapes in the comments of the modelling file, and in its map. Run: pytest tests/test_shape_comments.py"""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import DISTINCT_SIZES, S, T, random_ids, shape_letters

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer import modeling_vanilla_transformer as modeling

SOURCE_LINES = Path(modeling.__file__).read_text(encoding="utf-8").splitlines()
# Trailing comments that begin with a shape, as `x = ...  # (B,T,d)`; of `return ...  # (B,T) -> (B,T,d)` the last.
COMMENTS = {
    number: re.findall(r"\(([^()]*)\)", comment[1])
    for number, line in enumerate(SOURCE_LINES, start=1)
    if (comment := re.search(r"\S.*?  # (\(.*)", line))
}
MAP = {
    name: shapes
    for names, shapes in re.findall(r"^    (\w+(?:, \w+)*) .*?  (\(.*->.*)$", modeling.__doc__, re.MULTILINE)
    for name in names.split(", ")
}


class Shapes:
    """Holds shapes in letters against tensors; within a call of a function a letter stands for one length."""

    def __init__(self, config: VanillaTransformerConfig):
        self.config = config
        self.known: dict[int, dict[str, int]] = {}  # by frame

    def check(self, frame: int, place: str, letters: str, tensor: torch.Tensor):
        bound = self.known.setdefault(frame, {})
        dims = [dim for dim in letters.split(",") if dim]
        shape = list(tensor.shape)
        if dims[:1] == ["..."]:
            dims, shape = dims[1:], shape[len(shape) - len(dims) + 1 :]
        assert len(dims) == len(shape), (place, letters, shape)
        for dim, length in zip(dims, shape, strict=True):
            assert self.fits(bound, dim, length), f"{place} ({letters}) is {shape} with {bound}"

    def fits(self, bound: dict[str, int], dim: str, length: int) -> bool:
        if dim.isdigit():
            return int(dim) == length
        if "/" in dim:
            letter, divisor = dim.split("/")
            return bound.setdefault(letter, length * int(divisor)) == length * int(divisor)
        product = 1
        for factor in dim.split()[:-1]:
            product *= bound.get(factor, 3)  # the beams, of which there are 3
        letter = dim.split()[-1]
        if letter == "B" and bound.get("B") == 3 * length:
            return True  # beams of a sentence share their source
        encoder, decoder = shape_letters(self.config, True), shape_letters(self.config, False)
        if letter in encoder and length not in (encoder[letter] * product, decoder[letter] * product):
            return False
        return bound.setdefault(letter, length // product) * product == length


def tensor_of(value):
    """The tensor that a function returns, the first one or that of the model's output."""
    if hasattr(value, "last_hidden_state"):
        return value.last_hidden_state
    if hasattr(value, "logits"):
        return value.logits  # None in training
    return value[0] if isinstance(value, tuple) else value


def hold_comments_against(run, config: VanillaTransformerConfig) -> tuple[set[int], set[str]]:
    """Runs it line by line and holds each shape of the file against what is there; returns which lines and names."""
    shapes, lines, names = Shapes(config), set(), set()
    last: dict[int, int] = {}  # the line that a frame has just run

    def assigned(frame):
        number = last.get(id(frame))
        if number not in COMMENTS:
            return
        left = re.match(r"\s*([\w, ]+?)(?::[^=]*)? = ", SOURCE_LINES[number - 1])
        if left:
            comment = COMMENTS[number]
            if "if rotary" in SOURCE_LINES[number - 1] and config.position_embedding_type == "rotary":
                comment = comment[1:]
            for name, letters in zip(left[1].split(", "), 2 * comment, strict=False):
                if isinstance(frame.f_locals.get(name), torch.Tensor):
                    shapes.check(id(frame), f"line {number}", letters, frame.f_locals[name])
                    lines.add(number)

    def check_arguments(frame, key):
        signature = [
            name for name in frame.f_code.co_varnames[: frame.f_code.co_argcount] if name not in ("self", "module")
        ]
        first = frame.f_code.co_firstlineno
        for number in COMMENTS.keys() & set(range(first, first + 12)):
            name = re.match(r"\s*(\w+): ", SOURCE_LINES[number - 1])
            if name and isinstance(frame.f_locals.get(name[1]), torch.Tensor):
                shapes.check(id(frame), f"line {number}", COMMENTS[number][0], frame.f_locals[name[1]])
                lines.add(number)
        if key in MAP:
            given = [frame.f_locals[name] for name in signature if "mask" not in name and name != "bias"]
            found = re.findall(r"\(([^()]*)\)", MAP[key].split("->")[0])
            for letters, value in zip(found, given, strict=False):
                if isinstance(value, torch.Tensor):
                    shapes.check(id(frame), f"the map, {key}", letters, value)

    def trace(frame, event, argument):
        if frame.f_code.co_filename != modeling.__file__:
            return None
        owner = frame.f_locals.get("self")
        key = type(owner).__name__ if frame.f_code.co_name == "forward" else frame.f_code.co_name
        if key == "SinusoidalPositions" and config.position_embedding_type == "rotary":
            key = None  # angles of a head, (B,T,k), and no part of the sum
        if event == "call":
            shapes.known.pop(id(frame), None)
            last.pop(id(frame), None)
            check_arguments(frame, key)
        if event in ("line", "return"):
            assigned(frame)
            last[id(frame)] = frame.f_lineno
        if event == "return" and argument is not None:
            number = frame.f_lineno
            if number in COMMENTS and "return" in SOURCE_LINES[number - 1]:
                shapes.check(id(frame), f"line {number}", COMMENTS[number][-1], tensor_of(argument))
                lines.add(number)
            if key in MAP and isinstance(tensor_of(argument), torch.Tensor):
                letters = re.findall(r"\(([^()]*)\)", MAP[key].split("->")[1])[0]
                shapes.check(id(frame), f"the map, {key}", letters, tensor_of(argument))
                names.add(key)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines, names


def test_no_shape_in_the_modelling_file_is_wrong_or_out_of_reach(make_model):
    """Every shape in its comments and in its map is held against the tensors of passes that reach all of them."""
    reached, named = set(), set()
    for position_embedding_type in ("sinusoidal", "learned", "rotary"):
        sizes = {**DISTINCT_SIZES, "d_model": 24, "max_position_embeddings": 20, "decoder_start_token_id": 1}
        model = make_model(**sizes, position_embedding_type=position_embedding_type)
        model.set_attn_implementation("eager")
        base, source, target = model.model, random_ids(S), random_ids(T)

        def passes(model=model, base=base, source=source, target=target):
            model(source, torch.ones_like(source), target)
            base(input_ids=source, decoder_input_ids=target)
            model.generate(source, num_beams=3, max_new_tokens=4, output_attentions=True, return_dict_in_generate=True)
            if model.config.position_embedding_type == "sinusoidal":
                model(random_ids(23), None, target)  # beyond the table
            model.train()(source, labels=target)

        lines, names = hold_comments_against(passes, model.config)
        reached, named = reached | lines, named | names
    assert set(COMMENTS) - reached == set()
    assert set(MAP) - named == set()
    assert len(COMMENTS) > 15 and len(MAP) >= 12


def test_a_wrong_shape_is_found(make_model, monkeypatch):
    model = make_model(**DISTINCT_SIZES)
    number = next(number for number, line in enumerate(SOURCE_LINES, 1) if "queries = self.split_heads" in line)
    for wrong in ("B,T,h,k", "B,h,T", "B,h,T,d", "B,B,T,k"):
        monkeypatch.setitem(COMMENTS, number, [wrong])
        with pytest.raises(AssertionError, match=f"line {number}"):
            hold_comments_against(lambda: model(random_ids(S), None, random_ids(T)), model.config)
