"""Run a program eagerly and compiled; say how they differ, or nothing."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.fuzz.generate import Program
from tests.fuzz.stages import Capture, first_wrong
from tilewright import metrics

_STRIDES = "strides"
_MOST_EXCUSED = 4  # times the tolerance: how far from exact we may be because eager is, too
_NEARBY = 8  # sets of arguments next to those of a program
_NARROW = re.compile(r"torch\.(bfloat16|float16|float32)\b")
_RELATIVE = {torch.float64: 1e-6, torch.float32: 5e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def difference(program: Program, backend: Any = "tilewright") -> str:
    """How compiled differs from eager, over all choices of sizes; empty when it does not.

    What `aot_eager` does not manage either is not the backend's doing.
    """
    found = _difference(program, backend)
    return "" if found and _difference(program, "aot_eager") else found


def _difference(program: Program, backend: Any) -> str:
    with _listening() as heard:
        return _wrong(program, backend) or "; ".join(heard)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """What the backend warns of: kernels that were replaced by torch's operations give right values
    too, and of a program that is compiled as it should be there is nothing to say."""
    listener, logger = _Listener(), logging.getLogger("tilewright")
    logger.addHandler(listener)
    try:
        yield listener.heard
    finally:
        logger.removeHandler(listener)


def _wrong(program: Program, backend: Any) -> str:
    torch._dynamo.reset()
    metrics.reset()
    function = program.function()
    options = {"dynamic": True} if program.dynamic else {"dynamic": False}
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    for number, sizes in enumerate(program.sizes):
        eager_args, args = program.arguments(sizes), program.arguments(sizes)
        try:
            want = _run(function, eager_args)
        except Exception:
            return ""  # shrinking may make a program that eager refuses
        try:
            got = _run(compiled, args)
        except Exception as error:
            return f"call {number} raised {type(error).__name__}: {str(error)[:1500]}"
        exact = partial(_in_float64, program, sizes)
        near = partial(_nearby, program, sizes)
        found = _compare(program, (*got, args), (*want, eager_args), exact, near)
        if found:
            return f"call {number}: {found}"
    return without_kernel()


def without_kernel() -> str:
    """What torch's own operations ran on a card, though groups are only made of what can be a
    kernel."""
    return "; ".join(why for why in metrics.counters["triton"] if why.startswith("no kernel"))


def blame(program: Program) -> str:
    """The stage that first differs from eager."""
    torch._dynamo.reset()
    capture = Capture()
    options = {"dynamic": True} if program.dynamic else {"dynamic": False}
    compiled = torch.compile(program.function(), backend=capture, fullgraph=True, **options)
    with contextlib.suppress(Exception):
        for sizes in program.sizes:
            _run(compiled, program.arguments(sizes))
    try:
        return first_wrong(capture, _alike) or "no stage on its own (capture or calling convention)"
    finally:
        torch._dynamo.reset()


def _run(function: Callable[..., Any], args: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    outputs = list(function(*args))
    wanted = [a for a in args if a.requires_grad]
    ends = [o for o in outputs if o.requires_grad]
    if not wanted or not ends:
        return outputs, []
    directions = [torch.full_like(o, 0.5).detach() for o in ends]
    return outputs, list(torch.autograd.grad(ends, wanted, directions, allow_unused=True))


# ---- values


def _in_float64(program: Program, sizes: dict[str, int]) -> Results:
    """What the program gives in exact arithmetic, nearly: every rounding is of float64."""
    wide = program.in_float64()
    args = wide.arguments(sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return (*_run(wide.function(), args), args)
    finally:
        torch.set_default_dtype(before)


Results = tuple[list[Tensor], list[Any], list[Tensor]]  # outputs, gradients, arguments afterwards


def _nearby(program: Program, sizes: dict[str, int]) -> list[Results]:
    """What eager gives where arguments, and values on the way that are rounded, differ in their
    last bits: where these jump, no result is more right than others."""
    draw = torch.Generator("cpu")
    lines = (line if line.exact else replace(line, text=f"shaken({line.text})")
             for line in program.lines)  # fmt: skip
    function = replace(program, lines=tuple(lines)).function(shaken=partial(_shaken, draw, 2))
    found: list[Results] = []
    for number in range(_NEARBY):
        args = program.arguments(sizes)
        draw.manual_seed(number)
        for a in args:
            _shaken(draw, 4, torch.empty(0, dtype=a.dtype).set_(a.untyped_storage()))
        found.append((*_run(function, args), args))
    return found


def _shaken(draw: torch.Generator, most: int, value: Tensor) -> Tensor:
    """The value with some of its last bits changed where it lies."""
    if value.dtype.is_floating_point:
        steps = torch.randint(-most, most + 1, value.shape, generator=draw, device="cpu")
        factor = 1 + steps.to(value.device) * torch.finfo(value.dtype).eps
        with contextlib.suppress(RuntimeError):  # several of its elements lie in one place
            value.data.copy_(value.data.double() * factor)
    return value


def _compare(program: Program, got: Results, want: Results, exact: Callable[[], Results],
             near: Callable[[], list[Results]]) -> str:  # fmt: skip
    """How they differ. Where rounding may explain it, both are compared with the exact result, and
    with eager's nearby."""
    true: Results | None = None
    for kind, k, text in _differences(program, got, want):
        if _STRIDES in text and kind == 0 and _as_traced(program, got[2], k, got[0][k]):
            text = _differ(got[0][k], want[0][k], program.exact[program.outputs[k]], layout=False)
            if not text:
                continue
        if "not close" not in text or (kind == 0 and program.exact[program.outputs[k]]):
            return text
        with contextlib.suppress(Exception):  # an operation without float64
            true = true or exact()
        results = got[kind][k], want[kind][k]
        if true and _is_rounding(*results, true[kind][k], _coarse(program, kind, k)):
            continue
        if not _is_unstable(*results, [other[kind][k] for other in near()]):
            return text
    return _aliasing(got[0], got[2], want[0], want[2])


def _differences(program: Program, got: Results, want: Results) -> Iterator[tuple[int, int, str]]:
    """(outputs, gradients or arguments; which of them; how it differs)."""
    for k, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        number = program.outputs[k]
        found = _differ(a, b, program.exact[number], layout=True)
        if found:
            yield 0, k, f"output {k} (value {number}): {found}"
    for k, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        if (a is None) != (b is None):
            yield 1, k, f"gradient {k} is {(a is None and 'missing') or 'unexpected'}"
        found = "" if a is None or b is None else _differ(a, b, exact=False, layout=False)
        if found:
            yield 1, k, f"gradient {k}: {found}"
    for k, (a, b) in enumerate(zip(got[2], want[2], strict=True)):
        found = _differ(a.detach(), b.detach(), exact=False, layout=True)
        if found:
            yield 2, k, f"argument {k} afterwards: {found}"


def _differ(a: Tensor, b: Tensor, exact: bool, layout: bool) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
    if layout and b.numel() > 0:
        strides = [(s, w) for s, w, n in zip(a.stride(), b.stride(), b.shape, strict=True) if n > 1]
        if any(s != w for s, w in strides):
            return f"{_STRIDES} {a.stride()} instead of {b.stride()} for {tuple(b.shape)}"
    tolerance = 0.0 if exact else _RELATIVE.get(b.dtype, 0.0)
    scale = 0.0
    if tolerance and b.numel():
        scale = max(1.0, b.detach().abs().nan_to_num(0, 0, 0).max().item())
    try:
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance * scale,
                                   equal_nan=True)  # fmt: skip
    except AssertionError as error:
        return str(error)
    return ""


def _as_traced(program: Program, args: Sequence[Tensor], k: int, ours: Tensor) -> bool:
    """Whether a result is laid out as fake tensors say: for some operators (`div` with a rounding
    mode) that is not what eager's kernel does, and a graph is compiled for what it was traced with.
    """
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=shapes, static_shapes=True)
    with mode:
        results = program.function()(*(mode.from_tensor(a) for a in args))
    return results[k].stride() == ours.stride()


def _coarse(program: Program, kind: int, k: int) -> float:
    """How far from exact a result may be, relative to the largest: no nearer than the narrowest
    type that a value it comes from, or that its gradient comes through, was rounded to."""
    inputs = len(program.inputs)
    found = [_RELATIVE.get(i.dtype, 0.0) for i in program.inputs]
    above: list[set[int]] = [{n} for n in range(inputs)]  # of a value: all it comes from
    for n, line in enumerate(program.lines, start=inputs):
        above.append({n}.union(*(above[o] for o in line.operands)))
        named = [_RELATIVE[getattr(torch, t)] for t in re.findall(_NARROW, line.text)]
        found.append(max(named, default=0.0))
    if kind == 0:
        relevant = above[program.outputs[k]]
    elif kind == 1:
        wanted = [n for n, i in enumerate(program.inputs) if i.grad]
        below = [values for values in above if wanted[k] in values]
        relevant = set[int]().union(*below)
    else:
        relevant = set(range(len(above)))
    return max(found[n] for n in relevant)


def _is_rounding(ours: Tensor, eager: Tensor, true: Tensor, coarse: float) -> bool:
    """Whether ours is about as near to the exact result as eager's. An eager result that is far
    off excuses only the very same one: ours has to be near."""
    if not ours.dtype.is_floating_point or true.shape != ours.shape:
        return False
    scale = max(1.0, true.detach().abs().nan_to_num(0, 0, 0).max().item())
    tolerance = max(_RELATIVE[ours.dtype], coarse) * scale
    ours, eager, true = (t.detach().double() for t in (ours, eager, true))
    same = (ours == eager) | (ours.isnan() & eager.isnan())
    theirs = (eager - true).abs().nan_to_num(0, 0, 0)  # eager may have overflowed
    worst = min(theirs.max().item(), _MOST_EXCUSED * tolerance)
    room = max(tolerance, 1.5 * worst)
    return bool((same | ((ours - true).abs() <= room)).all())


def _is_unstable(ours: Tensor, eager: Tensor, nearby: Sequence[Tensor]) -> bool:
    """Whether ours is among eager's results nearby, wherever it is not eager's: no farther from
    them than they are from each other."""
    if not ours.dtype.is_floating_point or any(t.shape != ours.shape for t in nearby):
        return False
    scale = max(1.0, eager.detach().abs().nan_to_num(0, 0, 0).max().item())
    room = _RELATIVE[ours.dtype] * scale
    around = torch.stack([t.detach().double() for t in (eager, *nearby)])
    ours, eager = ours.detach().double(), eager.detach().double()
    right = ((ours - eager).abs() <= room) | (ours == eager) | (ours.isnan() & eager.isnan())
    least, most = around.amin(0), around.amax(0)
    beyond = most - least + room
    between = (ours >= least - beyond) & (ours <= most + beyond)
    return bool((right | between).all())


def _aliasing(got: Sequence[Tensor], args: Sequence[Tensor], want: Sequence[Tensor],
              eager_args: Sequence[Tensor]) -> str:  # fmt: skip
    """Outputs share memory with arguments and with each other exactly where eager's do."""
    mine, theirs = [*args, *got], [*eager_args, *want]
    for i in range(len(mine)):
        for j in range(max(i + 1, len(args)), len(mine)):
            a, b = _shares(mine[i], mine[j]), _shares(theirs[i], theirs[j])
            if b and not a:
                return f"value {i} and {j} of (arguments, outputs) no longer share memory"
            if a and not b:
                return (
                    f"value {i} and {j} of (arguments, outputs) share memory, which eager's do not"
                )
    return ""


def _shares(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _alike(got: Any, want: Any) -> bool:
    for a, b in zip(got, want, strict=True):
        if isinstance(b, Tensor):
            if _differ(a, b, exact=False, layout=False):
                return False
        elif a != b:
            return False
    return True
