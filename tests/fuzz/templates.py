"""Every Triton template against float64: sizes, strides, offsets and types that nobody chose.

`drawn(seed, name)` is a problem for the template of that name; `wrong(drawn, run)` runs its kernel,
in the interpreter or on a card, and says how it is off. What a result may be off by is what its
sums and roundings allow: so many bits of float32 for each term of its sum, and one rounding.
`python -m tests.fuzz.templates --count 500 --seed N` draws more of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.products import Made, interpret, problem
from tilewright import config
from tilewright.gemm import heuristics
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.problem import Op
from tilewright.gemm.provider import Kernel
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target

SIZES = (1, 2, 3, 5, 7, 8, 11, 13, 15, 16, 17, 23, 31, 32, 33, 37, 47, 61, 63, 64, 65, 97, 127, 128,
         129, 131)  # fmt: skip
LONG = (*SIZES, 199, 255, 256, 257, 509, 511, 513)  # of k
FEW = (1, 2, 3, 4, 5, 7, 8)
BATCHES = (1, 2, 3, 7)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
INSIDE = ("grouped_mm", "mm_pair")  # problems that only a program makes
POSED = ("_weight_int8pack_mm", "_weight_int4pack_mm")  # and their operators
Runner = Callable[[Made, Kernel, bool], Any]


@dataclass(frozen=True)
class Drawn:
    text: str
    made: Made
    result: Tensor
    template: TritonTemplate
    config: GemmConfig
    exact: Tensor  # float64
    terms: Tensor  # what the sums' terms come to without their signs
    length: int  # of the sums
    wide: bool  # the kernel for more elements than 32 bits can count

    def kernel(self) -> Kernel:
        problem, name = self.made.problem, self.template.name
        return TritonCandidate(problem, self.template, self.config, name, 0.0).kernel()

    def build(self) -> None:
        """Begin to."""
        from tilewright.runtime import triton_build

        source = self.kernel().source
        assert isinstance(source, TritonSource)
        found = source.wide if self.wide else source
        triton_build.submit(found or source)


def names() -> tuple[str, ...]:
    return tuple(n for n in TritonTemplate.all_templates if n not in INSIDE)


def drawn(seed: int, name: str, device: str = "cpu", target: Target | None = None) -> Drawn:
    """The first problem drawn that the template takes."""
    rng = random.Random(f"{seed} {name}")
    template = TritonTemplate.all_templates[name]
    target = target or Target("sm_100" if template.specialised else "sm_90")
    torch.manual_seed(seed)
    while True:
        found = _Drawing(rng, template, device, target).done()
        if found is not None:
            return found


class _Drawing:
    def __init__(self, rng: random.Random, template: TritonTemplate, device: str, target: Target
                 ) -> None:  # fmt: skip
        self.rng, self.template, self.device, self.target = rng, template, device, target
        self.op: Op = rng.choice([op for op in template.ops if op not in POSED])
        self.m = rng.choice(FEW if template.rows else SIZES)
        self.n, self.k = rng.choice(SIZES), rng.choice(LONG)
        self.lead = (rng.choice(BATCHES),) if "b" in self.op[:2] + self.op[-3:-2] else ()
        self.said: list[str] = []

    def done(self) -> Drawn | None:
        made, exact, terms = self._problem()
        if self.template.limits(made.problem):
            return None
        found = heuristics.get_template_heuristic(self.template.uid, "cuda", self.op)
        configs = list(found.get_template_configs(made.problem))
        if not configs:
            return None
        c = self._changed(self.rng.choice(configs))
        sizes = "x".join(map(str, (*self.lead, self.m, self.n, self.k)))
        text = f"{self.template.name} {self.op} {sizes} {' '.join(self.said)} {c}"
        wide = not made.values and not self.template.tma and self.rng.random() < 0.2
        return Drawn(text, made, self.result, self.template, c, exact, terms,
                     self.k, wide)  # fmt: skip

    def _changed(self, c: GemmConfig) -> GemmConfig:
        """Splits of sums and groups of rows of any kind."""
        whole = self.result.dtype == torch.int32  # shares of sums are float32
        if self.template.split and not whole and self.rng.random() < 0.7:
            c = replace(c, split_k=self.rng.choice((1, 2, 3, 5)))
        return replace(c, group_m=self.rng.choice((1, 2, 8)))

    def _problem(self) -> tuple[Made, Tensor, Tensor]:
        if self.op == "_scaled_mm":
            return self._scaled()
        if self.op == "_int_mm" or (self.op == "mm" and self.rng.random() < 0.1):
            return self._integers()
        dtype = self.rng.choice(FLOATS)
        pairs = 2 if self.op == "mm_plus_mm" else 1
        given = [self._operand(side, dtype) for _ in range(pairs) for side in "ab"]
        exact, terms = _products(given)
        bias, alpha, beta = None, 1.0, 1.0
        if self.op in ("addmm", "baddbmm"):
            bias = self._bias(dtype)
            alpha, beta = self.rng.choice((1.0, 0.5, -2.0)), self.rng.choice((1.0, 0.0, -0.5))
            exact = alpha * exact + beta * bias.double()
            terms = abs(alpha) * terms + abs(beta) * bias.double().abs()
        out = self.rng.choice((dtype, dtype, torch.float32))
        return self._made(given, out, bias=bias, alpha=alpha, beta=beta), exact, terms

    def _made(self, given: list[Tensor], out: torch.dtype, **more: Any) -> Made:
        sizes = {s for s in (self.m, self.n, self.k) if s > 1 and s not in self.lead}
        rarely = 0.0 if "scales" in more else 0.2
        dynamic = tuple(s for s in sorted(sizes) if self.rng.random() < rarely)
        self.result = result = self._window((*self.lead, self.m, self.n), out, fill=float("nan"))
        self.said.append(f"to {out} dynamic {dynamic}")
        target = replace(self.target, sms=self.rng.choice((3, self.target.sms)))
        return problem(self.op, *given, dtype=out, out=result, dynamic=dynamic, target=target,
                       **more)  # fmt: skip

    # ---- operands

    def _operand(self, side: str, dtype: torch.dtype) -> Tensor:
        rows, columns = (self.m, self.k) if side == "a" else (self.k, self.n)
        turned = self.rng.random() < 0.5
        shape = (*self.lead, columns, rows) if turned else (*self.lead, rows, columns)
        found = self._window(shape, dtype)
        return found.mT if turned else found

    def _bias(self, dtype: torch.dtype) -> Tensor:
        shape = [n if self.rng.random() < 0.6 else 1 for n in (*self.lead, self.m, self.n)]
        drop = self.rng.randrange(len(shape))
        return self._window(tuple(shape[drop:]), dtype).expand(*self.lead, self.m, self.n)

    def _window(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float | None = None
                ) -> Tensor:  # fmt: skip
        """Of a larger tensor: somewhere in it, rows further apart, perhaps every second element."""
        kind = self.rng.choice(("whole", "whole", "window", "aligned", "step"))
        self.said.append(kind)
        step = 2 if kind == "step" else 1
        skip = {"whole": 0, "aligned": 16}.get(kind, self.rng.choice((1, 3, 8)))
        whole = (*shape[:-1], shape[-1] * step + 2 * skip)
        store = self._filled((whole[0] + bool(skip), *whole[1:]), dtype)
        found = store[bool(skip) :][..., skip : skip + shape[-1] * step : step]
        return found if fill is None else found.fill_(fill)

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, device=self.device)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.randn(shape, device=self.device).to(dtype)

    # ---- few bits

    def _integers(self) -> tuple[Made, Tensor, Tensor]:
        self.lead = ()
        given = [self._operand(side, torch.int8) for side in "ab"]
        exact, terms = _products(given)
        self.result = result = torch.zeros(self.m, self.n, dtype=torch.int32, device=self.device)
        made = problem(self.op, *given, dtype=torch.int32, out=result, target=self.target)
        return made, exact, terms

    def _scaled(self) -> tuple[Made, Tensor, Tensor]:
        given = [self._operand(side, self.rng.choice(EIGHTS)) for side in "ab"]
        kinds = {"tensor": ((1,), (1,)), "rows": ((self.m, 1), (1, self.n)),
                 "blocks": ((self.m, -(-self.k // 128)), (-(-self.k // 128), -(-self.n // 128))),
                 "1x128": ((self.m, -(-self.k // 128)), (-(-self.k // 128), self.n))}  # fmt: skip
        kind = self.rng.choice(tuple(kinds))
        scales = [torch.rand(size, device=self.device) + 0.5 for size in kinds[kind]]
        self.said.append(kind)
        wide = [_spread(s, t) for s, t in zip(scales, given, strict=True)]
        exact, terms = _products(wide)
        return self._made(given, self.rng.choice(FLOATS), scales=scales), exact, terms


def _spread(scale: Tensor, operand: Tensor) -> Tensor:
    for dim, size in enumerate(operand.shape):
        if scale.dim() == 2 and 1 < scale.shape[dim] < size:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return operand.double() * scale.double()


def _products(given: list[Tensor]) -> tuple[Tensor, Tensor]:
    pairs = list(zip(given[::2], given[1::2], strict=True))
    exact = sum((torch.matmul(a.double(), b.double()) for a, b in pairs), torch.zeros(()))
    terms = sum((torch.matmul(a.double().abs(), b.double().abs()) for a, b in pairs),
                torch.zeros(()))  # fmt: skip
    return exact, terms


# ---- running


def wrong(case: Drawn, run: Runner = interpret, grain: float = 2.0**-23) -> str:
    """How the kernel's result is off, or an empty string. `grain` is of one addition."""
    if run is compiled:
        run(case.made, case.kernel(), case.wide)
        return ""
    kernel, found = case.kernel(), case.result
    run(case.made, kernel, case.wide and getattr(kernel.source, "wide", None) is not None)
    if not found.dtype.is_floating_point:
        return "" if torch.equal(found.double(), case.exact) else "other integers"
    rounded = 2 * torch.finfo(found.dtype).eps * case.exact.abs()
    bound = (case.length + 4) * grain * case.terms + rounded + torch.finfo(found.dtype).tiny
    off = ((found.double() - case.exact).abs() / bound).nan_to_num(float("inf"))
    worst = float(off.max())
    return "" if worst <= 1.0 else f"{worst:.3g} times what it may be off by"


def compiled(made: Made, kernel: Kernel, wide: bool) -> None:
    from tilewright.runtime import triton_build

    source = kernel.source
    assert isinstance(source, TritonSource)
    for one in (source, source.wide, source.unaligned):
        if one is not None:
            triton_build.build(one)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.templates", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="of each template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action="store_true", help="compile for a card, and run nothing"
    )
    parser.add_argument("--only", default="", help="one template")
    options = parser.parse_args()
    began, ran, failed = time.perf_counter(), 0, 0
    tuned = {"max_autotune": True, "triton.enable_persistent_tma_matmul": True}
    with config.patch(tuned):
        for seed in range(options.seed, options.seed + options.count):
            for name in (options.only,) if options.only else names():
                ran += 1
                case = drawn(seed, name)
                try:
                    said = wrong(case, compiled if options.compile else interpret)
                except Exception as error:
                    said = f"{type(error).__name__}: {str(error)[:400]}"
                if said:
                    failed += 1
                    print(f"seed {seed} {case.text}: {said}", flush=True)
    print(f"{ran} cases, {failed} wrong, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
