"""Triton kernels of users in compiled programs, on CPU tensors: Triton's interpreter runs them, in
eager and here. What a card does differently is in `tests/compile/test_user_kernels_card.py`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.utils._triton
import triton
import triton.language as tl
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.language import sqrt as imported_sqrt

import tilewright
from tests import kernels as user
from tilewright import metrics
from tilewright.graph import ttir, user_kernels
from tilewright.testing import fresh_cache, run_and_get_code


@pytest.fixture(autouse=True)
def _seen() -> Generator[None]:
    with user.seen():
        yield


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="tilewright", fullgraph=True, **options)


def copies(args: tuple[Any, ...]) -> list[Any]:
    return [torch.empty_strided(a.size(), a.stride(), dtype=a.dtype).copy_(a)
            if isinstance(a, Tensor) else a for a in args]  # fmt: skip


def check(program: Callable[[Any], Callable[..., Any]], kernel: Any, *args: Any,
          **options: Any) -> None:  # fmt: skip
    """Results and arguments afterwards are those of the kernel in the interpreter."""
    mine, theirs = copies(args), copies(args)
    actual = compiled(program(kernel), **options)(*mine)
    expected = program(user.eager(kernel))(*theirs)
    torch.testing.assert_close((actual, mine), (expected, theirs))


def launches(code: str, name: str) -> int:
    return code.count(f"    {name}(")


# ---- memory


def plus(kernel: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
            x, y, out, x.numel(), BLOCK=16
        )
        return out

    return run


@pytest.mark.parametrize("dynamic", [False, True])
# UT-1
def test_ut_1_nothing_is_copied(dynamic: bool) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for other in (y, out):
            user.add_kernel[(8,)](x, other, out, x.numel(), BLOCK=16)
        return out

    x, y = torch.randn(100), torch.randn(100)
    result, codes = run_and_get_code(compiled(run, dynamic=dynamic), x, y)
    torch.testing.assert_close(result, x + x + y)
    assert codes[0].count("= empty_cpu") == 1
    assert launches(codes[0], "add_kernel_0") == 2 or launches(codes[0], "(add_kernel_0") == 2
    assert metrics.counters["inplace"]["missed"] == 0


# UT-1
def test_ut_1_with_gradients() -> None:
    x = torch.randn(7, requires_grad=True)
    compiled(user.Sin.apply)(x).sum().backward()
    # RI-7: what the backward pass writes into is made there, and nothing fills or copies it
    assert metrics.generated_kernel_count == 0
    torch.testing.assert_close(x.grad, x.sin().sin().detach())
    assert metrics.counters["inplace"]["missed"] == 0


# UT-1
def test_ut_1_an_argument_is_written_where_it_lies() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        user.add_kernel[(2,)](x, y, x, 20, BLOCK=16)
        return x.sum()

    x, y = torch.randn(20), torch.randn(20)
    total, mine = x + y, x.clone()
    result, codes = run_and_get_code(compiled(run), mine, y)
    torch.testing.assert_close((mine, result), (total, total.sum()))
    assert "empty_cpu((20" not in codes[0]


def test_what_is_still_needed_is_copied() -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        t = x + 1
        old = t * 2
        user.add_kernel[(2,)](t, y, t, 20, BLOCK=16)
        return old, t

    x, y = torch.randn(20), torch.randn(20)
    torch.testing.assert_close(compiled(run)(x, y), ((x + 1) * 2, x + 1 + y))


@pytest.mark.parametrize("make", [torch.zeros, torch.empty])
def test_parts_of_a_new_tensor_are_written_in_place(make: Callable[..., Tensor]) -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, pair = make(2, 1, 20), make(2, 2, 10)
        for row in range(2):
            user.add_kernel[(2,)](x, y, out[row, 0], 20, BLOCK=16)
        user.two_sin_kernel[(8,)](x, pair[0].view(-1), pair[1], 20, BLOCK=4)
        return out, pair

    x, y = torch.randn(20), torch.randn(20)
    result, codes = run_and_get_code(compiled(run), x, y)
    sin = x.sin()
    expected = torch.stack([x + y] * 2).view(2, 1, 20), torch.stack([sin] * 2).view(2, 2, 10)
    torch.testing.assert_close(result, expected)
    assert codes[0].count("= empty_cpu") == 2
    assert metrics.counters["inplace"]["missed"] == 0


def test_a_part_whose_contents_are_wanted_is_copied() -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = x * 2
        part = base[5:15]
        old = part + 1
        user.add_kernel[(1,)](x, y, part, 10, BLOCK=16)
        return old, base, part

    x, y = torch.randn(20), torch.randn(20)
    expected = x * 2
    expected[5:15] = (x + y)[:10]
    old, base, part = compiled(run)(x, y)
    torch.testing.assert_close((old, base, part), (x[5:15] * 2 + 1, expected, expected[5:15]))


@triton.jit
def copy_rows(x, out, rows, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * row_stride + at * column_stride, mask=inside)
    tl.store(out + row * columns + at, value, mask=inside)


def rows_of(view: Callable[[Tensor], Tensor]) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    def program(kernel: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            y = view(x)
            out = torch.empty(y.shape)
            kernel[(y.shape[0],)](y, out, y.shape[0], y.shape[1], y.stride(0), y.stride(1), 32)
            return out + 1

        return run

    return program


@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[3:], lambda x: x[:, 2:9], lambda x: x[::2, 1:].t(),
    lambda x: x.as_strided((4, 5), (7, 2), 3), lambda x: (x * 2).t(),
], ids=["transposed", "offset", "columns", "steps", "as_strided", "computed"])  # fmt: skip
# UT-4
def test_ut_4_views_go_in_as_they_are(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(11, 12)
    check(rows_of(view), copy_rows, x)
    assert metrics.counters["inplace"]["missed"] == 0


def test_a_launch_whose_results_nobody_wants_is_dropped() -> None:
    def run(x: Tensor) -> Tensor:
        user.sin_kernel[(8,)](x, torch.empty_like(x), x.numel(), BLOCK=16)
        return x + 1

    _, codes = run_and_get_code(compiled(run), torch.randn(20))
    assert "sin_kernel" not in codes[0]


# ---- which pointers are written


@triton.jit
def _put(p, value, again):
    tl.store(p, value)
    return again + 1, p


@triton.jit(noinline=True)
def _apart(p, value):
    tl.store(p, value)


@triton.jit
def through_helpers(a, b, c, n):
    _, p = _put(a, tl.load(b), b)
    tl.store(p + 1, 2.0)
    _apart(c, 1.0)


@triton.jit
def through_loops(a, b, c, n):
    x, y = a, b
    for _ in range(n):
        tl.store(y, tl.load(x))
        x += 1
        y += 1
    i = 0
    while i < n:
        tl.load(c + i)
        i += 1


@triton.jit
def through_branches(a, b, c, n):
    if n > 3:
        p, q = a, b
    else:
        p, q = b, a
    if n > 4:
        if n > 5:
            r = c
        else:
            r = c + 1
        tl.store(p, tl.load(q) + tl.load(r))


@triton.jit
def by_swaps(a, b, c, n):
    x, y = a, b
    for _ in range(n):
        x, y = y, x
    tl.store(x, tl.load(c))


@triton.jit
def atomically(a, b, c, n):
    tl.atomic_add(a, tl.load(b))
    tl.atomic_cas(c.to(tl.pointer_type(tl.int32)), 0, 1)


@triton.jit
def sums(a, b, c, n):
    at = tl.arange(0, 16)
    tl.store(c, tl.sum(tl.load(a + at) * tl.load(b + at)))


@triton.jit
def by_address(a, b, c, n):
    address = tl.load(a.to(tl.pointer_type(tl.int64)))
    tl.store(address.to(tl.pointer_type(tl.float32)), tl.load(b))


@triton.jit
def described(a, b, c, n):
    source = tl.make_tensor_descriptor(a, [n, n], [n, 1], [16, 16])
    target = tl.make_tensor_descriptor(b, [n, n], [n, 1], [16, 16])
    target.store([0, 0], source.load([0, 0]))
    tl.load(c)


@triton.jit
def assembled(a, b, c, n):
    at = a + tl.arange(0, 32)
    tl.inline_asm_elementwise(
        "st.global.f32 [$1], $2; mov.u32 $0, 0;", "=r,l,f", [at, tl.load(b + tl.arange(0, 32))],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.load(c)


@triton.jit
def does_not_compile(a, b, c, n):
    tl.store(a, undefined_name)  # noqa: F821


@pytest.mark.parametrize(("kernel", "reads", "writes"), [
    (through_helpers, "b", "ac"), (through_loops, "ac", "b"), (through_branches, "abc", "ab"),
    (by_swaps, "c", "ab"), (atomically, "abc", "ac"), (sums, "ab", "c"),
    (by_address, "ab", "abc"), (described, "ac", "b"),
    (assembled, "abc", "a"), (does_not_compile, "abc", "abc"),
], ids=lambda v: getattr(v, "__name__", v))  # fmt: skip
# UT-3
def test_ut_3_pointers(kernel: Any, reads: str, writes: str) -> None:
    found = user_kernels.describe(kernel_side_table.add_kernel(kernel))
    t = torch.empty(64)
    accesses = ttir.accesses(found, kernel, {"a": t, "b": t, "c": t, "n": 64})
    assert accesses.writes == set(writes)
    # what is only loaded and not used may have been left out by Triton itself
    assert accesses.reads | set("c") >= set(reads) and accesses.reads <= set(reads)


# UT-3
def test_ut_3_settings_that_write_elsewhere() -> None:
    @triton.autotune([triton.Config({"FIRST": v}) for v in (True, False)], key=[])
    @triton.jit
    def either(a, b, FIRST: tl.constexpr):
        tl.store(a if FIRST else b, 1.0)

    found = user_kernels.describe(kernel_side_table.add_kernel(either))
    t = torch.empty(1)
    assert ttir.accesses(found, either, {"a": t, "b": t}).writes == {"a", "b"}


# ---- arguments


@triton.jit
def with_everything(x, bias, out, n, scale, shift: tl.int64, KIND: tl.constexpr, NAME: tl.constexpr,
                    BLOCK: tl.constexpr = 16):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside) * scale + shift
    if bias is not None:
        value += tl.load(bias + at, mask=inside)
    if NAME == "sqrt":
        value = imported_sqrt(tl.abs(value))
    tl.store(out + at, value.to(KIND), mask=inside)


@pytest.mark.parametrize("arguments", [
    (None, 1, 0.5, 3, tl.float32, ""), (None, 20, 1, 1, tl.float16, "sqrt"),
    ("x", 20, 2.5, 2**35, tl.float32, ""), ("x", 17, 1.0, -4, tl.bfloat16, "sqrt"),
], ids=str)  # fmt: skip
# UT-6
def test_ut_6_arguments(arguments: tuple[Any, ...]) -> None:
    bias, *rest = arguments
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[rest[3].name]

    n, scale, shift, kind, name = rest

    def run(x: Tensor) -> Tensor:
        out = torch.zeros(20, dtype=dtype)
        with_everything[(2, 1)](
            x, None if bias is None else x, out, n, scale, shift, KIND=kind, NAME=name
        )
        return out

    x = torch.randn(20)
    value = x * scale + shift + (0 if bias is None else x)
    expected = torch.zeros(20, dtype=dtype)
    expected[:n] = (value.abs().sqrt() if name else value).to(dtype)[:n]
    torch.testing.assert_close(compiled(run)(x), expected)


# UT-6
def test_ut_6_special_options_and_run() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        user.add_kernel.run(x, y, out, 20, BLOCK=32, grid=(1,), warmup=False, num_warps=8,
                            num_stages=2)  # fmt: skip
        return out

    x, y = torch.randn(20), torch.randn(20)
    torch.testing.assert_close(compiled(run)(x, y), x + y)


FACTOR = tl.constexpr(3.0)
PLAIN: tl.constexpr = 2


@triton.jit
def _scaled(value):
    return value * FACTOR + PLAIN


@triton.jit
def uses_globals(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, _scaled(tl.load(x + at, at < n)), at < n)


def simple(kernel: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
        return out

    return run


def test_a_kernel_takes_along_what_it_refers_to() -> None:
    x = torch.randn(33)
    torch.testing.assert_close(compiled(simple(uses_globals))(x), x * 3 + 2)
    text = user_kernels.describe(kernel_side_table.add_kernel(uses_globals)).text
    assert "FACTOR = triton.language.constexpr(3.0)" in text and "def _scaled" in text


IN_A_PROCESS = """
import json, torch
from tests import kernels as user
from tests.cpu.test_user_kernels import compiled, plus
from tilewright import metrics

x, y = torch.arange(33.0), torch.full((33,), 2.0)
with user.seen():
    result = compiled(lambda x, y: plus(user.add_kernel)(x, y) * y)(x, y)
assert torch.equal(result, (x + y) * y)
print(json.dumps([metrics.cache_hits, metrics.cache_misses, metrics.counters["capture"]["hit"]]))
"""


def test_a_second_process_has_it_from_the_cache(in_a_process: Callable[[str], Any]) -> None:
    assert in_a_process(IN_A_PROCESS) == [0, 1, 0]
    assert in_a_process(IN_A_PROCESS) == [1, 0, 1]


def test_a_kernel_that_cannot_leave_its_process() -> None:
    """It refers to a module that only this process may have: it runs, and is not kept."""

    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) * user.TWO, at < n)

    found = user_kernels.describe(kernel_side_table.add_kernel(kernel))
    assert found.reason == "the module tests.kernels" and not found.text
    x = torch.randn(20)
    with fresh_cache():
        torch.testing.assert_close(compiled(simple(kernel))(x), x * 2)
    assert any("the module tests.kernels" in why for why in metrics.counters["graph_cache"])


@triton.jit
def row_softmax(x, out, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    value = tl.load(x + row + at, at < columns, other=-float("inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + row + at, value / value.sum(0) + tl.zeros([BLOCK], tl.float32), at < columns)


def test_functions_of_the_language_that_are_kernels_code() -> None:
    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        row_softmax[(x.shape[0],)](x, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
        return out

    x = torch.randn(3, 21)
    language = [(owner, dict(vars(owner))) for owner in (tl, tl.core, tl.standard, tl.tensor)]
    torch.testing.assert_close(compiled(run)(x), x.softmax(1))
    for owner, before in language:  # what is compiled after it is not the interpreter's
        assert {n for n, v in before.items() if vars(owner)[n] is not v} <= {"__annotations__"}


# UT-7
def test_ut_7_one_program_for_all_sizes() -> None:
    run = compiled(plus(user.add_kernel), dynamic=True)
    for n in (5, 16, 33, 100):
        x, y = torch.randn(n), torch.randn(n)
        torch.testing.assert_close(run(x, y), x + y)
    assert metrics.cache_misses == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
# UT-7
def test_ut_7_sizes_that_are_data() -> None:
    def program(kernel: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            y = x[x > 0]
            out = torch.empty_like(y)
            n = y.numel()
            kernel[(n,)](y, out, n, BLOCK=4)
            return out

        return run

    check(program, user.sin_kernel, torch.randn(30))


# ---- settings


def _autotuned(**options: Any) -> Any:
    configs = [triton.Config({"BLOCK": 8}, num_warps=2), triton.Config({"BLOCK": 16})]
    return triton.autotune(configs, key=["n"], **options)


@_autotuned(reset_to_zero=["out"], restore_value=["x"])
@triton.jit
def tuned_sin(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sin(tl.load(x + at, at < n)), at < n)


def _first_half(configs: Any, named_args: Any, **kwargs: Any) -> Any:
    return configs[:1]


@_autotuned(prune_configs_by={"early_config_prune": _first_half})
@triton.jit
def pruned_sin(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sin(tl.load(x + at, at < n)), at < n)


@_autotuned()
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def heuristic_sin(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + at, tl.sin(tl.load(x + at)))
    else:
        tl.store(out + at, tl.sin(tl.load(x + at, at < n)), at < n)


@pytest.mark.parametrize("kernel", [tuned_sin, pruned_sin, heuristic_sin],
                         ids=["tuned", "pruned", "heuristics"])  # fmt: skip
# UT-5
def test_ut_5_autotuned(kernel: Any) -> None:
    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out

    for n in (32, 45):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(run, dynamic=False)(x), x.sin())


# UT-5
def test_ut_5_hooks_are_refused() -> None:
    kernel = _autotuned(pre_hook=lambda *_, **__: None)(user.sin_kernel)

    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(3,)](x, out, x.numel())
        return out

    with pytest.raises(Exception, match="pre_hook and post_hook are not supported"):
        compiled(run)(torch.randn(20))


# ---- descriptors


@triton.jit
def copy_block(source, other, target):
    target.store([0, 0], source.load([0, 0]) + other.load([0, 0]))


# UT-8
def test_ut_8_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is made for each tensor and block."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    monkeypatch.setattr(torch.utils._triton, "has_triton_tensor_descriptor_host_tma", lambda: True)

    def run(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        described = TensorDescriptor.from_tensor(x, [16, 16])
        again = TensorDescriptor.from_tensor(x, [16, 16])
        target = TensorDescriptor.from_tensor(out, [16, 16])
        copy_block[(1,)](described, again, target)
        return out

    x = torch.randn(32, 32)
    expected = torch.zeros(32, 32)
    expected[:16, :16] = 2 * x[:16, :16]
    program = compiled(run)
    torch.testing.assert_close(program(x), expected)
    assert metrics.counters["inplace"]["missed"] == 0
    made: list[Any] = []
    original = TensorDescriptor.from_tensor
    monkeypatch.setattr(TensorDescriptor, "from_tensor",
                        lambda *a, **k: made.append(a) or original(*a, **k))  # fmt: skip
    program(x)
    assert len(made) == 2


# ---- operators


def test_triton_op_is_looked_into() -> None:
    name = "tilewright_test::twice_sin"

    @torch.library.triton_op(name, mutates_args={})
    def twice_sin(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.empty_like(x), torch.empty_like(x)
        torch.library.wrap_triton(user.two_sin_kernel)[(8,)](x, first, second, x.numel(), BLOCK=16)
        return first, second

    x = torch.randn(20)
    (first, second), codes = run_and_get_code(compiled(lambda x: twice_sin(x)), x)
    torch.testing.assert_close((first, second), (x.sin(), x.sin()))
    assert launches(codes[0], "two_sin_kernel_0") == 1


# ---- names, texts, errors


# UT-2
def test_ut_2_the_same_kernel_is_emitted_once() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = plus(user.add_kernel)(x, y)
        return x

    x, y = torch.randn(20), torch.randn(20)
    result, codes = run_and_get_code(compiled(run), x, y)
    torch.testing.assert_close(result, x + 3 * y)
    assert codes[0].count("def add_kernel(") == 1
    assert launches(codes[0], "add_kernel_0") == 3
    assert "tests/kernels.py" in codes[0]


# UT-2
def test_ut_2_kernels_of_the_same_name_are_both_emitted() -> None:
    def make(second: bool) -> Any:
        if second:

            @triton.jit
            def kernel(x, out, n, BLOCK: tl.constexpr):
                at = tl.arange(0, BLOCK)
                tl.store(out + at, tl.load(x + at, at < n) + 2, at < n)
        else:

            @triton.jit
            def kernel(x, out, n, BLOCK: tl.constexpr):
                at = tl.arange(0, BLOCK)
                tl.store(out + at, tl.load(x + at, at < n) * 3, at < n)

        return kernel

    one, other = make(False), make(True)
    x = torch.randn(16)
    result, codes = run_and_get_code(compiled(lambda x: simple(other)(simple(one)(x))), x)
    torch.testing.assert_close(result, x * 3 + 2)
    assert codes[0].count("def kernel(") == 2


def test_explain_names_it() -> None:
    with FakeTensorMode():  # explaining runs the program by eager, which has no card for it
        found = tilewright.explain(plus(user.add_kernel))(torch.randn(20), torch.randn(20))
    (part,) = found.graphs[0].parts
    assert (part.name, part.moved, part.is_kernel) == ("add_kernel", 240, False)


# ---- caches


def test_found_again_whatever_its_number() -> None:
    x, y = torch.randn(20), torch.randn(20)
    program = plus(user.add_kernel)
    with fresh_cache():
        compiled(program)(x, y)
        assert metrics.cache_misses == 1
        for _ in range(2):
            torch._dynamo.reset()
            kernel_side_table.reset_table()
            for other in (user.sin_kernel, copy_rows):
                kernel_side_table.add_kernel(other)
            torch.testing.assert_close(compiled(program)(x, y), x + y)
        assert metrics.cache_misses == 1
        assert metrics.counters["capture"]["hit"] == 2
        torch._dynamo.reset()
        kernel_side_table.reset_table()
        torch.testing.assert_close(compiled(simple(user.sin_kernel))(x), x.sin())
        assert metrics.cache_misses == 2


def test_what_a_kernel_refers_to_is_in_its_identity() -> None:
    def make(factor: float) -> Any:
        size = tl.constexpr(factor)

        @triton.jit
        def kernel(x, out, n, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(x + at, at < n) * size, at < n)

        return kernel

    x = torch.randn(16)
    with fresh_cache():
        for factor in (2.0, 3.0):
            torch._dynamo.reset()
            torch.testing.assert_close(compiled(simple(make(factor)))(x), x * factor)
        assert metrics.cache_misses == 2


# ---- outputs that are overwritten whole


@triton.jit
def half_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n // 2)


@triton.jit
def every_other_kernel(x, out, n, BLOCK: tl.constexpr):
    at = 2 * (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def sometimes_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) > 0:
        tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize(
    ("kernel", "programs", "n", "filled"),
    [
        (copy_kernel, 3, 40, False), (copy_kernel, 2, 40, True), (copy_kernel, 3, 39, True),
        (half_kernel, 3, 40, True), (every_other_kernel, 3, 40, True),
        (sometimes_kernel, 3, 40, True),
    ],
    ids=["whole", "few programs", "not the last", "half", "every other", "sometimes"],
)  # fmt: skip
def test_only_what_is_overwritten_whole_is_not_initialised(
    kernel: Any, programs: int, n: int, filled: bool
) -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.full_like(x, 7.0)
        kernel[(programs,)](x, out, n, BLOCK=16)
        return out

    x = torch.randn(40)
    metrics.reset()
    found = compiled(function)(x)
    expected = torch.full_like(x, 7.0)
    user.eager(kernel)[(programs,)](x, expected, n, BLOCK=16)
    torch.testing.assert_close(found, expected)
    assert metrics.generated_kernel_count == filled
