"""Is a compiled result the same as eager's?

Values are compared with the tolerances of ``torch.testing.assert_close``, widened where PyTorch's
own tests of that operator widen them. A result outside them still passes when it is at least as
near to a float64 computation as eager's result is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_device_type import toleranceOverride
from torch.utils._pytree import tree_flatten

DEFAULTS: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
# The tests of PyTorch that compare two ways of computing the same thing on the CPU.
_COMPARING_TESTS = (
    ("TestCommon", "test_noncontiguous_samples"),
    ("TestCommon", "test_variant_consistency_eager"),
    ("TestCommon", "test_compare_cpu"),
    ("TestInductorOpInfo", "test_comprehensive"),
    ("TestEagerFusionOpInfo", "test_aot_autograd_exhaustive"),
)
# Times eager's largest error, and times its mean one: sums in another order are as exact, and which
# of a hundred thousand comes out worst is chance.
_LUCK = 1.1


@dataclass(frozen=True)
class Mismatch:
    """What differs: ``kind`` is value, meta (shape, dtype, layout) or stride."""

    kind: str
    text: str


@dataclass(frozen=True)
class Tolerance:
    """Widening on top of the per-dtype defaults, as (rtol, atol) by dtype."""

    extra: dict[torch.dtype, tuple[float, float]]

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        rtol, atol = DEFAULTS.get(dtype, (0.0, 0.0))
        more_rtol, more_atol = self.extra.get(dtype, (0.0, 0.0))
        return max(rtol, more_rtol), max(atol, more_atol)


def tolerance_for(op: Any, dtype: torch.dtype) -> Tolerance:
    extra: dict[torch.dtype, tuple[float, float]] = {}
    for test_class, test_name in _COMPARING_TESTS:
        for found in op.get_decorators(test_class, test_name, "cpu", dtype, {}):
            if isinstance(found, toleranceOverride):
                for kind, tol in found.d.items():
                    rtol, atol = extra.get(kind, (0.0, 0.0))
                    extra[kind] = (max(rtol, tol.rtol), max(atol, tol.atol))
    return Tolerance(extra)


def compare(
    actual: Any,
    expected: Any,
    tolerance: Tolerance,
    *,
    values: bool,
    exact: Callable[[], Any],
) -> Mismatch | None:
    """First difference between two trees; ``exact`` computes the same tree in float64 on demand.

    ``values=False`` compares everything but the contents, for operators that return
    uninitialised memory. A stride difference is reported only when nothing else differs.
    """
    got, got_spec = tree_flatten(actual)
    want, want_spec = tree_flatten(expected)
    if got_spec != want_spec:
        return Mismatch("meta", f"structure {got_spec} instead of {want_spec}")
    stride: Mismatch | None = None
    for position, (a, e) in enumerate(zip(got, want, strict=True)):
        found = _compare_leaf(a, e, tolerance, values)
        inexact = found is not None and found.kind == "value" and isinstance(e, torch.Tensor)
        if inexact and _as_good_as_eager(a, e, tolerance, exact, position):
            found = _compare_strides(a, e)
        if found is not None and found.kind == "stride":
            stride = stride or Mismatch("stride", f"result {position}: {found.text}")
        elif found is not None:
            return Mismatch(found.kind, f"result {position}: {found.text}")
    return stride


def _compare_leaf(a: Any, e: Any, tolerance: Tolerance, values: bool) -> Mismatch | None:
    if not isinstance(e, torch.Tensor) or not isinstance(a, torch.Tensor):
        return _compare_plain(a, e) if values else None
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_quantized"):
        if getattr(a, name) != getattr(e, name):
            text = f"{name} {getattr(a, name)} instead of {getattr(e, name)}"
            return Mismatch("meta", text)
    if values:
        rtol, atol = tolerance.of(e.dtype)
        try:
            torch.testing.assert_close(
                a.detach(), e.detach(), rtol=rtol, atol=atol, equal_nan=True, check_stride=False
            )
        except AssertionError as error:
            return Mismatch("value", " ".join(str(error).split())[:300])
    return _compare_strides(a, e)


def _compare_plain(a: Any, e: Any) -> Mismatch | None:
    if type(a) is not type(e):
        return Mismatch("meta", f"{type(a).__name__} instead of {type(e).__name__}")
    if isinstance(e, float):
        same = a == e or (a != a and e != e) or abs(a - e) <= 1e-5 + 1.3e-6 * abs(e)
    else:
        same = a is e or bool(a == e)
    return None if same else Mismatch("value", f"{a!r} instead of {e!r}")


def _compare_strides(a: torch.Tensor, e: torch.Tensor) -> Mismatch | None:
    """Strides that address something: of no meaning for sizes of one and empty tensors."""
    if e.layout != torch.strided or e.numel() == 0:
        return None
    meaning = [d for d in range(e.dim()) if e.size(d) > 1]
    if all(a.stride(d) == e.stride(d) for d in meaning):
        return None
    return Mismatch("stride", f"stride {a.stride()} instead of {e.stride()} for {tuple(e.shape)}")


def _as_good_as_eager(
    a: torch.Tensor,
    e: torch.Tensor,
    tolerance: Tolerance,
    exact: Callable[[], Any],
    position: int,
) -> bool:
    """Within tolerance of the float64 result, or nearer to it than eager, element by element
    or, about, in both the largest and the mean error."""
    if not e.is_floating_point():
        return False
    reference = _reference_leaf(exact, position)
    if reference is None or reference.shape != e.shape or not reference.is_floating_point():
        return False
    rtol, atol = tolerance.of(e.dtype)
    a, e, r = (t.detach().to(torch.float64) for t in (a, e, reference))
    # NaN and infinity have no distance: there the compiled result must be eager's, or right where
    # eager has overflowed on the way.
    finite = r.isfinite() & e.isfinite()
    near = (a - r).abs() <= atol + rtol * r.abs()
    special = (a == e) | (a.isnan() & e.isnan()) | (e.isinf() & r.isfinite() & near)
    if not bool(torch.where(finite, a.isfinite(), special).all()):
        return False
    a, e, r = a[finite], e[finite], r[finite]
    if not r.numel():
        return True
    ours, theirs = (a - r).abs(), (e - r).abs()
    allowed = torch.maximum(theirs, atol + rtol * r.abs())
    if bool((ours <= allowed).all()):
        return True
    return bool(ours.max() <= _LUCK * theirs.max() and ours.mean() <= _LUCK * theirs.mean())


def _reference_leaf(exact: Callable[[], Any], position: int) -> torch.Tensor | None:
    leaves = tree_flatten(exact())[0]
    if position >= len(leaves) or not isinstance(leaves[position], torch.Tensor):
        return None
    return leaves[position]
