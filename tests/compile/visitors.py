"""Epilogue visitors evaluated without a card.

The computations of an `Epilogue` are compiled by the host's C++ compiler from the text that nvcc is
given, and each is called with what its leaves read at every element of the result. So what is
proven is what is rendered: the arithmetic as C++, the roundings, and where each leaf reads and each
result is stored.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.products import Made
from tilewright.gemm.cutlass.evt import Access, Epilogue, Leaf, computation
from tilewright.gemm.problem import definition
from tilewright.ir import index as ix
from tilewright.ir import interp
from tilewright.ir.expr import Expr
from tilewright.ir.program import Program

_HEAD = """#include <cmath>
#include <cstdint>
#include <cstring>
#define CUTLASS_HOST_DEVICE
using std::signbit;
static float rounded_f16(float x) { return float(_Float16(x)); }
static float rounded_bf16(float x) {
  uint32_t b; std::memcpy(&b, &x, 4);
  if (x != x) return x;
  b = (b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &b, 4); return x;
}
"""


def compiled(epilogues: Sequence[Epilogue], folder: Path) -> list[list[Any]]:
    """For each epilogue the functions of its results, over arrays of floats."""
    lines = [_HEAD]
    for e, epilogue in enumerate(epilogues):
        for k, result in enumerate(epilogue.results):
            inputs = [epilogue.leaves[i].value for i in result.inputs]
            lines += computation(f"E{e}R{k}", result.value, inputs)
            given = ", ".join(f"x[{i}][j]" for i in range(len(inputs)))
            lines.append(
                f'extern "C" void e{e}r{k}(float** x, float* y, int64_t n) {{ '
                f"for (int64_t j = 0; j < n; ++j) y[j] = E{e}R{k}::at({given}); }}"
            )
    text, library = folder / "visitors.cpp", folder / "visitors.so"
    text.write_text("\n".join(lines))
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-w",
        str(text),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    return [
        [loaded[f"e{e}r{k}"] for k in range(len(epilogue.results))]
        for e, epilogue in enumerate(epilogues)
    ]


def window(made: Made, access: Access) -> torch.Tensor:
    """Elements for (batch, m, n), as CUTLASS walks them."""
    batch, m, n, _ = (ix.evaluate(e, made.values) for e in made.problem.sizes)
    down, across, step = (ix.evaluate(e, made.values) for e in access.strides)
    memory = made.tensors[access.buffer]
    offset = ix.evaluate(access.offset, made.values)
    return memory.as_strided((batch, m, n), (step, down, across), memory.storage_offset() + offset)


def _leaf(made: Made, leaf: Leaf, sums: torch.Tensor) -> torch.Tensor:
    if leaf.kind == "accumulator":
        return sums
    if leaf.access is not None:
        return window(made, leaf.access).float()
    number = leaf.number
    value = _number(number, made.values) if isinstance(number, Expr) else number
    return torch.full_like(sums, value)


def _number(e: Expr, values: Mapping[str, int]) -> float:
    return float(values[e.arg.name]) if e.op == "sym" else float(ix.evaluate(e, values))


def run(
    made: Made, epilogue: Epilogue, functions: Sequence[Any], sums: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the visitor stores, by buffer, in copies of the memory."""
    stored: dict[str, torch.Tensor] = {}
    for result, function in zip(epilogue.results, functions, strict=True):
        given = [_leaf(made, epilogue.leaves[i], sums).contiguous() for i in result.inputs]
        pointers = (ctypes.c_void_p * len(given))(*(t.data_ptr() for t in given))
        out = torch.empty_like(sums)
        function(pointers, ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.numel()))
        stored[result.access.buffer] = out.to(result.access.dtype)
    return stored


def expected(made: Made) -> dict[str, torch.Tensor]:
    """What the IR says of the same memory: the interpreter's results."""
    nodes = definition(made.problem)
    memory = {name: t.clone() for name, t in made.tensors.items()}
    names = [*memory, *made.values]
    symbols = {s.arg.name: s for node in nodes for s in node.symbols}
    program = Program(buffers=dict(made.problem.memory), inputs=names, symbols=symbols)
    given = [_laid(made, name, memory[name]) for name in memory]
    interp.run_nodes(program, nodes, [*given, *made.values.values()], ())
    return memory


def _laid(made: Made, name: str, memory: torch.Tensor) -> torch.Tensor:
    """Memory with the sizes and strides its buffer has."""
    buffer = made.problem.memory[name]
    size, stride = (
        [ix.evaluate(e, made.values) for e in part] for part in (buffer.size, buffer.stride)
    )
    return memory.as_strided(size, stride)
