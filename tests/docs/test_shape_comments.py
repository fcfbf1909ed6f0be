"""The shapes in comments and tables of the model files are those of the tensors."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import small_model

from vanilla_transformer import loss_vanilla_transformer as loss
from vanilla_transformer import modeling_vanilla_transformer as modeling

# Different letters have different lengths; h, k and f of the encoder, then of the decoder. Positions may have B = 1.
LENGTHS = {"B": {2, 1}, "d": {24}, "V": {37}, "h": {4, 2}, "k": {6, 12}, "f": {11, 13}}
SIZES = {"vocab_size": 37, "d_model": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 2}
SIZES |= {"encoder_ffn_dim": 11, "decoder_ffn_dim": 13, "max_position_embeddings": 20}
SOURCE, TARGET, LONG = (torch.randint(3, 37, (2, length)) for length in (7, 5, 23))


def shapes_in(text: str) -> list[str]:
    return re.findall(r"\(([^()]*)\)", text)


LINES = {
    (module.__file__, number): line
    for module in (modeling, loss)
    for number, line in enumerate(Path(module.__file__).read_text(encoding="utf-8").splitlines(), start=1)
}
# Comments at the end of a line that begin with a shape, as in `x = ...  # (B,T,d)`.
COMMENTS = {place: shapes_in(found[1]) for place, line in LINES.items() if (found := re.search(r"\S  # (\(.*)", line))}
# The tables in the docstrings: name -> the shapes of its arguments and of what it returns.
MAP = {
    name: (shapes_in(given), shapes_in(returned)[0])
    for module in (modeling, loss)
    for names, given, returned in re.findall(r"^    (\w+(?:, \w+)*) .*?  (\(.*)->(.*)$", module.__doc__, re.MULTILINE)
    for name in names.split(", ")
}


def check(place, letters: str, tensor, known: dict[str, int]):
    """`known` are the lengths that letters have in this call of a function."""
    dims, shape = letters.rstrip(",").split(",") if letters else [], list(tensor.shape)
    if dims[:1] == ["..."]:
        dims, shape = dims[1:], shape[len(shape) - len(dims) + 1 :]
    fits = len(dims) == len(shape)
    for dim, length in zip(dims, shape, strict=False):
        letter, _, divisor = dim.partition("/")
        length *= int(divisor or 1)
        allowed = {int(dim)} if dim.isdigit() else LENGTHS.get(letter, {length})
        fits &= length in allowed and known.setdefault(dim if dim.isdigit() else letter, length) == length
    assert fits, f"{place}: ({letters}) is {shape} where {known}"


def check_while_running(run, is_rotary: bool = False) -> set:
    """Runs it line by line. Returns the places and names whose shapes were compared with tensors."""
    reached, known, last = set(), {}, {}

    def compare(frame, place, letters, value):
        if isinstance(value, torch.Tensor):
            check(place, letters, value, known[id(frame)])
            reached.add(place)

    def first_tensor(value):
        value = getattr(value, "last_hidden_state", getattr(value, "logits", value))
        return value[0] if isinstance(value, tuple) else value

    def enter(frame, name):
        known[id(frame)], last[id(frame)] = {}, None
        code, names = frame.f_code, frame.f_code.co_varnames[: frame.f_code.co_argcount]
        for number in range(code.co_firstlineno, code.co_firstlineno + 12):
            place = (code.co_filename, number)
            if place in COMMENTS and (argument := re.match(r"\s*(\w+): ", LINES[place])):
                compare(frame, place, COMMENTS[place][0], frame.f_locals.get(argument[1]))
        arguments = [
            frame.f_locals[n] for n in names if n not in ("self", "module", "lm_head", "bias") and "mask" not in n
        ]
        for letters, value in zip(MAP.get(name, [[]])[0], arguments, strict=False):
            compare(frame, name, letters, value)

    def trace(frame, event, value):
        if frame.f_code.co_filename not in (modeling.__file__, loss.__file__):
            return None
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        name = type(owner).__name__ if name == "forward" else name
        if name == "SinusoidalPositions" and is_rotary:
            name = None  # those of a head, (B,T,k)
        if event == "call":
            enter(frame, name)
        place = (frame.f_code.co_filename, last[id(frame)])
        if place in COMMENTS and (left := re.match(r"\s*([\w, ]+?) = ", LINES[place])):
            letters = COMMENTS[place][1:] if "if rotary" in LINES[place] and is_rotary else COMMENTS[place]
            for variable, shape in zip(left[1].split(", "), 2 * letters, strict=False):
                compare(frame, place, shape, frame.f_locals.get(variable))
        last[id(frame)] = frame.f_lineno
        if event == "return":
            place = (frame.f_code.co_filename, frame.f_lineno)
            if place in COMMENTS and " return " in LINES[place]:
                compare(frame, place, COMMENTS[place][-1], first_tensor(value))
            if name in MAP:
                compare(frame, f"{name} returns", MAP[name][1], first_tensor(value))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return reached


def test_every_shape_is_right_and_was_compared():
    reached = set()
    for kind in ("sinusoidal", "learned", "rotary"):
        model = small_model(**SIZES, position_embedding_type=kind)
        model.set_attn_implementation("eager")

        def run(model=model, kind=kind):
            model(SOURCE, torch.ones_like(SOURCE), TARGET)
            model.model(input_ids=SOURCE, decoder_input_ids=TARGET)
            if kind == "sinusoidal":
                model(LONG, None, TARGET)  # longer than the table
            model.train()(SOURCE, labels=TARGET)

        reached |= check_while_running(run, kind == "rotary")
    assert set(COMMENTS) - reached == set() == {f"{name} returns" for name in MAP} - reached
    assert len(COMMENTS) > 15 and len(MAP) >= 12


@pytest.mark.parametrize("wrong", ["B,T,h,k", "B,h,T", "B,h,T,d", "B,B,T,k"])
def test_wrong_shape_is_found(monkeypatch, wrong):
    place = next(place for place, line in LINES.items() if "queries = self.split_heads" in line)
    monkeypatch.setitem(COMMENTS, place, [wrong])
    with pytest.raises(AssertionError, match=re.escape(f"{place}: ({wrong})")):
        check_while_running(lambda: small_model(**SIZES)(SOURCE, None, TARGET))
