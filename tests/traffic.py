"""The programs whose memory traffic is specified, by spec id, and how they are counted.

One line per case serves every target: sizes and types are text, so that the same program is
counted on the CPU and, with fake tensors, for cards that are not there. Traffic is a compile-time
fact: nothing runs.
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
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from tests import kernels as user
from tilewright import config, metrics
from tilewright.backend import count_fx

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32,
          "i64": torch.int64, "b8": torch.bool, "f64": torch.float64}  # fmt: skip


Ours = int | tuple[int, int]  # on both kinds of target, or on the CPU and on a card


@dataclass(frozen=True)
class Case:
    """A program, what the specification says of it, and what we count, in four-byte elements.

    `reference` is what the specification measured or asks for, `floor` the least any compiler could
    move, if that is less. `ours` is our number where it is another than the reference's, `moved`
    what really moves where that is not what is counted. Both are held exactly.
    """

    name: str
    reference: int
    program: Callable[..., Any]
    inputs: str = ""
    train: bool = False
    floor: int | None = None
    ours: Ours | None = None
    moved: Ours | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    functorch: Mapping[str, Any] = field(default_factory=dict[str, Any])  # torch's own options
    kernels: int | None = None  # where the specification says how many

    def expected(self, device: str) -> tuple[int, int]:
        """Elements under the compatible contract, and those that really move."""
        elements = _on(device, self.reference if self.ours is None else self.ours)
        return elements, elements if self.moved is None else _on(device, self.moved)


def _on(device: str, number: Ours) -> int:
    return number if isinstance(number, int) else number[device != "cpu"]


@dataclass(frozen=True)
class Counted:
    """What one compilation added to the counters, in four-byte elements."""

    elements: int
    moved: int
    kernels: int
    nodes: tuple[int, ...]


def tensors(inputs: str, device: str) -> list[Tensor]:
    """`"f32[10,10] i32[2]"` as empty tensors; a type alone is a number in a tensor."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", inputs)
    return [torch.empty([int(n) for n in size.split(",") if n], dtype=DTYPES[dtype], device=device)
            for dtype, size in found]  # fmt: skip


def count(case: Case, device: str = "cpu") -> Counted:
    """Compile a case (train: forward, and backward of the sum of means) for its counters."""
    torch._dynamo.reset()
    metrics.reset()
    with (
        user.seen(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device(device),
        config.patch(dict(case.options)),
        functorch_config.patch(dict(case.functorch)),
    ):
        given = tensors(case.inputs, device)
        if case.train:
            given = [x.requires_grad_(x.is_floating_point()) for x in given]
        out = torch.compile(case.program, backend=count_fx, dynamic=False)(*given)
        if case.train:
            # tensors are not iterated: the means of ten thousand rows would be the slow part
            sum(item.mean() for item in (out if isinstance(out, tuple) else (out,))).backward()
    nodes = tuple(n for _, n in metrics.nodes_num_elem)
    return Counted(metrics.num_bytes_accessed // 4, metrics.num_bytes_moved // 4,
                   metrics.generated_kernel_count, nodes)  # fmt: skip


# ---- programs too long for a line

cat, softmax, aten = torch.cat, torch.softmax, torch.ops.aten
EVERY_OP = {"realize_opcount_threshold": 0, "pattern_matcher": False}
BATCHED = {"batch_fusion": "linear,layer_norm,pointwise", "split_cat_fx_passes": False}
UNMATCHED = {"pattern_matcher": False}


def scaled_by_row_sums(a: Tensor) -> Tensor:
    for _ in range(3):
        a = a * a.sum(1, keepdim=True)
    return a


def add_into_both(a: Tensor, b: Tensor, c: Tensor) -> None:
    a0 = a + c
    b0 = b + a0
    b.copy_(b0)
    a.copy_(a0)


def shared_mask(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    mask = torch.tril(torch.ones(32, 32))
    return a + mask, b + mask, c + mask


def squares(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b) ** 2).sum(-1).amax(1)


def copy_cat(target: Tensor, a: Tensor, b: Tensor) -> None:
    target.copy_(cat([a, b]))


def choice1(a: Tensor) -> Tensor:
    c = a.cos()
    return c @ c + c.cos()


def choice2(a: Tensor) -> Tensor:
    c = a.cos()
    return c @ c + c.sum(1)


def choice3(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a.cos()
    e = c + a
    return c @ c + e, e


def choice4(a: Tensor, b: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    c = a + b
    e = c + b + more
    return c @ c + e + more, e


def unremat(x: Tensor) -> Tensor:
    return (x @ torch.ones_like(x)).tanh().tanh()


def two_kept(a: Tensor) -> Tensor:
    q = a @ a + 1
    return q @ (q + 2)


def long_chain(x: Tensor) -> Tensor:
    kept = x
    for _ in range(2):
        x = x * x
        x = x @ x
        x = 2 * x
        x = kept + x
        kept = x
    return x


class ThroughView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, u = x.sin(), x.cos().view(10, 10)
        ctx.save_for_backward(u, y)
        return u.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        u, y = ctx.saved_tensors
        return (g @ u).view(100) * y


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True).relu()


def ones_at(a: Tensor, i: Tensor) -> Tensor:
    a = a.cos()
    a[i] = 1
    return a


def put_back(put: Any) -> Callable[..., None]:
    def program(a: Tensor, i: Tensor) -> None:
        a.copy_(put(a, (i,), torch.full((), 1.0)))

    return program


def ones_in_columns(a: Tensor, i: Tensor) -> Tensor:
    a[:, i] = 1
    return a


def add_rows(x: Tensor, y: Tensor, s: Tensor) -> None:
    x.index_add_(0, torch.randperm(10)[:5], y * s)


def opaque(x: Tensor) -> Tensor:
    """An op with neither a decomposition nor a lowering."""
    return aten._lazy_clone(x)


def _library() -> torch.library.Library:
    """Opaque ops: one that reads `x` and writes `out`, one that writes two, one that also reads."""
    made = torch.library.Library("tilewright_traffic", "DEF")
    made.define("sin_into(Tensor x, Tensor(a!) out) -> ()")
    made.define("sin_cos_into(Tensor x, Tensor(a!) sin, Tensor(b!) cos) -> ()")
    made.define("attend(Tensor q, Tensor(a!) k, Tensor(b!) v) -> Tensor")
    made.impl("sin_into", lambda x, out: None, "Meta")
    made.impl("sin_cos_into", lambda x, sin, cos: None, "Meta")
    made.impl("attend", lambda q, k, v: torch.empty_like(q), "Meta")
    return made


LIBRARY = _library()
OPS = torch.ops.tilewright_traffic


class SinTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        OPS.sin_into(x, out)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (saved,) = ctx.saved_tensors
        out = torch.empty_like(g)
        OPS.sin_into(saved, out)
        return out


def two_written(x: Tensor) -> tuple[Tensor, ...]:
    sin, cos = torch.empty_like(x), torch.empty_like(x)
    OPS.sin_cos_into(x, sin, cos)
    return x.clone(), sin, cos


def sin_thrice(x: Tensor, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    for source in (x, out, out):
        OPS.sin_into(source, out)
    return out


def attend_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OPS.attend(q, k, v) + OPS.attend(q, k, v)


def norm_and_most(x: Tensor, scale: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n = F.layer_norm(x, (4096,), w, b)
    return (n * scale).sigmoid(), n.abs().amax()


def scaled_and_most(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    v = 1.1 * x
    return (v * scale).sigmoid(), v.abs().amax()


def geglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * F.gelu(b)


def norm_and_most_kept(x: Tensor, scale: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n = F.layer_norm(x, (4096,), w, b)
    return (n * scale).sigmoid(), n.abs().amax((0, 1, 2), keepdim=True)


def scaled_and_most_kept(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    v = 1.1 * x
    return (v * scale).sigmoid(), v.abs().amax((0, 1, 2), keepdim=True)


def copies_and_sum(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x * 2, (x * 2).t().contiguous()


def rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = F.rms_norm(x, x.shape[-1:], w).chunk(2, -1)
    return cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_whole(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = F.rms_norm(x, x.shape[-1:], w)
    half = n.shape[-1] // 2
    return n * cos + cat([-n[..., half:], n[..., :half]], -1) * sin


def rotary_in_turns(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = F.rms_norm(x, x.shape[-1:], w)
    a, b = n[..., ::2], n[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def block_mask() -> tuple[Tensor, ...]:
    """Which blocks of 1024 positions, in a box of 4 x 16 x 16, have others within two steps."""

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = q >= 0
        for step, size in ((256, 4), (16, 16), (1, 16)):
            mine, other = q // step % size, k // step % size
            inside = inside & ((other - mine.clamp(2, size - 3)).abs() <= 2)
        return inside

    device = torch.empty(()).device
    made = create_block_mask(near, None, None, 1024, 1024, device=device, BLOCK_SIZE=128)
    return tuple(t for t in made.as_tuple() if isinstance(t, Tensor))


# ---- the cases

CASES = [
    # the counter itself
    Case("PF-01a", 20, lambda x: x.cos(), "f32[10]"),
    Case("PF-01b", 30, lambda x, y: x + y, "f32[10] f32[10]"),
    Case("PF-01c", 210, lambda x, y: x + y, "f32[10,10] f32[10]"),
    Case("PF-01d", 20, lambda x: x + x, "f32[10]"),
    Case("PF-01e", 200, lambda x: x + x.t(), "f32[10,10]"),
    Case("PF-01f", 50, lambda a, b, c: (a.cos(), b.sin() + c.sin()), "f32[10] f32[10] f32[10]"),
    Case("PF-02a", 110, lambda x: x.sum(1), "f32[10,10]"),
    Case("PF-02b", 110, lambda x: x.sum(0), "f32[10,10]"),
    Case("PF-03a", 200, lambda x: x @ x, "f32[10,10]"),
    Case("PF-03b", 300, lambda a, b: a @ b, "f32[10,10] f32[10,10]"),
    Case("PF-03c", 600, lambda x: (x.cos() @ x.cos()).cos(), "f32[10,10]"),
    Case("PF-03d", 600, lambda x: x.cos() @ x.sin(), "f32[10,10]"),
    # concatenation
    Case("PF-04a", 40, lambda a, b: cat([a.sin(), b.sin()]), "f32[10] f32[10]"),
    Case("PF-04b", 40, lambda a, b: cat([a, b]), "f32[10] f32[10]"),
    Case("PF-04c", 40, lambda a, b: cat([a.cos(), b]), "f32[10] f32[10]"),
    Case("PF-04d", 30, lambda a: cat([a.cos(), a.sin()]), "f32[10]"),
    Case("PF-04e", 400, lambda a, b: cat([a @ a, b.sin()]), "f32[10,10]" * 2),
    Case("PF-04f", 600, lambda *x: cat([t + k for k, t in enumerate(x)]) + 10, "f32[10,10]" * 3),
    Case("PF-04g", 1000, lambda *x: cat([t + k for k, t in enumerate(x)]) + 10, "f32[10,10]" * 5),
    Case("PF-04h", 2600, lambda a, b: cat([a.sum(0), b.sum(0)]) + 10, "f32[10,10,10]" * 2,
         floor=2200, ours=2200),
    Case("PF-05a", 400, lambda a, b: cat([softmax(a, 1), softmax(b, 1)]), "f32[10,10]" * 2),
    Case("PF-05b", 680, lambda a, b: cat([softmax(a, 1), softmax(b, 1)]).cos(), "f32[10,10]" * 2,
         floor=400, ours=400),
    Case("PF-05c", 600, lambda a, b: cat([a.cos(), b @ b]).cos(), "f32[10,10]" * 2),
    Case("PF-05d", 800, lambda a, b: cat([a @ a, b @ b]).cos(), "f32[10,10]" * 2),
    Case("PF-05e", 400, lambda a, b: cat([a, b]).cos(), "f32[10,10]" * 2),
    Case("PF-05f", 400, lambda a, b: cat([a, b.cos()]), "f32[10,10]" * 2),
    Case("PF-05g", 680, lambda a, b: F.pad(cat([a @ a, b]), (2, 2), value=0.5), "f32[10,10]" * 2,
         floor=480, ours=480),
    Case("PF-06", 6400, lambda *x: cat([F.gelu(t) for t in x]) + 10, "f32[10,10]" * 16, floor=3200,
         ours=3200, options=BATCHED),
    Case("PF-07", 9600, lambda *x: cat([F.relu(t) for t in x]) + 10, "f32[10,10]" * 16, floor=3200,
         ours=3200, options=BATCHED),
    Case("PF-08", 400, lambda a, b: cat([a + 1, b + 2]) + 3, "f32[10,10]" * 2,
         options={"max_pointwise_cat_inputs": 0}),
    Case("PF-09", 30, lambda a, i: a[i], "f32[10] i32[10]"),
    *(Case(f"PF-10 {'delayed' if delayed else 'at once'}", 6144, shared_mask, "f32[32,32]" * 3,
           options={"delay_realize_cheap_outputs": delayed}) for delayed in (False, True)),
    # one kernel
    Case("PF-11", 210, lambda a: (a.sum(1), a.cos()), "f32[10,10]"),
    Case("PF-12", 120, lambda a: (a.sum(1), a.amax(1)), "f32[10,10]"),
    Case("PF-13", 120, lambda a, b: b.cos() + a.sum(1), "f32[10,10] f32[10]"),
    Case("PF-14", 120, lambda a, b: b.cos() + a.sum(0), "f32[10,10] f32[10]"),
    Case("PF-15", 210, lambda a, b: a.sum(1, keepdim=True) * b.cos(), "f32[10,10] f32[10]"),
    Case("PF-16", 110, lambda a: a.cos().sum(1).cos(), "f32[10,10]"),
    Case("PF-17", 200, scaled_by_row_sums, "f32[10,10]", kernels=1),
    Case("PF-18", 200, lambda a: softmax(a, 1), "f32[10,10]"),
    Case("PF-19", 220, lambda a, w, b: F.layer_norm(a, (10,), w, b), "f32[10,10] f32[10] f32[10]"),
    Case("PF-20", 200, lambda a: softmax(softmax(a, 1), 1), "f32[10,10]", kernels=1),
    Case("PF-21", 300, lambda g, o: aten._softmax_backward_data(g, o, 1, torch.float32),
         "f32[10,10]" * 2),
    Case("PF-22", 90, squares, "f32[10,1,4] f32[1,10,4]"),
    Case("PF-23", 10, lambda: (torch.ones(10) + torch.ones(10, 10)).sum(-1)),
    Case("PF-24", 320, lambda a, i: a[i].cos(), "f32[10,10] i32[20]"),
    Case("PF-25", 140, lambda a, i: a[i].cos().sum(1), "f32[10,10] i32[20]"),
    Case("PF-26", 500, add_into_both, "f32[10,10]" * 3),
    Case("PF-27", 40, copy_cat, "f32[20] f32[10] f32[10]"),
    Case("PF-28", 67133442, norm_and_most, "f32[4,2048,4096] f32[1] f32[4096] f32[4096]",
         floor=67117058, ours=(67117122, 67133442), kernels=2),
    Case("PF-29", 100663298, scaled_and_most, "f32[4,2048,4096] f32[1]", floor=67108866,
         ours=(67108930, 67109378), kernels=2),
    Case("PF-28 keepdim", 67133442, norm_and_most_kept,
         "f32[4,2048,4096] f32[1] f32[4096] f32[4096]", floor=67117058,
         ours=(67117122, 67133442), kernels=2),
    Case("PF-29 keepdim", 100663298, scaled_and_most_kept, "f32[4,2048,4096] f32[1]",
         floor=67108866, ours=(67108930, 67109378), kernels=2),
    Case("PF-30", 209714, block_mask, floor=288, ours=(15184, 47360), moved=(15040, 47216)),
    # grouping when not everything fits; every op is a buffer of its own
    Case("PF-31", 700, choice1, "f32[10,10]", floor=600, ours=600, options=EVERY_OP),
    Case("PF-32", 620, choice2, "f32[10,10]", floor=420, ours=420, options=EVERY_OP),
    Case("PF-33", 800, choice3, "f32[10,10]", floor=600, ours=600, options=EVERY_OP),
    Case("PF-34a", 1331, lambda x, w: x * w + 1, "f32[2,3,10,11] f32[11]", options=EVERY_OP),
    Case("PF-34b", 1342, lambda x, v, w: x * v + x * w, "f32[2,3,10,11] f32[11] f32[11]",
         options=EVERY_OP),
    # tiling
    Case("PF-35a", 300, lambda a, b: a + b.t(), "f32[10,10]" * 2, kernels=1),
    Case("PF-35b", 300, lambda a, b: a.t() + b, "f32[10,10]" * 2, kernels=1),
    Case("PF-36", 4000, lambda a, b, c: a + b.permute(1, 2, 0) + c.permute(2, 0, 1),
         "f32[10,10,10]" * 3, kernels=1),
    # what the backward pass is given
    Case("PF-37", 50, lambda x: x.cos().cos().cos(), "f32[10]", train=True),
    Case("PF-38", 90, lambda *x: sum(x).cos().cos(), "f32[10]" * 4, train=True),
    Case("PF-39", 450, lambda x: (x < 0) * x, "f32[100]", train=True),
    Case("PF-40", 1300, unremat, "f32[10,10]", train=True, floor=1200, ours=1200,
         functorch={"max_dist_from_bw": 1000}),
    Case("PF-41", 2600, two_kept, "f32[10,10]", train=True, floor=2200, ours=2200,
         options=UNMATCHED),
    Case("PF-42", 220, lambda a, b: (a * b).cos().sum(1), "f32[20,1] f32[1,20]", train=True,
         floor=160, ours=160),
    Case("PF-43", 70, lambda a, b: cat([a.tanh(), b]), "f32[10] f32[10]", train=True),
    Case("PF-44", 72, lambda x: x.relu(), "f32[16]", train=True),
    Case("PF-45", 900, ThroughView.apply, "f32[100]", train=True),
    Case("PF-46", 3900, long_chain, "f32[10,10]", train=True, floor=3700, ours=3800,
         options=UNMATCHED),
    Case("PF-57", 21, two_written, "f32[3]", moved=15),
    Case("PF-58", 18, SinTwice.apply, "f32[3]", train=True, moved=12),
    Case("PF-59", 21, sin_thrice, "f32[3] f32[3]"),
    Case("PF-60", 21, sin_thrice, "f32[3]", moved=18),
    Case("PF-61", 45, attend_twice, "f32[3] f32[3] f32[3]"),
    Case("PF-55", 18, user.Sin.apply, "f32[3]", train=True, moved=12),
    Case("PF-56", 27, user.TwoSin.apply, "f32[3]", train=True, moved=21),
    Case("PF-62", 50, user.add, "f32[10]" * 2, ours=40, moved=30),
    Case("PF-63", 70, user.added_beside, "f32[10]" * 2, ours=60, moved=50),
    Case("PF-64", 80, user.added_before, "f32[10]" * 2, ours=60, moved=50),
    Case("PF-65", 70, user.added_view, "f32[10]" * 2, ours=60, moved=50),
    Case("PF-66", 80, user.added_before_view, "f32[10]" * 2, ours=60, moved=50),
    Case("PF-67", 50, user.added_to_itself, "f32[10]", ours=30, moved=20),
    # at real sizes; a card keeps sums of columns in 512 parts
    Case("layer norm", 126750464, lambda x, w, b: F.layer_norm(x, (768,), w, b),
         "f32[32768,768] f32[768] f32[768]", train=True, floor=125829120,
         ours=(126062336, 127536896)),
    Case("RMS norm", 126290176, lambda x, w: F.rms_norm(x, (768,), w), "f32[32768,768] f32[768]",
         train=True, floor=125829120, ours=(125946112, 126683392)),
    Case("sums of rows and of columns", 25592576, lambda x: (x.sum(0), x.sum(1)),
         "f32[32768,768]", floor=25199360, ours=(25248512, 25985792)),
    Case("GEGLU", 16777216, geglu, "f32[1024,4096]", train=True),
    Case("softmax", 83886080, lambda x: softmax(x, 1), "f32[4096,4096]", train=True),
    Case("cross entropy", 524328964, lambda x, t: (F.cross_entropy(x, t),),
         "f32[4096,32000] i64[4096]", train=True, floor=393216000, ours=(393248900, 393265156)),
    Case("gelu MLP", 32505856, lambda x, v, w: F.linear(F.gelu(F.linear(x, v)), w),
         "f32[1024,512] f32[2048,512] f32[512,2048]", train=True),
    Case("dropout", 4718596, lambda x: F.dropout(x, 0.5), "f32[1024,1024]", train=True,
         floor=4194308, ours=4194307),
    Case("relu of batch norm", 56206528, batch_norm, "f32[32,64,56,56] f32[64] f32[64]",
         train=True, ours=32113280),
    Case("RMS norm and rotary", 532544, rotary,
         "f32[4,8,128,64] f32[64] f32[128,32] f32[128,32]"),
    Case("RMS norm and rotary of whole rows", 540736, rotary_whole,
         "f32[4,8,128,64] f32[64] f32[128,64] f32[128,64]"),
    Case("RMS norm and rotary in turns", 532544, rotary_in_turns,
         "f32[4,8,128,64] f32[64] f32[128,32] f32[128,32]"),
    # no-ops
    Case("PF-47a", 20, lambda x: opaque(x.clone()), "f32[10]"),
    Case("PF-47b", 40, lambda x: (b := x.clone(), opaque(b)), "f32[10]"),
    Case("PF-48", 20, lambda x: opaque(aten.slice_scatter(x, x)), "f32[10]"),
    Case("PF-49", 20, lambda x: opaque(torch.ops.prims.convert_element_type(x, torch.float32)),
         "f32[10]"),
    Case("PF-50", 20, lambda x: opaque(torch.ops.prims.device_put(x, x.device)), "f32[10]"),
    Case("PF-51a", 20, lambda x: opaque(x.ceil()), "i32[10]"),
    Case("PF-51b", 20, lambda x: opaque(x.floor()), "i32[10]"),
    Case("PF-51c", 20, lambda x: opaque(x.round()), "i32[10]"),
    Case("PF-51d", 20, lambda x: opaque(x.pow(1)), "i32[10]"),
    Case("PF-52a", 20, lambda x: opaque(cat([x])), "f32[10]"),
    Case("PF-52b", 20, lambda x: cat([cat([x])]), "f32[10]"),
    # in place
    Case("PF-53a", 26, ones_at, "f32[10] i32[2]", moved=24),
    Case("PF-53b", 6, put_back(aten.index_put), "f32[10] i32[2]", moved=4),
    Case("PF-53c", 6, put_back(aten._unsafe_index_put), "f32[10] i32[2]", moved=4),
    Case("PF-54", 42, ones_in_columns, "f32[10,10] i32[2]", moved=22),
    Case("PF-68", 250, add_rows, "f32[10,10] f32[5,10] f32[10]", ours=200, moved=190),
    # beyond the reference
    Case("PF-69", 210, lambda a: (a.sum(0), a.cos()), "f32[10,10]", floor=210),
    Case("PF-69 at 1024x1024", 3163136, lambda a: (a.sum(0), a.cos()), "f32[1024,1024]",
         floor=2098176, ours=(2098176, 2130944)),
    Case("PF-69 at 4096x4096", 50597888, lambda a: (a.sum(0), a.cos()), "f32[4096,4096]",
         floor=33558528, ours=(33558528, 33591296)),
    Case("PF-70", 200, lambda a: softmax(a, 0), "f32[10,10]", floor=200),
    Case("PF-70 at 1024x1024", 3182592, lambda a: softmax(a, 0), "f32[1024,1024]", floor=2097152,
         ours=2097152),
    Case("PF-71", 1000, choice4, "f32[10,10] f16[10,10] f32[10,10]", floor=850, options=EVERY_OP),
    Case("PF-70 at 4096x4096", 50872320, lambda a: softmax(a, 0), "f32[4096,4096]",
         floor=33554432, ours=33554432),
    Case("PF-72", 170, squares, "f32[10,1,8] f32[1,10,8]", floor=170),
    Case("PF-72 of 16", 530, squares, "f32[10,1,16] f32[1,10,16]", floor=330, ours=330),
    Case("PF-72 of 64", 1490, squares, "f32[10,1,64] f32[1,10,64]", floor=1290,
         ours=1290),
    Case("LO-11 softmax", 1 << 27, lambda x: softmax(x, 0), "f32[32,2097152]"),
    Case("LO-11 sum", 1 << 27, lambda x: x.sum(0) + x, "f32[32,2097152]"),
    Case("LO-12", 3 * 2097152 + 2 * 1024 + 1, copies_and_sum, "f32[1024,2048]",
         floor=3 * 2097152 + 1, ours=(6291521, 6291969)),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def count_by_name(name: str, device: str) -> Counted:
    """The same for another process: a case itself does not travel."""
    return count(BY_NAME[name], device)
