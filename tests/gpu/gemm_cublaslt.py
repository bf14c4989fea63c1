"""`python -m tests.gpu.gemm_cublaslt`: cuBLASLt's algorithms on a real card.

For each shape all algorithms the heuristics offer: numbers against float64 (an algorithm may be
twice as far off as torch's own product), times by replaying CUDA graphs against torch's. Then what
a call costs the host, what fused epilogues do to NaN, and the facts the provider relies on.
`tests/compile/test_cublaslt.py` is the twin that needs no card.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.compile import fake_cublaslt
from tests.gpu.gemm_cases import rounded
from tests.problems import Case, case, fused, linear
from tilewright import metrics
from tilewright.gemm.cublaslt import CublasLt, LtCandidate
from tilewright.ir import build
from tilewright.ir.expr import Expr, load
from tilewright.lower import formula as f
from tilewright.lower.activations import gelu
from tilewright.runtime import cublaslt as lt

LT = CublasLt()
HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAUNCHES, REPLAYS, SETS = 20, 9, 4
failures: list[str] = []


@dataclass(frozen=True)
class Shape:
    name: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = BRAIN
    layout: str = "nt"  # of each operand: n row by row, t column by column
    batch: int = 0
    bias: str = ""  # row or matrix
    tf32: bool = False


SHAPES = [
    Shape("decode 1", 1, 4096, 4096),
    Shape("decode 16", 16, 14336, 4096),
    Shape("decode 64 nn", 64, 4096, 14336, layout="nn"),
    Shape("prefill", 2048, 4096, 4096),
    Shape("linear + row", 2048, 4096, 1024, bias="row"),
    Shape("+ matrix", 512, 2048, 2048, bias="matrix"),
    Shape("large k tn", 256, 256, 65536, layout="tn"),
    Shape("odd", 1023, 767, 333, HALF, "nn"),
    Shape("small half", 128, 128, 128, HALF, "nn"),
    Shape("square", 8192, 8192, 8192),
    Shape("float32", 1024, 1024, 1024, FULL, "nn"),
    Shape("float32 tf32", 2048, 2048, 2048, FULL, "nt", tf32=True),
    Shape("float64", 512, 512, 512, DOUBLE, "nn"),
    Shape("bmm qk", 128, 128, 64, HALF, "nt", batch=96),
    Shape("baddbmm", 128, 128, 64, BRAIN, "nn", batch=96, bias="matrix"),
]


def matrix(rows: int, cols: int, shape: Shape, layout: str = "n") -> torch.Tensor:
    lead = (shape.batch,) if shape.batch else ()
    size = (rows, cols) if layout == "n" else (cols, rows)
    made = torch.randn(*lead, *size, device="cuda", dtype=shape.dtype)
    return made if layout == "n" else made.transpose(-1, -2)


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def operands(s: Shape) -> Operands:
    a, b = matrix(s.m, s.k, s, s.layout[0]), matrix(s.k, s.n, s, s.layout[1])
    out = matrix(s.m, s.n, s)
    bias = None
    if s.bias:
        bias = matrix(s.m, s.n, s) if s.bias == "matrix" else matrix(1, s.n, s)[0]
    return a, b, out, bias


def problem(s: Shape, t: Operands) -> Case:
    a, b, out, bias = t
    op = ("baddbmm" if s.batch else "addmm") if s.bias else ("bmm" if s.batch else "mm")
    return case(op, a, b, out, bias)


def eager(t: Operands) -> Callable[[], Any]:
    a, b, out, bias = t
    if bias is None:
        product = torch.bmm if a.dim() == 3 else torch.mm
        return lambda: product(a, b, out=out)
    added = torch.baddbmm if a.dim() == 3 else torch.addmm
    return lambda: added(bias, a, b, out=out)


# ---- measuring


def microseconds(runs: list[Callable[[], Any]]) -> float:
    """The median of one launch, each with the next of the sets."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for k in range(LAUNCHES):
                runs[k % len(runs)]()
        graph.replay()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(times)


def host_microseconds(run: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            run()
        times.append((time.perf_counter() - start) * 1e4)
    torch.cuda.synchronize()
    return statistics.median(times)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.square().mean().sqrt()
    return float(((found.double() - expected).abs().max() / scale).nan_to_num(1e9))


def expect(condition: bool, what: str) -> None:
    if not condition:
        failures.append(what)
        print("FAILED", what)


# ---- the table


def table() -> None:
    print(f"{'shape':14} {'m n k':>18} algos  torch us  first us  best of 8   best us (rank)  "
          "torch/best  error/torch's  seconds  best")  # fmt: skip
    for s in SHAPES:
        began = time.perf_counter()
        torch.backends.cuda.matmul.allow_tf32 = s.tf32
        sets = [operands(s) for _ in range(SETS)]
        cases = [problem(s, t) for t in sets]
        said = LT.supports(cases[0].problem)
        expect(said == "", f"{s.name}: {said}")
        found = [] if said else list(LT.candidates(cases[0].problem, "max"))
        reference = microseconds([eager(t) for t in sets])
        if not found:
            continue
        errors = numbers(s, cases[0], sets[0], found)
        times = [microseconds([c.bound(x) for c in cases]) for x in found]
        best = min(range(len(times)), key=times.__getitem__)
        size = f"{s.m} {s.n} {s.k}" + (f" x{s.batch}" if s.batch else "")
        print(f"{s.name:14} {size:>18} {len(found):5} {reference:9.2f} {times[0]:9.2f} "
              f"{min(times[:8]):10.2f} {times[best]:9.2f} ({best:2})   "
              f"{reference / times[best]:9.3f} {max(errors):13.2f} "
              f"{time.perf_counter() - began:9.1f}  {found[best].description}",
              flush=True)  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = False


def numbers(s: Shape, made: Case, t: Operands, found: list[LtCandidate]) -> list[float]:
    """How much farther off than torch each algorithm is. What fails or is too far off is dropped;
    of what the heuristics themselves offer nothing may be."""
    a, b, out, bias = t
    expected = a.double() @ b.double()
    if bias is not None:
        expected += bias.double()
    eager(t)()
    # torch's own product in float64 is what it is compared with
    least = 1e-13 if s.dtype == DOUBLE else torch.finfo(s.dtype).eps
    allowed = max(error(out, expected), least)
    ratios: list[float] = []
    for candidate in list(found):
        said = ""
        try:
            made.run(candidate)
            torch.cuda.synchronize()
            ratio = error(out, expected) / allowed
            said = f"{ratio:.1f} times torch's error" if ratio >= 2.5 else ""
            ratios += [] if said else [ratio]
        except RuntimeError as failure:
            said = str(failure)
        if said:
            found.remove(candidate)
            print(f"  {s.name} {candidate.name} ({candidate.description}): {said}")
            expect(candidate.rank >= 8, f"{s.name} {candidate.name}: {said}")
    return ratios


# ---- epilogues


def applied(dtype: torch.dtype) -> dict[str, tuple[Callable[[Expr], Expr], Any]]:
    wide, cast = torch.float32, build.cast
    return {
        "relu": (lambda x: cast(f.maximum(0, cast(x, wide)), dtype), torch.relu),
        "gelu": (lambda x: cast(gelu(cast(x, wide), "tanh"), dtype),
                 lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    }  # fmt: skip


def epilogues() -> None:
    s = Shape("", 2048, 4096, 1024, bias="row")
    for name, (value, plain) in applied(s.dtype).items():
        sets = [operands(s) for _ in range(SETS)]
        outs = [torch.empty_like(t[2]) for t in sets]
        cases = [fused(problem(s, t), value, out) for t, out in zip(sets, outs, strict=True)]
        said = LT.supports(cases[0].problem)
        expect(said == "", f"{name}: {said}")
        if said:
            continue
        found = list(LT.candidates(cases[0].problem, "max"))
        a, b, _, bias = sets[0]
        assert bias is not None
        exact = plain(a.double() @ b.double() + bias.double())
        base = error(plain(torch.addmm(bias, a, b)), exact)
        worst = 0.0
        for x in found:
            cases[0].run(x)
            worst = max(worst, error(outs[0], exact) / base)
        expect(worst < 2, f"bias and {name}: {worst:.1f} times eager's error")
        times = [microseconds([c.bound(x) for c in cases]) for x in found]
        reference = microseconds(
            [lambda t=t, p=plain: p(torch.addmm(t[3], t[0], t[1])) for t in sets]
        )
        print(f"bias and {name}: {len(found)} algorithms, eager {reference:.2f} us, "
              f"best {min(times):.2f} us, error {worst:.2f} of eager's")  # fmt: skip
        not_a_number(name, value, plain)
    residual()


def not_a_number(name: str, value: Callable[[Expr], Expr], plain: Any) -> None:
    """What becomes of NaN and infinities, in every algorithm."""
    s = Shape("", 128, 256, 64)
    a, b, c, _ = operands(s)
    a[3, 5], a[7, 0], a[8, 0] = float("nan"), float("inf"), float("-inf")
    out = torch.empty_like(c)
    made = fused(case("mm", a, b, c), value, out)
    if LT.supports(made.problem):
        return
    expected = plain(a @ b)
    kept = 0
    found = LT.candidates(made.problem, "max")
    for x in found:
        made.run(x)
        kept += bool(torch.equal(out.isnan(), expected.isnan()))
    print(f"  {name} keeps NaN as eager does in {kept} of {len(found)} algorithms")


def residual() -> None:
    """A matrix added in the epilogue is the library's C."""
    s = Shape("", 2048, 4096, 1024, bias="row")
    a, b, c, bias = operands(s)
    more, out = torch.randn_like(c), torch.empty_like(c)
    base = problem(s, (a, b, c, bias))

    def value(x: Expr) -> Expr:
        other = build.cast(load("x", s.dtype, linear(base.problem, more)), FULL)
        return build.cast(f.add(build.cast(x, FULL), other), s.dtype)

    made = fused(base, value, out, x=more)
    said = LT.supports(made.problem)
    expect(said == "", f"residual: {said}")
    if said:
        return
    assert bias is not None
    exact = a.double() @ b.double() + bias.double() + more.double()
    found = list(LT.candidates(made.problem, "max"))
    errors: list[float] = []
    for x in found:
        made.run(x)
        errors.append(error(out, exact))
    expect(max(errors) < 2 * error(torch.addmm(bias, a, b) + more, exact), "residual: numbers")
    times = [microseconds([made.bound(x)]) for x in found]
    reference = microseconds([lambda: torch.addmm(bias, a, b) + more])
    print(f"bias and residual: {len(found)} algorithms, eager {reference:.2f} us, "
          f"best {min(times):.2f} us")  # fmt: skip


# ---- int8


def integers() -> None:
    a = torch.randint(-128, 128, (256, 512), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 128, (384, 512), dtype=torch.int8, device="cuda").t()
    out = torch.empty(256, 384, dtype=torch.int32, device="cuda")
    made = case("mm", a, b, out)
    said = LT.supports(made.problem)
    if said:
        print("int8:", said)
        return
    found = LT.candidates(made.problem, "max")
    good = 0
    for x in found:
        made.run(x)
        good += bool(torch.equal(out.double(), a.double() @ b.double()))
    expect(good == len(found), f"int8: {good} of {len(found)} are right")
    print(f"int8: {good} of {len(found)} algorithms are right")


# ---- facts


def host() -> None:
    for name, s in (("mm", Shape("", 32, 32, 32)), ("addmm", Shape("", 32, 32, 32, bias="row"))):
        t = operands(s)
        made = problem(s, t)
        found = LT.candidates(made.problem, "quick")
        for x in (found[0], next((x for x in found if x.source.algorithm.workspace), found[0])):
            mine, direct = host_microseconds(made.bound(x)), made.bound(x).func.run
            args = made.bound(x).args
            bare = host_microseconds(lambda d=direct, a=args: d(*a))
            theirs = host_microseconds(eager(t))
            space = x.source.algorithm.workspace
            print(f"host, {name} {x.name} (workspace {space}): {mine:.2f} us, without the "
                  f"Python frame {bare:.2f}, torch with out= {theirs:.2f}")  # fmt: skip


def facts() -> None:
    lib = lt.library()
    if isinstance(lib, str):
        print(lib)
        sys.exit(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {lib.version} "
          f"({lib.path})")  # fmt: skip
    text = fake_cublaslt.header()
    wrong = ["no header here"] if text is None else fake_cublaslt.disagreements(text)
    print("constants against the header:", wrong or "all equal")
    expect(text is None or not wrong, "constants")
    s = SHAPES[3]
    made = problem(s, operands(s))
    first = LT.candidates(made.problem, "max")[0].source
    for promised in (16, 256):
        pointers = tuple(replace(p, alignment=promised) for p in first.call.pointers)
        call = replace(first.call, pointers=pointers)
        start = time.perf_counter()
        found = lt.algorithms(call, 64, torch.device("cuda"), f"promise {promised}")
        took = (time.perf_counter() - start) * 1e3
        same = bool(found) and found[0].data == first.algorithm.data
        print(f"promising {promised} bytes: {len(found)} algorithms in {took:.1f} ms, "
              f"{'the same' if same else 'another'} first")  # fmt: skip


def robust() -> None:
    """Recorded, from another stream, after pickling, and from memory that is not aligned."""
    s = Shape("", 256, 512, 4096, bias="row")
    t = operands(s)
    a, b, out, bias = t
    assert bias is not None
    bias.add_(100)  # more than the sums, so that a result without it is seen
    near = rounded(a.dtype, s.k)
    made = problem(s, t)
    for x in LT.candidates(made.problem, "quick"):
        source = pickle.loads(pickle.dumps(x.kernel().source))
        run = partial_of(made, x, source)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        run()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        for one in (a, b):
            one.copy_(torch.randn_like(one))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expect(torch.allclose(out, torch.addmm(bias, a, b), **near), f"replayed {x.name}")
    odd = torch.empty(a.numel() + 1, device="cuda", dtype=a.dtype)[1:].copy_(a.reshape(-1))
    given = dict(made.tensors, a=odd)
    kernel = LT.candidates(made.problem, "quick")[0].kernel()
    out.fill_(float("nan"))
    kernel.source(*(given[name] for _, name in kernel.arguments))
    expect(torch.allclose(out, torch.addmm(bias, a, b), **near), "unaligned memory")
    print("counters:", dict(metrics.counters["cublaslt"]))


def partial_of(made: Case, candidate: LtCandidate, source: Any) -> Callable[[], None]:
    args = [made.tensors[name] for _, name in candidate.kernel().arguments]
    return lambda: source(*args)


def main() -> int:
    torch.manual_seed(0)
    for part in (facts, robust, host, integers, table, epilogues):
        try:
            part()
        except Exception as failure:
            traceback.print_exc()
            failures.append(f"{part.__name__}: {failure}")
    print("all well" if not failures else "FAILED:\n" + "\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
