"""From sources to loaded kernels.

`store` keeps content-addressed files for all processes, `cxx` builds and loads C++ kernels
through it, and `include/` is what those kernels stand on: `tw.h` and the parts it includes.
"""

from __future__ import annotations

# Modules of what generated Triton kernels call.
HELPERS = ("tri", "tri_fp8", "tri_logs", "tri_maths", "tri_moves", "tri_rows", "tri_special")
