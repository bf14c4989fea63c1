"""Run a function through the compiler with Triton kernels, in Triton's interpreter, on the CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tilewright.codegen.triton.generate import generate, limits
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.graph import decompositions
from tilewright.graph.simplify import simplify
from tilewright.host.program import KernelCall, assemble
from tilewright.ir.program import Program
from tilewright.ir.verify import verify
from tilewright.lower.graph import lower
from tilewright.runtime.interpret import Interpreted
from tilewright.schedule.plan import schedule
from tilewright.target import Target

TARGET = Target("sm_90")
OWN = ("workspace", "counters")  # what a kernel whose programs wait for each other is given


class Interpreter:
    """A torch.compile backend; `kernels` are those it made, in order."""

    def __init__(self, config: int = 0) -> None:
        self.kernels: list[TritonKernel] = []
        self._config = config

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with decompositions.keep_whole():
            return aot_autograd(
                fw_compiler=self._compile, bw_compiler=self._compile,
                inference_compiler=self._compile, decompositions=decompositions.table(),
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )(gm, inputs)  # fmt: skip

    def _compile(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with _disable_current_modes():
            simplify(gm)
            program = lower(gm)
            constants = {n: operator.attrgetter(p)(gm) for n, p in program.constants.items()}
            return executable(program, constants, self.kernels, self._config)


def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """For the operator sweep: `python -m tests.sweep --backend tests.compile.interp:backend`."""
    return Interpreter()(gm, inputs)


def executable(
    program: Program, constants: Mapping[str, Any] | None = None,
    made: list[TritonKernel] | None = None, config: int = 0
) -> Callable[[list[Any]], Any]:  # fmt: skip
    """Every stage after lowering; the kernels are appended to `made`."""
    verify(program)
    plan = schedule(program, lambda program, group: limits(program, group, TARGET))
    program = plan.program
    calls: list[KernelCall | None] = []
    functions: dict[str, Callable[..., None]] = {}
    for k, step in enumerate(plan.steps):
        if step.group.call is not None:
            calls.append(None)
            continue
        kernel = generate(program, step.group, TARGET, str(k))
        args = tuple((p.kind, p.name) for p in kernel.params if p.name not in OWN)
        calls.append(KernelCall(kernel.name, args, kernel.checked))
        functions[kernel.name] = runner(kernel, config)
        if made is not None:
            made.append(kernel)
    return assemble(program, plan.steps, calls).load(functions, constants or {}, {})


def runner(kernel: TritonKernel, which: int = 0) -> Callable[..., None]:
    config = kernel.configs[min(which, len(kernel.configs) - 1)]
    types = [t for _, t in kernel.arguments]
    run = Interpreted(kernel.text, kernel.name, types, config.kwargs)
    names = [p.name for p in kernel.params]
    workspace = torch.empty(kernel.workspace)
    counters = torch.zeros(kernel.counters, dtype=torch.int32)

    def call(*given: torch.Tensor | int | float) -> None:
        args = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given]
        if kernel.counters:  # the last of its parameters
            last = len(names) - len(OWN)
            args[last:last] = [workspace.data_ptr(), counters.data_ptr()]
        sizes = {n: a for n, a, p in zip(names, args, kernel.params, strict=False)
                 if p.kind == "int"}  # fmt: skip
        try:
            run(kernel.programs(sizes, config), *args)  # type: ignore[arg-type]
        except Exception as error:
            error.add_note(f"in {config}\n{kernel.text}")
            raise
        assert not counters.any()

    return call


def check(fn: Callable[..., Any], *args: Any, dynamic: bool | None = False, config: int = 0,
          **tolerance: float) -> list[TritonKernel]:  # fmt: skip
    """`fn` in the interpreter gives what eager gives; returns the kernels."""
    torch._dynamo.reset()
    backend = Interpreter(config)
    expected = fn(*pytree.tree_map_only(torch.Tensor, torch.clone, args))
    actual = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)
    return backend.kernels
