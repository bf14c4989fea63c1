"""CuTe DSL: templates with hooks, compiled for a card, and kernels of libraries written in it.

- `template.py`  `CuteDSLTemplate`, and the choices made of it
- `kernel.py`    the hooks a template calls; `entry.py` makes one flat function of what they give
- `vocabulary.py` the text of every operation; `device.py` what it calls, `writer.py` lines of it
- `call.py`      operators that templates compute: sites like products
- `provider.py`  products: `quack.py` a library's kernel, `epilogue.py` what follows in its terms
- `gated.py`     two products of one operand, as one; `grouped.py` grouped products
- `build.py`     compiled once for all processes; with `shim.cpp` nothing of the DSL is needed then
- `source.py`    a kernel as it is called; `toolchain.py` the DSL as it is installed
"""

from __future__ import annotations

from tilewright.gemm.cutedsl.call import lowering
from tilewright.gemm.cutedsl.kernel import CuteDSLTemplateKernel, PartialRender, Subgraph
from tilewright.gemm.cutedsl.overrides import CuteDSLOpOverrides
from tilewright.gemm.cutedsl.source import CuteDSLKernelWrapper
from tilewright.gemm.cutedsl.template import CuteDSLTemplate, CuteDSLTemplateCaller, Layout

__all__ = ["CuteDSLKernelWrapper", "CuteDSLOpOverrides", "CuteDSLTemplate", "CuteDSLTemplateCaller",
           "CuteDSLTemplateKernel", "Layout", "PartialRender", "Subgraph", "lowering"]  # fmt: skip
