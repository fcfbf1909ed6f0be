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
    """Checks each call of a function when it returns. Returns the places and names that were compared with tensors."""
    reached = set()

    def compare(place, letters, value, known):
        value = getattr(value, "last_hidden_state", getattr(value, "logits", value))
        value = value[0] if isinstance(value, tuple) else value
        if isinstance(value, torch.Tensor):
            check(place, letters, value, known)
            reached.add(place)

    def when_returning(frame, event, value):
        code, variables, known = frame.f_code, frame.f_locals, {}
        if event != "return" or code.co_filename not in (modeling.__file__, loss.__file__):
            return
        name = type(variables.get("self")).__name__ if code.co_name == "forward" else code.co_name
        if name in MAP and not (name == "SinusoidalPositions" and is_rotary):  # those of a head, (B,T,k)
            skipped = {"self", "module", "lm_head", "bias"}
            given = [n for n in code.co_varnames[: code.co_argcount] if n not in skipped and "mask" not in n]
            for letters, argument in zip(MAP[name][0], given, strict=False):
                compare(name, letters, variables[argument], known)
            compare(f"{name} returns", MAP[name][1], value, known)
        for number in range(code.co_firstlineno, max(line for *_, line in code.co_lines() if line) + 1):
            place = (code.co_filename, number)
            shapes = COMMENTS.get(place, [])[1 if is_rotary and "if rotary" in LINES[place] else 0 :]
            if shapes and " return " in LINES[place]:
                compare(place, shapes[-1], value, known)
            elif shapes and (left := re.match(r"\s*(\w+(?:, \w+)*)(?:: | = )", LINES[place])):
                for variable, letters in zip(left[1].split(", "), 2 * shapes, strict=False):
                    compare(place, letters, variables.get(variable), known)

    before = sys.getprofile()
    sys.setprofile(when_returning)
    try:
        run()
    finally:
        sys.setprofile(before)
    return reached


def test_every_shape_is_right_and_was_compared():
    reached = set()
    for kind in ("sinusoidal", "learned", "rotary", "marian"):
        model = small_model(**SIZES, position_embedding_type=kind)
        model.set_attn_implementation("eager")

        def run(model=model, kind=kind):
            model(SOURCE, torch.ones_like(SOURCE), TARGET)
            model.model(input_ids=SOURCE, decoder_input_ids=TARGET)
            if kind == "sinusoidal":
                model(LONG, None, TARGET)  # longer than the table
            model.train()(SOURCE, labels=TARGET, output_logits=False)

        reached |= check_while_running(run, kind == "rotary")
    assert set(COMMENTS) - reached == set() == {f"{name} returns" for name in MAP} - reached
    assert len(COMMENTS) > 15 and len(MAP) >= 12


@pytest.mark.parametrize("wrong", ["B,T,h,k", "B,h,T", "B,h,T,d", "B,B,T,k"])
def test_wrong_shape_is_found(monkeypatch, wrong):
    place = next(place for place, line in LINES.items() if "queries = self.split_heads" in line)
    monkeypatch.setitem(COMMENTS, place, [wrong])
    with pytest.raises(AssertionError, match=re.escape(f"{place}: ({wrong})")):
        check_while_running(lambda: small_model(**SIZES)(SOURCE, None, TARGET))
