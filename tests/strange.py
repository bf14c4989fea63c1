"""Random programs of a product and what follows it, with what `bench.cutlass_cases` does not draw:
operands beside it of every dtype and laid out in every way, integers and booleans, numbers of no
dimension, results that are counted or reduced, batches. Products are exact, so that what is
compared or rounded comes out the same however sums are taken."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (F16, BF16, F32)
DTYPES = (*FLOATS, *FLOATS, F64, *INTEGERS, torch.bool, torch.float8_e4m3fn)

Shape = tuple[int, ...]
Make = Callable[[Shape], Tensor]
# Of m by n: what a tensor beside a product is, from one that makes numbers of a shape.
LAID: dict[str, Callable[[Make, int, int], Tensor]] = {
    "whole": lambda r, m, n: r((m, n)),
    "turned": lambda r, m, n: r((n, m)).t(),
    "apart": lambda r, m, n: r((m, n + 8))[:, 8:],
    "begins oddly": lambda r, m, n: r((m, n + 3))[:, 1 : n + 1],
    "every second column": lambda r, m, n: r((m, 2 * n))[:, ::2],
    "every second row": lambda r, m, n: r((2 * m, n))[::2],
    "steps both ways": lambda r, m, n: r((2 * n, 3 * m))[::2, ::3].t(),
    "row": lambda r, m, n: r((n,)),
    "row of a column": lambda r, m, n: r((n, 4))[:, 1],
    "row with a dimension": lambda r, m, n: r((1, n)),
    "rows that are one": lambda r, m, n: r((n,)).expand(m, n),
    "column": lambda r, m, n: r((m, 1)),
    "column of rows": lambda r, m, n: r((m, 5))[:, 2:3],
    "columns that are one": lambda r, m, n: r((m, 1)).expand(m, n),
    "number": lambda r, m, n: r((1, 1)),
    "no dimension": lambda r, m, n: r(()),
    "one in three": lambda r, m, n: r((3,))[1:2],
    "diagonals": lambda r, m, n: r((m + n,)).as_strided((m, n), (1, 1)),
}  # fmt: skip
EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "maximum": torch.maximum,
    "times": lambda x, y: x * torch.clamp(y, -2, 2),
    "larger": lambda x, y: torch.where(x > y, x, y),
    "equal": lambda x, y: x + (x == y),
    "not": lambda x, y: torch.where((y == 0).logical_not(), x, y),
    "sign": lambda x, y: x * torch.sign(y),
    "negative": lambda x, y: -x,
    "absolute": lambda x, y: x.abs(),
    "relu": lambda x, y: torch.relu(x),
    "half": lambda x, y: x * 0.5,
    "clamped": lambda x, y: x.clamp(-4, 6),
    "square": lambda x, y: torch.square(x.clamp(-8, 8)),
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu, "exp": lambda x: torch.exp(x.clamp(max=1)),
    "softplus": torch.nn.functional.softplus, "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
}  # fmt: skip
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x.float(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "positive": lambda x: x > 0,
    "int32": lambda x: x.to(torch.int32),
    "int8": lambda x: x.clamp(-9, 9).to(torch.int8),
    "sum of rows": lambda x: x.float().sum(-1),
    "largest of columns": lambda x: x.amax(-2),
    "sum of all": lambda x: x.float().sum(),
    "where the largest is": lambda x: x.float().argmax(-1),
    "turned": lambda x: x.transpose(-1, -2).contiguous(),
    "flat": lambda x: x.reshape(-1) * 2,
    "cumulated": lambda x: x.float().cumsum(-1),
}
BIASES = ("", "", "row", "whole", "column of rows", "no dimension", "rows that are one", "apart")


@dataclass(frozen=True)
class Strange:
    seed: int
    dtype: torch.dtype
    batch: int  # 0: no batch
    bias: str  # how it is laid out, if there is one
    beside: tuple[tuple[str, torch.dtype], ...]
    steps: tuple[tuple[str, int, int], ...]
    smooth: str  # applied to the last value, if not empty
    ends: tuple[str, ...]
    keeps: bool
    turned: bool  # the right operand has its columns one after the other

    def __call__(self, a: Tensor, b: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        rest = list(given)
        if self.bias:
            total = torch.addmm(rest.pop(0), a, b, beta=2, alpha=0.5)
        else:
            total = torch.bmm(a, b) if self.batch else torch.mm(a, b)
        values = [total, *(t.float() if t.dtype == torch.float8_e4m3fn else t for t in rest)]
        for name, x, y in self.steps:
            values.append(EXACT[name](values[x] + total, values[y]))
        last = values[-1]
        if self.smooth:
            last = SMOOTH[self.smooth](last.float())
        made = tuple(ENDS[e](last) for e in self.ends)
        return (total, *made) if self.keeps else made

    def inputs(self, m: int, n: int, k: int) -> tuple[Tensor, ...]:
        torch.manual_seed(self.seed)

        def of(dtype: torch.dtype) -> Make:
            if dtype == torch.bool:
                return lambda shape: torch.randint(0, 2, shape).bool()
            least = 0 if dtype == torch.uint8 else -2
            return lambda shape: torch.randint(least, 3, shape).to(dtype)

        lead = (self.batch,) if self.batch else ()
        r = of(self.dtype)
        b = r((*lead, n, k)).transpose(-1, -2) if self.turned else r((*lead, k, n))
        bias = (LAID[self.bias](r, m, n),) if self.bias else ()
        return (r((*lead, m, k)), b, *bias, *(LAID[how](of(d), m, n) for how, d in self.beside))


def strange(seed: int) -> Strange:
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    beside = tuple((rng.choice(list(LAID)), rng.choice(DTYPES)) for _ in range(count))
    steps: list[tuple[str, int, int]] = []
    for k in range(rng.randint(1, 5)):
        known = count + 1 + k
        steps.append((rng.choice(list(EXACT)), rng.randrange(known), rng.randrange(known)))
    smooth = rng.choice(["", "", "", *SMOOTH])
    ends = [*ENDS][:3] if smooth else [*ENDS]
    batch = rng.choice([0, 0, 0, 3])
    bias = "" if batch else rng.choice(BIASES)
    chosen = tuple(rng.sample(ends, rng.randint(1, min(3, len(ends)))))
    dtype = rng.choice((F16, BF16))
    keeps, turned = rng.random() < 0.3, rng.random() < 0.6
    return Strange(seed, dtype, batch, bias, beside, tuple(steps), smooth, chosen, keeps, turned)
