"""What can be known of kernels without running them: their text, estimates, distances (BM)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright
from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import kernels_of
from tests.pretend import run
from tests.programs import compiled
from tilewright.explanation import Graph
from tilewright.testing import kernel_facts, run_and_get_code


def code_of(function: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    with as_cuda():
        found, code = run_and_get_code(compiled(function, options=options or None), *args)
    torch.testing.assert_close(found, function(*args), rtol=1e-3, atol=1e-3)
    return "\n".join(code)


def test_bm_3_kernels_stand_alone() -> None:
    """There is nothing to strip: a kernel is a function of Triton's, decorated by it alone; what
    it calls is in modules of device functions, which the interpreter runs as well."""
    for function in (lambda x: x.cos() + 1, lambda x: x.softmax(1), lambda x: x.cumsum(1)):
        for kernel in kernels_of(function, torch.empty(64, 300)):
            assert set(re.findall(r"^@(.*)$", kernel.text, re.M)) == {"triton.jit"}
            imported = re.findall(r"^(?:import|from) (\S+)", kernel.text, re.M)
            assert {m.partition(".")[0] for m in imported} <= {"triton", "tilewright", "__future__"}
            assert all("tilewright.runtime" in m or "triton" in m.split(".")[0] for m in imported)


def test_bm_6_what_is_read_off_a_kernel() -> None:
    (added,) = kernel_facts(code_of(lambda x, y: x + y, torch.randn(999), torch.randn(999)))
    assert added.name.startswith("triton_poi_fused_add") and added.kind == "pointwise"
    assert (added.loads, added.stores, added.loops, added.atomics) == (2, 1, 0, 0)
    assert added.arguments >= 3
    held = kernel_facts(code_of(lambda x: x.sum(1), torch.randn(70, 300)))
    assert [k.kind for k in held] == ["persistent reduction"] and held[0].loops == 0
    (walked, *_) = kernel_facts(code_of(lambda x: x.sum(1), torch.randn(200, 20000)))
    assert walked.kind == "reduction" and walked.loops >= 1
    at = torch.randint(0, 9, (50,))
    scattered = kernel_facts(code_of(lambda x, i: torch.zeros(9).index_add(0, i, x),
                                     torch.randn(50), at))  # fmt: skip
    assert sum(k.atomics for k in scattered) == 1
    (product,) = kernel_facts(code_of(
        lambda a, b: (a @ b).relu(), torch.randn(40, 32), torch.randn(32, 40), max_autotune=True,
        max_autotune_gemm_backends="TRITON",
        **{"test_configs.max_mm_configs": 1,
           "test_configs.autotune_choice_name_regex": r"triton_mm_\d+_epilogue"}))  # fmt: skip
    assert product.kind == "template" and (product.loads, product.loops) == (2, 1)


def test_bm_6_bytes_of_a_sum() -> None:
    """2.0 GB of 2.5e8 elements."""
    assert run(sum_of_many) == 2_000_000_000


def sum_of_many() -> int:
    (graph,) = explained(lambda x: x + 1, (250_000_000,))
    (part,) = graph.parts
    return part.moved


def explained(function: Callable[..., Any], *sizes: tuple[int, ...], device: str = "cuda"
              ) -> tuple[Graph, ...]:  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(size, device=device) for size in sizes]
        return tilewright.explain(function)(*given).graphs


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "pointwise": (lambda x: x.cos() + 1, ((1000, 1000),)),
    "reduction": (lambda x: x.sum(1), ((1000, 1000),)),
    "mm": (lambda a, b: a @ b, ((512, 256), (256, 128))),
    "bmm": (lambda a, b: a @ b, ((4, 512, 256), (4, 256, 128))),
    "convolution": (lambda x, w: torch.conv2d(x, w), ((8, 16, 32, 32), (32, 16, 3, 3))),
}


def estimates(name: str, device: str) -> list[float]:
    function, sizes = PROGRAMS[name]
    (graph,) = explained(function, *sizes, device=device)
    return [part.at_best for part in graph.parts if part.moved]


@pytest.mark.parametrize("name", PROGRAMS)
def test_bm_4_how_long_a_part_takes_at_best(name: str) -> None:
    """Something on a card, and nothing is said of a CPU."""
    on_card = run(estimates, name, "cuda")
    assert on_card and all(us > 0 for us in on_card)
    assert set(estimates(name, "cpu")) == {0.0}


def test_bm_4_more_takes_longer() -> None:
    assert run(growing) == sorted(run(growing))


def growing() -> list[float]:
    found: list[float] = []
    for n in (256, 1024, 4096):
        (graph,) = explained(lambda a, b: a @ b, (n, n), (n, n))
        found.append(sum(part.at_best for part in graph.parts))
    return found


def test_bm_4_of_sizes_that_are_not_known() -> None:
    assert run(dynamic) > 0


def dynamic() -> float:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1000, 50, device="cuda")
        torch._dynamo.mark_dynamic(x, 0)
        (graph,) = tilewright.explain(lambda x: x.sum(1))(x).graphs
    return sum(part.at_best for part in graph.parts)


def test_bm_5_how_far_a_part_is_from_the_arguments() -> None:
    """On the shortest and on the longest way."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        first = a @ b
        second = first @ b
        return second @ (a @ second)

    (graph,) = tilewright.explain(function)(torch.randn(8, 8), torch.randn(8, 8)).graphs
    assert [(p.nearest, p.farthest) for p in graph.parts] == [(0, 0), (0, 1), (0, 2), (1, 3)]
