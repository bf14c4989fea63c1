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

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "offset", "expanded", "padded")
SIZES = (2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130)
_NARROW = re.compile(r"torch\.(bfloat16|float16|float32)\b")
LARGEST = 40_000  # elements of one value


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
        generator = torch.Generator().manual_seed(self.seed)
        t = _laid_out(lambda s: self._fill(s, generator), shape, self.layout)
        return t.requires_grad_() if self.grad else t

    def _fill(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        if self.highest:
            return torch.randint(0, self.highest, shape, generator=generator)
        if not self.dtype.is_floating_point:
            low = 0 if self.dtype == torch.uint8 else -9
            return torch.randint(low, 10, shape, generator=generator).to(self.dtype)
        # multiples of an eighth: many sums and ties are exact in every type
        steps = torch.randint(-24, 25, shape, generator=generator)
        return (steps / 8).to(self.dtype)


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

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        namespace = {"torch": torch, "F": torch.nn.functional}
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
    return _Growth(seed).grow()


class _Growth:
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
        if text is None:
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
        return True

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
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
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


def _mutates(text: str) -> bool:
    return "_(" in text.replace("__", "")


def _tame(t: Tensor) -> bool:
    """Small enough that a rounding error stays one."""
    if not t.dtype.is_floating_point or not t.numel():
        return True
    size = t.detach().abs().nan_to_num(0, 0, 0).max().item()
    return size < 1e4


# ---- kinds of lines


@dataclass(frozen=True)
class Kind:
    operands: tuple[Callable[[Tensor], bool], ...]
    write: Callable[..., str | None]
    exact: bool = True  # the result is exact if the operands are
    needs_exact: bool = False


def _any(t: Tensor) -> bool:
    return True


def _float(t: Tensor) -> bool:
    return t.dtype.is_floating_point


def _int(t: Tensor) -> bool:
    return not t.dtype.is_floating_point and t.dtype != torch.bool


def _bool(t: Tensor) -> bool:
    return t.dtype == torch.bool


def _number(t: Tensor) -> bool:
    return t.dtype != torch.bool


def _deep(t: Tensor) -> bool:
    return t.dim() >= 1


def _matrix(t: Tensor) -> bool:
    return t.dim() >= 2


def _deep_float(t: Tensor) -> bool:
    return _float(t) and t.dim() >= 1


def _deep_number(t: Tensor) -> bool:
    return _number(t) and t.dim() >= 1


def _fixed(*texts: str) -> Callable[..., str]:
    return lambda rng, *tensors: rng.choice(texts)


def _with_dim(*texts: str) -> Callable[..., str]:
    """`DIM` becomes a dimension of the first operand, from either end."""

    def write(rng: random.Random, t: Tensor, *_: Tensor) -> str:
        text = rng.choice(texts)
        while "DIM" in text:
            text = text.replace("DIM", str(rng.randrange(-t.dim(), t.dim())), 1)
        return text

    return write


def _reduce(*names: str) -> Callable[..., str]:
    def write(rng: random.Random, t: Tensor) -> str:
        name = rng.choice(names)
        draw = rng.random()
        keep = rng.choice((True, False))
        if draw < 0.3:
            dims: object = tuple(range(t.dim()))
        elif draw < 0.5 and t.dim() > 1:
            dims = tuple(sorted(rng.sample(range(t.dim()), 2)))
        else:
            dims = (rng.randrange(-t.dim(), t.dim()),)
        return f"torch.{name}({{0}}, dim={dims}, keepdim={keep})"

    return write


def _slice(rng: random.Random, t: Tensor) -> str:
    parts: list[str] = []
    for _ in range(t.dim()):
        parts.append(rng.choice((":", ":", "1:", ":-1", "::2", "1::2", "1:3", "0:1", "-2:")))
    return f"{{0}}[{', '.join(parts)}]"


def _permute(rng: random.Random, t: Tensor) -> str:
    order = list(range(t.dim()))
    rng.shuffle(order)
    return f"{{0}}.permute({', '.join(map(str, order))})"


def _reshape(rng: random.Random, t: Tensor) -> str:
    texts = ["{0}.reshape(-1)", "{0}.unsqueeze(DIM)", "{0}.contiguous()", "{0}.clone()"]
    if t.dim() >= 2:
        texts += ["{0}.flatten(0, 1)", "{0}.flatten(-2, -1)", "{0}.transpose(0, 1)",
                  "{0}.reshape({0}.shape[1], -1)", "{0}.reshape({0}.shape[0] * {0}.shape[1], -1)",
                  "{0}.transpose(0, 1).reshape({0}.shape)"]  # fmt: skip
    if t.dim() >= 1 and t.shape[-1] and t.shape[-1] % 2 == 0:
        texts.append("{0}.reshape(*{0}.shape[:-1], 2, {0}.shape[-1] // 2)")
    return rng.choice(texts).replace("DIM", str(rng.randrange(-t.dim() - 1, t.dim() + 1)))


def _pad(rng: random.Random, t: Tensor) -> str:
    left, right = rng.choice((-1, 0, 1, 2)), rng.choice((0, 1, 3))
    mode = rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        return f"F.pad({{0}}, ({left}, {right}), value={rng.choice((0, 1.5, -2))})"
    return f"F.pad({{0}}, ({abs(left)}, {right}), mode={mode!r})"


def _window(rng: random.Random, t: Tensor) -> str:
    width = rng.choice((2, 3, 9, 12))
    tail = rng.choice(("", ".sum(-1)", ".amax(-1)", ".amax(-2)"))
    return (f"F.pad({{0}}, (0, {rng.choice((0, width - 1))})).unfold(-1, {width}, "
            f"{rng.choice((1, 2))}){tail}")  # fmt: skip


def _gather(rng: random.Random, t: Tensor, i: Tensor) -> str:
    """Indices made to fit: the remainder by the size of the dimension."""
    d = rng.randrange(t.dim())
    flat = f"({{1}}.long().reshape(-1) % max({{0}}.shape[{d}], 1))"
    shaped = f"({{1}}.long() % max({{0}}.shape[{d}], 1))"
    return rng.choice((
        f"torch.index_select({{0}}, {d}, {flat})",
        f"{{0}}.movedim({d}, 0)[{shaped}]",
        f"torch.gather({{0}}, {d}, {shaped})",
        "torch.take({0}, {1}.long() % max({0}.numel(), 1))",
        f"{{0}}.movedim({d}, 0)[:, None][{flat}]",
    ))  # fmt: skip


def _scatter(rng: random.Random, t: Tensor, i: Tensor) -> str:
    """Of a constant, so that the order of equal indices does not show."""
    d = rng.randrange(t.dim())
    shaped = f"({{1}}.long() % max({{0}}.shape[{d}], 1))"
    flat = f"({{1}}.long().reshape(-1) % max({{0}}.shape[{d}], 1))"
    ones = "torch.ones_like({1}, dtype={0}.dtype)"
    return rng.choice((
        f"torch.scatter({{0}}, {d}, {shaped}, 2)",
        f"torch.scatter_add({{0}}, {d}, {shaped}, {ones})",
        f"torch.scatter_reduce({{0}}, {d}, {shaped}, {ones}, 'amax')",
        f"{{0}}.index_fill({d}, {flat}, 3)",
        ("torch.index_put({0}, ({1}.long().reshape(-1) % max({0}.shape[0], 1),), "
         "torch.ones((), dtype={0}.dtype), accumulate=True)"),
    ))  # fmt: skip


def _cast(rng: random.Random, t: Tensor) -> str:
    to = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64,
                     torch.int32, torch.uint8, torch.bool))  # fmt: skip
    if to == torch.uint8 and t.dtype != torch.bool:  # a negative float has no defined byte
        return "({0} > 0).to(torch.uint8)"
    return f"{{0}}.to({to})"


def _cast_float(rng: random.Random, t: Tensor) -> str:
    return f"{{0}}.to({rng.choice((torch.float32, torch.float64, torch.bfloat16))})"


def _mutate(rng: random.Random, t: Tensor, *_: Tensor) -> str:
    texts = ["{0}.add_(1)", "{0}.mul_(2)", "{0}.copy_({0}.flip(0))", "{0}.fill_(1)", "{0}.zero_()",
             "{0}[1:].add_(1)", "{0}[..., ::2].mul_(2)", "{0}.select(0, 0).add_(3)",
             "{0}.transpose(0, -1).add_(1)", "{0}.clamp_(-1, 1)"]  # fmt: skip
    return rng.choice(texts)


def _mutate_by(rng: random.Random, a: Tensor, b: Tensor) -> str:
    return rng.choice(("{0}.add_({1})", "{0}.copy_({1})", "{0}.sub_({1})", "{0}[1:].copy_({1}[1:])",
                       "{0}[:1].copy_({1}[-1:])"))  # fmt: skip


_POINTWISE_ROUNDED = (
    "torch.sin({0})", "torch.cos({0})", "torch.tanh({0})", "torch.sigmoid({0})",
    "torch.exp({0}.clamp(max=3))", "torch.sqrt({0}.abs())", "torch.rsqrt({0}.abs() + 1)",
    "F.gelu({0})", "F.silu({0})", "F.softplus({0})", "torch.erf({0})", "torch.log1p({0}.abs())",
    "torch.reciprocal({0}.abs() + 0.5)", "F.elu({0})", "F.mish({0})", "torch.atan({0})",
)  # fmt: skip
_POINTWISE_EXACT = (
    "-{0}", "{0}.abs()", "{0} + 1", "{0} * 2", "{0} - 3", "F.relu({0})", "{0}.clamp(-2, 2)",
    "{0} * {0}", "1 - {0}", "{0}.square()", "torch.where({0} > 0, {0}, 0)", "{0}.detach() + {0}",
    "torch.zeros_like({0})", "torch.full_like({0}, 2)", "{0}.masked_fill({0} > 1, -1)",
)  # fmt: skip
_BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})",
           "torch.minimum({0}, {1})", "torch.where({0} > {1}, {0}, {1})")  # fmt: skip
_COMPARE = ("{0} > {1}", "{0} == {1}", "{0} <= {1}", "torch.logical_xor({0}, {1})",
            "torch.div({0}, {1}.abs() + 1, rounding_mode='floor')",
            "torch.remainder({0}, {1}.abs() + 1)", "torch.fmod({0}, {1}.abs() + 1)")  # fmt: skip

_KINDS: tuple[Kind, ...] = (
    *[Kind((_float,), _fixed(*_POINTWISE_ROUNDED), exact=False)] * 4,
    *[Kind((_number,), _fixed(*_POINTWISE_EXACT))] * 4,
    *[Kind((_number, _number), _fixed(*_BINARY))] * 6,
    Kind((_float, _float), _fixed("{0} / ({1}.abs() + 1)", "torch.atan2({0}, {1})",
                                  "torch.lerp({0}, {1}, 0.25)"), exact=False),
    *[Kind((_number, _number), _fixed(*_COMPARE), needs_exact=True)] * 2,
    Kind((_number,), _fixed("{0} > 0", "{0} != 0", "torch.sign({0})"), needs_exact=True),
    Kind((_float,), _fixed("torch.floor({0} / 2)", "torch.round({0})", "torch.trunc({0} / 3)"),
         needs_exact=True),
    Kind((_int, _int), _fixed("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}")),
    Kind((_bool, _bool), _fixed("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}")),
    Kind((_bool, _any, _any), _fixed("torch.where({0}, {1}, {2})")),
    Kind((_any,), _cast, needs_exact=True),
    Kind((_float,), _cast_float, exact=False),
    # views and copies
    *[Kind((_deep,), _slice)] * 3,
    *[Kind((_any,), _reshape)] * 4,
    *[Kind((_matrix,), _permute)] * 3,
    Kind((_deep,), _with_dim("{0}.flip(DIM)", "{0}.roll(1, DIM)", "{0}.select(DIM, 0)",
                             "{0}.squeeze(DIM)", "{0}.movedim(DIM, DIM)", "{0}.chunk(2, DIM)[0]",
                             "{0}.split(3, DIM)[-1]", "{0}.repeat_interleave(2, DIM)",
                             "{0}.narrow(DIM, 0, 1)", "{0}.unbind(DIM)[-1]")),
    Kind((_any,), _fixed("{0}.expand(3, *{0}.shape)", "{0}.repeat(2, *[1] * {0}.dim())",
                         "{0}.broadcast_to(2, *{0}.shape)")),
    Kind((_matrix,), _fixed("{0}.tril()", "{0}.triu(1)", "{0}.diagonal()",
                            "{0}.diagonal(1, -2, -1)", "{0}.mT")),
    # joining
    *[Kind((_deep, _deep), _with_dim(
        "torch.cat(({0}, {1}), DIM)", "torch.cat(({0}, {0}, {1}), DIM)",
        "torch.stack(({0}, {0}), DIM)"))] * 2,
    Kind((_deep_float,), _pad),
    Kind((_deep_float,), _window, exact=False),
    # folds
    *[Kind((_deep_float,), _reduce("sum", "mean", "logsumexp", "var", "std"), exact=False)] * 4,
    Kind((_deep_number,), _reduce("amax", "amin")),
    Kind((_deep,), _with_dim("torch.any({0} != 0, DIM)", "torch.all({0} != 0, DIM)",
                             "torch.argmax({0}, DIM)", "torch.argmin({0}, DIM, keepdim=True)",
                             "torch.max({0}, DIM)[0]", "torch.count_nonzero({0}, DIM)",
                             "{0}.argmax()"), needs_exact=True),
    Kind((_int,), _fixed("{0}.sum()", "{0}.prod()")),
    *[Kind((_deep_float,), _with_dim(
        "F.softmax({0}, DIM)", "F.log_softmax({0}, DIM)", "F.normalize({0}, dim=DIM)",
        "F.layer_norm({0}, {0}.shape[-1:])", "torch.cumsum({0}, DIM)",
        "{0} - {0}.mean(DIM, keepdim=True)", "torch.linalg.vector_norm({0}, dim=DIM)",
        "{0} / ({0}.abs().sum(DIM, keepdim=True) + 1)"), exact=False)] * 3,
    Kind((_deep_number,), _with_dim(
        "torch.cummax({0}, DIM)[0]", "torch.cummin({0}, DIM)[1]",
        "torch.sort({0}, DIM, stable=True)[0]", "torch.diff({0}, dim=DIM)"), needs_exact=True),
    # indirect access
    *[Kind((_deep, _int), _gather)] * 2,
    *[Kind((_deep_number, _int), _scatter)] * 2,
    Kind((_int,), _fixed("F.one_hot({0}.long() % 5, 5)",
                         "torch.bincount({0}.long().reshape(-1) % 7, minlength=7)")),
    Kind((_deep_float,), _fixed("torch.topk({0}, 1)[0]"), needs_exact=True),
    Kind((_deep,), _fixed("torch.arange({0}.shape[0])",
                          "torch.arange({0}.shape[-1], dtype=torch.float32)")),
    # products
    *[Kind((_matrix, _matrix), _fixed("torch.matmul({0}, {1}.mT)", "torch.matmul({0}.mT, {1})",
                                      "F.linear({0}, {1})"), exact=False)] * 2,
    # mutation, of inputs and of values made before
    *[Kind((_number,), _mutate)] * 2,
    *[Kind((_number, _number), _mutate_by)] * 2,
)  # fmt: skip

__all__ = ["Input", "Line", "Program", "generate", "replace"]
