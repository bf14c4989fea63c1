"""Products whose operands and results the card moves through tensor descriptors: what can be moved,
the kernels in the interpreter, and compiled for cards that are not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.compile.as_cuda import as_cuda, as_fake_cuda
from tests.gemm_programs import host
from tests.products import Made, interpret, problem
from tests.programs import compiled
from tilewright import config
from tilewright.gemm import choose, descriptors, plan
from tilewright.gemm.descriptors import LONGEST, Matrix, matrix
from tilewright.gemm.heuristics import GemmConfig, available_sms, get_template_heuristic
from tilewright.gemm.plan import Described, Memory, Part
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.ir import index as ix
from tilewright.ir.expr import const, sym
from tilewright.ir.program import Buffer, View
from tilewright.runtime import triton_worker
from tilewright.runtime.triton_build import TritonSource
from tilewright.testing import run_and_get_code

F16, F32 = torch.float16, torch.float32
SMALL = GemmConfig(16, 32, 16, 2, 4, group_m=2)
TMA: dict[str, Any] = {
    "max_autotune": True, "test_configs.max_mm_configs": 1, "triton.native_matmul": False,
    "triton.enable_persistent_tma_matmul": "1",
    "test_configs.autotune_choice_name_regex": "mm_persistent_tma",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    choose._memo.clear()
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        yield


def code_of(function: Callable[..., Any], *args: Any, arch: str = "sm_90",
            dynamic: bool | None = None, **options: Any) -> str:  # fmt: skip
    """The program, run in the interpreter and compared with eager."""
    with as_cuda(arch):
        call = compiled(function, options={**TMA, **options}, dynamic=dynamic)
        result, code = run_and_get_code(call, *args)
    torch.testing.assert_close(result, function(*args), rtol=1e-2, atol=1e-2)
    return "\n".join(code)


def failing(function: Callable[..., Any], *args: Any, dynamic: bool = False,
            **options: Any) -> str:  # fmt: skip
    with as_cuda(), pytest.raises(BackendCompilerFailed) as found:
        compiled(function, options={**TMA, **options}, dynamic=dynamic)(*args)
    return str(found.value)


def r(*shape: int, dtype: torch.dtype = F16) -> Tensor:
    return (torch.randn(*shape) / 4).to(dtype)


def tiled_mm(transposed: tuple[bool, bool]) -> tuple[Callable[..., Any], tuple[Tensor, Tensor]]:
    """A product of 168x88 and 88x248, of operands that the program makes of small ones."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.repeat(8, 8), b.repeat(8, 8)
        return torch.mm(a.t() if transposed[0] else a, b.t() if transposed[1] else b)

    a = r(11, 21) if transposed[0] else r(21, 11)
    return function, (a, r(31, 11) if transposed[1] else r(11, 31))


BOTH = [(False, False), (False, True), (True, False), (True, True)]


def stored_by(code: str) -> str:
    """How the template of a program stores."""
    kernel = code[code.index("def triton_tem_fused_") :]
    kernel = kernel[: kernel.index("'''")] if "'''" in kernel else kernel
    assert kernel.count("tl.make_tensor_descriptor(") >= 2
    assert "desc_a.load(" in kernel and "desc_b.load(" in kernel
    return "descriptor" if "desc_to_" in kernel else "pointer"


@pytest.mark.covering(1)
@pytest.mark.parametrize("transposed", BOTH)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tma_store", [False, True])
def test_ma_d1_mm(transposed: tuple[bool, bool], dynamic: bool, tma_store: bool) -> None:
    function, args = tiled_mm(transposed)
    code = code_of(function, *args, dynamic=dynamic,
                   **{"triton.enable_template_tma_store": tma_store})  # fmt: skip
    assert stored_by(code) == ("descriptor" if tma_store else "pointer")


@pytest.mark.covering(1)
@pytest.mark.parametrize("transposed", BOTH)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tma_store", [False, True])
def test_ma_d2_addmm(transposed: tuple[bool, bool], dynamic: bool, tma_store: bool) -> None:
    _, args = tiled_mm(transposed)

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.repeat(8, 8), b.repeat(8, 8)
        left, right = a.t() if transposed[0] else a, b.t() if transposed[1] else b
        return torch.addmm(x.repeat(8), left, right)

    code = code_of(function, r(31), *args, dynamic=dynamic,
                   **{"triton.enable_template_tma_store": tma_store})  # fmt: skip
    assert stored_by(code) == ("descriptor" if tma_store else "pointer")
    assert "triton_tem_fused_" in code and "addmm" in code


def padded(rows: int, columns: int, dtype: torch.dtype = F16) -> Tensor:
    """A matrix whose rows are a multiple of 16 elements apart."""
    return r(rows, -(-columns // 16) * 16, dtype=dtype)[:, :columns]


@pytest.mark.covering(1)
@pytest.mark.parametrize("transposed", BOTH)
@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_d3_the_strides_are_those_of_the_tensors(
    transposed: tuple[bool, bool], dynamic: bool
) -> None:
    a = padded(88, 168).t() if transposed[0] else padded(168, 88)
    b = padded(248, 88).t() if transposed[1] else padded(88, 248)
    code = code_of(torch.mm, a, b, dynamic=dynamic)
    assert stored_by(code) == "pointer"
    steps = re.findall(r"make_tensor_descriptor\(p_\w+, \[\w+, \w+\], \[(\w+), 1\]", code)
    wanted = [str(t.stride(1) if turned else t.stride(0))
              for t, turned in zip((a, b), transposed, strict=True)]  # fmt: skip
    assert dynamic or steps[:2] == wanted == ["176" if transposed[0] else "96",
                                              "96" if transposed[1] else "256"]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_d4_d5_rows_that_start_anywhere(dynamic: bool) -> None:
    """MA-D4, MA-D5: 22 bytes apart; nobody is left."""
    a, b = r(21, 11), r(11, 31)
    for function, args in ((torch.mm, (a, b)), (torch.addmm, (r(31), a, b))):
        said = failing(function, *args, dynamic=dynamic)
        assert "NoValidChoicesError" in said


@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_d6_results_whose_rows_start_anywhere(dynamic: bool) -> None:
    """62 bytes apart: stored through pointers, and refused where descriptors are asked for."""
    a, b, out = r(21, 32), r(31, 32).t(), torch.empty(21, 31, dtype=F16)
    mm = lambda a, b, out: torch.mm(a, b, out=out)  # noqa: E731
    assert stored_by(code_of(mm, a, b, out, dynamic=False)) == "pointer"
    said = failing(mm, a, b, out, dynamic=dynamic, **{"triton.enable_template_tma_store": True})
    assert "NoValidChoicesError" in said
    made = problem("mm", a, b)
    with config.patch({"triton.enable_template_tma_store": True}):
        assert "is to be stored by descriptors: rows of it" in descriptors.limits(made.problem)
    assert descriptors.limits(made.problem) == ""


@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_ma_d7_d8_any_number_of_rows(op: str) -> None:
    """MA-D7, MA-D8: the rows stay a symbol: one compilation for all, none of it specialised."""
    function = torch.mm if op == "mm" else torch.addmm
    bias = () if op == "mm" else (r(248),)
    a, b = r(168, 88), r(88, 248)
    torch._dynamo.mark_dynamic(a, 0)
    with as_cuda():
        call = compiled(function, options=TMA)
        found, (code,) = run_and_get_code(call, *bias, a, b)
        torch.testing.assert_close(found, function(*bias, a, b), rtol=1e-2, atol=1e-2)
        assert stored_by(code) == "pointer"
        with torch._dynamo.config.patch(error_on_recompile=True):
            for left in (r(100, 88), r(7, 88)):
                wanted = function(*bias, left, b)
                torch.testing.assert_close(call(*bias, left, b), wanted, rtol=1e-2, atol=1e-2)


def test_ma_d7_a_symbolic_row_length_is_looked_at_when_it_is_called() -> None:
    """Nothing is specialised; lengths that do not fit take the kernel with pointers."""
    with as_cuda():
        call = compiled(torch.mm, options=TMA, dynamic=True)
        a, b = r(40, 88), r(88, 64)
        found, (code,) = run_and_get_code(call, a, b)
        torch.testing.assert_close(found, a @ b, rtol=1e-2, atol=1e-2)
        assert re.search(r"\(triton_tem_fused_mm_0 if .* else triton_tem_fused_mm_0_wide\)", code)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for k in (96, 90):
                a, b = r(40, k), r(k, 64)
                torch.testing.assert_close(call(a, b), a @ b, rtol=1e-2, atol=1e-2)


# ---- the SMs that are left


@pytest.mark.parametrize("op", ["mm", "scaled_mm"])
@pytest.mark.parametrize("kept", [None, 0, 27])
def test_ma_d9_some_sms_are_left_to_others(op: str, kept: int | None) -> None:
    """MA-D9, MA-D22, MA-F3: one template, by as many programs as there are SMs left."""
    dtype = torch.bfloat16 if op == "mm" else torch.float8_e4m3fn
    a, b = (torch.empty(2560, 2560, dtype=dtype) for _ in range(2))
    one = torch.ones(())

    def scaled(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    torch._C._set_sm_carveout_experimental(kept)
    try:
        with as_fake_cuda() as driver:
            options = {**TMA, "max_autotune_gemm_backends": "TRITON"}
            compiled(torch.mm if op == "mm" else scaled, options=options)(a, b.t())
            grids = [launch.grid for launch in driver.launches if "tem_fused" in launch.name]
    finally:
        torch._C._set_sm_carveout_experimental(None)
    (grid,) = grids
    assert 2560 // 256 * (2560 // 128) > 132  # blocks, of the largest that are tried
    assert grid == (132 - (kept or 0), 1, 1)


@pytest.mark.parametrize("kept", [None, 27])
@pytest.mark.parametrize(("m", "n"), [(256, 512), (2560, 2560)])
def test_ma_d22_programs_are_blocks_or_sms(m: int, n: int, kept: int | None) -> None:
    """As many as there are blocks where these are fewer; nobody with two warps is among them."""
    made = problem("mm", meta(m, 64), meta(64, n)).problem
    offered = [c for c in TritonProvider().candidates(made, "max")
               if isinstance(c, TritonCandidate) and c.template.tma]  # fmt: skip
    assert min(c.config.num_warps for c in offered) == 4
    torch._C._set_sm_carveout_experimental(kept)
    try:
        for c in offered:
            blocks = -(-m // c.config.block_m) * -(-n // c.config.block_n)
            programs = eval(c.template.programs(made, c.config))
            if c.template.persistent:
                assert programs == min(132 - (kept or 0), blocks)
            else:
                assert programs == blocks * c.config.split_k
    finally:
        torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize("layout", BOTH)
def test_ma_d22_how_an_operand_lies_is_in_its_descriptor(layout: tuple[bool, bool]) -> None:
    """Its shape and block are as memory runs; what is not, is turned in registers."""
    a = r(64, 40).t() if layout[0] else r(40, 64)
    b = r(48, 64).t() if layout[1] else r(64, 48)
    made = problem("mm", a, b)
    text = candidate(made, "mm_persistent_tma", SMALL).kernel().source.text
    shapes = re.findall(r"make_tensor_descriptor\(\w+, \[(\w+), (\w+)\].*\[(\w+), (\w+)\]\)", text)
    wanted = [("M", "K", "BLOCK_M", "BLOCK_K"), ("K", "N", "BLOCK_K", "BLOCK_N")]
    turned = [(w[1], w[0], w[3], w[2]) if t else w for w, t in zip(wanted, layout, strict=True)]
    assert shapes == turned, text
    for name, t in zip("ab", layout, strict=True):
        (line,) = re.findall(rf"^ *{name} = (.*desc_{name}.load.*)$", text, re.M)
        assert ("tl.trans(" in line or ".T" in line) == t


def test_what_is_kept_is_for_as_many_sms() -> None:
    """MA-D9: rendered kernels, decisions and kept programs are told apart."""
    from tilewright.host import artifact

    made = problem("mm", r(64, 64), r(64, 64)).problem
    template = TritonTemplate.all_templates["mm_persistent_tma"]
    candidate = TritonCandidate(made, template, SMALL, "x", 0.0)
    keys: set[tuple[str, str]] = set()
    for kept in (None, 27):
        torch._C._set_sm_carveout_experimental(kept)
        try:
            keys.add((candidate.key, artifact.named("graph")))
            assert available_sms(made.target) == 132 - (kept or 0)
        finally:
            torch._C._set_sm_carveout_experimental(None)
    assert len({k for k, _ in keys}) == len({k for _, k in keys}) == 2


# ---- what can be moved


def view(sizes: tuple[Any, ...], strides: tuple[Any, ...], start: Any = 0,
         dtype: torch.dtype = F16) -> View:  # fmt: skip
    size, stride = (tuple(map(ix.as_index, part)) for part in (sizes, strides))
    return View("x", size, stride, ix.as_index(start), dtype)


REFUSED: dict[str, tuple[View, str]] = {
    "type": (view((16, 16), (16, 1), dtype=torch.float64), "no descriptors for torch.float64"),
    "no contiguous dimension": (view((16, 16), (32, 2)), "no contiguous dimension"),
    "rows": (view((16, 12), (12, 1)), "do not start at multiples of 16 bytes"),
    "columns": (view((12, 16), (1, 12)), "do not start at multiples of 16 bytes"),
    "the start": (view((16, 16), (16, 1), 4), "do not start at multiples of 16 bytes"),
    "a batch": (view((2, 16, 16), (260, 16, 1)), "do not start at multiples of 16 bytes"),
    "one row for all": (view((16, 16), (0, 1)), "repeats its rows"),
    "one matrix for all": (view((4, 16, 16), (0, 16, 1)), "repeats its rows"),
    "few bytes": (view((64, 16), (16, 1), dtype=torch.int8), "fewer than 32 bytes"),
    "long": (view((2**31, 128), (128, 1)), "too long"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_ma_d10_what_a_descriptor_cannot_describe(why: str) -> None:
    given, reason = REFUSED[why]
    found = matrix(given)
    assert isinstance(found, str) and reason in found


def test_ma_d10_what_it_can() -> None:
    found = matrix(view((3, 168, 88), (16384, 96, 1), 8))
    assert found == Matrix("x", const(8), tuple(map(const, (3, 168, 88))),
                           tuple(map(const, (16384, 96))), False)  # fmt: skip
    turned = matrix(view((88, 168), (1, 96)))
    assert isinstance(turned, Matrix) and turned.turned
    assert [n.arg for n in turned.sizes] == [168, 88] and [s.arg for s in turned.steps] == [96]
    assert isinstance(matrix(view((64, 32), (32, 1), dtype=torch.int8)), Matrix)
    assert isinstance(matrix(view((64, 20), (24, 1))), Matrix)  # the end of a row may be anywhere


def meta(*size: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


@pytest.mark.parametrize(("k", "fits"), [(2**31, False), (2**31 - 16, True)])
def test_ma_d11_lengths_have_31_bits(k: int, fits: bool) -> None:
    """The longest row that starts where the next one may."""
    made = problem("mm", meta(128, k), meta(k, 128))
    reason = TritonTemplate.all_templates["mm_persistent_tma"].limits(made.problem)
    assert reason == ("" if fits else "an operand is too long for a tensor descriptor")


def test_ma_d12_lengths_are_proven_or_looked_at_once() -> None:
    """What is known is compared here; of what is not, what has a bound needs nothing, and the rest
    is one condition of the call."""
    free, bound = sym("s0", lower=0, hint=64), sym("s1", lower=0, upper=LONGEST, hint=64)
    found = matrix(view((3, free, 128), (8192, 128, 1)))
    assert isinstance(found, Matrix) and found.assumed == (free,)
    found = matrix(view((3, bound, 128), (8192, 128, 1)))
    assert isinstance(found, Matrix) and found.assumed == ()
    assert isinstance(matrix(view((LONGEST + 1, free), (128, 1))), str)
    # 64 and 65: rows of 128 and 130 bytes
    found = matrix(view((128, free), (free, 1)))
    assert isinstance(found, Matrix)
    values = [[ix.evaluate(e, {"s0": n}) < 2**31 for e in found.assumed] for n in (64, 72, 65)]
    assert [all(v) for v in values] == [True, True, False]
    made = problem("mm", r(40, 64), r(64, 32), dynamic=(40, 64))
    kernel = TritonCandidate(made.problem, TritonTemplate.all_templates["mm_persistent_tma"],
                             SMALL, "x", 0.0).kernel()  # fmt: skip
    assert len(kernel.assume) == len(set(kernel.assume)) and kernel.source.wide is not None
    assert "descriptor" in kernel.source.text and "descriptor" not in kernel.source.wide.text


# ---- compiled for a card, and in the interpreter


def candidate(made: Made, template: str, c: GemmConfig) -> TritonCandidate:
    chosen = TritonTemplate.all_templates[template]
    assert chosen.limits(made.problem) == ""
    return TritonCandidate(made.problem, chosen, c, template, 0.0)


def ptx(made: TritonCandidate) -> str:
    source = made.kernel().source
    assert isinstance(source, TritonSource)
    return triton_worker.build(source.order(source.configs[0]))["ptx"]


@pytest.mark.parametrize("tma_store", [False, True])
def test_ma_d13_positions_of_64_bits_and_coordinates_of_32(tma_store: bool) -> None:
    made = problem("mm", meta(1280, 65536), meta(65536, 65536))
    with config.patch({"triton.enable_template_tma_store": tma_store}):
        for template in ("mm_tma", "mm_persistent_tma"):
            chosen = candidate(made, template, GemmConfig(128, 128, 64, 3, 8))
            text = chosen.kernel().source.text
            assert ".to(tl.int64)" in text and "tl.cast(k0, tl.int32)" in text
            found = ptx(chosen)
            assert "cp.async.bulk.tensor.2d.shared" in found
            assert ("cp.async.bulk.tensor.2d.global.shared" in found) == tma_store


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("template", ["mm_tma", "mm_persistent_tma"])
def test_batches_are_a_dimension_of_the_descriptor(layout: str, template: str) -> None:
    a = r(3, 40, 72) if layout[0] == "n" else r(3, 72, 40).mT
    b = r(3, 72, 48) if layout[1] == "n" else r(3, 48, 72).mT
    bias = r(3, 1, 48)
    with config.patch({"triton.enable_template_tma_store": True}):
        for op, given in (("bmm", None), ("baddbmm", bias)):
            made = problem(op, a, b, bias=given)  # type: ignore[arg-type]
            chosen = candidate(made, template, SMALL)
            interpret(made, chosen.kernel())
            wanted = torch.bmm(a.double(), b.double()) + (0 if given is None else given.double())
            found = made.tensors["c"].view(wanted.shape).double()
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert "tensor.3d.shared" in ptx(candidate(made, template, GemmConfig(64, 64, 32, 3, 4)))


def test_a_result_in_columns_is_turned_for_its_descriptor() -> None:
    a, b = r(40, 72), r(72, 48)
    out = torch.zeros(48, 40, dtype=F16).t()
    with config.patch({"triton.enable_template_tma_store": True}):
        made = problem("mm", a, b, out=out)
        chosen = candidate(made, "mm_persistent_tma", SMALL)
        assert "tl.trans(c" in chosen.kernel().source.text
        interpret(made, chosen.kernel())
    torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=1e-2)


# ---- workspaces


def test_ma_d17_every_launch_has_a_workspace_of_its_own() -> None:
    """Three products in one program, of one problem and so one kernel."""
    found = get_template_heuristic("mm_persistent_tma", "cuda", "mm")
    found.mm_configs = [GemmConfig(128, 128, 64, 4, 8)]  # type: ignore[attr-defined]
    try:
        code = code_of(lambda a, b, c, d: (a @ d, b @ d, c @ d), *(r(64, 64) for _ in range(4)))
    finally:
        found.mm_configs = ()  # type: ignore[attr-defined]
    body = host(code)
    assert body.count("workspace = empty_cuda(") == body.count("del workspace") == 3
    assert len(re.findall(r"triton_tem_fused_\w+\(.*workspace", body)) == 3


def test_ma_d18_a_workspace_is_counted_in_elements_of_four_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1024 elements are 4096 bytes, for whoever times a kernel and for whoever runs it."""
    made = problem("mm", r(64, 64, dtype=torch.bfloat16), r(64, 64, dtype=torch.bfloat16))
    chosen = candidate(made, "mm_persistent_tma", GemmConfig(128, 128, 64, 4, 8))
    kernel = replace(chosen.kernel(), workspace=const(1024))
    buffer = Buffer("c", F16, torch.device("cpu"), (const(64),), (const(1),))
    memory = Memory(Described((buffer,), (), ("c",)))
    own = Part(kernel.source, kernel.arguments, kernel)._own(memory)
    assert own["workspace"].nbytes == 4096
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(plan, "torch", SimpleNamespace(**{
        **vars(torch), "empty": lambda n, **_: asked.append((n,)) or torch.zeros(n)}))  # fmt: skip
    Part(kernel.source, kernel.arguments, kernel)._own(memory)
    assert asked == [(1024,)]


def test_ma_d22_scratch_is_enough_for_all_descriptors() -> None:
    """Two for operands, two for what is stored; more are refused."""
    a, b = r(128, 64), r(64, 128)
    epilogue = lambda b, c: {name: (torch.empty(128, 128, dtype=F16), c) for name in more}  # noqa: E731
    with config.patch({"triton.enable_template_tma_store": True}):
        more = ["y"]
        made = problem("mm", a, b, epilogue=epilogue)
        chosen = candidate(made, "mm_persistent_tma", GemmConfig(64, 64, 32, 3, 4))
        source = chosen.kernel().source
        assert isinstance(source, TritonSource)
        found = triton_worker.build(source.order(source.configs[0]))
        assert found["global_scratch"] == 4 * 128 <= 4 * descriptors.MOST * descriptors.ROOM
        more = ["y", "z"]
        made = problem("mm", a, b, epilogue=epilogue)
        assert "more than 4" in descriptors.limits(made.problem)


@pytest.mark.parametrize("tma_store", [False, True])
def test_ma_d19_an_epilogue_uses_what_is_stored(tma_store: bool) -> None:
    """One kernel; every buffer it is given is in its text."""
    _, args = tiled_mm((False, False))
    code = code_of(
        lambda a, b: torch.relu(torch.mm(a.repeat(8, 8), b.repeat(8, 8))), *args,
        **{"triton.enable_template_tma_store": tma_store, "epilogue_fusion": True,
           "triton.disallow_failing_autotune_kernels_TESTING_ONLY": True},
    )  # fmt: skip
    assert "triton_tem_fused_mm_relu" in code
    assert stored_by(code) == ("descriptor" if tma_store else "pointer")


def test_what_an_epilogue_stores_has_to_be_a_matrix() -> None:
    a, b = r(32, 32), r(32, 32)
    with config.patch({"triton.enable_template_tma_store": True}):
        out = torch.empty(32 * 40)[: 32 * 33].view(32, 33)[:, :32]
        made = problem("mm", a, b, epilogue=lambda b, c: {"y": (out, c)})
        assert "rows of it do not start" in descriptors.limits(made.problem)
        made = problem("mm", a, b, epilogue=lambda b, c: {"y": (torch.empty(32, 32), c)})
        assert descriptors.limits(made.problem) == ""


# ---- without descriptors


@pytest.mark.covering(1)
@pytest.mark.parametrize("transposed", BOTH)
@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_d20_persistent_without_descriptors(
    transposed: tuple[bool, bool], dynamic: bool
) -> None:
    function, args = tiled_mm(transposed)
    only = {"test_configs.autotune_choice_name_regex": "mm_persistent"}
    code = code_of(function, *args, arch="sm_80", dynamic=dynamic, **only)
    assert "make_tensor_descriptor" not in code and "turn * NUM_SMS" in code


@pytest.mark.covering(1)
@pytest.mark.parametrize("transposed", BOTH)
def test_ma_d21_persistent_addmm_without_descriptors(transposed: tuple[bool, bool]) -> None:
    _, (a, b) = tiled_mm(transposed)
    only = {"test_configs.autotune_choice_name_regex": "mm_persistent"}

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.repeat(8, 8), b.repeat(8, 8)
        left, right = a.t() if transposed[0] else a, b.t() if transposed[1] else b
        return torch.addmm(x, left, right)

    for dynamic in (False, True):
        code = code_of(function, r(248), a, b, arch="sm_80", dynamic=dynamic, **only)
        assert "make_tensor_descriptor" not in code and "turn * NUM_SMS" in code


def test_what_is_offered_is_what_was_asked_for() -> None:
    """However few configurations are wanted, and whatever the model thinks of the others."""
    made = problem("mm", meta(168, 88), meta(88, 248)).problem
    for most in (1, 4):
        with config.patch({"test_configs.max_mm_configs": most}):
            names = [c.template.name for c in TritonProvider().candidates(made, "default")]
        assert "mm_persistent_tma" in names and "mm_tma" in names


# ---- large results


def test_results_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """MA-D16: what is said of them is what is said of the whole."""
    a = torch.randn(1000)
    wrong, odd = a.clone(), a.clone()
    wrong[[3, 700]] += 0.5
    odd[512] = torch.inf
    said = [plan.difference(b, a, 1e-4) for b in (a, wrong, odd)]
    monkeypatch.setattr(plan, "CACHED", 64)
    assert [plan.difference(b, a, 1e-4) for b in (a, wrong, odd)] == said
    assert said[0] == "" and said[1].startswith("2 of 1000") and said[2].startswith("1 elements")
