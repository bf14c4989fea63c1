"""`python -m bench.gpu_products [PART ...]`: all products, in one run, with a verdict for each
of the criteria at the end.

Parts, each with a share of `--minutes`:

- dynamic: one compilation of linear + gelu + linear, at random numbers of rows, beside eager and
  beside kernels tuned for that number alone
- singles: products of known sizes, those of a list and others that are drawn (`bench.gpu_gemm`)
- narrow: products of eight bits and of packed weights (`bench.gpu_narrow`)
- fused: groups of a product and what surrounds it, of the forward and of the backward
- gates: two products of one operand
- grouped: grouped products, alone and as a mixture of experts has them
- convolutions: those of ResNet-50, ConvNeXt and a U-Net, with what follows them
- fuzzed: every Triton template against float64, at sizes, strides and types that nobody chose

A row that crashes or takes too long costs itself alone (`bench.rows`). `--host` measures `dynamic`
on a CPU: processor time of one thread, the least of several turns.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import gpu_narrow, rows
from bench.gemm_cases import BACKWARD, FUSED, PRODUCTS, Case, drawn, drawn_groups, rand
from bench.gpu_gemm import Recorder, in_turns, ratio, row
from bench.measure import geomean
from bench.rows import Found, Row, mark
from tests.fuzz import templates
from tilewright import config

LAST = torch.channels_last
TURNS = 7  # on a CPU, of each number of rows
LEAST_TURN = 2e-3  # seconds of a turn there
STATIC_EVERY = 5  # one number of rows in so many is tuned for by itself too
SINGLES, GROUPS = 24, 12  # that are drawn
FUZZED = 12  # problems of each template
SHARES = {"dynamic": 1.2, "singles": 2.2, "narrow": 2.2, "fused": 1.5, "gates": 0.6, "grouped": 0.8,
          "convolutions": 1.7, "fuzzed": 0.5}  # fmt: skip


# ---- sizes that change


def layer(device: str) -> tuple[nn.Module, int]:
    """The layer, and what a row has."""
    wide, inner = (1024, 4096) if device == "cuda" else (256, 1024)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    first, last = (nn.Linear(n, m, device=device, dtype=dtype)
                   for n, m in ((wide, inner), (inner, wide)))  # fmt: skip
    return nn.Sequential(first, nn.GELU(), last).eval(), wide


def rows_drawn(count: int, seed: int, most: int) -> list[int]:
    """Of all magnitudes alike, 1 and the largest among them."""
    draw = random.Random(seed)
    found = {1, most}
    while len(found) < min(count, most):
        found.add(round(most ** draw.random()))
    return sorted(found)


@functools.cache
def _compiled(device: str) -> tuple[nn.Module, Callable[..., Any], int]:
    """The layer, and compiled for any number of rows: the first call has one of its own that is
    none of those that are measured."""
    model, wide = layer(device)
    ours = torch.compile(model, backend="tilewright", mode="max-autotune-no-cudagraphs")
    began = time.perf_counter()
    _called(ours, _input(67, wide, device))
    print(f"compiled and tuned in {time.perf_counter() - began:.0f} s", flush=True)
    return model, ours, wide


def dynamic(count: int, is_static: bool, device: str) -> Found:
    model, ours, wide = _compiled(device)
    calls = {"eager": model, "tilewright": ours}
    if is_static:
        calls["static"] = _tuned_for(model, count, wide, device)
    found = _at(calls, count, wide, device)
    static = f", {found['static']:.2f} of a static tune" if is_static else ""
    return {"x": found, "shown": f"{found['eager']:.2f} of eager's speed{static}"}


def dynamic_rows(count: int, seed: int, device: str) -> Iterator[Row]:
    for k, many in enumerate(rows_drawn(count, seed, 8192)):
        is_static = k % STATIC_EVERY == STATIC_EVERY - 1
        yield Row(
            "dynamic", f"{many} rows", functools.partial(dynamic, many, is_static, device), 90.0
        )


def _input(rows: int, wide: int, device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = torch.randn(rows, wide, device=device, dtype=dtype)
    torch._dynamo.decorators.mark_unbacked(made, 0)
    return made


def _called(fn: Callable[..., Any], x: Tensor) -> Any:
    with torch.no_grad():
        return fn(x)


def _tuned_for(model: nn.Module, rows: int, wide: int, device: str) -> Callable[..., Any]:
    def alone(x: Tensor) -> Any:
        return model(x)

    made = torch.compile(alone, backend="tilewright", mode="max-autotune-no-cudagraphs",
                         dynamic=False)  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    _called(made, torch.randn(rows, wide, device=device, dtype=dtype))
    return made


def _at(calls: dict[str, Callable[..., Any]], rows: int, wide: int, device: str
        ) -> dict[str, float]:  # fmt: skip
    """How many times as fast ours is as each, for so many rows; values are compared first."""
    sets = [(_input(rows, wide, device),) for _ in range(4)]
    plain = [(torch.empty_like(x).copy_(x),) for (x,) in sets]
    given = {name: plain if name == "static" else sets for name in calls}
    expected = _called(calls["eager"], sets[0][0])
    found = _called(calls["tilewright"], sets[0][0])
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    if device == "cpu":
        times = _processor_times(calls, given)
        return {name: times[name] / times["tilewright"] for name in times}
    recorder = Recorder()
    with torch.no_grad():
        graphs = {name: recorder.recorded(fn, given[name]) for name, fn in calls.items()}
    turns = in_turns(graphs)
    return {name: ratio(turns, name) for name in graphs}


def _processor_times(calls: dict[str, Callable[..., Any]], given: dict[str, Any]
                     ) -> dict[str, float]:  # fmt: skip
    best = dict.fromkeys(calls, float("inf"))
    for name in [n for _ in range(TURNS) for n in calls]:
        count, began = 0, time.process_time()
        while (spent := time.process_time() - began) < LEAST_TURN or not count:
            _called(calls[name], given[name][count % 4][0])
            count += 1
        best[name] = min(best[name], spent / count)
    return best


# ---- cases of known sizes


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if a.dtype != torch.float64:
        return torch.ops.aten._grouped_mm(a, b, ends)
    bounds = [0, *ends.tolist()]
    parts = [a[s:e] @ b[g] for g, (s, e) in enumerate(itertools.pairwise(bounds))]
    return torch.cat(parts)


def expert(a: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    """As a mixture of experts has it."""
    hidden = F.silu(grouped_mm(a, w1, ends)) * grouped_mm(a, w3, ends)
    return grouped_mm(hidden, w2, ends)


def _ends(rows: int, groups: int) -> Tensor:
    """Uneven, at multiples of 8; one group is empty."""
    draw = random.Random(rows + groups)
    inner = sorted(8 * draw.randrange(rows // 8 + 1) for _ in range(groups - 2))
    ends = [*inner, inner[-1], rows] if groups > 2 else [rows // 2, rows]
    return torch.tensor(ends, dtype=torch.int32).to("cuda")


def grouped_cases() -> list[Case]:
    sizes = [(256, 8, 4096, 1024), (2048, 8, 4096, 1024), (8192, 8, 2048, 4096),
             (4096, 64, 2048, 1408), (16384, 64, 2048, 1408), (512, 128, 2048, 768)]  # fmt: skip
    found = [Case(f"rows {m} in {g} groups, {k} to {n}", grouped_mm,
                  lambda m=m, g=g, n=n, k=k: (rand(m, k), rand(g, n, k).mT, _ends(m, g)))
             for m, g, k, n in sizes]  # fmt: skip
    return [*found, *(Case(f"expert {m} rows in {g} groups, {k} to {n}", expert,
                           lambda m=m, g=g, n=n, k=k: (rand(m, k), rand(g, n, k).mT,
                                                       rand(g, n, k).mT, rand(g, k, n).mT,
                                                       _ends(m, g)), fused=True)
                      for m, g, k, n in sizes[1:5])]  # fmt: skip


def gate(x: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    return F.silu(x @ w1) * (x @ w3)


def normed_gate(x: Tensor, scale: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    return gate(F.rms_norm(x, x.shape[-1:], scale), w1, w3)


def gate_cases() -> list[Case]:
    sizes = [(16, 14336, 4096), (512, 11008, 4096), (4096, 11008, 4096), (4096, 14336, 4096),
             (8192, 8192, 2048), (2048, 5632, 2048)]  # fmt: skip
    found = [Case(f"gate {m}x{n}x{k}", gate,
                  lambda m=m, n=n, k=k: (rand(m, k), rand(n, k).t(), rand(n, k).t()), fused=True)
             for m, n, k in sizes]  # fmt: skip
    return [*found, *(Case(f"norm and gate {m}x{n}x{k}", normed_gate,
                           lambda m=m, n=n, k=k: (rand(m, k), rand(1, k)[0], rand(n, k).t(),
                                                  rand(n, k).t()), fused=True)
                      for m, n, k in sizes[1:3])]  # fmt: skip


def normed(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], scale), w)


def layer_normed(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], scale, scale), w)


def norm_cases() -> list[Case]:
    """Of few rows, as they are when one token after the other is made."""
    found = [Case(f"{fn.__name__} product {m}x{n}x{k}", fn,
                  lambda m=m, n=n, k=k: (rand(m, k), rand(1, k)[0], rand(n, k)), fused=True)
             for fn in (normed, layer_normed) for m in (1, 16, 64)
             for n, k in ((6144, 4096), (4096, 4096))]  # fmt: skip
    return [*found, *(Case(f"norm and gate {m}x11008x4096", normed_gate,
                           lambda m=m: (rand(m, 4096), rand(1, 4096)[0], rand(11008, 4096).t(),
                                        rand(11008, 4096).t()), fused=True)
                      for m in (1, 16))]  # fmt: skip


def _image(n: int, c: int, side: int) -> Tensor:
    return rand(n, c, side, side).to(memory_format=LAST)


def _convolution(name: str, n: int, c: int, side: int, to: int, of: int, *, step: int = 1,
                 groups: int = 1, after: str = "") -> Case:  # fmt: skip
    def run(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, *more: Tensor) -> Tensor:
        made = F.conv2d(x, w, stride=step, padding=of // 2, groups=groups)
        if not after:
            return made
        made = made * scale[:, None, None] + bias[:, None, None]  # batch norm of inference
        if more:
            made = made + more[0]
        return F.gelu(made) if after == "gelu" else made.relu()

    def inputs() -> tuple[Tensor, ...]:
        weight = rand(to, c // groups, of, of).to(memory_format=LAST)
        more = (_image(n, to, -(-side // step)),) if after == "residual" else ()
        return (_image(n, c, side), weight, rand(1, to)[0], rand(1, to)[0], *more)

    fused = f" + {after}" if after else ""
    return Case(f"{name} {c} to {to} {of}x{of} at {side}{fused}", run, inputs, fused=bool(after))


def convolution_cases() -> list[Case]:
    def made() -> Iterator[Case]:
        for after in ("", "relu"):
            yield _convolution("ResNet-50", 64, 3, 224, 64, 7, step=2, after=after)
            for c, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
                yield _convolution("ResNet-50", 64, c, side, c, 3, after=after)
                yield _convolution("ResNet-50", 64, c, side, 4 * c, 1,
                                   after="residual" if after else "")  # fmt: skip
        for c, side in ((96, 56), (192, 28), (384, 14), (768, 7)):
            yield _convolution("ConvNeXt", 64, c, side, c, 7, groups=c)
            yield _convolution("ConvNeXt", 64, c, side, 4 * c, 1, after="gelu")
        for c, to, side in ((320, 320, 64), (640, 640, 32), (1280, 1280, 16), (1920, 640, 32)):
            yield _convolution("U-Net", 4, c, side, to, 3)
            yield _convolution("U-Net", 4, c, side, to, 3, after="residual")

    return list(made())


CASES: dict[str, Callable[[], list[Case]]] = {
    "singles": lambda: [*PRODUCTS, *drawn(SINGLES, 11)],
    "fused": lambda: [*FUSED, *BACKWARD, *drawn_groups(GROUPS, 11), *norm_cases()],
    "gates": gate_cases, "grouped": grouped_cases, "convolutions": convolution_cases,
}  # fmt: skip


def _measured(case: Case, backends: list[str]) -> Found:
    found = row(case, backends)
    return {**found, "shown": _shown(found, backends)}


def _narrow(case: gpu_narrow.Case, backends: list[str]) -> Found:
    found = gpu_narrow.row(case, backends)
    bound = f"{found['x bytes']:.2f} of the bytes' time, " if "x bytes" in found else ""
    return {**found, "shown": bound + _shown(found, backends)}


def _shown(found: Found, backends: list[str]) -> str:
    us, speeds = found.get("us", {}), found.get("x", {})
    cells = [f"{b} {us[b]:.1f} us" if b in us else str(found.get(f"{b} failed", "-"))
             for b in backends]  # fmt: skip
    cells += [f"{speeds[b]:.2f} of {b}" for b in backends if b in speeds and b != "tilewright"]
    cells += [f"{found.get('tilewright s', 0):.1f} s", str(found.get("chosen", ""))]
    return ", ".join(cells)


# ---- templates


def on_card(made: Any, kernel: Any, wide: bool) -> None:
    """In place of the interpreter."""
    from tests.products import arguments, programs
    from tilewright.runtime import launch, triton_build

    source = kernel.source.wide if wide else kernel.source
    function = launch.load(source, triton_build.build(source), 0)
    stream = torch.cuda.current_stream().cuda_stream
    function(stream, programs(made, source), 1, 1, *arguments(made, kernel))
    torch.cuda.synchronize()


def fuzzed(name: str, seed: int) -> Found:
    """Matrix units keep fewer bits of a sum than float32 has, and of eight-bit floats 14."""
    off: list[str] = []
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        cases = [templates.drawn(seed + k, name, "cuda") for k in range(FUZZED)]
        for case in cases:
            case.build()
        for case in cases:
            few = case.made.problem.op == "_scaled_mm"
            why = templates.wrong(case, on_card, 2.0**-13 if few else 2.0**-20)
            off += [f"{case.text}: {why}"] if why else []
    return {"wrong": off, "shown": f"{FUZZED - len(off)} of {FUZZED} right {'; '.join(off)[:300]}"}


# ---- the verdict


def verdict(found: Sequence[Found]) -> list[str]:
    """A line for each criterion."""
    by = {part: [f for f in found if f["part"] == part] for part in SHARES}
    lines = ["", "## verdict"]
    lines += _of_sizes([f["x"] for f in by["dynamic"] if "x" in f])
    few = [f for f in by["narrow"] if "x" in f]
    lines += _over(
        f"shapes, {len(few)} of them of few bits (60, 20)", by["singles"] + few, 1.12, 0.98
    )
    lines += _over("fp8, int8 and int4 alone", few, 0.0, 0.98)
    lines += _near_the_bytes(few)
    together = by["fused"] + by["gates"]
    lines += _over("fused groups, forward and backward (16)", together, 1.6, 0.98)
    lines += _over("gates", by["gates"], 0.0, 0.98)
    lines += _over("grouped products", by["grouped"], 1.2, 0.98)
    plain, fused = ([f for f in by["convolutions"] if f.get("fused") is k] for k in (False, True))
    lines += _over("convolutions alone", plain, 1.0, 1.0)
    lines += _over("convolutions with what follows", fused, 1.15, 1.0)
    lines += _tuning(by["singles"] + few)
    lines += _right(found)
    return [*lines, *rows.rest(found)]


def _of_sizes(found: Sequence[dict[str, float]]) -> list[str]:
    if not found:
        return []
    eager = [r["eager"] for r in found]
    static = [r["static"] for r in found if "static" in r]
    worst = min(eager)
    said = (f"{mark(worst >= 0.98)} dynamic: {geomean(eager):.3f} of eager's speed (geomean of "
            f"{len(eager)}), worst {worst:.3f} (never under 0.98)")  # fmt: skip
    lines = [said]
    if static:
        lines.append(f"{mark(min(static) >= 0.95)} dynamic: {min(static):.3f} of a static tune at "
                     f"worst, of {len(static)} (within 5 %)")  # fmt: skip
    return lines


def _over(name: str, found: Sequence[Found], wanted: float, least: float) -> list[str]:
    lines: list[str] = []
    others = dict.fromkeys(b for f in found for b in f.get("x", {}) if b != "tilewright")
    for other in others:
        speeds = {f["row"]: f["x"][other] for f in found if other in f.get("x", {})}
        mean, worst = geomean(speeds.values()), min(speeds, key=lambda row: speeds[row])
        met = mean >= wanted and speeds[worst] >= least
        asked = f" ({wanted:g}, none under {least:g})" if other == "eager" else ""
        head = mark(met) if other == "eager" else "    "
        under = [row for row, x in speeds.items() if x < least]
        lines.append(f"{head} {name}: {mean:.3f} over {other} (geomean of {len(speeds)}){asked}, "
                     f"worst {speeds[worst]:.3f} {worst}; {len(under)} under")  # fmt: skip
    return lines


def _near_the_bytes(found: Sequence[Found]) -> list[str]:
    mine = {f["row"]: f["x bytes"] for f in found if "x bytes" in f
            and f["kind"].startswith(("int8 ", "int4 ")) and f["rows"] <= 16}  # fmt: skip
    if not mine:
        return []
    worst = max(mine, key=lambda row: mine[row])
    said = (f"{mark(mine[worst] <= 1.25)} weights of few bits, 1 to 16 rows: at most "
            f"{mine[worst]:.2f} of the bytes' time (1.25), {worst}; {len(mine)} rows")  # fmt: skip
    return [said]


def _tuning(found: Sequence[Found]) -> list[str]:
    spent = [f["tilewright s"] for f in found if "tilewright s" in f]
    if not spent:
        return []
    mean = statistics.fmean(spent)
    return [f"{mark(mean <= 2.0)} tuning, cold: {mean:.2f} s a shape, of {len(spent)} (2)"]


def _right(found: Sequence[Found]) -> list[str]:
    """Nobody is further from float64 than twice as far as eager is."""
    errors = [f for f in found if "tilewright error" in f]
    off = [
        f["row"] for f in errors if not f["tilewright error"] <= 2 * f.get("eager error", 1) + 1e-6
    ]
    off += [text for f in found for text in f.get("wrong", ())]
    fuzz = sum("wrong" in f for f in found)
    if not errors and not fuzz:
        return []
    said = (f"{mark(not off)} as near to float64 as is allowed: {len(errors)} rows and {fuzz} "
            f"templates{': ' if off else ''}{'; '.join(off)[:600]}")  # fmt: skip
    return [said]


def every_row(given: Any) -> Iterator[Row]:
    backends = ["eager", *(["inductor"] if given.reference else []), "tilewright"]
    device = "cpu" if given.host else "cuda"
    chosen = ["dynamic"] if given.host else given.parts or list(SHARES)
    if "dynamic" in chosen:
        yield from dynamic_rows(given.rows, given.seed, device)
    for part, cases in CASES.items():
        if part in chosen:
            for case in cases():
                yield Row(part, case.name, functools.partial(_measured, case, backends))
    if "narrow" in chosen:
        for few in gpu_narrow.spread(gpu_narrow.cases()):
            yield Row("narrow", few.name, functools.partial(_narrow, few, backends))
    if "fuzzed" in chosen:
        for name in templates.names():
            if name != "blackwell_ws_persistent_device_tma":
                yield Row("fuzzed", name, functools.partial(fuzzed, name, 1000 * given.seed))


def main(argv: Sequence[str] | None = None) -> int:
    parser = rows.parser("bench.gpu_products", __doc__, SHARES)
    parser.add_argument("--reference", action="store_true", help="measure the reference too")
    parser.add_argument("--host", action="store_true", help="the part `dynamic`, on a CPU")
    parser.add_argument("--rows", type=int, default=30, help="how many numbers of rows are drawn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    if given.host:
        torch.set_num_threads(1)
    if given.worker:  # torch's own compiler is imported: seconds
        torch.compile(torch.neg, backend="eager")(torch.ones(1))
    ordered = sorted(every_row(given), key=lambda r: list(SHARES).index(r.part))
    return rows.run("bench.gpu_products", given, arguments, ordered, SHARES, verdict)


if __name__ == "__main__":
    sys.exit(main())
