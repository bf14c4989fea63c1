"""Random programs as a card would run them, and those of them that came out wrong once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compile.as_cuda import as_cuda
from tests.cpu.test_fuzz import SEED
from tests.fuzz.check import difference
from tests.fuzz.generate import Input, Line, Program, generate
from tests.limits import limit


def _program(inputs: tuple[Input, ...], *lines: tuple[str, tuple[int, ...]]) -> Program:
    """All values but the inputs are results."""
    made = tuple(Line(text, operands, exact=True) for text, operands in lines)
    count = len(inputs) + len(lines)
    return Program(inputs, made, tuple(range(len(inputs), count)), (True,) * count)


_ROWS = Input((33, 1), torch.float32)
_INTO_ONE = "torch.zeros_like({0}).index_add_(0, torch.zeros(17, dtype=torch.long), {0}[:17])"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            _program(
                (Input((1, 31, 2), torch.float32),),
                ("{0}[1:].add_(1)", (0,)),
                ("{0} * 2", (0,)),
            ),
            id="nothing is changed where there is nothing",
        ),
        pytest.param(
            _program((Input((0, 5), torch.float32),), ("F.layer_norm({0}, (5,)).sum()", (0,))),
            id="a sum of nothing reads nothing",
        ),
        pytest.param(
            _program((Input((65, 31), torch.float32),), ("(-{0})[1::2, 1::2]", (0,))),
            id="no loop that memory runs along",
        ),
        pytest.param(
            replace(
                _program(
                    (Input((2, 2, "A"), torch.float32, "expanded"),),
                    ("F.log_softmax(F.softplus({0}), 0)", (0,)),
                ),
                sizes=({"A": 3}, {"A": 17}),
                dynamic=True,
                exact=(True, False),
            ),
            id="a sum of equals counts them",
        ),
        pytest.param(
            _program(
                (Input((2, 1), torch.float64), Input((1, 1, 3), torch.int64)),
                (
                    "torch.scatter(torch.minimum({0}, {1} ^ {1}), 0, {1} * 0, 2).clone() + 1",
                    (0, 1),
                ),
            ),
            id="a row that is overwritten in part before it is read",
        ),
        pytest.param(
            _program(
                (Input((1,), torch.float32), Input((), torch.int8)),
                ("F.pad(torch.scatter({0}, 0, {1}.long() * 0, 2), (0, 2))", (0, 1)),
            ),
            id="a number that is overwritten before it is read in part",
        ),
        pytest.param(
            replace(
                _program((Input(("A", "B"), torch.float32),), ("(-{0})[1::2, 1::2] * 2", (0,))),
                sizes=({"A": 64, "B": 31}, {"A": 33, "B": 130}),
                dynamic=True,
            ),
            id="no loop that memory runs along, of any size",
        ),
        *(
            pytest.param(
                _program((replace(_ROWS, dtype=dtype),), (_INTO_ONE, (0,))),
                id=f"many of {dtype} are added to one",
            )
            for dtype in (torch.float32, torch.float64, torch.int64, torch.int16)
        ),
    ],
)
def test_found_before(program: Program) -> None:
    with as_cuda():
        assert difference(program) == ""


def test_a_row_that_is_overwritten_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a loop over a row that is too long to be held."""
    limit(monkeypatch, "RESIDENT_ROW", 64)
    limit(monkeypatch, "RESIDENT_ONE_PASS", 32)
    text = "F.softmax(torch.index_fill({0}, 1, torch.zeros(1, dtype=torch.long), 2.0) * {0}, -1)"
    program = _program((Input((33, 1, 100), torch.float32),), (text, (0,)))
    with as_cuda():
        assert difference(replace(program, exact=(True, False))) == ""


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(
            (
                ("{0}.cumsum(1)", (0,)),
                ("torch.exp({0} - {0}.amax(0))", (1,)),
                ("{0} / {1}.sum(0)", (1, 2)),
                ("{0} * {1}.sum(0)", (2, 3)),
            ),
            id="powers of a row, after it is divided",
        ),
        pytest.param(
            (
                ("{0}.cumsum(1) * {0}", (0,)),
                ("{0} / ({1}.abs().sum(0) + 1)", (1, 0)),
                ("F.softmax({0}, 0)", (1,)),
                ("{0} - {0}.amax(0)", (2,)),
            ),
            id="a row that is divided, after its softmax",
        ),
    ],
)
def test_what_a_row_is_computed_from_again_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, lines: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    """A result took the place of what a later loop over the row was to read, and there was no
    kernel for both."""
    limit(monkeypatch, "RESIDENT_ROW", 64)
    limit(monkeypatch, "RESIDENT_ONE_PASS", 32)
    program = _program((Input((130, 64), torch.float32),), *lines)
    with as_cuda():
        assert difference(replace(program, outputs=(3, 4), exact=(True,) + 4 * (False,))) == ""


@pytest.mark.in_turn(2)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("number", range(4))
def test_random_programs(number: int) -> None:
    """Programs that no run before this one had; see `tests/cpu/test_fuzz.py`."""
    print(f"TILEWRIGHT_FUZZ_SEED={SEED}")
    with as_cuda():
        found = difference(generate(SEED + number))
    assert found == "", f"TILEWRIGHT_FUZZ_SEED={SEED}: seed {SEED + number}: {found}"
