"""`python -m tests.gpu.cutedsl [NAME ...]`: kernels of the CuTe DSL on a real card, checked.

Every product of the compile-only tests with every configuration, grouped products with empty groups
and odd offsets, and programs with a template of a user's: each against eager or float64. The twins
without a card are `tests/compile/test_cutedsl_*.py`.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tilewright import config, metrics
from tilewright.gemm.cutedsl import build, gated, grouped, lowering, quack
from tilewright.gemm.cutedsl.resort import Resort
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.problem import GemmProblem, definition
from tilewright.ir import index as ix
from tilewright.runtime import store
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

DOCS = Path(__file__).parents[2] / "docs" / "cutedsl.md"
bf16 = torch.bfloat16


def _on_card(made: Any) -> dict[str, torch.Tensor]:
    """Fresh memory of a problem, laid out as its buffers are."""
    found: dict[str, torch.Tensor] = {}
    for buffer in made.problem.buffers:
        size, stride = ([ix.evaluate(e, made.values) for e in part]
                        for part in (buffer.size, buffer.stride))  # fmt: skip
        t = torch.empty_strided(size, stride, dtype=torch.float32, device="cuda").normal_()
        found[buffer.name] = t.to(buffer.dtype)
    return found


def _results(problem: GemmProblem, run: Callable[..., None], names: list[str], made: Any,
             memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # fmt: skip
    held = {n: t.clone() for n, t in memory.items()}
    for name in problem.writes:
        held[name].fill_(float("nan"))
    run(*(held[n] if n in held else made.values[n] for n in names))
    torch.cuda.synchronize()
    return {n: held[n].float() for n in problem.writes}


def products() -> Iterator[tuple[str, Callable[[], None]]]:
    from tests.compile.test_cutedsl_compile import PRODUCTS

    for name, made in PRODUCTS.items():
        for chosen in quack.CONFIGS:
            yield f"{name} {chosen}", lambda made=made, chosen=chosen: _product(made, chosen)


def _product(made: Any, chosen: quack.Config) -> None:
    p = made.problem
    kernel = quack.QuackCandidate(p, chosen, "cutedsl_quack_0", 1.0).kernel()
    assert isinstance(kernel.source, CuteSource)
    memory = _on_card(made)
    got = _results(p, kernel.source, [n for _, n in kernel.arguments], made, memory)
    wide = p.operands[0].dtype.itemsize == 1  # torch has no plain product of eight bits
    if wide:
        left, right = (memory[o.view.buffer].float() for o in p.operands)
        expected = {"c": left.view(320, 128) @ right.view(256, 128).t()}
    else:
        spare = Resort.of(p, definition(p))
        expected = _results(p, spare, list(spare.names), made, memory)
    for name, value in got.items():
        torch.testing.assert_close(value.view(expected[name].shape), expected[name],
                                   rtol=3e-2, atol=6e-2)  # fmt: skip


def gates() -> Iterator[tuple[str, Callable[[], None]]]:
    """Two matrices apart from each other, in both orders, and of one matrix, by every
    configuration; then a whole block of a transformer, forward and backward."""
    from tests.compile.test_cutedsl_gated import PAIRS

    for name in PAIRS:
        for chosen in gated.configurations(Target.of("cuda")):
            for turned in (False, True):
                case = f"gate {name} {chosen} {turned}"
                yield case, lambda n=name, c=chosen, t=turned: _gate(n, c, t)
    yield "gate in a block", _gated_block


def _gate(name: str, chosen: quack.Config, turned: bool) -> None:
    from tests.compile.test_cutedsl_gated import PAIRS

    made = PAIRS[name]
    p = made.problem
    kernel = gated.GatedCandidate(p, chosen, "gate", 1.0).kernel()
    assert isinstance(kernel.source, CuteSource)
    build.load(kernel.source.request)  # what cannot be loaded would be torch's own operations
    memory = _on_card(made)
    one, two = (v.buffer for v in gated.rights(p))
    if one != two and (memory[one].data_ptr() < memory[two].data_ptr()) == turned:
        memory[one], memory[two] = memory[two], memory[one]
    spare = Resort.of(p, definition(p))
    expected = _results(p, spare, list(spare.names), made, memory)
    for name in p.writes:
        memory[name].fill_(float("nan"))
    kernel.source(*(memory[n] if n in memory else made.values[n] for _, n in kernel.arguments))
    for name, value in expected.items():
        near = 0.02 * value.abs().max().item()
        torch.testing.assert_close(memory[name].float(), value, rtol=3e-2, atol=near)


def _gated_block() -> None:
    def block(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> Any:
        return (torch.nn.functional.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t()

    sizes = ((1000, 512), (1408, 512), (1408, 512), (512, 1408))
    given = [(torch.randn(s, device="cuda") / 8).to(bf16).requires_grad_() for s in sizes]
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CUTEDSL"}
    torch._dynamo.reset()
    with config.patch(options):
        found, codes = run_and_get_code(torch.compile(block, backend="tilewright"), *given)
        mine = torch.autograd.grad(found.float().square().sum(), given)
    assert "mm_pair" in codes[0], "the gate is not one kernel"
    expected = block(*given)
    theirs = torch.autograd.grad(expected.float().square().sum(), given)
    for a, e in zip((found, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, e, rtol=5e-2, atol=0.02 * e.abs().max().item())


def groups() -> Iterator[tuple[str, Callable[[], None]]]:
    """CD-L1, CD-L2, CD-L6, CD-L7."""
    for count in (2, 8):
        for k, n in ((64, 128), (128, 256)):
            yield f"grouped {count} {k} {n}", lambda c=count, k=k, n=n: _grouped(c, k, n)
    for a in ("offset", "pitch", "contiguous"):
        for b in ("contiguous", "expanded"):
            yield f"grouped {a} {b}", lambda a=a, b=b: _laid_out(a, b)


def _reference(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    starts = [0, *ends]
    return torch.cat([a[s:e] @ b[g] for g, (s, e) in enumerate(zip(starts, ends, strict=False))])


def _compiled() -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()

    def f(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._grouped_mm(a, b, offs)

    return torch.compile(f, backend="tilewright", dynamic=False)


ON = {"max_autotune": True, "max_autotune_gemm_backends": "CUTEDSL",
      "cutedsl_enable_autotuning": True}  # fmt: skip


def _grouped(count: int, k: int, n: int) -> None:
    rows = 256 * count
    a = torch.randn(rows, k, device="cuda", dtype=bf16) * 0.1
    b = torch.randn(count, k, n, device="cuda", dtype=bf16) * 0.01
    even = [256 * (g + 1) for g in range(count)]
    odd = [1, *(256 * g + 37 for g in range(1, count - 1)), rows]
    with config.patch(ON):
        f = _compiled()
        before = -1
        for ends in (even, odd[-count:], [0] * (count - 1) + [rows], [rows] * count):
            offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
            torch.testing.assert_close(f(a, b, offs), _reference(a, b, ends), rtol=2e-2, atol=1e-3)
            missed = metrics.counters["inductor"]["cutedsl_kernel_cache_miss"]
            assert before in (-1, missed), "other offsets were compiled for"
            before = missed


def _laid_out(a: str, b: str) -> None:
    count, rows, k, n = 8, 1024, 64, 128
    base = torch.randn(rows * (k + 8) + 256, device="cuda", dtype=bf16) * 0.1
    left = {"offset": base.as_strided((rows, k), (k, 1), 128),
            "pitch": base.as_strided((rows, k), (k + 8, 1)),
            "contiguous": base[: rows * k].view(rows, k)}[a]  # fmt: skip
    one = torch.randn(1 if b == "expanded" else count, k, n, device="cuda", dtype=bf16) * 0.01
    right = one.expand(count, k, n)
    ends = [128 * (g + 1) for g in range(count)]
    with config.patch(ON):
        got = _compiled()(left, right, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    torch.testing.assert_close(got, _reference(left, right, ends), rtol=2e-2, atol=1e-3)


def templates() -> Iterator[tuple[str, Callable[[], None]]]:
    """CD-K17, CD-K18, CD-M1, CD-M2, CD-M9: the programs of the tests without a card."""
    from tests.compile.test_cutedsl_programs import EPILOGUES

    for name, (f, sizes) in EPILOGUES.items():
        for dynamic in (False, True):
            yield f"template {name} {dynamic}", lambda f=f, s=sizes, d=dynamic: _template(f, s, d)


@contextmanager
def documented() -> Iterator[None]:
    """The template of the documentation computes sums."""
    op = lowering(torch.ops.aten.add.Tensor)
    block = DOCS.read_text().split("```python\n")[1].split("```")[0]
    from tilewright.gemm.cutedsl import CuteDSLTemplate

    CuteDSLTemplate.all_templates.pop("matrix_add", None)
    exec(compile(block, str(DOCS), "exec"), {"__name__": "documented"})
    try:
        yield
    finally:
        op.forget()


def _template(f: Callable[..., Any], sizes: tuple[tuple[int, ...], ...], dynamic: bool) -> None:
    with documented():
        torch._dynamo.reset()
        given = [torch.randn(s, device="cuda") for s in sizes]
        got = torch.compile(f, backend="tilewright", dynamic=dynamic)(*given)
        torch.testing.assert_close(got, f(*given))


def choices() -> Iterator[tuple[str, Callable[[], None]]]:
    """CD-K18: all three are timed, and the fastest is taken."""
    yield "three choices", _three


def _three() -> None:
    seen: list[dict[Any, float]] = []
    select.add_feedback_saver(lambda times, *_: seen.append(dict(times)))
    try:
        with documented(), fresh_cache():
            torch._dynamo.reset()
            x, y = (torch.randn(128, 128, device="cuda") for _ in range(2))
            f = torch.compile(torch.add, backend="tilewright", options={"max_autotune": True})
            torch.testing.assert_close(f(x, y), x + y)
    finally:
        select.clear_feedback_savers()
    timed = {c.description: t for one in seen for c, t in one.items() if "cutedsl" in c.name}
    assert len(timed) == 3 and all(map(math.isfinite, timed.values())), timed


def together() -> Iterator[tuple[str, Callable[[], None]]]:
    """CD-M3: calls that need nothing of each other are one launch."""
    from tests.compile.test_cutedsl_programs import TWO

    for name, f in TWO.items():
        yield f"two calls {name}", lambda f=f: _together(f)


def _together(f: Callable[..., Any]) -> None:
    from tests.compile.test_cutedsl_programs import beside
    from tilewright.gemm.cutedsl import CuteDSLTemplate

    CuteDSLTemplate.all_templates.pop("beside_add", None)
    beside()
    try:
        torch._dynamo.reset()
        metrics.reset()
        given = [torch.randn(96, 40, device="cuda") for _ in range(4)]
        got = torch.compile(f, backend="tilewright", dynamic=False)(*given)
        torch.testing.assert_close(got, f(*given))
        assert metrics.counters["inductor"]["cutedsl_horizontal_fusion_counter"] == 1
    finally:
        lowering(torch.ops.aten.add.Tensor).forget()


def masks() -> Iterator[tuple[str, Callable[[], None]]]:
    """CD-M5: what is padded is loaded where it is, and is zero beside."""
    yield "a masked load", _masked


def _masked() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (3, 5, 1, 2)) + y

    with documented():
        torch._dynamo.reset()
        metrics.reset()
        x, y = torch.randn(125, 120, device="cuda"), torch.randn(128, 128, device="cuda")
        torch.testing.assert_close(torch.compile(f, backend="tilewright")(x, y), f(x, y))
        assert metrics.counters["inductor"]["cutedsl_prologue_fusion_counter"] == 1


WITHOUT = """
import pickle, sys
sys.modules["cutlass"] = sys.modules["quack"] = None
import torch
source, names = pickle.loads(bytes.fromhex(sys.argv[1]))
a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
given = {"x0": a, "x1": b.t(), "c": torch.full_like(a, float("nan"))}
source(*(given[name] for name in names))
near = 2 * torch.finfo(a.dtype).eps  # of sums that are near sqrt(k)
torch.testing.assert_close(given["c"], a @ b.t(), rtol=near, atol=near * a.shape[1] ** 0.5)
"""


def packaged() -> Iterator[tuple[str, Callable[[], None]]]:
    """CD-M10: a kernel that was compiled runs in a process that has no DSL."""
    yield "without the DSL", _without


def _without() -> None:
    from tests.products import problem

    a, b = (torch.empty(512, 512, dtype=bf16) for _ in range(2))
    made = problem("mm", a, b.t(), target=Target.of("cuda"))
    kernel = quack.candidates(made.problem)[0].kernel()
    assert isinstance(kernel.source, CuteSource)
    kernel.source.submit().result()
    sent = pickle.dumps((kernel.source, [name for _, name in kernel.arguments])).hex()
    given = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(store.root())}
    subprocess.run([sys.executable, "-c", WITHOUT, sent], check=True, env=given)


def main() -> int:
    wanted, failed, ran = sys.argv[1:], 0, 0
    with fresh_cache():
        for name, check in (*templates(), *choices(), *together(), *masks(), *packaged(),
                            *groups(), *gates(), *products()):  # fmt: skip
            if wanted and not any(w in name for w in wanted):
                continue
            ran, start = ran + 1, time.perf_counter()
            try:
                check()
                print(f"{name}: ok ({time.perf_counter() - start:.1f} s)", flush=True)
            except Exception:
                failed += 1
                print(f"{name}: FAILED\n{traceback.format_exc(limit=3)}", flush=True)
        build._workers.end()
    print(f"{ran - failed} of {ran} passed; {grouped.__name__} and {quack.version()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
