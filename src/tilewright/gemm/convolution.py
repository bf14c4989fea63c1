"""Convolutions as products: each point of the result is a row, each element of a window one of k.

Nothing is copied: the templates for products load the image at the positions of the windows, zero
where these are beyond its edge. An image with its channels last has points for rows and channels
for columns; one with its channels first the other way round, so that what is next to each other in
memory is next to each other in a tile. Groups, and images with their channels first, are a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import config
from tilewright.gemm.problem import GemmProblem, Op, Operand, loops, takes_tf32, window
from tilewright.gemm.provider import Argument, Candidate, Effort, Kernel
from tilewright.gemm.roofline import roofline
from tilewright.gemm.triton import TritonProvider
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load
from tilewright.ir.program import Opaque, Origin, Program, View
from tilewright.runtime import store
from tilewright.target import Target

aten = torch.ops.aten
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))


@dataclass(frozen=True)
class Windows:
    """Where a convolution looks: its numbers in each dimension of the image."""

    step: tuple[int, ...]
    margin: tuple[int, ...]
    spread: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class ConvolutionProblem(GemmProblem):
    """Its operands have the views of the call: image and weights, or with `images_right` the other
    way round."""

    windows: Windows = Windows((), (), (), 1)
    images_right: bool = False
    whole: View | None = None  # the result as the call makes it

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype  # it is no product that another could be added to

    @property
    def providers(self) -> tuple[Any, ...]:
        return (PROVIDER,)

    @property
    def library(self) -> Any:
        return Library(self)

    @property
    def is_bare(self) -> bool:
        return not self.epilogue

    @property
    def views(self) -> tuple[View, ...]:
        """Image, weights, bias if there is one, and the result, as the call has them."""
        assert self.whole is not None
        image, weight = reversed(self.operands) if self.images_right else self.operands
        out = View(self.result.buffer, self.whole.size, self.whole.stride, self.whole.offset,
                   self.whole.dtype)  # fmt: skip
        return (image.view, weight.view, *([] if self.bias is None else [self.bias.view]), out)

    @property
    def operator(self) -> Opaque | None:
        image, weight, *bias, out = self.views
        w = self.windows
        args = (image, weight, bias[0] if bias else None, list(w.step), list(w.margin),
                list(w.spread), False, [0] * len(w.step), w.groups)  # fmt: skip
        return Opaque("convolution", aten.convolution.out, args, {}, (), (), Origin(()), out=out)

    def describe(self) -> str:
        return f"{super().describe()}\n{self.windows} {self.images_right} {self.whole}"

    def __str__(self) -> str:
        b, m, n, k = self.hints
        kind = str(self.dtype).removeprefix("torch.")
        fused = " + epilogue" if self.epilogue else ""
        return f"convolution {b}x{m}x{n}x{k} {kind}{fused}"


# ---- from a call


def is_tuned(call: Opaque) -> bool:
    return call.target is aten.convolution.default


def parsed(program: Program, call: Opaque, result: View) -> ConvolutionProblem | str:
    """The problem, in the program's names, or why it is the library's."""
    image, weight, bias, step, margin, spread, transposed, beyond, groups = call.args
    tensors = [t for t in (image, weight, bias, result) if isinstance(t, View)]
    target = Target.of(program.buffers[result.buffer].device)
    if not target.is_gpu:
        return "on a CPU convolutions are the library's"
    if len(tensors) < 3 or (bias is not None and not isinstance(bias, View)):
        return "its arguments are not all tensors in memory"
    if any(ix.value_of(e) is None for t in tensors for e in (*t.size, *t.stride, t.offset)):
        return "sizes of its image are not known before it runs"
    numbers = (*step, *margin, *spread, *beyond, groups)
    if any(ix.value_of(ix.as_index(n)) is None for n in numbers):
        return "its windows are not known before it runs"
    if transposed:
        return "it is transposed"
    if any(_number(n) for n in beyond):
        return "it has a padding of its result"
    if len({t.dtype for t in tensors}) != 1 or image.dtype not in DTYPES:
        return f"no template computes convolutions of {image.dtype}"
    count = _number(groups)
    if _number(weight.size[1]) * count != _number(image.size[1]):
        return "its channels are not those of its weights"
    rank = len(image.size) - 2
    steps, margins, spreads = (tuple(map(_number, part)) * (rank if len(part) == 1 else 1)
                               for part in (step, margin, spread))  # fmt: skip
    windows = Windows(steps, margins, spreads, count)
    return _Maker(image, weight, bias, result, windows).problem(program, target)


def _number(e: Any) -> int:
    found = ix.value_of(ix.as_index(e))
    assert found is not None
    return found


@dataclass(frozen=True)
class _Maker:
    image: View
    weight: View
    bias: View | None
    result: View
    windows: Windows

    def problem(self, program: Program, target: Target) -> ConvolutionProblem | str:
        out, groups = self.result, self.windows.groups
        images, channels, *space = map(_number, out.size)
        points, own = functools.reduce(lambda a, b: a * b, space, 1), channels // groups
        k = functools.reduce(lambda a, b: a * _number(b), self.weight.size[1:], 1)
        steps = [_number(s) for s in out.stride]
        last = steps[1] == 1 and channels > 1
        wanted = self._dense(last)
        if steps != wanted:
            return "its result is laid out neither way"
        if last:
            sizes = (groups, images * points, own, k)
            strides = (own, channels, 1)
        else:
            sizes = (images * groups, own, points, k)
            strides = (own * points, points, 1)
        batched = sizes[0] != 1
        found = loops(*map(ix.as_index, sizes))
        only = ix.ZERO if not batched else found[0]  # a batch of one is no loop
        at = (only, *found[1:])
        values = self._operands(at, last, points)
        place = ((found[0],) if batched else (), found[1:3])
        bias, op = None, "bmm" if batched else "mm"
        if self.bias is not None:
            channel = self._channel(at, last)
            index = ix.add(self.bias.offset, ix.mul(channel, self.bias.stride[0]))
            bias = Operand(self.bias, load(self.bias.buffer, self.bias.dtype, index), False)
            op = "baddbmm" if batched else "addmm"
        lead = slice(None) if batched else slice(1, None)
        view = View(out.buffer, tuple(v.src[0] for v in (*place[0], *place[1])),
                    tuple(map(ix.as_index, strides[lead])), out.offset, out.dtype)  # fmt: skip
        used = {v.buffer for v in (self.image, self.weight, self.bias, out) if v is not None}
        made: Op = op  # type: ignore[assignment]
        return ConvolutionProblem(
            made, *found, values, view, tuple(program.buffers[b] for b in sorted(used)), target,
            bias, windows=self.windows, images_right=not last, whole=out,
        )  # fmt: skip

    def _dense(self, last: bool) -> list[int]:
        sizes = [_number(n) for n in self.result.size]
        order = [0, *range(2, len(sizes)), 1] if last else list(range(len(sizes)))
        strides, step = [0] * len(sizes), 1
        for dim in reversed(order):
            strides[dim], step = step, step * sizes[dim]
        return strides

    def _channel(self, found: tuple[Expr, ...], last: bool) -> Expr:
        """The channel of the result at the position of the loops."""
        batch, m, n, _ = found
        own = _number(self.result.size[1]) // self.windows.groups
        group = batch if last else ix.mod(batch, self.windows.groups)
        return ix.add(ix.mul(group, own), n if last else m)

    def _operands(self, found: tuple[Expr, ...], last: bool, points: int) -> tuple[Operand, ...]:
        batch, m, n, k = found
        w, groups = self.windows, self.windows.groups
        point, channel = (m, n) if last else (n, m)
        picture = ix.floordiv(point, points) if last else ix.floordiv(batch, groups)
        group = batch if last else ix.mod(batch, groups)
        where = _digits(ix.mod(point, points), self.result.size[2:])
        # along k what is next to each other in the image
        inner = list(self.weight.size[1:])
        if last:
            *at, plane = _digits(k, [*inner[1:], inner[0]])
        else:
            plane, *at = _digits(k, inner)
        index = ix.add(self.image.offset, ix.mul(picture, self.image.stride[0]))
        channels = ix.add(ix.mul(group, _number(inner[0])), plane)
        index = ix.add(index, ix.mul(channels, self.image.stride[1]))
        seen = build.TRUE
        for d, (o, i) in enumerate(zip(where, at, strict=True)):
            x = ix.add(ix.mul(o, w.step[d]), ix.mul(i, w.spread[d]), -w.margin[d])
            index = ix.add(index, ix.mul(x, self.image.stride[2 + d]))
            seen = _within(seen, x, self.image.size[2 + d])
        image = Operand(self.image, load(self.image.buffer, self.image.dtype, index,
                                         None if seen is build.TRUE else seen), False)  # fmt: skip
        mine = _number(self.weight.size[0]) // groups
        row = ix.add(ix.mul(group, mine), channel)
        place = ix.linearize((row, plane, *at), self.weight.stride, self.weight.offset)
        weight = Operand(self.weight, load(self.weight.buffer, self.weight.dtype, place), False)
        return (image, weight) if last else (weight, image)


def _digits(position: Expr, sizes: Sequence[Expr]) -> list[Expr]:
    """A position in a row-major space, in each of its dimensions."""
    found: list[Expr] = []
    for size in reversed(sizes):
        found.append(ix.mod(position, size))
        position = ix.floordiv(position, size)
    return found[::-1]


def _within(seen: Expr, x: Expr, size: Expr) -> Expr:
    """Also inside the image; what is there for sure is not looked at."""
    low, high = ix.bounds(x)
    if low < 0:
        seen = build.both(seen, build.op("ge", x, ix.ZERO))
    if high >= _number(size):
        seen = build.both(seen, build.op("lt", x, size))
    return seen


# ---- who computes it


@dataclass(frozen=True)
class Library:
    """ATen's convolution: what everybody has to beat."""

    problem: ConvolutionProblem
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return "convolution"

    @property
    def estimate(self) -> float:
        return roofline(self.problem)

    @property
    def key(self) -> str:
        return store.key("convolution", self.problem.key, torch.__version__, str(takes_tf32()))

    def kernel(self, label: str = "") -> Kernel:
        p = self.problem
        names = tuple(dict.fromkeys(v.buffer for v in p.views))
        arguments: tuple[Argument, ...] = tuple(("ptr", name) for name in names)
        call = LibraryCall(p.views, names, p.windows)
        return Kernel("extern_kernels.convolution", call, arguments)


@dataclass(frozen=True)
class LibraryCall:
    views: tuple[View, ...]  # image, weights, bias if there is one, and the result
    names: tuple[str, ...]
    windows: Windows

    @property
    def text(self) -> str:
        return "extern_kernels.convolution"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        image, weight, *bias, out = (window(v, given) for v in self.views)
        w = self.windows
        if not out.is_cuda:
            made = aten.convolution(image, weight, bias[0] if bias else None, w.step, w.margin,
                                    w.spread, False, [0] * len(w.step), w.groups)  # fmt: skip
            out.copy_(made)
            return
        # cuDNN's own form with a result: ATen's copies it, which is not part of a convolution
        aten.cudnn_convolution.out(image, weight, w.margin, w.step, w.spread, w.groups,
                                   torch.backends.cudnn.benchmark, False,
                                   torch.backends.cudnn.allow_tf32, out=out)  # fmt: skip
        if bias:
            out.add_(bias[0].view(1, -1, *[1] * len(w.step)))


class _Provider:
    """Of those that `max_autotune_conv_backends` names."""

    name = "CONVOLUTION"

    def supports(self, problem: GemmProblem) -> str:
        return "" if _named() else "config.max_autotune_conv_backends names nobody"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        assert isinstance(problem, ConvolutionProblem)
        found: list[Candidate] = []
        if "ATEN" in _named() and problem.is_bare:
            found.append(Library(problem))
        if "TRITON" in _named():
            found += TritonProvider().candidates(problem, effort)
        return found


def _named() -> set[str]:
    every = config.max_autotune_conv_backends.split(",")
    return {n.strip().upper() for n in every if n.strip()} & {"ATEN", "TRITON"}


PROVIDER = _Provider()

__all__ = ["ConvolutionProblem", "Library", "Windows", "is_tuned", "parsed"]
