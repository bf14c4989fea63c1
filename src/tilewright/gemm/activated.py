"""The library's product with what it adds and applies itself, in one call, without measuring.

`aten._addmm_activation` is cuBLASLt's product with its bias and relu or gelu (by tanh) epilogues:
the loop kernel that would read the product and write what follows is not launched. Under
max-autotune the same epilogues are candidates of `cublaslt`, and measured; rounding is as there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tilewright.gemm.cublaslt import Matrix, product
from tilewright.gemm.problem import GemmProblem, takes_tf32
from tilewright.gemm.provider import Argument, Kernel
from tilewright.gemm.roofline import LAUNCH, bandwidth, roofline
from tilewright.runtime import store

OPS = frozenset(("max", "tanh"))  # of which relu and gelu are made
WORTH = 0.02
"""Part of a product's time that the kernel saved has to take: less is not worth another algorithm
of the library. By the model of bytes alone; not measured on a card yet."""


@dataclass(frozen=True)
class ActivatedCall:
    """`aten._addmm_activation` over windows of the memory it is given."""

    bias: Matrix
    left: Matrix
    right: Matrix
    out: Matrix
    use_gelu: bool
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"extern_kernels.addmm with {'gelu' if self.use_gelu else 'relu'}"

    def __call__(self, *args: torch.Tensor) -> None:
        given = dict(zip(self.names, args, strict=True))
        all_ = (self.left, self.right, self.out, self.bias)
        left, right, out, bias = (_window(x, given[x.buffer]) for x in all_)
        if out.is_cuda:
            torch._addmm_activation(bias[0], left, right, use_gelu=self.use_gelu, out=out)
            return
        made = torch.addmm(bias[0], left, right)  # a CPU's gelu here would be the other one
        out.copy_(F.gelu(made, approximate="tanh") if self.use_gelu else torch.relu(made))


def _window(x: Matrix, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(x.size, x.stride, tensor.storage_offset() + x.offset)


@dataclass(frozen=True)
class ActivatedCandidate:
    problem: GemmProblem
    call: ActivatedCall
    provider: str = "ATEN"
    description: str = ""
    name: str = "addmm_activation"

    @property
    def estimate(self) -> float:
        return roofline(self.problem)

    @property
    def saved(self) -> float:
        """Microseconds of the kernel that is not launched: it reads and writes the result."""
        _, m, n, _ = self.problem.hints
        return 2 * m * n * self.problem.dtype.itemsize / bandwidth(self.problem.target) + LAUNCH

    @property
    def key(self) -> str:
        return store.key("activated", self.problem.key, torch.__version__, str(takes_tf32()))

    def kernel(self) -> Kernel:
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in self.call.names)
        return Kernel(f"extern_kernels.{self.name}", self.call, arguments)


def preferred(problem: GemmProblem) -> ActivatedCandidate | None:
    """The problem as one call of the library, where that has all of it and a model finds it worth
    the while."""
    if not problem.target.is_gpu or problem.is_batched or not problem.epilogue:
        return None
    found = product(problem)
    if isinstance(found, str) or not found.activation or found.alpha != 1:
        return None
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    if len(found.terms) != 1 or found.terms[0][0] != 1 or not found.terms[0][1].turned.is_row:
        return None
    bias, out = found.terms[0][1], found.out
    if out.size[0] == 1:  # from row to row there is no distance
        out = replace(out, stride=(out.size[1], out.stride[1]))
    if bias.dtype != problem.dtype or out.stride != (out.size[1], 1):
        return None
    names = tuple(dict.fromkeys(x.buffer for x in (bias, found.left, found.right, out)))
    call = ActivatedCall(bias, found.left, found.right, out, found.activation == "gelu", names)
    made = ActivatedCandidate(problem, call)
    return made if made.saved >= WORTH * made.estimate else None
