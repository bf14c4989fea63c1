"""The patterns whose traffic is specified, over sizes and types that are not: each with the bytes
it moves, as a formula.

Sizes are named in the inputs (`f[A,B] i[C]`) and in the formula, in which `f` and `i` are the bytes
of a number and of an index. Inputs of type `f` are of the type that is tried. In a `low` precision
a product is rounded before it is added to: there is no accumulating form. Where sizes are
`dynamic`, what folds rows and columns at once leaves partial results: of both on a `card`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import kernels as user
from tests import traffic
from tests.traffic import EVERY_OP, aten, cat, opaque, softmax
from tilewright import config, metrics
from tilewright.backend import count_fx

INDEX = torch.int32


@dataclass(frozen=True)
class Pattern:
    name: str  # the id of what is specified
    formula: str
    program: Callable[..., Any]
    inputs: str
    train: bool = False
    narrow: bool = True  # whether it exists in types of two bytes
    held: bool = False  # a card has to know the sizes
    known: bool = False  # so does any target
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def exists(self, dtype: torch.dtype) -> bool:
        return self.narrow or dtype.itemsize > 2

    def bytes(self, dtype: torch.dtype, sizes: Mapping[str, int], device: str, dynamic: bool
              ) -> int:  # fmt: skip
        names = {**sizes, "f": dtype.itemsize, "i": INDEX.itemsize, "low": dtype.itemsize < 4,
                 "card": device == "cuda", "dynamic": dynamic}  # fmt: skip
        return int(eval(self.formula, {}, names))

    def tensors(self, dtype: torch.dtype, sizes: Mapping[str, int], device: str) -> list[Tensor]:
        found = re.findall(r"(\w)\[([^\]]*)\]", self.inputs)
        types = {"f": dtype, "i": INDEX}
        made = [torch.empty([int(eval(n, {}, dict(sizes))) for n in size.split(",") if n],
                            dtype=types[kind], device=device) for kind, size in found]  # fmt: skip
        return [t.requires_grad_(self.train and t.is_floating_point()) for t in made]


def counted(pattern: Pattern, dtype: torch.dtype, sizes: Mapping[str, int], device: str,
            dynamic: bool) -> int:  # fmt: skip
    """The bytes one compilation accesses; nothing runs."""
    torch._dynamo.reset()
    metrics.reset()
    with (
        user.seen(),
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
        torch.device(device),
        config.patch(dict(pattern.options)),
    ):
        given = pattern.tensors(dtype, sizes, device)
        out = torch.compile(pattern.program, backend=count_fx, dynamic=dynamic)(*given)
        if pattern.train:
            sum(item.mean() for item in (out if isinstance(out, tuple) else (out,))).backward()
    return metrics.num_bytes_accessed


def counted_by_name(name: str, dtype: torch.dtype, sizes: dict[str, int], device: str,
                    dynamic: bool) -> int:  # fmt: skip
    """The same for another process."""
    return counted(BY_NAME[name], dtype, sizes, device, dynamic)


def ones(n: int, like: Tensor) -> Tensor:
    return torch.ones(n, dtype=like.dtype)


def copy_cat(target: Tensor, a: Tensor, b: Tensor) -> None:
    target.copy_(cat([a, b], -1))


def inner(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum((0, 2)), x.amax((0, 2)), x.exp()


PATTERNS = [
    Pattern("PF-01a", "2*A*f", lambda x: x.cos(), "f[A]"),
    Pattern("PF-01a of rank 4", "2*6*A*B*f", lambda x: x.cos(), "f[2,A,3,B]"),
    Pattern("PF-01b", "3*A*B*f", lambda x, y: x + y, "f[A,B] f[A,B]"),
    Pattern("PF-01c", "(2*A*B + B)*f", lambda x, y: x + y, "f[A,B] f[B]"),
    Pattern("PF-01c of rank 3", "(2*A*B*C + A*C)*f", lambda x, y: x + y, "f[A,B,C] f[A,1,C]"),
    Pattern("PF-01d", "2*A*f", lambda x: x + x, "f[A]"),
    Pattern("PF-01e", "2*A*A*f", lambda x: x + x.t(), "f[A,A]"),
    Pattern("PF-01f", "(2*A + 3*B)*f", lambda a, b, c: (a.cos(), b.sin() + c.sin()),
            "f[A] f[B] f[B]"),
    Pattern("PF-02a", "(A*B + A)*f", lambda x: x.sum(1), "f[A,B]"),
    Pattern("PF-02b", "(A*B + B)*f", lambda x: x.sum(0), "f[A,B]"),
    Pattern("PF-02 of rank 3", "(A*B*C + A*C)*f", lambda x: x.sum(1), "f[A,B,C]"),
    Pattern("PF-03a", "2*A*A*f", lambda x: x @ x, "f[A,A]"),
    Pattern("PF-03b", "(A*B + B*C + A*C)*f", lambda a, b: a @ b, "f[A,B] f[B,C]"),
    Pattern("PF-03c", "6*A*A*f", lambda x: (x.cos() @ x.cos()).cos(), "f[A,A]"),
    Pattern("PF-03d", "6*A*A*f", lambda x: x.cos() @ x.sin(), "f[A,A]"),
    Pattern("PF-04a", "2*(A + B)*f", lambda a, b: cat([a.sin(), b.sin()]), "f[A] f[B]"),
    Pattern("PF-04b", "2*(A*B + A*C)*f", lambda a, b: cat([a, b], 1), "f[A,B] f[A,C]"),
    Pattern("PF-04c", "2*(A*B + A*C)*f", lambda a, b: cat([a.cos(), b], 1), "f[A,B] f[A,C]"),
    Pattern("PF-04d", "3*A*B*f", lambda a: cat([a.cos(), a.sin()], -1), "f[A,B]"),
    Pattern("PF-04e", "(2*A*A + 2*A*B)*f", lambda a, b: cat([a @ a, b.sin()]), "f[A,A] f[B,A]"),
    Pattern("PF-04f", "2*C*(2*A + B)*f",
            lambda *x: cat([t + k for k, t in enumerate(x)]) + 10, "f[A,C] f[B,C] f[A,C]"),
    Pattern("PF-04g", "2*5*A*B*f", lambda *x: cat([t + k for k, t in enumerate(x)]) + 10,
            "f[A,B]" * 5),
    Pattern("PF-04h", "(2*A*B*C + 2*B*C)*f", lambda a, b: cat([a.sum(0), b.sum(0)]) + 10,
            "f[A,B,C] f[A,B,C]"),
    Pattern("PF-05a", "2*B*(A + C)*f", lambda a, b: cat([softmax(a, 1), softmax(b, 1)]),
            "f[A,B] f[C,B]"),
    Pattern("PF-05b", "2*B*(A + C)*f", lambda a, b: cat([softmax(a, 1), softmax(b, 1)]).cos(),
            "f[A,B] f[C,B]"),
    Pattern("PF-05c", "6*A*A*f", lambda a, b: cat([a.cos(), b @ b]).cos(), "f[A,A] f[A,A]"),
    Pattern("PF-05d", "8*A*A*f", lambda a, b: cat([a @ a, b @ b]).cos(), "f[A,A] f[A,A]"),
    Pattern("PF-05e", "2*B*(A + C)*f", lambda a, b: cat([a, b]).cos(), "f[A,B] f[C,B]"),
    Pattern("PF-05f", "2*B*(A + C)*f", lambda a, b: cat([a, b.cos()]), "f[A,B] f[C,B]"),
    Pattern("PF-05g", "(A*A + A*B + (A + B)*(A + 4))*f",
            lambda a, b: F.pad(cat([a @ a, b]), (2, 2), value=0.5), "f[A,A] f[B,A]"),
    Pattern("PF-06", "2*11*A*B*f", lambda *x: cat([F.gelu(t) for t in x]) + 10, "f[A,B]" * 11),
    Pattern("PF-07", "2*11*A*B*f", lambda *x: cat([F.relu(t) for t in x]) + 10, "f[A,B]" * 11),
    Pattern("PF-09", "(min(A, B) + B)*f + B*i", lambda a, i: a[i], "f[A] i[B]"),
    Pattern("PF-11", "(2*A*B + A)*f", lambda a: (a.sum(1), a.cos()), "f[A,B]"),
    Pattern("PF-11 of rank 3", "(2*A*B*C + 2*B)*f", inner, "f[A,B,C]"),
    Pattern("PF-12", "(A*B + 2*A)*f", lambda a: (a.sum(1), a.amax(1)), "f[A,B]"),
    Pattern("PF-13", "(A*B + 2*A)*f", lambda a, b: b.cos() + a.sum(1), "f[A,B] f[A]"),
    Pattern("PF-14", "(A*B + 2*B)*f", lambda a, b: b.cos() + a.sum(0), "f[A,B] f[B]"),
    Pattern("PF-15", "(2*A*B + B)*f", lambda a, b: a.sum(1, keepdim=True) * b.cos(),
            "f[A,B] f[B]"),
    Pattern("PF-16", "(A*B + A)*f", lambda a: a.cos().sum(1).cos(), "f[A,B]"),
    Pattern("PF-17", "2*A*B*f", traffic.scaled_by_row_sums, "f[A,B]"),
    Pattern("PF-18", "2*A*B*C*f", lambda a: softmax(a, -1), "f[A,B,C]"),
    Pattern("PF-19", "(2*A*B + 2*B)*f", lambda a, w, b: F.layer_norm(a, a.shape[-1:], w, b),
            "f[A,B] f[B] f[B]"),
    Pattern("PF-20", "2*A*B*f", lambda a: softmax(softmax(a, 1), 1), "f[A,B]"),
    Pattern("PF-21", "3*A*B*f", lambda g, o: aten._softmax_backward_data(g, o, 1, g.dtype),
            "f[A,B] f[A,B]"),
    Pattern("PF-22", "(4*A + 4*B + A)*f", traffic.squares, "f[A,1,4] f[1,B,4]", held=True),
    Pattern("PF-23", "A*f", lambda x: (ones(x.shape[1], x) + torch.ones(
        x.shape, dtype=x.dtype)).sum(-1), "f[A,B]"),
    Pattern("PF-24", "(min(A, C)*B + C*B)*f + C*i", lambda a, i: a[i].cos(), "f[A,B] i[C]"),
    Pattern("PF-25", "(min(A, C)*B + C)*f + C*i", lambda a, i: a[i].cos().sum(1), "f[A,B] i[C]"),
    Pattern("PF-26", "5*A*B*f", traffic.add_into_both, "f[A,B]" * 3),
    Pattern("PF-27", "2*A*(B + C)*f", copy_cat, "f[A,B+C] f[A,B] f[A,C]"),
    Pattern("PF-31", "(6 + low)*A*A*f", traffic.choice1, "f[A,A]", options=EVERY_OP),
    Pattern("PF-32", "((4 + 2*low)*A*A + 2*A)*f", traffic.choice2, "f[A,A]", options=EVERY_OP),
    Pattern("PF-33", "(6 + 2*low)*A*A*f", traffic.choice3, "f[A,A]", options=EVERY_OP),
    Pattern("PF-34a", "(12*A*B + B)*f", lambda x, w: x * w + 1, "f[2,3,A,B] f[B]",
            options=EVERY_OP),
    Pattern("PF-34b", "(12*A*B + 2*B)*f", lambda x, v, w: x * v + x * w, "f[2,3,A,B] f[B] f[B]",
            options=EVERY_OP),
    Pattern("PF-35a", "3*A*B*f", lambda a, b: a + b.t(), "f[A,B] f[B,A]"),
    Pattern("PF-35b", "3*A*B*f", lambda a, b: a.t() + b, "f[A,B] f[B,A]"),
    Pattern("PF-36", "4*A*B*C*f", lambda a, b, c: a + b.permute(1, 2, 0) + c.permute(2, 0, 1),
            "f[A,B,C] f[C,A,B] f[B,C,A]"),
    Pattern("PF-37", "5*A*f", lambda x: x.cos().cos().cos(), "f[A]", train=True),
    Pattern("PF-38", "9*A*B*f", lambda *x: sum(x).cos().cos(), "f[A,B]" * 4, train=True),
    Pattern("PF-39", "4*A*f + 2*A", lambda x: (x < 0) * x, "f[A]", train=True),
    Pattern("PF-40", "12*A*A*f", traffic.unremat, "f[A,A]", train=True),
    Pattern("PF-41", "(22 + 4*low)*A*A*f", traffic.two_kept, "f[A,A]", train=True,
            options={"pattern_matcher": False}),
    Pattern("PF-42", "(5*A + 3*B + dynamic*(2*A + B if card else 2*B))*f",
            lambda a, b: (a * b).cos().sum(1), "f[A,1] f[1,B]", train=True),
    Pattern("PF-43", "(4*A + 2*B + A)*f", lambda a, b: cat([a.tanh(), b]), "f[A] f[B]",
            train=True),
    Pattern("PF-44", "4*A*B*f + 2*A*B", lambda x: x.relu(), "f[A,B]", train=True),
    Pattern("PF-46", "38*A*A*f", traffic.long_chain, "f[A,A]", train=True),
    Pattern("PF-47a", "2*A*f", lambda x: opaque(x.clone()), "f[A]"),
    Pattern("PF-47b", "4*A*B*f", lambda x: (b := x.clone(), opaque(b)), "f[A,B]"),
    Pattern("PF-48", "2*A*B*f", lambda x: opaque(aten.slice_scatter(x, x)), "f[A,B]"),
    Pattern("PF-49", "2*A*B*f", lambda x: opaque(x.to(x.dtype)), "f[A,B]"),
    Pattern("PF-51", "2*A*i", lambda x: opaque(x.ceil().floor().round().pow(1)), "i[A]"),
    Pattern("PF-52a", "2*A*B*f", lambda x: opaque(cat([x], 1)), "f[A,B]"),
    Pattern("PF-52b", "2*A*B*f", lambda x: cat([cat([x])]), "f[A,B]"),
    Pattern("PF-53a", "(2*A + 2*min(A, B))*f + B*i", traffic.ones_at, "f[A] i[B]"),
    Pattern("PF-54", "2*A*C*f + C*i", traffic.ones_in_columns, "f[A,B] i[C]"),
    Pattern("PF-55", "6*A*f", user.Sin.apply, "f[A]", train=True, narrow=False),
    Pattern("PF-57", "7*A*f", traffic.two_written, "f[A]"),
    Pattern("PF-58", "6*A*f", traffic.SinTwice.apply, "f[A]", train=True),
    Pattern("PF-59", "7*A*f", traffic.sin_thrice, "f[A] f[A]"),
    Pattern("PF-60", "7*A*f", traffic.sin_thrice, "f[A]"),
    Pattern("PF-61", "15*A*f", traffic.attend_twice, "f[A] f[A] f[A]"),
    Pattern("PF-62", "4*A*f", user.add, "f[A] f[A]"),
    Pattern("PF-64", "6*A*f", user.added_before, "f[A] f[A]"),
    Pattern("PF-67", "3*A*f", user.added_to_itself, "f[A]"),
    Pattern("PF-69", "(2*A*B + B)*f", lambda a: (a.sum(0), a.cos()), "f[A,B]"),
    Pattern("PF-70", "2*A*B*f", lambda a: softmax(a, 0), "f[A,B]"),
    Pattern("PF-70 of rank 3", "2*A*B*C*f", lambda a: softmax(a, 1), "f[A,B,C]"),
    Pattern("PF-72", "(A*C + B*C + A)*f", traffic.squares, "f[A,1,C] f[1,B,C]", held=True),
    Pattern("LO-3", "(2*A*B + A)*f", lambda x: (x.sum(1), x.t().contiguous()), "f[A,B]"),
    Pattern("LO-13", "(2*A*B*2*C + 2*C + 2*B*C)*f", traffic.rotary,
            "f[A,B,2*C] f[2*C] f[B,C] f[B,C]", known=True),
    Pattern("LO-13 in turns", "(2*A*B*2*C + 2*C + 2*B*C)*f", traffic.rotary_in_turns,
            "f[A,B,2*C] f[2*C] f[B,C] f[B,C]", known=True),
    Pattern("LO-13 of whole rows", "(2*A*B*12 + 12 + 2*B*12)*f", traffic.rotary_whole,
            "f[A,B,12] f[12] f[B,12] f[B,12]", held=True),
    Pattern("softmax", "5*A*B*f", lambda x: softmax(x, 1), "f[A,B]", train=True),
    Pattern("GEGLU", "8*A*B*f", traffic.geglu, "f[A,2*B]", train=True),
]  # fmt: skip

BY_NAME = {pattern.name: pattern for pattern in PATTERNS}
