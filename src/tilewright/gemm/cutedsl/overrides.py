"""The vocabulary as calls over variables, for text that is written by hand."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilewright.gemm.cutedsl import vocabulary
from tilewright.gemm.cutedsl.kernel import CuteDSLTemplateKernel
from tilewright.gemm.cutedsl.types import bare
from tilewright.ir.expr import make, sym
from tilewright.ir.ops import TABLE

ALIASES = {
    "truediv": "div", "maximum": "max", "minimum": "min", "remainder": "mod",
    "logical_and": "bit_and", "logical_or": "bit_or", "logical_xor": "bit_xor",
    "logical_not": "bit_not", "bitwise_and": "bit_and", "bitwise_or": "bit_or",
    "bitwise_xor": "bit_xor", "bitwise_not": "bit_not", "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr", "to_dtype": "cast",
}  # fmt: skip


class CSEVariable(str):
    """A variable of generated text, with what is known of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __new__(cls, name: str, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> CSEVariable:
        made = super().__new__(cls, name)
        made.dtype, made.shape = dtype, shape
        return made


class CuteDSLOpOverrides:
    """`ops.add(a, b)` writes a line of a kernel's body, and gives its variable."""

    def __init__(self, kernel: CuteDSLTemplateKernel) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._apply, name)

    @staticmethod
    def _ensure_tensor_ssa(value: Any, like: Any, is_tensor: bool = True) -> str:
        """A tensor as it is; a number in the shape and type of another variable."""
        return str(value) if is_tensor else f"cute.full_like({like}, {value})"

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> str:
        return bare(value, dtype)

    def to_dtype(self, x: CSEVariable, dtype: torch.dtype) -> CSEVariable:
        text = vocabulary.cast(str(x), x.dtype, dtype)
        return CSEVariable(self.kernel.cse.generate(self.kernel.body, text), dtype, x.shape)

    def _apply(self, name: str, *args: Any) -> CSEVariable:
        op = ALIASES.get(name, name)
        tensors = [a for a in args if isinstance(a, CSEVariable)]
        if op not in vocabulary.OPS or not tensors:
            why = vocabulary.REASONS.get(op, "there is no such operation")
            raise NotImplementedError(f"{name}({', '.join(map(str, args))}): {why}")
        first = tensors[-1 if op == "where" else 0]
        texts = [self._ensure_tensor_ssa(a, first, isinstance(a, CSEVariable)) for a in args]
        kinds = [a.dtype if isinstance(a, CSEVariable) else first.dtype for a in args]
        result = torch.bool if TABLE[op].result == "bool" else first.dtype
        node = make(op, result, tuple(sym(f"a{k}", d) for k, d in enumerate(kinds)))
        text = vocabulary.text(node, *texts)
        return CSEVariable(self.kernel.cse.generate(self.kernel.body, text), result, first.shape)
