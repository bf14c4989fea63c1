"""A CUTLASS kernel as the host program calls it.

It is called with tensors and numbers of the program. Sizes and distances are worked out of those
once for each set of numbers; what the kernel assumes of them and of addresses is looked at, and a
call for which it does not hold is computed by torch instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tilewright import metrics
from tilewright.errors import BuildError, TilewrightError
from tilewright.gemm.cutlass.render import Value
from tilewright.gemm.problem import GemmProblem, definition
from tilewright.ir import index as ix
from tilewright.ir import interp
from tilewright.ir.expr import Expr
from tilewright.ir.program import Program
from tilewright.runtime import nvcc
from tilewright.runtime.nvcc import Loaded, NvccSource

MANY = 4096  # sets of numbers that are remembered
STATUS = (
    "success",
    "misaligned operand",
    "invalid data type",
    "invalid layout",
    "invalid problem",
    "not supported",
    "workspace is null",
    "internal error",
    "architecture mismatch",
    "insufficient driver",
    "memory allocation failed",
)


@dataclass(frozen=True)
class Assumption:
    """An address is a multiple of so many bytes; a number of so many elements."""

    argument: int = -1  # which address
    number: Expr | None = None
    multiple: int = 1


@dataclass(frozen=True)
class Numbers:
    """Of one call: the arguments after the addresses, and the workspace it needs."""

    values: tuple[int | float, ...]
    holds: bool
    workspace: int = -1  # bytes; -1: not asked yet


def worked_out(value: Value, symbols: Mapping[str, Any], swizzle: int, sms: int) -> int | float:
    """An argument of a call, given the values of the program's symbols."""
    match value:
        case "swizzle":
            return swizzle
        case "sms":
            return sms
        case Expr():
            return symbols[value.arg.name] if value.op == "sym" else ix.evaluate(value, symbols)
        case _:
            return float(value)


@dataclass(frozen=True)
class CutlassSource:
    """A kernel with the order its tiles are taken in. It pickles with the key of its binary, so
    that it runs where there is neither nvcc nor CUTLASS."""

    source: NvccSource
    key: str
    label: str  # of the operation, for people
    names: tuple[str, ...]  # of the arguments it is called with: buffers, then symbols
    addresses: tuple[int, ...]  # for each address of the kernel, which of them
    numbers: tuple[Value, ...]
    assumptions: tuple[Assumption, ...]
    swizzle: int
    sms: int
    problem: GemmProblem
    known: dict[tuple[Any, ...], Numbers] = field(
        default_factory=dict["tuple[Any, ...]", Numbers], compare=False, repr=False
    )

    @property
    def text(self) -> str:
        return f"{self.source.name}  # {self.label}, swizzle={self.swizzle}"

    def submit(self) -> Future[Loaded]:
        """Begin to build it."""
        return nvcc.submit(self.source, self.key)

    def __call__(self, *args: Any) -> None:
        tensors, given = args[: self._buffers], args[self._buffers :]
        numbers = self.known.get(given)
        if numbers is None:
            numbers = self._worked_out(given)
        pointers = [tensors[k].data_ptr() for k in self.addresses]
        if not numbers.holds or not self._is_aligned(pointers):
            self._instead("a size or an address is not a multiple of what the kernel moves", args)
            return
        run = self._run
        if run is None:
            self._instead("its binary is not there, nor nvcc", args)
            return
        device = tensors[0].device
        if device.index == torch._C._cuda_getDevice():
            self._launched(run, numbers, given, pointers, device)
        else:  # CUTLASS launches on the current one
            with torch.cuda.device(device):
                self._launched(run, numbers, given, pointers, device)

    def _launched(
        self,
        run: Loaded,
        numbers: Numbers,
        given: tuple[Any, ...],
        pointers: list[int],
        device: torch.device,
    ) -> None:
        if numbers.workspace < 0:
            numbers = self._asked(run, numbers, given)
        space = None
        if numbers.workspace:
            space = torch.empty(numbers.workspace, dtype=torch.uint8, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        status = run(
            *pointers, *numbers.values, None, None if space is None else space.data_ptr(), stream
        )
        if status:
            raise self._failed(status)

    @cached_property
    def _run(self) -> Loaded | None:
        try:
            return self.submit().result()
        except BuildError:
            if nvcc.find():
                raise
            return None

    @cached_property
    def _buffers(self) -> int:
        return sum(name in self.problem.memory for name in self.names)

    def _worked_out(self, given: tuple[Any, ...]) -> Numbers:
        """Arguments for these values of the symbols."""
        symbols = dict(zip(self.names[self._buffers :], given, strict=True))
        sizes = {name: value for name, value in symbols.items() if isinstance(value, int)}
        values = tuple(worked_out(v, symbols, self.swizzle, self.sms) for v in self.numbers)
        needed = [(a.number, a.multiple) for a in self.assumptions if a.number is not None]
        holds = all(ix.evaluate(e, sizes) % n == 0 for e, n in needed)
        holds &= all(ix.evaluate(e, sizes) > 0 for e in self.problem.sizes)
        if len(self.known) >= MANY:
            self.known.clear()
        found = self.known[given] = Numbers(values, holds)
        return found

    def _is_aligned(self, pointers: list[int]) -> bool:
        return all(
            pointers[a.argument] % a.multiple == 0 for a in self.assumptions if a.argument >= 0
        )

    def _asked(self, run: Loaded, numbers: Numbers, given: tuple[Any, ...]) -> Numbers:
        """The kernel tells how much memory it wants, and touches none."""
        size = ctypes.c_size_t(0)
        nothing = [None] * len(self.addresses)
        status = run(*nothing, *numbers.values, ctypes.addressof(size), None, None)
        if status:
            raise self._failed(status)
        found = self.known[given] = Numbers(numbers.values, numbers.holds, size.value)
        return found

    def _failed(self, status: int) -> TilewrightError:
        why = STATUS[status] if 0 <= status < len(STATUS) else f"status {status}"
        return TilewrightError(
            f"the CUTLASS kernel {self.source.name} failed: {why}",
            stage="run",
            hint=f"its operation is {self.label}; config.cuda.cutlass_op_denylist_regex leaves it "
            "out",
        )

    def _instead(self, why: str, args: tuple[Any, ...]) -> None:
        metrics.counters["cutlass"][f"computed by torch: {why}"] += 1
        self._otherwise(*args)

    @cached_property
    def _otherwise(self) -> Callable[..., None]:
        """The same by torch, from memory of any alignment, and of nothing where it is empty."""
        nodes = definition(self.problem)
        memory = self.problem.memory
        local = tuple(sorted(memory.keys() - set(self.names)))
        symbols = {s.arg.name: s for node in nodes for s in node.symbols}
        program = Program(buffers=dict(memory), inputs=list(self.names), symbols=symbols)

        def call(*args: Any) -> None:
            with torch.no_grad(), torch.device(args[0].device):
                interp.run_nodes(program, nodes, args, local)

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return CutlassSource, (
            self.source,
            self.key,
            self.label,
            self.names,
            self.addresses,
            self.numbers,
            self.assumptions,
            self.swizzle,
            self.sms,
            self.problem,
        )
