"""Programs of unusual size, for a card that is not there: kernels compile, and grids fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import pretend
from tests.pretend import pretended
from tilewright import config, metrics, pipeline
from tilewright.backend import count_schedules
from tilewright.runtime import launch, triton_build
from tilewright.runtime.triton_build import TritonSource
from tilewright.schedule.plan import Schedule

HALF = torch.float16
Size = tuple[int, ...]

PROGRAMS: dict[str, tuple[Callable[..., Any], list[Size], str]] = {
    # name: (function, sizes of its arguments, card)
    "rows of 2**31": (lambda x: torch.softmax(x, -1), [(3, 2**31 + 4)], "sm_90"),
    "2**31 rows": (lambda x: torch.softmax(x, -1), [(2**31 + 4, 2)], "sm_80"),
    "2**31 turned": (lambda x: x.t().contiguous() * 2, [(2**16, 2**15 + 1)], "sm_100"),
    "the largest of 2**31": (lambda x: (x.argmax(), x.sum()), [(2**31 + 5,)], "sm_90"),
    "25 dimensions": (lambda x: x.permute(*reversed(range(25))) + 1, [(2,) * 15 + (1,) * 10],
                      "sm_90"),
    "70 arguments": (lambda *xs: sum(x * k for k, x in enumerate(xs)), [(100, 3)] * 70, "sm_80"),
    "nothing": (lambda x: (x.sum(0), torch.softmax(x, 0), x.cumsum(0), torch.cat([x, x]), x.var(0)),
                [(0, 5)], "sm_90"),
    "no dimension": (lambda x: (x.relu(), x.sum(), x.cumsum(0), torch.softmax(x, 0)), [()],
                     "sm_90"),
}  # fmt: skip


def sources(function: Callable[..., Any], sizes: list[Size]) -> list[TritonSource]:
    """The kernels of a program, as they are built; none is left to torch."""
    found: list[TritonSource] = []

    def seen(role: str, plan: Schedule) -> None:
        written = pipeline.write(plan).kernels.values()
        kernels = [s for s in written if isinstance(s, TritonSource)]
        assert len(kernels) == len(written)
        found.extend(k for s in kernels for k in (s, s.wide) if k is not None)

    torch._dynamo.reset()
    metrics.reset()
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        args: list[Tensor] = [torch.empty(s, dtype=HALF, device="cuda") for s in sizes]
        torch.compile(function, backend=count_schedules(seen))(*args)
    assert not metrics.fallback_ops and not metrics.counters["triton"]
    return found


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pretended
def test_it_fits(name: str) -> None:
    function, sizes, arch = PROGRAMS[name]
    pretend.cuda(arch)
    try:
        with config.patch({"cuda.arch": arch}):
            made = sources(function, sizes)
            assert made
            for source in made:
                built = triton_build.build(source)
                programs = eval(source.programs(built.config), {}, dict(source.sizes))
                assert 0 <= programs <= launch.MOST_PROGRAMS[0]
    finally:
        pretend.cuda()
