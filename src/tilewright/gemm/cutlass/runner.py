"""A program around one kernel (`cuda.generate_test_runner`), to run it under a profiler or a
debugger: memory of the problem's sizes, two calls to warm up and ten more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.gemm.cutlass.render import Rendered
from tilewright.gemm.problem import GemmProblem
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer


def runner(problem: GemmProblem, rendered: Rendered, values: Sequence[int | float]) -> str:
    """The text to add to a source; it is compiled where `GENERATE_STANDALONE_RUNNER` is defined."""
    sizes = [_bytes(problem.memory[name]) for name in rendered.buffers]
    given = [f"p[{k}]" for k in range(len(sizes))]
    numbers = [f"{v!r}f" if kind == "float" else str(v)
               for (_, kind, _), v in zip(rendered.numbers, values, strict=True)]  # fmt: skip
    call = f"{rendered.name}({', '.join((*given, *numbers))}"
    return "\n".join([
        "",
        "#ifdef GENERATE_STANDALONE_RUNNER",
        "#include <cstdio>",
        "int main() {",
        f"  size_t bytes[] = {{{', '.join(map(str, sizes))}}};",
        f"  void* p[{len(sizes)}];",
        f"  for (int k = 0; k < {len(sizes)}; ++k) {{",
        "    if (cudaMalloc(&p[k], bytes[k]) != cudaSuccess) return 1;",
        "    if (cudaMemset(p[k], 0, bytes[k]) != cudaSuccess) return 1;",
        "  }",
        "  size_t size = 0;",
        "  void* workspace = nullptr;",
        f"  if ({call}, &size, nullptr, nullptr)) return 2;",
        "  if (size != 0 && cudaMalloc(&workspace, size) != cudaSuccess) return 1;",
        "  for (int k = 0; k < 12; ++k) {",
        f"    int status = {call}, nullptr, workspace, nullptr);",
        '    if (status != 0) { std::fprintf(stderr, "status %d\\n", status); return 3; }',
        "  }",
        "  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 4;",
        "}",
        "#endif",
        "",
    ])  # fmt: skip


def _bytes(buffer: Buffer) -> int:
    last = sum((ix.likely(n) - 1) * ix.likely(s)
               for n, s in zip(buffer.size, buffer.stride, strict=True))  # fmt: skip
    return math.ceil((last + 1) * buffer.dtype.itemsize / 16) * 16
