"""The providers there are, libraries first: importing a module registers what it provides."""

from tilewright.gemm import aten, cpp, cublaslt, triton
from tilewright.gemm.cutedsl import provider as cutedsl
from tilewright.gemm.cutlass import provider as cutlass
from tilewright.gemm.provider import enabled

MODULES = (aten, cublaslt, triton, cutlass, cutedsl, cpp)

__all__ = ["MODULES", "enabled"]
