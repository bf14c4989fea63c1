"""The providers there are, in the order their candidates are listed: importing one registers it."""

from tilewright.gemm import aten, cpp, triton  # isort: skip
from tilewright.gemm.provider import PROVIDERS, enabled, register

__all__ = ["PROVIDERS", "aten", "cpp", "enabled", "register", "triton"]
