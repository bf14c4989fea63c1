"""Kernels of a function for a card that is not there, compiled to machine code and looked into."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewright.codegen.triton.generate import generate, limits
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.graph import decompositions
from tilewright.graph.simplify import simplify
from tilewright.lower.graph import lower
from tilewright.runtime.cubin import facts
from tilewright.schedule.plan import schedule
from tilewright.target import Target


@dataclass(frozen=True)
class Compiled:
    kernel: TritonKernel
    ptx: str
    shared: int
    spills: int  # bytes of stack per thread

    def widest(self, what: str) -> int:
        """Bytes of the widest access of a kind (`ld.global`, `st.global`)."""
        found = re.findall(rf"\b{what}[.:\w]*?(?:\.v(\d))?\.b(\d+)\b", self.ptx)
        return max((int(n or 1) * int(bits) // 8 for n, bits in found), default=0)


def kernels_of(fn: Callable[..., Any], *args: torch.Tensor, target: str = "sm_90"
               ) -> list[TritonKernel]:  # fmt: skip
    """Of a forward graph traced on tensors that need not exist."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = [mode.from_tensor(a) for a in args]
        gm = make_fx(lambda *xs: pytree.tree_leaves(fn(*xs)),
                     decomposition_table=decompositions.table())(*fake)  # fmt: skip
    simplify(gm)
    program = lower(gm)
    made: list[TritonKernel] = []
    plan = schedule(program, lambda program, group: limits(program, group, Target(target)))
    for k, step in enumerate(plan.steps):
        if step.group.call is None:
            made.append(generate(plan.program, step.group, Target(target), str(k)))
    return made


def build(kernel: TritonKernel, target: str = "sm_90", config: int = 0) -> Compiled:
    """With pointers aligned, as the allocator gives them, where the kernel makes use of it."""
    file = f"<{kernel.name} {hash(kernel.text)}>"
    linecache.cache[file] = (len(kernel.text), None, kernel.text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": file}
    exec(compile(kernel.text, file, "exec"), namespace)
    chosen = kernel.configs[config]
    signature = {**dict(kernel.arguments), **dict.fromkeys(chosen.kwargs, "constexpr")}
    aligned = {(k,): [["tt.divisibility", 16]] for k, p in enumerate(kernel.params)
               if p.kind == "ptr" and p.multiple == 16}  # fmt: skip
    source = ASTSource(namespace[kernel.name], signature, chosen.kwargs, aligned)
    capability = int(target.removeprefix("sm_"))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                          options={"num_warps": chosen.num_warps,
                                   "num_stages": chosen.num_stages,
                                   "maxnreg": chosen.registers,
                                   "enable_fp_fusion": kernel.joins})  # fmt: skip
    return Compiled(
        kernel, made.asm["ptx"], made.metadata.shared, facts(made.asm["cubin"], kernel.name).stack
    )
