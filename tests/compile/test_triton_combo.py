"""Kernels of a card that share a launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tests.limits import limit
from tilewright import config, metrics
from tilewright.runtime.triton_build import TritonConfig, TritonSource
from tilewright.testing import run_and_get_code
from tilewright.tune import kernels


def launched(fn: Callable[..., Any], *args: Tensor, dynamic: bool = False, asked: bool = True,
             **options: Any) -> tuple[int, str]:  # fmt: skip
    """How many kernels are launched, and their text; the results are eager's."""
    metrics.reset()
    expected = fn(*(a.clone() for a in args))
    with as_cuda(), config.patch(combo_kernels=asked, **options):
        compiled = torch.compile(fn, backend="tilewright", dynamic=dynamic)
        found, code = run_and_get_code(compiled, *args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return metrics.generated_kernel_count, "\n".join(code)


def six(*x: Tensor) -> list[Tensor]:
    return [t.sin() + k for k, t in enumerate(x)]


SIX = tuple(torch.randn(n) for n in (10, 20, 30, 400, 5000, 60))


def test_ck_1_kernels_of_any_size() -> None:
    count, text = launched(six, *SIX)
    assert count == 1 and text.count("@triton.jit\ndef triton_") == 1
    assert len(re.findall(r"def part\d", text)) == 6


def test_ck_1_in_place() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        a.add_(1)
        b.mul_(2)
        return a, b, c.exp()

    assert launched(fn, *(torch.randn(n) for n in (10, 30, 77)))[0] == 1


@pytest.mark.parametrize(("most", "launches"), [(8, 1), (3, 2), (2, 3)])
def test_ck_4_the_most_kernels_of_a_launch(most: int, launches: int) -> None:
    assert launched(six, *SIX, combo_kernel_max_num_nodes=most)[0] == launches


@pytest.mark.parametrize(("pieces", "launches"), [(4, 1), (5, 1), (40, 2)])
def test_many_small_pieces_of_one_result_share_launches(pieces: int, launches: int) -> None:
    """Without being asked to: a launch takes longer than they do."""

    def joined(*x: Tensor) -> Tensor:
        return torch.cat([t * (k + 1) for k, t in enumerate(x)], -1)

    inputs = [torch.randn(3, 5 + k % 9) for k in range(pieces)]
    assert launched(joined, *inputs, asked=False)[0] == launches


def rows(*x: Tensor) -> list[Tensor]:
    return [t.softmax(1) if k % 2 else t.sum(1) for k, t in enumerate(x)]


def test_ck_5_each_has_its_own_blocks() -> None:
    """The long one has those it would have alone, the short one smaller ones."""
    function, inputs = lambda a, b: (a.cos(), b.sin()), (torch.randn(40), torch.randn(70000))
    count, text = launched(function, *inputs)
    assert count == 1 and "XBLOCK=XBLOCK0" in text and "XBLOCK=XBLOCK1" in text

    def blocks(function: Callable[..., Any], *inputs: Tensor) -> list[int]:
        with config.patch(combo_kernels=True):
            (kernel,) = kernels_of(function, *inputs)
        return [value for name, value in kernel.configs[0].constants if name.startswith("XBLOCK")]

    (alone,) = blocks(torch.sin, inputs[1])
    long, short = blocks(function, *inputs)
    assert long == alone > short


def test_ck_5_rows_held_and_rows_walked() -> None:
    """Short rows are whole in registers, long ones are walked: both in one launch."""
    inputs = torch.randn(30, 20), torch.randn(9, 33), torch.randn(12, 9000)
    count, text = launched(rows, *inputs)
    assert count == 1
    parts = text.split("def part")[1:]
    assert any("for roffset" in part for part in parts)
    assert any("for roffset" not in part for part in parts)


@pytest.mark.parametrize("n", [40, 41])
def test_ck_6_grids_follow_the_sizes(n: int) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.cos() * a.shape[0], b.sum(1)

    def both(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return a.cos(), b.sin(), c.exp() + c.shape[0]

    inputs = torch.randn(n), torch.randn(3 * n, 5), torch.randn(2, n)
    assert launched(both, *inputs, dynamic=True)[0] == 1
    launched(fn, torch.randn(n), torch.randn(n, 7), dynamic=True)


def test_a_bad_index_is_reported_from_any_part() -> None:
    def fn(a: Tensor, i: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a[i] + 1, b.cos()

    a, i, b = torch.randn(10), torch.tensor([1, 2, 9]), torch.randn(50)
    count, text = launched(fn, a, i, b)
    assert count == 1 and "tri.report(err" in text


def test_ck_9_lists() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        added = torch._foreach_add([a.sin(), b], [c, d])
        return [x * 2 for x in torch._foreach_mul(added, 3.0)]

    inputs = torch.randn(10, 3), torch.randn(33), torch.randn(10, 3), torch.randn(33)
    assert launched(fn, *inputs)[0] == 1


def test_ck_6_more_programs_than_the_second_dimension_of_a_grid_takes() -> None:
    """All parts are counted along the first, which takes 2**31."""
    many = replace(SOURCE, grid=(("200000000", "XBLOCK0"),))
    for c in many.configs:
        blocks = dict(c.constants)
        beside = -(-60 // blocks["XBLOCK1"]) + -(-50 // blocks["XBLOCK1"])
        assert eval(many.programs(c)) == -(-200000000 // blocks["XBLOCK0"]) + beside > 65535
    _, text = launched(lambda a, b, c: (a.cos(), b.sin(), c.exp()), *map(torch.randn, (40, 70, 9)))
    assert set(re.findall(r"program_id\((\d)\)", text)) == {"0"}


# ---- tuning (CK-8)


def settings(*blocks: tuple[int, int], warps: int = 4) -> tuple[TritonConfig, ...]:
    return tuple(TritonConfig((("XBLOCK0", a), ("XBLOCK1", b)), warps) for a, b in blocks)


SOURCE = TritonSource("", "kernel", (), settings((1024, 64), (512, 64), (1024, 32)), capability=90,
                      shared_memory=1 << 16, grid=(("5000", "XBLOCK0"),),
                      beside=((("60", "XBLOCK1"),), (("50", "XBLOCK1"),)))  # fmt: skip


def test_ck_8_kernels_with_the_same_choices_are_tuned_as_one() -> None:
    """Four short ones and a long one: two choices of blocks, the long one's first."""
    inputs = [torch.randn(n) for n in (40, 40, 70000, 40, 40)]
    _, text = launched(six, *inputs)
    calls = re.findall(r"part(\d)\(pid.*XBLOCK=XBLOCK(\d)", text)
    assert [choice for _, choice in calls] == ["0", "1", "1", "1", "1"]
    assert "70000" in text.split("def part1")[0]


def test_ck_8_the_largest_is_tuned_first() -> None:
    (long,), (short,) = kernels.turns(SOURCE)
    best = long(SOURCE.configs[0])
    assert dict(best.constants) == {"XBLOCK0": 512, "XBLOCK1": 64}
    assert dict(short(best).constants) == {"XBLOCK0": 512, "XBLOCK1": 32}
    (together,) = kernels.turns(
        TritonSource("", "kernel", (), SOURCE.configs, capability=90, shared_memory=1 << 16)
    )
    assert [change(best) for change in together] == list(SOURCE.configs[1:])


def test_ck_8_descent_starts_with_the_largest() -> None:
    first = next(iter(kernels._neighbours(SOURCE, SOURCE.configs[0])))
    assert dict(first.constants) == {"XBLOCK0": 512, "XBLOCK1": 64}


@pytest.mark.parametrize(("parameters", "launches"), [(3, 3), (4, 1), (7, 2)])
def test_steps_of_many_parameters_share_launches(
    parameters: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "MANY_ALIKE", 4)
    limit(monkeypatch, "ALIKE_TOGETHER", 6)
    limit(monkeypatch, "FEW_ALIKE_BYTES", 0)

    def step(*x: Tensor) -> list[Tensor]:
        pairs = zip(x[:parameters], x[parameters:], strict=True)
        return [p - 0.1 * (g + 0.01 * p) for p, g in pairs]

    given = [torch.randn(3 + k, 5) for k in range(parameters)] * 2
    assert launched(step, *given, asked=False)[0] == launches


def turned_by(q: Tensor, k: Tensor, table: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    there = table[at][:, None]
    return q * there, k + there


def test_few_short_kernels_share_a_launch() -> None:
    """That rows have an operand of their own, as a place to look up, is nothing against it."""
    given = torch.randn(6, 96, 32), torch.randn(6, 80, 32), torch.randn(50, 32)
    count, text = launched(turned_by, *given, torch.randint(50, (6,)), asked=False)
    assert count == 1 and len(re.findall(r"def part\d", text)) == 2


def test_kernels_that_move_more_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "FEW_ALIKE_BYTES", 4096)
    given = [torch.randn(n) for n in (400, 500, 600)]
    assert launched(lambda *x: [t.sin() for t in x], *given, asked=False)[0] == 2


def test_what_turns_a_matrix_shares_no_launch() -> None:
    given = torch.randn(40, 50), torch.randn(70)
    found = launched(lambda a, b: (a.t().contiguous(), b.sin()), *given, asked=False)
    assert found[0] == 2


def test_blocks_by_as_many_threads_as_others_need_end_where_the_data_does() -> None:
    """768 elements are whole blocks of one warp, but none of four."""
    count, text = launched(six, *(torch.randn(n) for n in (400_000, 768, 768)))
    assert count == 1 and text.count("xmask = ") == 3


# ---- kernels that are alike


def test_kernels_that_differ_in_their_buffers_are_one_function() -> None:
    def step(*x: Tensor) -> list[Tensor]:
        return [p - 0.1 * g for p, g in zip(x[::2], x[1::2], strict=True)]

    sizes = (300, 77, 300, 300, 77, 300, 300)
    given = [torch.randn(n) for n in sizes for _ in range(2)]
    count, text = launched(step, *given)
    assert count == 1 and len(re.findall(r"def part\d", text)) == 2
    assert "pid < 5 * count" in text and "pid < 2 * count" in text


def test_a_buffer_that_all_have_is_not_chosen() -> None:
    def step(scale: Tensor, *x: Tensor) -> list[Tensor]:
        return [t.mul_(scale) for t in x]

    count, text = launched(step, torch.tensor(0.5), *(torch.randn(9, 5) for _ in range(3)))
    assert count == 1 and len(re.findall(r"def part\d", text)) == 1
    assert len(re.findall(r"\bown\d+ = p\d+", text)) == 3


def test_buffers_of_other_types_are_other_functions() -> None:
    def doubled(*x: Tensor) -> list[Tensor]:
        return [t + t for t in x]

    given = [torch.randn(50).to(d) for d in (torch.float16, torch.bfloat16, torch.float16)]
    count, text = launched(doubled, *given)
    assert count == 1 and len(re.findall(r"def part\d", text)) == 2


def test_kernels_that_are_alike_move_whole_pieces() -> None:
    """The pointers they choose among are known to be aligned."""

    def step(*x: Tensor) -> list[Tensor]:
        return [t.sin() for t in x]

    with as_cuda(), config.patch(combo_kernels=True):
        (kernel,) = kernels_of(step, *(torch.empty(1 << 16) for _ in range(5)))
    made = build(kernel)
    assert kernel.text.count("def part") == 1
    assert made.widest("ld.global") == made.widest("st.global") == 16


def clipped(*x: Tensor) -> list[Tensor]:
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(x))))
    return [*torch._foreach_mul(list(x), 1 / (total + 1e-6)), total]


def test_norms_of_many_tensors_share_launches() -> None:
    """Chunks of all, what folds them beside the short ones, the norm of norms, what is scaled: the
    program that makes the norm scales none of them."""
    sizes = (*5 * (140_000,), *4 * (150_000,), *6 * (700,))
    count, text = launched(clipped, *(torch.randn(n) for n in sizes), asked=False)
    assert count == 4 and "R1BLOCK" not in text


def test_rows_of_one_program_are_few() -> None:
    """Twelve short rows scaled by a sum of one are not all that one program's."""

    def scaled(a: Tensor, *x: Tensor) -> list[Tensor]:
        return [t * a.sum() for t in x]

    _, text = launched(scaled, torch.randn(900), *(torch.randn(600 + k) for k in range(12)),
                       asked=False)  # fmt: skip
    assert max(len(set(re.findall(r"r\d+numel = ", part))) for part in text.split("def ")) <= 4


def test_what_all_elements_have_in_common_is_made_by_each_kernel() -> None:
    def unscaled(scale: Tensor, *x: Tensor) -> list[Tensor]:
        inverse = 1 / scale
        return [t * inverse for t in x]

    given = [torch.randn(600 + k) for k in range(10)]
    assert launched(unscaled, torch.tensor(3.0), *given, asked=False)[0] == 1
