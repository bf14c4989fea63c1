"""Kinds of lines a random program is made of: what they take, and how they are written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    operands: tuple[Callable[[Tensor], bool], ...]
    write: Callable[..., str | None]
    exact: bool = True  # the result is exact if the operands are
    needs_exact: bool = False


def anything(t: Tensor) -> bool:
    return True


def floating(t: Tensor) -> bool:
    return t.dtype.is_floating_point


def whole(t: Tensor) -> bool:
    return not t.dtype.is_floating_point and t.dtype != torch.bool


def boolean(t: Tensor) -> bool:
    return t.dtype == torch.bool


def number(t: Tensor) -> bool:
    return t.dtype != torch.bool


def deep(t: Tensor) -> bool:
    return t.dim() >= 1


def matrix(t: Tensor) -> bool:
    return t.dim() >= 2


def deep_float(t: Tensor) -> bool:
    return floating(t) and t.dim() >= 1


def deep_number(t: Tensor) -> bool:
    return number(t) and t.dim() >= 1


def fixed(*texts: str) -> Callable[..., str]:
    return lambda rng, *tensors: rng.choice(texts)


def with_dim(*texts: str) -> Callable[..., str]:
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

KINDS: tuple[Kind, ...] = (
    *[Kind((floating,), fixed(*_POINTWISE_ROUNDED), exact=False)] * 4,
    *[Kind((number,), fixed(*_POINTWISE_EXACT))] * 4,
    *[Kind((number, number), fixed(*_BINARY))] * 6,
    Kind((floating, floating), fixed("{0} / ({1}.abs() + 1)", "torch.atan2({0}, {1})",
                                  "torch.lerp({0}, {1}, 0.25)"), exact=False),
    *[Kind((number, number), fixed(*_COMPARE), needs_exact=True)] * 2,
    Kind((number,), fixed("{0} > 0", "{0} != 0", "torch.sign({0})"), needs_exact=True),
    Kind((floating,), fixed("torch.floor({0} / 2)", "torch.round({0})", "torch.trunc({0} / 3)"),
         needs_exact=True),
    Kind((whole, whole), fixed("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}")),
    Kind((boolean, boolean), fixed("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}")),
    Kind((boolean, anything, anything), fixed("torch.where({0}, {1}, {2})")),
    Kind((anything,), _cast, needs_exact=True),
    Kind((floating,), _cast_float, exact=False),
    # views and copies
    *[Kind((deep,), _slice)] * 3,
    *[Kind((anything,), _reshape)] * 4,
    *[Kind((matrix,), _permute)] * 3,
    Kind((deep,), with_dim("{0}.flip(DIM)", "{0}.roll(1, DIM)", "{0}.select(DIM, 0)",
                             "{0}.squeeze(DIM)", "{0}.movedim(DIM, DIM)", "{0}.chunk(2, DIM)[0]",
                             "{0}.split(3, DIM)[-1]", "{0}.repeat_interleave(2, DIM)",
                             "{0}.narrow(DIM, 0, 1)", "{0}.unbind(DIM)[-1]")),
    Kind((anything,), fixed("{0}.expand(3, *{0}.shape)", "{0}.repeat(2, *[1] * {0}.dim())",
                         "{0}.broadcast_to(2, *{0}.shape)")),
    Kind((matrix,), fixed("{0}.tril()", "{0}.triu(1)", "{0}.diagonal()",
                            "{0}.diagonal(1, -2, -1)", "{0}.mT")),
    # joining
    *[Kind((deep, deep), with_dim(
        "torch.cat(({0}, {1}), DIM)", "torch.cat(({0}, {0}, {1}), DIM)",
        "torch.stack(({0}, {0}), DIM)"))] * 2,
    Kind((deep_float,), _pad),
    Kind((deep_float,), _window, exact=False),
    # folds
    *[Kind((deep_float,), _reduce("sum", "mean", "logsumexp", "var", "std"), exact=False)] * 4,
    Kind((deep_number,), _reduce("amax", "amin")),
    Kind((deep,), with_dim("torch.any({0} != 0, DIM)", "torch.all({0} != 0, DIM)",
                             "torch.argmax({0}, DIM)", "torch.argmin({0}, DIM, keepdim=True)",
                             "torch.max({0}, DIM)[0]", "torch.count_nonzero({0}, DIM)",
                             "{0}.argmax()"), needs_exact=True),
    Kind((whole,), fixed("{0}.sum()", "{0}.prod()")),
    *[Kind((deep_float,), with_dim(
        "F.softmax({0}, DIM)", "F.log_softmax({0}, DIM)", "F.normalize({0}, dim=DIM)",
        "F.layer_norm({0}, {0}.shape[-1:])", "torch.cumsum({0}, DIM)",
        "{0} - {0}.mean(DIM, keepdim=True)", "torch.linalg.vector_norm({0}, dim=DIM)",
        "{0} / ({0}.abs().sum(DIM, keepdim=True) + 1)"), exact=False)] * 3,
    Kind((deep_number,), with_dim(
        "torch.cummax({0}, DIM)[0]", "torch.cummin({0}, DIM)[1]",
        "torch.sort({0}, DIM, stable=True)[0]", "torch.diff({0}, dim=DIM)"), needs_exact=True),
    # indirect access
    *[Kind((deep, whole), _gather)] * 2,
    *[Kind((deep_number, whole), _scatter)] * 2,
    Kind((whole,), fixed("F.one_hot({0}.long() % 5, 5)",
                         "torch.bincount({0}.long().reshape(-1) % 7, minlength=7)")),
    Kind((deep_float,), fixed("torch.topk({0}, 1)[0]"), needs_exact=True),
    Kind((deep,), fixed("torch.arange({0}.shape[0])",
                          "torch.arange({0}.shape[-1], dtype=torch.float32)")),
    # products
    *[Kind((matrix, matrix), fixed("torch.matmul({0}, {1}.mT)", "torch.matmul({0}.mT, {1})",
                                      "F.linear({0}, {1})"), exact=False)] * 2,
    # mutation, of inputs and of values made before
    *[Kind((number,), _mutate)] * 2,
    *[Kind((number, number), _mutate_by)] * 2,
)  # fmt: skip
