"""`python -m bench.rehearse NAME [ARGUMENT ...]`: a benchmark for a card, such as `gpu_products`,
without one.

Everything is compiled as for an H200, Triton's kernels and what nvcc and the DSL make included;
nothing is run: tensors are fake, all times are 1, results are not compared, and of the candidates
for a product one is drawn, where a card would measure. So what is wrong with the benchmark itself,
with a case, or with another version of torch and triton is found before a card is waited for.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench.pretend import cuda

cuda("sm_90")  # before torch is imported

import torch  # noqa: E402
from torch._dynamo.backends import registry  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tilewright import backend  # noqa: E402
from tilewright.runtime import launch  # noqa: E402
from tilewright.tune import select  # noqa: E402


def rehearsed(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles, and gives back what was to be compiled."""

    def compiled(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        compile_fx(gm, inputs, **options)
        return gm.forward

    return compiled


def drawn(subject: Any, trials: Sequence[Any]) -> Any:
    """One that the filters leave, and that can be built."""
    left = list(trials)
    random.Random(subject.key).shuffle(left)
    return left[0]


def nothing(*args: Any, **options: Any) -> None:
    pass


def stubs() -> None:
    """In place of all that waits for a card, times it or looks at its results."""
    registry._COMPILER_FNS["tilewright"] = rehearsed(backend.compile_fx)
    launch.load = lambda *args, **options: nothing
    select.unmeasured = drawn
    from tilewright.gemm import choose

    choose._Chooser._measurable = lambda self: False
    torch.cuda.empty_cache = nothing
    torch.cuda.graph_pool_handle = nothing
    torch.testing.assert_close = nothing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rehearse", description=__doc__)
    parser.add_argument("name", help="of the module in bench")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own")
    options = parser.parse_args(argv)
    stubs()
    module = importlib.import_module(f"bench.{options.name}")
    timing = importlib.import_module("bench.gpu_gemm")
    setattr(timing, "in_float64", nothing)  # noqa: B010
    for where in (timing, importlib.import_module("bench.gpu_narrow"), module):
        for name, stub in STUBS.items():
            if hasattr(where, name):
                setattr(where, name, stub)
    if hasattr(module, "templates"):
        module.templates.wrong = compiled_alone
    one = ["--here"] if hasattr(module, "rows") else []
    sys.argv = [options.name, *options.arguments, *one]
    with FakeTensorMode(allow_non_fake_inputs=True):
        return module.main() or 0


def compiled_alone(case: Any, run: Callable[..., Any], grain: float) -> str:
    """In place of a comparison with float64."""
    run(case.made, case.kernel(), False)
    return ""


class Recorder:
    def recorded(self, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        fn(*sets[0])


STUBS: dict[str, Any] = {
    "Recorder": Recorder,
    "in_turns": lambda graphs: [dict.fromkeys(graphs, 1.0)] * 4,
    "error": lambda result, expected: 0.0,
    "close": nothing,
    "microseconds": lambda calls: 1.0,
}


if __name__ == "__main__":
    sys.exit(main())
