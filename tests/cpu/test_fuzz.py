"""Random programs against eager; `python -m tests.fuzz` runs many more of them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.__main__ import ended, report
from tests.fuzz.check import difference
from tests.fuzz.generate import Input, Line, Program, generate
from tests.fuzz.shrink import shrink

EACH = 4  # programs of one test
# Nobody has seen these programs. A run is had again with TILEWRIGHT_FUZZ_SEED=what it printed.
SEED = int(os.environ.get("TILEWRIGHT_FUZZ_SEED") or time.time_ns() % 1_000_000_007)


@pytest.mark.in_turn(2)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("batch", range(4))
def test_random_programs(batch: int) -> None:
    """Programs that no run before this one had."""
    print(f"TILEWRIGHT_FUZZ_SEED={SEED}")
    for seed in range(SEED + batch * EACH, SEED + (batch + 1) * EACH):
        program = generate(seed)
        found = difference(program)
        assert not found, f"TILEWRIGHT_FUZZ_SEED={SEED}\n{report(program, found)}"


# Found by the fuzzer, as small as they got.


def _program(inputs: tuple[Input, ...], lines: tuple[tuple[str, tuple[int, ...]], ...],
             outputs: tuple[int, ...]) -> Program:  # fmt: skip
    made = tuple(Line(text, operands, exact=True) for text, operands in lines)
    return Program(inputs, made, outputs, (True,) * (len(inputs) + len(lines)))


_MATRIX = Input((9, 16), torch.float32)
_ROTATED = ("(lambda n: torch.cat((-n[..., n.shape[-1] // 2 :], n[..., : n.shape[-1] // 2]), -1))"
            "(F.rms_norm({0}, {0}.shape[-1:]))")  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            _program(
                (_MATRIX,),
                (("{0} + 1", (0,)), ("{0}.movedim(0, -1)", (1,)), ("{0}[1::2]", (2,))),
                (3, 1, 2),
            ),
            id="views of one result stay views of it",
        ),
        pytest.param(
            _program(
                (_MATRIX,),
                (("{0}.transpose(0, 1).reshape({0}.shape)", (0,)), ("{0}.reshape(-1)", (1,))),
                (1, 2),
            ),
            id="a copy that is returned with a view of it",
        ),
        pytest.param(
            _program(
                (_MATRIX,),
                (
                    ("{0}.transpose(0, 1).reshape({0}.shape)", (0,)),
                    ("{0}.clone()", (1,)),
                    ("{0}.reshape(-1)", (2,)),
                ),
                (2, 3),
            ),
            id="a clone of a copy, returned with a view of it",
        ),
        pytest.param(
            _program((_MATRIX,), (("{0}.t()", (0,)), ("{0}[2:]", (1,))), (1, 2)),
            id="views of an argument",
        ),
        pytest.param(
            replace(
                _program(
                    (
                        Input(("B", "A", 2), torch.int8, "offset"),
                        Input((217, 2), torch.float32),
                    ),
                    (
                        ("{0}.reshape({0}.shape[0] * {0}.shape[1], -1)", (0,)),
                        ("{0}.copy_({1})", (2, 1)),
                    ),
                    (3,),
                ),
                sizes=({"A": 31, "B": 7},),
                dynamic=True,
            ),
            id="a view of a changed argument that begins inside its storage",
        ),
        pytest.param(
            _program(
                (Input((8, 8), torch.float32, "transposed"),),
                (("torch.floor({0} / 2)", (0,)), ("{0}.select(0, 0).add_(3)", (1,))),
                (2,),
            ),
            id="a changed part keeps the stride of the whole",
        ),
        pytest.param(
            _program(
                (Input((16, 1), torch.int64),),
                (
                    ("torch.max({0}, -2)[0]", (0,)),
                    ("{0}.index_fill(1, {0}.reshape(-1) % 1, 3)", (0,)),
                ),
                (1, 2),
            ),
            id="a scatter into an argument that has other readers with two results",
        ),
        pytest.param(
            replace(
                _program(
                    (Input(("A", "B"), torch.float32),),
                    ((_ROTATED, (0,)),),
                    (1,),
                ),
                sizes=({"A": 16, "B": 8}, {"A": 3, "B": 6}),
                dynamic=True,
                exact=(True, False),
            ),
            id="a row that ends where a quotient says",
        ),
        pytest.param(
            replace(
                _program(
                    (Input(("A",), torch.float32, "strided"),),
                    (("{0}.chunk(2, 0)[-1].clamp_(-1, 1)", (0,)),),
                    (1,),
                ),
                sizes=({"A": 9}, {"A": 31}),
                dynamic=True,
            ),
            id="a part of a changed argument that is one of several",
        ),
        pytest.param(
            replace(
                _program(
                    (Input(("B", "A"), torch.float64, "transposed"),),
                    (("{0}.chunk(2, 0)[-1].clamp_(-1, 1).flatten(-2, -1)", (0,)),),
                    (1,),
                ),
                sizes=({"A": 17, "B": 2}, {"A": 7, "B": 31}),
                dynamic=True,
            ),
            id="a changed row that is all of its part",
        ),
        pytest.param(
            replace(
                _program(
                    (Input(("B", "A"), torch.float32),),
                    (("{0} * {0}.unfold(1, 3, 3).amax(-1)", (0,)),),
                    (1,),
                ),
                sizes=({"A": 5, "B": 3},),
                dynamic=True,
            ),
            id="a computed size that is one",
        ),
        pytest.param(
            replace(
                _program(
                    (Input((9, 31), torch.float32, grad=True),),
                    (
                        ("{0} * torch.rsqrt({0}.square().mean(-1, keepdim=True) + 1e-5)", (0,)),
                        ("{0}.unfold(-1, 2, 1).amax(-1)", (1,)),
                    ),
                    (2,),
                ),
                exact=(True, False, False),
            ),
            id="a row that is kept as windows that overlap",
        ),
        pytest.param(
            _program(
                (_MATRIX,),
                (
                    ("{0}.amax(-1)", (0,)),
                    ("{0}.copy_({0}.flip(0))", (1,)),
                    ("{0}[1:3]", (1,)),
                ),
                (2, 3),
            ),
            id="what is read backwards, returned with a view of it",
        ),
        pytest.param(
            replace(
                _program(
                    (Input((5, 33), torch.float32, grad=True, seed=730924),),
                    (
                        (
                            "torch.slice_scatter(torch.cat(({0}, {0} * 2), 1), {0} - 1, 1, 1, 34)",
                            (0,),
                        ),
                        ("F.batch_norm({0}, None, None, training=True)", (1,)),
                    ),
                    (2,),
                ),
                exact=(True, True, False),
            ),
            id="loads of a row that no load motion takes beyond its stores",
        ),
        pytest.param(
            _program(
                (Input((31, 8), torch.float32, layout="transposed"),),
                (
                    ("{0}.narrow(1, 0, 1).copy_({0}.narrow(1, 0, 1).flip(-1))", (0,)),
                    ("{0}.clone()", (0,)),
                    ("({0}.select(1, 0).add_(1), {0}.select(1, -1).mul_(2), {0})[-1]", (2,)),
                ),
                (3,),
            ),
            id="all of it is read before any of two parts is written",
        ),
    ],
)
def test_found_before(program: Program) -> None:
    assert difference(program) == ""


def test_found_before_and_not_made_smaller() -> None:
    """A variance nobody asks for, beside rows that share its loops."""
    assert difference(generate(731106)) == ""


def test_a_sum_that_eager_rounds_at_every_step_may_be_nearer_to_the_truth() -> None:
    """In bfloat16 256 + 1 is 256. That the sum is compared at all is seen by giving another."""
    inputs = Input((2, 2), torch.bfloat16), Input((65, 65, 6), torch.int8)
    text = ("torch.index_put({0}, ({1}.long().reshape(-1) % 2,), torch.ones((), dtype={0}.dtype), "
            "accumulate=True)")  # fmt: skip
    program = Program(inputs, (Line(text, (0, 1), False),), (2,), (True, True, False))
    assert difference(program) == ""
    assert "not close" in difference(program, _times(0.5))


def test_where_eager_jumps_any_of_its_results_will_do() -> None:
    """A sign that hangs on last bits: the opposite may come, the ninefold may not."""
    text = "torch.sin({0} * 1e9).sign()"
    program = replace(_program((Input((5,), torch.float32),), ((text, (0,)),), (1,)),
                      exact=(True, False))  # fmt: skip
    assert difference(program, _times(-1)) == ""
    assert "not close" in difference(program, _times(9))


def test_where_a_rounding_on_the_way_decides_any_result_will_do() -> None:
    """Two numbers that come out equal, or one last bit apart, are normalised: a card's eager group
    norm has a mean and a deviation of few bits."""
    lines = (
        ("{0}.square().float()", (0,)),
        ("{0}.mean((1, 2), True).bfloat16()", (1,)),
        ("{0}.std((1, 2), correction=0, keepdim=True).bfloat16()", (1,)),
        ("F.layer_norm((({0} - {1}.float()) / {2}.float()).bfloat16(), (2,))", (1, 2, 3)),
    )
    program = _program((Input((130, 130, 2), torch.bfloat16, seed=575557),), lines, (4,))
    rounded = tuple(replace(line, exact=False) for line in program.lines)
    program = replace(program, lines=rounded, exact=(True, *[False] * 4))

    def better(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., list[Tensor]]:
        return lambda x: [F.layer_norm(F.group_norm(x.square(), 1), (2,))]

    assert difference(program, better) == ""
    assert "not close" in difference(program, _times(0.5))


def _times(factor: float) -> Callable[..., object]:
    return lambda gm, _: lambda *args: [r * factor for r in gm(*args)]


# The tools themselves: a fuzzer that cannot fail finds nothing.


def _wrong(gm: torch.fx.GraphModule, _: list[Tensor]) -> object:
    """A backend that gives sine where cosine is asked for."""
    for node in gm.graph.nodes:
        if node.target is torch.sin:
            node.target = torch.cos
    gm.recompile()
    return gm


def test_a_wrong_backend_is_noticed_and_the_program_shrunk() -> None:
    lines = (("{0} + 1", (0,)), ("torch.sin({0})", (1,)), ("{0} * 2", (2,)), ("-{0}", (1,)))
    program = _program((_MATRIX,), lines, (3, 4))
    assert "Tensor-likes are not" in difference(program, _wrong)
    small = shrink(program, lambda p: bool(difference(p, _wrong)))
    assert [line.text for line in small.lines] == ["torch.sin({0})"]
    assert len(small.outputs) == 1


def test_a_process_that_does_not_end_is_not_waited_for() -> None:
    """Nor for what it has started, which holds its output open."""
    text = ("import subprocess, time\n"
            "left = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            "print(left.pid, flush=True); time.sleep(60)")  # fmt: skip
    code, said, _ = ended([sys.executable, "-c", text], 2)
    os.kill(int(said), signal.SIGKILL)  # it is still there, or this raises
    assert code is None
    assert ended([sys.executable, "-c", "exit(3)"], 60) == (3, "", "")


def test_generation_is_repeatable() -> None:
    assert generate(11).source() == generate(11).source()
    assert generate(11).inputs == generate(11).inputs
    assert len({generate(seed).source() for seed in range(20)}) == 20


def test_generated_programs_cover_what_they_claim() -> None:
    programs = [generate(seed) for seed in range(150)]
    text = "\n".join(p.source() for p in programs)
    for word in ("cat", "pad", "gather", "scatter", "matmul", "add_(", "softmax", "cumsum",
                 "permute", "where", "index_select", "unfold", "group_norm", "rms_norm", "one_hot",
                 "masked_fill(torch.ones", "index_add", "copy_(", "slice_scatter"):  # fmt: skip
        assert word in text, word
    inputs = [i for p in programs for i in p.inputs]
    assert {i.layout for i in inputs} >= {"transposed", "strided", "offset", "expanded", "padded"}
    assert {i.dtype for i in inputs} >= {torch.bfloat16, torch.float64, torch.int32, torch.bool}
    assert any(0 in i.shape for i in inputs)
    assert any(i.grad for i in inputs)
    assert any(p.dynamic for p in programs)


def test_a_backend_that_warns_is_noticed() -> None:
    """Torch's operations in place of a kernel give what is right too."""

    def warns(gm: torch.fx.GraphModule, _: list[Tensor]) -> object:
        logging.getLogger("tilewright.fuzz").warning("%s is replaced", "a kernel")
        return gm

    program = _program((_MATRIX,), (("torch.sin({0})", (0,)),), (1,))
    assert difference(program, warns) == "a kernel is replaced"
