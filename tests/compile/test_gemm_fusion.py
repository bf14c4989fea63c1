"""What is fused to a product in Triton kernels: prologues in its loads, epilogues in its stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compile.test_gemm_triton import ROW, SMALL, SPLIT, close, kernel_of, product
from tests.products import Builder, Made, interpret, problem
from tilewright import config
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.provider import Kernel
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, const, load

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    with config.patch(max_autotune=True):
        yield


def number(value: float) -> Expr:
    return const(value, F32)


def loop(kernel: Kernel) -> str:
    """The text from the loop over k to the product inside it."""
    text = kernel.source.text
    return text[text.index("for k0") : text.index("tl.dot")]


def left(made: Callable[[Builder, Expr], Expr], x: torch.Tensor) -> Mapping[int, Any]:
    """A prologue of the left operand over the elements of `x`."""
    return {0: lambda b: made(b, b.read("x", x, b.m, b.k))}


# ---- prologues


@pytest.mark.parametrize("sizes", [(64, 128, 256), (63, 120, 50)])
def test_upcast(sizes: tuple[int, int, int]) -> None:
    """MA-K2: nothing is masked again between the load and the product."""
    m, k, n = sizes
    x, y = torch.randn(m, k).half(), torch.randn(k, n)
    made = problem("mm", x.float(), y, prologue=left(lambda b, e: cast(e, F32), x))
    kernel = kernel_of(made, "mm", GemmConfig(32, 64, 32, 2, 4))
    assert "tl.where" not in loop(kernel)
    interpret(made, kernel)
    close(made, product(x, y))


def test_gathered_rows() -> None:
    """MA-K3: rows are looked up once, before the loop; a bad position is reported."""
    x, rows, y = torch.randn(90, 50).half(), torch.randint(0, 90, (33,)), torch.randn(50, 40).half()

    def gathered(b: Builder) -> Expr:
        row = op("index", b.read("rows", rows, b.m), const(90))
        view = b.view("x", x)
        return load("x", x.dtype, ix.linearize((row, b.k), view.stride, view.offset))

    made = problem("mm", x[:33], y, prologue={0: gathered})
    kernel = kernel_of(made)
    assert kernel.checked and "p_rows" not in loop(kernel) and "float32" not in loop(kernel)
    *_, flag = interpret(made, kernel)
    assert flag.item() == 0
    close(made, product(x[rows], y))
    made.tensors["rows"][7] = 90
    *_, flag = interpret(made, kernel)
    assert flag.item() != 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
@pytest.mark.parametrize("to", [BF16, F16])
def test_bytes_become_sixteen_bits_at_once(dtype: torch.dtype, to: torch.dtype) -> None:
    """MA-K4: float32 is not on the way."""
    low = 0 if dtype == torch.uint8 else -100
    x = torch.randint(low, 100, (32, 40)).to(dtype)
    if dtype.is_floating_point:
        x = torch.randn(32, 40).to(dtype)
    y = torch.randn(40, 50).to(to)
    for through in (to, F32):
        made = problem("mm", x.to(to), y, prologue=left(
            lambda b, e, via=through: cast(cast(e, via), to), x))  # fmt: skip
        kernel = kernel_of(made)
        assert "float32" not in loop(kernel) and "tri." not in loop(kernel)
        interpret(made, kernel)
        close(made, product(x.float(), y), tolerance=2e-2)


def test_several_fusions_share_nothing() -> None:
    """MA-K7: each of the three parts has its own literal."""
    x, y = torch.randn(64, 120), torch.randn(120, 64)
    out = torch.empty(64, 64)
    made = problem(
        "mm", x, y, keeps=False,
        prologue={0: lambda b: op("sub", b.read("x", x, b.m, b.k), number(1.1)),
                  1: lambda b: op("add", b.read("y", y, b.k, b.n), number(1.1))},
        epilogue=lambda b, c: {"out": (out, op("mul", c, number(1.1)))},
    )  # fmt: skip
    kernel = kernel_of(made, "mm", GemmConfig(32, 64, 32, 2, 4))
    assert kernel.source.text.count("1.10000") == 3
    assert [n for _, n in kernel.arguments] == ["out", "x", "y"]
    interpret(made, kernel)
    close(made, product(x - 1.1, y + 1.1) * 1.1, "out")


def test_several_inputs() -> None:
    """MA-K8."""
    x, w, z = torch.randn(63, 120).half(), torch.randn(63, 120).half(), torch.randn(120, 50)
    added = left(lambda b, e: op("add", cast(e, F32), cast(b.read("w", w, b.m, b.k), F32)), x)
    made = problem("mm", x.float(), z, prologue=added)
    interpret(made, kernel_of(made))
    close(made, product(x.double() + w.double(), z))


def test_offsets_into_one_buffer() -> None:
    """MA-K9: each operand's offset counts once."""
    both = torch.randn(128, 64)
    top, bottom = both[:64], both[64:]
    made = problem("mm", top, bottom, prologue={
        0: lambda b: op("add", b.read("both", top, b.m, b.k), number(2.0)),
        1: lambda b: op("sub", b.read("both", bottom, b.k, b.n), number(2.0))})  # fmt: skip
    kernel = kernel_of(made)
    assert [n for _, n in kernel.arguments] == ["both", "c"]
    interpret(made, kernel)
    close(made, product(top + 2, bottom - 2))


@pytest.mark.parametrize("k", [63, 64])
def test_broadcast_operands_of_a_dynamic_k(k: int) -> None:
    """MA-K11."""
    x, y = torch.randn(1, 1), torch.randn(k, 128)
    made = problem("mm", x.expand(1, k), y, dynamic=(k,),
                   prologue=left(lambda b, e: op("add", e, number(1.0)), x))  # fmt: skip
    interpret(made, kernel_of(made))
    close(made, product(x.expand(1, k) + 1, y))


def test_broadcast_of_a_dynamic_m() -> None:
    """MA-K12."""
    x, y = torch.randn(20, 1), torch.randn(1, 1)
    made = problem("mm", x, y, dynamic=(20,), prologue=left(lambda b, e: op("add", e, e), x))
    interpret(made, kernel_of(made))
    close(made, product(x + x, y))


@pytest.mark.parametrize(
    ("change", "ref", "masked"),
    [
        (lambda e: op("max", e, number(0.0)), torch.relu, False),
        (lambda e: op("mul", e, number(3.0)), lambda x: x * 3, False),
        (lambda e: op("add", e, number(1.0)), lambda x: x + 1, True),
        (lambda e: op("hypot", e, e), lambda x: torch.hypot(x, x), True),
        (lambda e: op("exp", e), torch.exp, True),
    ],
)
@pytest.mark.parametrize("template", ["mm", "mm_split_k", "mm_persistent"])
def test_zeros_beyond_the_last_k(change: Any, ref: Any, masked: bool, template: str) -> None:
    """MA-K13: a mask is applied again exactly where the expression may not keep zeros."""
    x, y = torch.randn(40, 127), torch.randn(127, 40)
    made = problem("mm", x, y, prologue=left(lambda b, e: change(e), x))
    kernel = kernel_of(made, template, SPLIT if template == "mm_split_k" else SMALL)
    assert ("a = tl.where(kamask" in loop(kernel)) == masked
    interpret(made, kernel)
    close(made, product(ref(x.double()), y), tolerance=1e-3)


@pytest.mark.parametrize("template", ["mm", "mm_split_k", "mm_persistent"])
def test_an_operand_that_is_read_where_a_mask_holds(template: str) -> None:
    """As of a padded tensor: elsewhere it is zero, and what is in memory there does not count."""
    x, y = torch.randn(33, 70), torch.randn(70, 40)
    x[:, 25:] = torch.nan
    below = const(25)

    def some(b: Builder, e: Expr) -> Expr:
        return op("add", load(e.arg, e.dtype, e.src[0], op("lt", b.k, below)), number(1.0))

    made = problem("mm", torch.empty(33, 70), y, prologue=left(some, x))
    kernel = kernel_of(made, template, SPLIT if template == "mm_split_k" else SMALL)
    interpret(made, kernel)
    close(made, product(torch.where(torch.arange(70) < 25, x, 0) + 1, y), tolerance=1e-3)


def test_a_scale_that_may_be_infinite_does_not_keep_zeros() -> None:
    x, scale, y = torch.randn(40, 127), torch.randn(40, 1), torch.randn(127, 40)
    made = problem("mm", x, y, prologue={0: lambda b: op(
        "mul", b.read("x", x, b.m, b.k), b.read("scale", scale, b.m, b.k))})  # fmt: skip
    kernel = kernel_of(made)
    assert "tl.where" in loop(kernel) and "p_scale" not in loop(kernel)  # read before the loop
    interpret(made, kernel)
    close(made, product(x * scale, y))
    even = problem("mm", x[:, :112], y[:112], prologue={0: lambda b: op(
        "mul", b.read("x", x[:, :112], b.m, b.k), b.read("scale", scale, b.m, b.k))})  # fmt: skip
    assert "tl.where" not in loop(kernel_of(even))


# ---- epilogues


def _chain(residual: torch.Tensor, column: torch.Tensor, outs: tuple[torch.Tensor, torch.Tensor]
           ) -> Callable[[Builder, Expr], dict[str, tuple[torch.Tensor, Expr]]]:  # fmt: skip
    def made(b: Builder, c: Expr) -> dict[str, tuple[torch.Tensor, Expr]]:
        kept = op("max", cast(c, F32), number(0.0))
        scaled = op("mul", kept, cast(b.read("column", column, b.m, b.n), F32))
        place = (b.batch, b.m, b.n) if b.batched else (b.m, b.n)
        total = op("add", scaled, cast(b.read("residual", residual, *place), F32))
        return {"out": (outs[0], cast(total, F16)), "kept": (outs[1], kept)}

    return made


@pytest.mark.parametrize(
    ("template", "c", "rows"),
    [("mm", SMALL, 33), ("mm_split_k", SPLIT, 33), ("mm_persistent", SMALL, 33), ("mv", ROW, 3)],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_chain_with_two_results(template: str, c: GemmConfig, rows: int, keeps: bool) -> None:
    """MA-J6, MA-J15: broadcasts, casts, another layout, and the product itself if it is wanted;
    the epilogue reads the product as it would be in memory."""
    a, b = torch.randn(rows, 50).half(), torch.randn(50, 40).half()
    residual, column = torch.randn(rows, 40).half(), torch.randn(1, 40).half()
    out, kept = torch.empty(rows, 40, dtype=F16), torch.empty(40, rows).t()
    made = problem("mm", a, b, epilogue=_chain(residual, column, (out, kept)), keeps=keeps)
    kernel = kernel_of(made, template, c)
    assert (("ptr", "c") in kernel.arguments) == keeps
    interpret(made, kernel)
    rounded = product(a, b).half().double()
    torch.testing.assert_close(kept.double(), rounded.relu(), atol=1e-2, rtol=2e-3)
    assert torch.equal(kept, kept.half().float()), "not rounded before the epilogue reads it"
    expected = rounded.relu() * column.double() + residual.double()
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-3)
    if keeps:
        close(made, rounded)


def test_an_epilogue_is_stored_as_precisely_as_its_result() -> None:
    """Of a product of halves, in float32: it is not rounded to a half on the way."""
    a, b, out = torch.randn(33, 50).half(), torch.randn(50, 40).half(), torch.empty(33, 40)
    made = problem("mm", a, b, keeps=False, epilogue=lambda b, c: {
        "out": (out, op("mul", cast(c, F32), number(1.1)))})  # fmt: skip
    interpret(made, kernel_of(made))
    torch.testing.assert_close(out.double(), product(a, b) * 1.1, atol=2e-2, rtol=2e-3)
    assert int((out != out.half().float()).sum()) > out.numel() // 2


def test_epilogue_of_a_batch_with_bias() -> None:
    a, b, bias = torch.randn(3, 20, 30), torch.randn(3, 30, 40), torch.randn(3, 1, 40)
    residual, column = torch.randn(3, 20, 40).half(), torch.randn(1, 40).half()
    out, kept = torch.empty(3, 20, 40, dtype=F16), torch.empty(3, 20, 40)
    made = problem("baddbmm", a, b, bias=bias, keeps=False,
                   epilogue=_chain(residual, column, (out, kept)))  # fmt: skip
    interpret(made, kernel_of(made, "bmm"))
    expected = torch.baddbmm(bias.double(), a.double(), b.double()).relu()
    close(made, expected, "kept", 1e-4)
    close(made, expected * column.double() + residual.double(), "out", 2e-3)


def test_an_epilogue_that_stores_where_a_mask_holds() -> None:
    """Elsewhere memory stays as it was."""
    a, b, out = torch.randn(20, 30), torch.randn(30, 40), torch.full((20, 40), 7.0)
    made = problem("mm", a, b, keeps=False,
                   epilogue=lambda b, c: {"out": (out, op("mul", c, number(2.0)))})  # fmt: skip
    (store,) = made.problem.epilogue
    below = op("lt", made.problem.n, const(25))
    masked = replace(made, problem=replace(made.problem, epilogue=(replace(store, mask=below),)))
    interpret(masked, kernel_of(masked))
    torch.testing.assert_close(
        out[:, :25].double(), 2 * product(a, b)[:, :25], atol=1e-3, rtol=1e-3
    )
    assert (out[:, 25:] == 7.0).all()


def test_epilogue_of_dynamic_sizes() -> None:
    """MA-J17: one kernel for every number of rows."""
    texts: set[str] = set()
    for rows in (5, 8):
        w, bias, x = torch.randn(3, 4).half(), torch.randn(3).half(), torch.randn(4, rows).half()
        mul, out = torch.randn(rows, 3).half(), torch.empty(rows, 3, dtype=F16)

        def gated(b: Builder, c: Expr, mul: torch.Tensor = mul, out: torch.Tensor = out) -> Any:
            kept = op("max", cast(c, F32), number(0.0))
            return {
                "out": (out, cast(op("mul", kept, cast(b.read("mul", mul, b.m, b.n), F32)), F16))
            }

        made = problem(
            "addmm", x.t(), w.t(), bias=bias, dynamic=(rows,), epilogue=gated, keeps=False
        )
        kernel = kernel_of(made)
        texts.add(kernel.source.text)
        interpret(made, kernel)
        expected = torch.relu(product(x.t(), w.t()) + bias.double()) * mul.double()
        torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=5e-3)
    assert len(texts) == 1


def test_prologues_and_epilogue_of_two_products() -> None:
    """MA-C1, MA-K17: mm_plus_mm takes all of them."""
    a, b, c, d = (torch.randn(20, 40).half(), torch.randn(40, 30), torch.randn(20, 40),
                  torch.randn(40, 30))  # fmt: skip
    out = torch.empty(20, 30)
    made = problem("mm_plus_mm", a.float(), b, c, d, keeps=False,
                   prologue=left(lambda b, e: op("add", cast(e, F32), number(1.0)), a),
                   epilogue=lambda b, e: {"out": (out, op("max", e, number(0.0)))})  # fmt: skip
    interpret(made, kernel_of(made, "mm_plus_mm"))
    close(made, torch.relu(product(a.double() + 1, b) + product(c, d)), "out")


def test_what_cannot_be_fused_is_said() -> None:
    from tilewright.ir.build import reduce
    from tilewright.ir.program import Store

    made: Made = problem("mm", torch.randn(20, 40), torch.randn(40, 30))
    p = made.problem
    adds = replace(p, epilogue=(Store("c", p.product.src[0], p.product, "add"),))
    folds = replace(p, epilogue=(Store("c", p.product.src[0], reduce("sum", p.product)),))
    from tilewright.gemm.hooks import limits

    assert limits(adds) == "the epilogue adds to memory"
    assert "reduce" in limits(folds)
