"""The providers there are, libraries first: importing a module registers what it provides."""

from tilewright.gemm import aten, cpp, cublaslt, triton
from tilewright.gemm.provider import enabled

MODULES = (aten, cublaslt, triton, cpp)

__all__ = ["MODULES", "enabled"]
