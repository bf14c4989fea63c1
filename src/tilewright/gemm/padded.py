"""A product whose rows start anywhere, by way of copies whose rows do not.

The matrix units load sixteen bytes at once, from multiples of sixteen. With an odd row length the
library falls back to kernels that are several times slower (bfloat16, 2049x2051x2047 on an H200:
164 us; 26 us once operands and result are padded). Both operands are copied by one launch of a
Triton kernel, zeros behind what is summed over; the library multiplies the copies; one more launch
copies the result to where it belongs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewright import caches, config
from tilewright.gemm.problem import GemmProblem, takes_tf32, window
from tilewright.gemm.provider import Argument, Kernel
from tilewright.gemm.roofline import LAUNCH, bandwidth, flops, roofline
from tilewright.ir import index as ix
from tilewright.ir.program import View
from tilewright.runtime import launch, store, triton_build
from tilewright.runtime.triton_build import TritonConfig, TritonSource

ALIGNED = 16  # bytes the matrix units load at once
UNIT = 16  # elements that rows of copies are a multiple of: then they are stored sixteen bytes each
WORTH = 1 << 30  # operations below which copying costs more than it brings
ROWS, COLUMNS = 2, 1024  # that one program copies; of nine sizes the best there, 8.8 and 6.1 us
GAIN = 1.1  # times faster that copies have to make a product, by the model, to be taken unmeasured

SHARE: dict[str, float] = {"sm_90": 0.16}
"""Of the operations per second of aligned kernels that the library's others do. H200, bfloat16:
2049x2051x2047 takes 164 us, 2048x50257x768 1677 us, which is 1.05e8 and 0.94e8 operations per
microsecond of 6.5e8."""
SHARE_ELSEWHERE = 0.3  # not measured on other cards yet: by the model they gain half as much


def is_misaligned(problem: GemmProblem) -> bool:
    """Whether rows of operands or result start at addresses the matrix units cannot load from."""
    if problem.op == "mm_plus_mm" or not problem.target.is_gpu:
        return False
    views = (*(o.view for o in problem.operands), problem.result)
    if problem.out_dtype is not None or not all(o.is_plain for o in problem.operands):
        return False
    added = () if problem.bias is None else (problem.bias.view,)
    rows = (problem.result, *added)  # these are copied row by row
    if any(v.stride[-1] is not ix.ONE for v in rows):
        return False
    if not all(ix.ONE in v.stride[-2:] for v in views):
        return False
    _, _, n, k = problem.hints
    unit = ALIGNED // problem.operands[0].dtype.itemsize
    return bool(n % unit or k % unit) or any(map(starts_anywhere, views))


def is_slow(problem: GemmProblem) -> bool:
    """Whether it is misaligned, and large enough to do something about it."""
    return is_misaligned(problem) and problem.flops >= WORTH


def starts_anywhere(view: View) -> bool:
    """Whether a matrix, one of its rows (or columns, where these are contiguous), or one matrix of
    a batch begins at no multiple of sixteen bytes."""
    steps = [s for s, n in zip(view.stride, view.size, strict=True)
             if n is not ix.ONE and s is not ix.ONE]  # fmt: skip
    return any(ix.likely(s) * view.dtype.itemsize % ALIGNED for s in (*steps, view.offset))


def offered(problem: GemmProblem) -> list[PaddedCandidate]:
    wanted = config.shape_padding and is_slow(problem)
    return [PaddedCandidate(problem)] if wanted else []


def preferred(problem: GemmProblem, constant: frozenset[str] = frozenset()
              ) -> PaddedCandidate | None:  # fmt: skip
    """The product by way of copies, where a model finds that faster; nothing is measured. Copies of
    what is in `constant` are made once."""
    if not config.shape_padding or not is_misaligned(problem):
        return None
    found = PaddedCandidate(problem, constant=tuple(sorted(constant)))
    if config.force_shape_pad:
        return found
    views = (*(o.view for o in problem.operands), problem.result)
    if not is_slow(problem):
        return None
    uses_units = problem.operands[0].dtype.itemsize == 2 or takes_tf32()
    if not uses_units or not any(map(starts_anywhere, views)):
        return None  # slow or fast, the library's kernels are the same
    return found if GAIN * found.estimate < unaligned(problem) else None


def unaligned(problem: GemmProblem) -> float:
    """Microseconds of the library's kernels for rows that start anywhere."""
    rate = flops(problem.target, problem.operands[0].dtype)
    share = SHARE.get(problem.target.arch, SHARE_ELSEWHERE)
    return max(problem.flops / (share * rate), roofline(problem) - LAUNCH) + LAUNCH


@dataclass(frozen=True)
class PaddedCandidate:
    problem: GemmProblem
    provider: str = "ATEN"
    description: str = ""
    constant: tuple[str, ...] = ()  # buffers that never change

    @property
    def name(self) -> str:
        return f"padded_{self.problem.op}"

    @property
    def estimate(self) -> float:
        """What is copied is read and written once more."""
        p = self.problem
        copied = [v for v in self._copied if v.buffer not in self.constant]
        return roofline(p) + sum(2 * _bytes(v) / bandwidth(p.target) + LAUNCH for v in copied)

    @property
    def _copied(self) -> list[View]:
        """What has to lie elsewhere for the library, as `PaddedCall` finds at run time."""
        p = self.problem
        _, m, n, k = p.hints
        left, right, out, *_ = self.views
        high = m if left.stride[-1] is not ix.ONE else 0  # copied as its transpose
        unit = ALIGNED // left.dtype.itemsize
        inner = ((left, (k, high)), (right, (k, n)), (out, (n, high)))
        return [v for v, sizes in inner if starts_anywhere(v) or any(s % unit for s in sizes)]

    @property
    def key(self) -> str:
        text = _text(2), repr((ROWS, COLUMNS))
        return store.key("padded", self.problem.key, *text, torch.__version__, str(takes_tf32()))

    @property
    def views(self) -> tuple[View, ...]:
        """Left, right, the result, and what is added."""
        p = self.problem
        added = () if p.bias is None or p.beta == 0 else (p.bias.view,)
        return (*(o.view for o in p.operands), p.result, *added)

    def kernel(self) -> Kernel:
        p = self.problem
        memory = tuple(dict.fromkeys(v.buffer for v in self.views))
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in memory)
        arguments += tuple(("int", s.arg.name) for s in p.symbols)
        names = tuple(name for _, name in arguments)
        major, minor = p.target.capability if p.target.is_gpu else (0, 0)
        source = PaddedCall(p.op, self.views, names, 10 * major + minor, p.target.shared_memory,
                            (p.alpha, p.beta), self.constant)  # fmt: skip
        return Kernel(f"extern_kernels.{self.name}", source, arguments)


def _bytes(view: View) -> int:
    used = (n for n, s in zip(view.size, view.stride, strict=True) if s is not ix.ZERO)
    return math.prod(ix.likely(n) for n in used) * view.dtype.itemsize


@dataclass(frozen=True)
class PaddedCall:
    """`aten.op` over padded copies of windows of the memory it is given."""

    op: str
    views: tuple[View, ...]  # left, right, result, and what is added
    names: tuple[str, ...]  # of the arguments
    capability: int
    shared_memory: int
    scale: tuple[float, float] = (1.0, 1.0)
    constant: tuple[str, ...] = ()  # arguments that never change: copied at the first call
    leaves: tuple[str, ...] = ()  # arguments whose copies a later call of the program takes
    finds: tuple[str, ...] = ()  # arguments that an earlier one has copied

    @property
    def text(self) -> str:
        return f"extern_kernels.{self.op} of padded operands"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        left, right, out, *added = (window(v, given) for v in self.views)
        # a matrix that is contiguous down its columns is copied as its transpose
        down = left.stride(-1) != 1
        m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
        wide_n, wide_k = _up(n, out), _up(k, out)
        rooms = [_room(left, _up(m, out) if down else m, wide_k, down),
                 _room(right, wide_k, wide_n, right.stride(-1) != 1)]  # fmt: skip
        high = rooms[0].shape[-2]
        direct = (wide_n, high) == (n, m) and _is_aligned(out)
        sides = [left, right, *map(_row, added)]
        if added:
            bias, fits = sides[2], (wide_n, high) == (n, m)
            rows = 1 if bias.shape[-2] == 1 else high
            rooms.append(bias if fits else _fresh(bias, rows, wide_n))
        self._fill(sides, rooms, args)
        made = self._product(rooms, {"out": out} if direct else {})
        if not direct:
            self._copy([(made, out)], into=False)

    def _product(self, rooms: Sequence[torch.Tensor], out: dict[str, torch.Tensor]) -> torch.Tensor:
        a, b, *added = rooms
        alpha, beta = self.scale
        if not added:
            made = (torch.bmm if a.dim() == 3 else torch.mm)(a, b, **out)
            return made if alpha == 1 else made.mul_(alpha)
        one = added[0].dim() == 2 and added[0].shape[0] == 1
        bias = added[0][0] if one else added[0]  # a vector is added by the library's own epilogue
        return getattr(torch, self.op)(bias, a, b, alpha=alpha, beta=beta, **out)

    def _fill(self, sides: Sequence[torch.Tensor], rooms: list[torch.Tensor],
              args: Sequence[Any]) -> None:  # fmt: skip
        """Copy what has to be; constants at the first call alone."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, (side, room) in enumerate(zip(sides, rooms, strict=True)):
            if side is room:
                continue
            name = self.views[k].buffer
            if k < 2 and name in self.constant:
                known = _copies.setdefault(args[self.names.index(name)], {})
                rooms[k] = known.setdefault((self, k), room)
                if rooms[k] is not room:
                    continue
            elif k < 2 and name in (*self.leaves, *self.finds):
                rooms[k] = self._handed_on(name, args[self.names.index(name)], side, room)
                if rooms[k] is not room:
                    continue
            pairs.append((side, room))
        if pairs:
            self._copy(pairs, into=True)
        for name in set(self.finds).difference(self.leaves):
            _left.pop(args[self.names.index(name)], None)

    def _handed_on(self, name: str, owner: torch.Tensor, side: torch.Tensor, room: torch.Tensor
                   ) -> torch.Tensor:  # fmt: skip
        """The copy that an earlier call made of these rows, or `room`; it is left for the next."""
        down = side.stride(-1) != 1
        rows, wanted = (side.mT, room.mT) if down else (side, room)
        layout = rows.shape, rows.stride(), rows.storage_offset(), wanted.shape
        before, copy = _left.get(owner, (None, wanted)) if name in self.finds else (None, wanted)
        if before != layout:
            copy = wanted
        if name in self.leaves:
            _left[owner] = layout, copy
        if copy is wanted:
            return room
        return copy.mT if down else copy

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], into: bool) -> None:
        """Each into a window of another size: what is not there is zero, what has no place is left
        out. The padded side is what is copied into, or from."""
        first = pairs[0][0]
        if not first.is_cuda:
            for source, target in pairs:
                rows, columns = map(min, source.shape[-2:], target.shape[-2:])
                target.zero_()[..., :rows, :columns].copy_(source[..., :rows, :columns])
            return
        source = copier(len(pairs), first.element_size(), into, self.capability,
                        self.shared_memory)  # fmt: skip
        kernel = _loaded(source, first.device.index or 0)
        given: list[Any] = []
        programs = 0
        for source, target in pairs:
            numbers, blocks = _numbers(source, target)
            given += [source, target, *numbers, blocks]
            programs += blocks
        kernel(torch.cuda.current_stream(first.device).cuda_stream, programs, 1, 1, *given)


_copies: Any = WeakTensorKeyDictionary()
"""Of constants, for as long as they are there: call and operand -> the copy."""
_left: Any = WeakTensorKeyDictionary()
"""Of what two products of one run read, between the first and the last: its layout and the copy."""


def _row(added: torch.Tensor) -> torch.Tensor:
    """What is added, with one row where all are the same."""
    same = added.stride(-2) == 0 and added.shape[-2] > 1
    return added[..., :1, :] if same else added


def _up(size: int, like: torch.Tensor) -> int:
    return size if size * like.element_size() % ALIGNED == 0 else -(-size // UNIT) * UNIT


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row, or every column, starts where the matrix units can load."""
    steps = [s for s in x.stride() if s != 1]
    return all(at % ALIGNED == 0 for at in (x.data_ptr(), *(s * x.element_size() for s in steps)))


def _room(like: torch.Tensor, rows: int, columns: int, down: bool) -> torch.Tensor:
    """Memory for the matrix with so many rows and columns; itself, where it will do."""
    if (rows, columns) == tuple(like.shape[-2:]) and _is_aligned(like):
        return like
    return _fresh(like, columns, rows).mT if down else _fresh(like, rows, columns)


def _fresh(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return like.new_empty(*like.shape[:-2], rows, columns)


def _numbers(source: torch.Tensor, target: torch.Tensor) -> tuple[list[int], int]:
    """What the kernel is told of a copy, and how many programs make it."""
    if target.stride(-1) != 1:
        source, target = source.transpose(-1, -2), target.transpose(-1, -2)
    batch = source.shape[0] if source.dim() == 3 else 1
    leaps = (source.stride(0), target.stride(0)) if source.dim() == 3 else (0, 0)
    (rows, columns), (high, wide) = source.shape[-2:], target.shape[-2:]
    numbers = [rows, columns, high, wide, source.stride(-2), target.stride(-2), *leaps]
    return numbers, batch * -(-high // ROWS) * -(-wide // COLUMNS)


# ---- the kernel

_HEAD = """\
import triton
import triton.language as tl


@triton.jit
def copied({params}, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
"""
_ONE = """\
    if (program >= 0) & (program < blocks{i}):
        across{i} = (wide{i} + COLUMNS - 1) // COLUMNS
        down{i} = (high{i} + ROWS - 1) // ROWS
        block{i} = program // across{i}
        batch{i} = (block{i} // down{i}).to(tl.int64)
        row{i} = (block{i} % down{i}) * ROWS + tl.arange(0, ROWS)[:, None]
        column{i} = (program % across{i}) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        from{i} = batch{i} * source_leap{i} + row{i}.to(tl.int64) * source_step{i} + column{i}
        to{i} = batch{i} * target_leap{i} + row{i}.to(tl.int64) * target_step{i} + column{i}
        value{i} = tl.load(source{i} + from{i}, (row{i} < rows{i}) & (column{i} < columns{i}), 0)
        tl.store(target{i} + to{i}, value{i}, (row{i} < high{i}) & (column{i} < wide{i}))
    program -= blocks{i}
"""
_NUMBERS: tuple[str, ...] = (
    "rows", "columns", "high", "wide", "source_step", "target_step", "source_leap", "target_leap",
    "blocks",
)  # fmt: skip


@functools.cache
def _text(count: int) -> str:
    """Of the kernel that makes so many copies in one launch."""
    names = [f"{name}{i}" for i in range(count) for name in ("source", "target", *_NUMBERS)]
    return _HEAD.format(params=", ".join(names)) + "".join(_ONE.format(i=i) for i in range(count))


@functools.cache
def copier(count: int, itemsize: int, into: bool, capability: int, shared_memory: int
           ) -> TritonSource:  # fmt: skip
    """The kernel. Rows that are copied into, or from, start at multiples of sixteen bytes; those of
    the other side may start anywhere."""
    kind = f"*i{8 * itemsize}"
    types = {"source": kind, "target": kind, "source_leap": "i64", "target_leap": "i64"}
    params = tuple((f"{name}{i}", types.get(name, "i32")) for i in range(count)
                   for name in ("source", "target", *_NUMBERS))  # fmt: skip
    side = "target" if into else "source"
    aligned = [side, f"{side}_step", f"{side}_leap", "wide" if into else "columns"]
    return TritonSource(
        _text(count),
        "copied",
        params,
        (TritonConfig((("ROWS", ROWS), ("COLUMNS", COLUMNS)), 4, 1),),
        capability,
        shared_memory,
        aligned=frozenset(f"{name}{i}" for i in range(count) for name in aligned),
    )


@functools.cache
def _loaded(source: TritonSource, device: int) -> launch.Launcher:
    return launch.load(source, triton_build.build(source), device)


caches.register(_loaded.cache_clear)
