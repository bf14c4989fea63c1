"""Random programs as text. Every line is tried eagerly while the program grows, so that all of
them are valid; a program over named sizes is valid for two choices of those sizes.

A value is *exact* when any correct compiler must give the very bits eager gives: it came through
operations that round once, or not at all. Only exact values go into operations where a rounding
error would become a large one (comparison, floor, sorting), and exact results are compared exactly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.idioms import IDIOMS
from tests.fuzz.kinds import KINDS, Kind

_KINDS = (*KINDS, *IDIOMS)
FLOATS = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "offset", "expanded", "padded")
SIZES = (2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130)
_NARROW = re.compile(r"torch\.(bfloat16|float16|float32)\b")
LARGEST = 40_000  # elements of one value
MOST_PIECES = 130  # of a value that is cut up: where sizes are symbols, Dynamo took 0.2 s for each


@dataclass(frozen=True)
class Input:
    """How to make one argument; `shape` holds numbers, or names of sizes."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    layout: str = "plain"
    grad: bool = False
    seed: int = 0
    highest: int = 0  # for indices: values in [0, highest)

    def make(self, sizes: dict[str, int]) -> Tensor:
        shape = tuple(sizes[n] if isinstance(n, str) else n for n in self.shape)
        generator = torch.Generator("cpu").manual_seed(self.seed)
        t = _laid_out(lambda s: self._fill(s, generator), shape, self.layout)
        return t.requires_grad_() if self.grad else t

    def _fill(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The same numbers on every device; they lie on the default one."""

        def drawn(low: int, high: int) -> Tensor:
            numbers = torch.randint(low, high, shape, generator=generator, device="cpu")
            return numbers.to(torch.get_default_device())

        if self.dtype == torch.bool:
            return drawn(0, 2).bool()
        if self.highest:
            return drawn(0, self.highest).to(self.dtype)
        if not self.dtype.is_floating_point:
            return drawn(0 if self.dtype == torch.uint8 else -9, 10).to(self.dtype)
        # multiples of an eighth: many sums and ties are exact in every type
        return (drawn(-24, 25) / 8).to(self.dtype)


def _laid_out(fill: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...],
              layout: str) -> Tensor:  # fmt: skip
    if not shape:
        return fill(shape)
    match layout:
        case "transposed":
            return fill(shape[::-1]).permute(*reversed(range(len(shape))))
        case "strided":
            return fill((*shape[:-1], 2 * shape[-1]))[..., ::2]
        case "offset":
            return fill((shape[0] + 2, *shape[1:]))[1 : 1 + shape[0]]
        case "expanded":
            return fill((1, *shape[1:])).expand(shape)
        case "padded":
            return fill((*shape[:-1], shape[-1] + 3))[..., : shape[-1]]
        case _:
            return fill(shape)


@dataclass(frozen=True)
class Line:
    """`v7 = torch.add({0}, {1})` with `{k}` standing for a value by number."""

    text: str
    operands: tuple[int, ...]
    exact: bool

    def render(self, names: dict[int, str]) -> str:
        return self.text.format(*(names[k] for k in self.operands))


@dataclass(frozen=True)
class Program:
    """Values are numbered: the inputs first, then one per line."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    exact: tuple[bool, ...]  # per value
    sizes: tuple[dict[str, int], ...] = ({},)  # one choice of the named sizes per call
    dynamic: bool = False
    seed: int = 0
    notes: str = field(default="", compare=False)

    def source(self) -> str:
        names = {k: f"a{k}" for k in range(len(self.inputs))}
        text = [f"def program({', '.join(names.values())}):"]
        for k, line in enumerate(self.lines, start=len(self.inputs)):
            text.append(f"    v{k} = {line.render(names)}")
            names[k] = f"v{k}"
        outputs = ", ".join(names[k] for k in self.outputs)
        return "\n".join([*text, f"    return ({outputs},)", ""])

    def function(self, **names: Any) -> Callable[..., tuple[Tensor, ...]]:
        namespace = {"torch": torch, "F": torch.nn.functional, **names}
        exec(compile(self.source(), f"<fuzz {self.seed}>", "exec"), namespace)
        return namespace["program"]  # type: ignore[return-value]

    def in_float64(self) -> Program:
        """The same with every floating type the widest; with that as the default type, too."""
        inputs = tuple(replace(i, dtype=torch.float64) if i.dtype.is_floating_point else i
                       for i in self.inputs)  # fmt: skip
        lines = tuple(replace(line, text=_NARROW.sub("torch.float64", line.text))
                      for line in self.lines)  # fmt: skip
        return replace(self, inputs=inputs, lines=lines)

    def arguments(self, sizes: dict[str, int]) -> list[Tensor]:
        return [i.make(sizes) for i in self.inputs]


def generate(seed: int) -> Program:
    with torch.device("cpu"):  # where a line that is not valid raises, and nothing else happens
        return Growth(seed).grow()


class Growth:
    """A program under construction, with the eager values of each choice of sizes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.dynamic = self.rng.random() < 0.3
        self.grad = self.rng.random() < 0.3
        self.sizes: list[dict[str, int]] = [self._sizes()]
        if self.dynamic:
            self.sizes.append(self._sizes())
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.exact: list[bool] = []
        self.values: list[list[Tensor]] = [[] for _ in self.sizes]  # per choice of sizes

    def _sizes(self) -> dict[str, int]:
        if self.dynamic:
            return {name: self.rng.choice(SIZES) for name in "ABC"}
        extra = (0, 1, 1) if self.rng.random() < 0.3 else (1,)
        return {name: self.rng.choice((*SIZES, *extra)) for name in "ABC"}

    def grow(self) -> Program:
        rng = self.rng
        for _ in range(rng.randint(1, 4)):
            self._input()
        for _ in range(rng.randint(3, 16)):
            for _attempt in range(20):
                if self._line(rng.choice(_KINDS)):
                    break
        made = range(len(self.inputs), len(self.exact))
        used = {k for line in self.lines for k in line.operands}
        last = [k for k in made if k not in used]
        outputs = last + [k for k in made if k in used and rng.random() < 0.2]
        if rng.random() < 0.1:
            outputs.append(0)
        return Program(tuple(self.inputs), tuple(self.lines), tuple(outputs), tuple(self.exact),
                       tuple(self.sizes), self.dynamic, self.seed)  # fmt: skip

    def _input(self) -> None:
        rng = self.rng
        rank = rng.choice((0, 1, 2, 2, 2, 3, 3, 4))
        names = [rng.choice("ABC") if k < 2 else rng.choice((2, 3, 4)) for k in range(rank)]
        shape: tuple[int | str, ...] = tuple(
            1 if rng.random() < 0.1 else n if self.dynamic or isinstance(n, int)
            else self.sizes[0][n] for n in names)  # fmt: skip
        draw = rng.random()
        dtype = torch.bool if draw < 0.05 else rng.choice(INTS if draw < 0.2 else FLOATS)
        grad = self.grad and dtype.is_floating_point and rng.random() < 0.7
        self._add_input(Input(shape, dtype, rng.choice(LAYOUTS), grad, rng.randrange(10**6)))

    def _add_input(self, spec: Input) -> None:
        assert not self.lines, "inputs are numbered before lines"
        self.inputs.append(spec)
        self.exact.append(True)
        for sizes, values in zip(self.sizes, self.values, strict=True):
            values.append(spec.make(sizes))

    def _line(self, kind: Kind) -> bool:
        """Try to append one line of this kind; says whether it worked."""
        operands = self._operands(kind)
        if operands is None:
            return False
        tensors = [self.values[0][k] for k in operands]
        text = kind.write(self.rng, *tensors)
        if text is None or (_cuts(text) and self._longest(operands[0]) > MOST_PIECES):
            return False
        exact = kind.exact and not _sums(text, tensors[0])
        line = Line(text, tuple(operands), exact)
        results = [self._try(line, values) for values in self.values]
        if (
            any(r is None for r in results)
            or len({(r.dtype, r.dim()) for r in results if r is not None}) > 1
        ):
            return False
        self.lines.append(line)
        self.exact.append(exact and all(self.exact[k] for k in operands))
        for values, result in zip(self.values, results, strict=True):
            assert result is not None
            values.append(result)
        if _mutates(text) and not self.exact[-1]:
            self._blur(self.values[0][-1])
        return True

    def _longest(self, value: int) -> int:
        return max(n for values in self.values for n in (*values[value].shape, 1))

    def _blur(self, changed: Tensor) -> None:
        """What lies in memory that holds rounded numbers now is not exact any more."""
        memory = changed.untyped_storage().data_ptr()
        for k, t in enumerate(self.values[0]):
            self.exact[k] &= t.untyped_storage().data_ptr() != memory

    def _operands(self, kind: Kind) -> list[int] | None:
        """Random values that suit the kind; recent ones are likelier."""
        chosen: list[int] = []
        for accepts in kind.operands:
            fitting = [k for k, t in enumerate(self.values[0])
                       if accepts(t) and (self.exact[k] or not kind.needs_exact)]  # fmt: skip
            if not fitting:
                return None
            recent = fitting[-4:] if self.rng.random() < 0.6 else fitting
            chosen.append(self.rng.choice(recent))
        return chosen

    def _try(self, line: Line, values: list[Tensor]) -> Tensor | None:
        names = {k: f"x[{k}]" for k in line.operands}
        if ".grad" not in line.text and _mutates(line.text):
            if any(t.requires_grad for t in values):
                return None
            before = [(t, t.detach().clone()) for t in values]
        else:
            before = []
        try:
            result = eval(line.render(names), {"torch": torch, "F": torch.nn.functional,
                                               "x": values})  # fmt: skip
        except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError):
            for t, old in before:
                if t.numel() and 0 not in t.stride():
                    t.copy_(old)
            return None
        good = isinstance(result, Tensor) and result.numel() <= LARGEST and _tame(result)
        if not good:
            for t, old in before:
                if t.numel() and 0 not in t.stride():
                    t.copy_(old)
            return None
        return result


def _sums(text: str, t: Tensor) -> bool:
    """Whether the line adds many numbers into one: eager rounds after each of them, in bfloat16
    until the sum no longer grows, and a compiler may keep the sum in a wider type."""
    return t.dtype.is_floating_point and ("scatter_add" in text or "accumulate=True" in text)


def _cuts(text: str) -> bool:
    """Whether the line makes a tensor of every element or two along a dimension."""
    return ".unbind(" in text or ".split(" in text


def _mutates(text: str) -> bool:
    return "_(" in text.replace("__", "")


def _tame(t: Tensor) -> bool:
    """Small enough that a rounding error stays one."""
    if not t.dtype.is_floating_point or not t.numel():
        return True
    size = t.detach().abs().nan_to_num(0, 0, 0).max().item()
    return size < 1e4


__all__ = ["Input", "Line", "Program", "generate", "replace"]
