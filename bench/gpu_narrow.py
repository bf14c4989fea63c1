"""`python -m bench.gpu_narrow [--reference] [--only TEXT] [--seconds S] [--out FILE]`: products of
eight bits and of packed weights on a card, eager, the reference and tilewright in one run.

fp8 with scales of everything, of rows and of blocks, int8 by int8, weights of eight and of four
bits, for 1, 16 and 64 rows and for many. Results are compared with float64, times are of the device
and taken in turns as in `bench.gpu_gemm`. Beside them are the microseconds the bytes need at 4.24
TB/s, and how many times these ours takes. A row that fails says so, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_gemm import Recorder, chosen, compiled, error, in_turns, ratio
from bench.measure import geomean

BANDWIDTH = 4.24e6  # bytes a microsecond of an H200
E4, BF16 = torch.float8_e4m3fn, torch.bfloat16
GROUP = 128
CACHE = 120 << 20  # bytes that are surely past the card's cache
MOST_SETS = 16
ROWS = (1, 16, 64)
WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336))  # n, k
LARGE = ((4096, 4096, 4096), (8192, 8192, 4096), (2048, 14336, 4096))  # m, n, k


@dataclass(frozen=True)
class Case:
    """`exact` is the same in float64, of the same inputs."""

    kind: str
    sizes: tuple[int, int, int]  # m, n, k
    fn: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    exact: Callable[..., Tensor]

    @property
    def name(self) -> str:
        m, n, k = self.sizes
        return f"{self.kind} {m}x{n}x{k}"


# ---- programs


def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, device="cuda").to(dtype)


def positive(*size: int) -> Tensor:
    return torch.rand(size, device="cuda") + 0.5


def scaled(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), s, t, out_dtype=BF16, use_fast_accum=True)


def scaled_exactly(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), s, t, out_dtype=BF16)


def scaled_in_float64(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return (a.double() * _spread(s, a)) @ (b.double() * _spread(t.t(), b)).t()


def _spread(scale: Tensor, operand: Tensor) -> Tensor:
    for dim, size in enumerate(operand.shape):
        if scale.dim() == 2 and 1 < scale.shape[dim] < size:
            scale = scale.repeat_interleave(GROUP, dim).narrow(dim, 0, size)
    return scale.double()


def quantised(a: Tensor, b: Tensor, s: Tensor, t: Tensor, step: Tensor) -> Tensor:
    """An activation behind it, in eight bits again."""
    return (scaled(a, b, s, t).relu().float() * step).clamp(-448, 448).to(E4)


def quantised_in_float64(a: Tensor, b: Tensor, s: Tensor, t: Tensor, step: Tensor) -> Tensor:
    return (scaled_in_float64(a, b, s, t).relu() * step.double()).clamp(-448, 448)


def integers(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return (torch._int_mm(a, b.t()).float() * s).to(BF16)


def integers_in_float64(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return a.double() @ b.double().t() * s.double()


def int8_rows(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


def int8_groups(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    apart = w.to(x.dtype).unflatten(1, (s.shape[1], -1))
    return F.linear(x, (apart * s[..., None]).flatten(1))


def int4_groups(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Neighbours along k in a byte, scales and zero points of groups."""
    apart = torch.stack([w & 15, w >> 4], -1).flatten(1).to(x.dtype)
    return F.linear(
        x, ((apart.unflatten(1, (s.shape[1], -1)) - z[..., None]) * s[..., None]).flatten(1)
    )


def int4_tiles(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """As torch packs them for a card's matrix units."""
    return torch.ops.aten._weight_int4pack_mm(x, w, GROUP, s)


def int4_tiles_in_float64(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Of the weights that the library has unpacked: a product with ones."""
    one = torch.eye(x.shape[1], dtype=BF16, device="cuda")
    return x.double() @ int4_tiles(one, w, s).double()


def in_float64(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *a: fn(*(t.double() if t.is_floating_point() else t for t in a))


# ---- cases


def _eights(m: int, n: int, k: int, kind: str) -> Callable[[], tuple[Tensor, ...]]:
    blocks = k // GROUP

    def made() -> tuple[Tensor, ...]:
        scales = {
            "tensor": lambda: (positive(1)[0], positive(1)[0]),
            "rows": lambda: (positive(m, 1), positive(1, n)),
            "blocks": lambda: (positive(blocks, m).t(), positive(n // GROUP, blocks).t()),
        }[kind]()
        return draw(m, k, dtype=E4), draw(n, k, dtype=E4), *scales

    return made


def _int8(*size: int) -> Tensor:
    return torch.randint(-128, 128, size, dtype=torch.int8, device="cuda")


def cases() -> list[Case]:
    found: list[Case] = []
    few = [(m, *WEIGHTS[0]) for m in ROWS] + [(16, *w) for w in WEIGHTS[1:]]
    for m, n, k in (*few, *LARGE):
        size = (m, n, k)
        for kind in ("tensor", "rows"):
            found.append(Case(f"fp8 {kind}", size, scaled, _eights(*size, kind), scaled_in_float64))
    for m, n, k in (*few[1:3], *LARGE):
        size = (m, n, k)
        found.append(Case("fp8 blocks", size, scaled_exactly, _eights(*size, "blocks"),
                          scaled_in_float64))  # fmt: skip
    for m, n, k in LARGE[:2]:
        again = _eights(m, n, k, "rows")
        found.append(Case("fp8 quantised", (m, n, k), quantised,
                          lambda again=again: (*again(), positive(1)[0] / 10),
                          quantised_in_float64))  # fmt: skip
    for m, n, k in ((64, *WEIGHTS[0]), *LARGE):
        found.append(Case("int8 x int8", (m, n, k), integers,
                          lambda m=m, n=n, k=k: (_int8(m, k), _int8(n, k), positive(1, n) / 1e4),
                          integers_in_float64))  # fmt: skip
    for m, n, k in (*few, (2048, *WEIGHTS[0])):
        found.append(
            Case(
                "int8 weights",
                (m, n, k),
                int8_rows,
                lambda m=m, n=n, k=k: (draw(m, k, dtype=BF16), _int8(n, k), draw(n, dtype=BF16)),
                in_float64(int8_rows),
            )
        )
        groups = k // GROUP
        found.append(Case("int4 weights", (m, n, k), int4_groups,
                          lambda m=m, n=n, k=k, g=groups: (
                              draw(m, k, dtype=BF16),
                              torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
                              draw(n, g, dtype=BF16), positive(n, g).to(BF16) * 8),
                          in_float64(int4_groups)))  # fmt: skip
        found.append(Case("int4 tiles", (m, n, k), int4_tiles,
                          lambda m=m, n=n, k=k, g=groups: (
                              draw(m, k, dtype=BF16), _tiles(n, k), draw(g, n, 2, dtype=BF16)),
                          int4_tiles_in_float64))  # fmt: skip
    for m in (1, 16):
        n, k = WEIGHTS[0]
        found.append(Case("int8 groups", (m, n, k), int8_groups,
                          lambda m=m, n=n, k=k: (draw(m, k, dtype=BF16), _int8(n, k),
                                                 draw(n, k // GROUP, dtype=BF16)),
                          in_float64(int8_groups)))  # fmt: skip
    return found


def _tiles(n: int, k: int) -> Tensor:
    pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8)


# ---- measuring


def row(case: Case, backends: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    sets = [case.inputs()]
    size = sum(t.nbytes for t in sets[0])
    sets += [case.inputs() for _ in range(max(1, min(MOST_SETS, CACHE // size + 1)) - 1)]
    m, n, _ = case.sizes
    wide = 1 if case.kind == "fp8 quantised" else 2
    found: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": m}
    found["bytes us"] = (size + m * n * wide) / BANDWIDTH
    expected = case.exact(*sets[0])
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    recorder = Recorder()
    for backend in backends:
        try:
            began = time.perf_counter()
            fn = compiled(case.fn, backend)
            result = fn(*sets[0])
            torch.cuda.synchronize()
            found[f"{backend} s"] = time.perf_counter() - began
            found[f"{backend} error"] = error(result, expected)
            graphs[backend] = recorder.recorded(fn, sets)
        except Exception as why:
            traceback.print_exc()
            torch.cuda.synchronize()
            found[f"{backend} failed"] = f"{type(why).__name__}: {' '.join(str(why).split())[:160]}"
    del expected
    if graphs:
        turns = in_turns(graphs)
        found["us"] = {name: statistics.median(turn[name] for turn in turns) for name in graphs}
        if "tilewright" in graphs:
            found["x"] = {name: ratio(turns, name) for name in graphs}
            found["chosen"] = chosen()
            found["x bytes"] = found["us"]["tilewright"] / found["bytes us"]
    return found


def line(found: dict[str, Any], backends: list[str]) -> str:
    us, ratios = found.get("us", {}), found.get("x", {})
    cells = [found["case"]]
    cells += [f"{us[b]:.1f}" if b in us else found.get(f"{b} failed", "-")[:60] for b in backends]
    cells += [f"{ratios[b]:.2f}" if b in ratios else "-" for b in backends[:-1]]
    cells += [f"{found['bytes us']:.1f}", f"{found.get('x bytes', 0):.2f}"]
    cells += [f"{found.get(f'{b} s', 0):.1f}" for b in backends[1:]]
    wrong = [f"{found[f'{b} error']:.1e}" if f"{b} error" in found else "-" for b in backends]
    return f"| {' | '.join([*cells, ' '.join(wrong), found.get('chosen', '')])} |"


def summary(rows: list[dict[str, Any]], backends: list[str]) -> list[str]:
    lines: list[str] = []
    for kind in ["", *dict.fromkeys(r["kind"] for r in rows)]:
        mine = [r for r in rows if kind in ("", r["kind"]) and "x" in r]
        for other in backends[:-1]:
            ratios = [r["x"][other] for r in mine if other in r["x"]]
            if ratios:
                lines.append(f"{kind or 'all'}: {geomean(ratios):.3f} over {other} (geomean of "
                             f"{len(ratios)}, worst {min(ratios):.2f})")  # fmt: skip
    few = [r for r in rows if r["kind"].startswith("int") and "x bytes" in r]
    far = [r for r in few if r["case"].split()[-1].partition("x")[0] in ("1", "16")]
    lines += [f"{r['case']}: {r['x bytes']:.2f} of the bytes' time" for r in far]
    lines += [f"failed: {r['case']}: {r['tilewright failed']}" for r in rows
              if "tilewright failed" in r]  # fmt: skip
    for b in backends[1:]:
        spent = [r[f"{b} s"] for r in rows if f"{b} s" in r]
        lines.append(f"{b}: {sum(spent):.1f} s to compile and tune {len(spent)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=170, help="no case begins after these")
    parser.add_argument("--reference", action="store_true", help="measure the reference too")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", default="", help="rows as JSON")
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    backends = ["eager", *(["inductor"] if options.reference else []), "tilewright"]
    columns = ["case", *(f"{b} us" for b in backends), *(f"x {b}" for b in backends[:-1])]
    columns += ["bytes us", "x bytes", *(f"{b} s" for b in backends[1:]), "errors", "chosen"]
    head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(head, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n", flush=True)
    torch.compile(torch.neg, backend="eager")(torch.ones(1))  # imports all of Dynamo: seconds
    rows: list[dict[str, Any]] = []
    for case in spread(cases()):
        if options.only not in case.name:
            continue
        if time.perf_counter() > end:
            print(f"| {case.name} | out of time |", flush=True)
            continue
        try:
            rows.append(row(case, backends))
            print(line(rows[-1], backends), flush=True)
        except Exception as why:
            traceback.print_exc()
            print(f"| {case.name} | {type(why).__name__}: {str(why)[:160]} |", flush=True)
        torch.cuda.empty_cache()
        if options.out:
            with open(options.out, "w") as file:
                json.dump(rows, file, indent=1)
    print(*summary(rows, backends), sep="\n", flush=True)


def spread(found: list[Case]) -> list[Case]:
    """One of each kind after the other: what time does not suffice for is not all of a kind."""
    kinds = list(dict.fromkeys(c.kind for c in found))
    each = {kind: [c for c in found if c.kind == kind] for kind in kinds}
    most = max(map(len, each.values()))
    return [each[kind][k] for k in range(most) for kind in kinds if k < len(each[kind])]


if __name__ == "__main__":
    main()
