"""Programs with operators that templates compute: on CPU tensors, kernels in a stand-in of the DSL,
host programs and fusion those of a card."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.compile.as_cuda import as_cuda
from tests.cutedsl import running
from tests.ours import torch_may_take_over
from tilewright import config, metrics
from tilewright.gemm import cutedsl
from tilewright.gemm.cutedsl import CuteDSLTemplate, build, toolchain
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.testing import fresh_cache, run_and_get_code

DOCS = Path(__file__).parents[2] / "docs" / "cutedsl.md"
Launches = list[tuple[int, ...]]

PLAIN = r"""
{{gen_defines()}}
@cute.kernel
def {{kernel_name}}_kernel(gA: cute.Tensor, gB: cute.Tensor, gC: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    bdim, _, _ = cute.arch.block_dim()
    i = bidx * bdim + tidx
    rows, cols = gA.shape
    if i < rows * cols:
        m, n = i // cols, i % cols
        gC[m, n] = gA[m, n] + gB[m, n]

@cute.jit
def {{kernel_name}}_jit(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    blocks = (cute.size(mA) + THREADS_PER_BLOCK - 1) // THREADS_PER_BLOCK
    {{kernel_name}}_kernel(mA, mB, mC).launch(
        grid=[blocks, 1, 1], block=[THREADS_PER_BLOCK, 1, 1], stream=stream)

{{def_kernel("input_a", "input_b")}}
    cute_a = from_dlpack(input_a)
    cute_b = from_dlpack(input_b)
    cute_c = from_dlpack({{get_output()}})
    {{kernel_name}}_jit(cute_a, cute_b, cute_c, cuda.CUstream(stream))
    return {{get_output()}}
"""


@pytest.fixture
def launches() -> Generator[Launches]:
    before = dict(CuteDSLTemplate.all_templates)
    with fresh_cache(), as_cuda(), running() as found, config.patch(compile_threads=1):
        yield found
    CuteDSLTemplate.all_templates.clear()
    CuteDSLTemplate.all_templates.update(before)
    cutedsl.lowering(torch.ops.aten.add.Tensor).forget()


@pytest.fixture(autouse=True)
def never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is another file's concern: here it is only counted."""
    monkeypatch.setattr(build, "make", lambda request: request.key)
    monkeypatch.setattr(toolchain, "why_not", lambda: "")


def documented() -> None:
    """The template of the documentation, as a reader would have it."""
    block = DOCS.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(block, str(DOCS), "exec"), {"__name__": "documented"})
    source = block.split('r"""\n')[1].split('""")')[0]
    assert len([line for line in source.splitlines() if line.strip()]) <= 20


def plain(*threads: int) -> None:
    made = CuteDSLTemplate("plain_add", PLAIN)

    @cutedsl.lowering(torch.ops.aten.add.Tensor)
    def add(choices: Any, input_nodes: Any, layout: Any) -> None:
        for n in threads:
            assert (
                made.maybe_append_choice(
                    choices, input_nodes=input_nodes, layout=layout, THREADS_PER_BLOCK=n
                )
                is None
            )


def check(f: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> str:
    got, codes = run_and_get_code(torch.compile(f, backend="tilewright", dynamic=dynamic), *args)
    torch.testing.assert_close(got, f(*args))
    return codes[0]


def counter(name: str) -> int:
    return metrics.counters["inductor"][name]


def test_cd_k17_a_template_is_the_lowering_of_an_operator(launches: Launches) -> None:
    plain(256)
    x, y = torch.randn(128, 4), torch.randn(128, 4)
    code = check(lambda x, y: x + y, x, y)
    assert "cute" in code and "THREADS_PER_BLOCK: cutlass.Constexpr = 256" in code
    assert launches == [(2, 1, 1, 256, 1, 1)]


def test_cd_k18_of_three_choices_one_is_in_the_program(launches: Launches) -> None:
    plain(128, 256, 512)
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    with config.patch({"test_configs.autotune_choice_name_regex": "cutedsl_plain_add_.*"}):
        check(lambda x, y: x + y, x, y)
    assert launches == [(2, 1, 1, 128, 1, 1)]  # there is no card to time them on: the first


def test_cd_k18_a_filter_takes_one_of_them(launches: Launches) -> None:
    plain(128, 256, 512)
    number = next(CuteDSLTemplate._numbers)
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    pattern = f"cutedsl_plain_add_{number + 2}$"
    with config.patch({"test_configs.autotune_choice_name_regex": pattern}):
        check(lambda x, y: x + y, x, y)
    assert launches == [(1, 1, 1, 256, 1, 1)]


def test_a_template_without_hooks_runs_beside_its_neighbours(launches: Launches) -> None:
    """CD-M1, the other side: no store hook, no fusion, and the reason is known."""
    plain(64)
    before = counter("cutedsl_epilogue_fusion_counter")
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    code = check(lambda x, y: torch.relu(x + y), x, y)
    assert counter("cutedsl_epilogue_fusion_counter") == before and "triton_poi" in code


STORED = '{{store_output("out", "a + b", "m", "n")}}'
MISTAKES: dict[str, tuple[str, str, str]] = {
    "a hook there is not": ("{{load_input(", "{{load_inputs(", "'load_inputs' is undefined"),
    "an input there is not": ('load_input("x"', 'load_input("z"', "def_kernel names x, y"),
    "a position too few": (STORED, STORED.replace(', "n"', ""), "takes 2 positions, not 1"),
    "no Python": ("cute.size(out):", "cute.size(out)", "expected ':': if i < cute.size"),
    "a parameter there is not": ("* THREADS", "* BLOCK", "uses BLOCK, which nothing in it defines"),
    "a value there is not": ("a + b", "a + q", "uses q, which nothing in it defines .*THREADS"),
    "another result": ('store_output("out"', 'store_output("o"', "uses o, which nothing"),
    "a function there is not": ("_jit(from_dlpack(x)", "_jut(from_dlpack(x)", "_jut, which"),
    "no entry": ('{{def_kernel("x", "y")}}', "def entry(x, y, stream):", "def_kernel makes it"),
    "a tensor's elements": ("    {{kernel_name}}_jit(from_dlpack(x)",
                            "    x = x + 1\n    {{kernel_name}}_jit(from_dlpack(x)",
                            "run once, on descriptions of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_in_a_template_are_said_once(
    name: str, launches: Launches, caplog: pytest.LogCaptureFixture
) -> None:
    """The program runs without it, and its author is told what to do."""
    wrong, instead, said = MISTAKES[name]
    source = DOCS.read_text().split('r"""\n')[1].split('""")')[0]
    assert wrong in source
    made = CuteDSLTemplate("matrix_add", source.replace(wrong, instead))
    reasons: list[Any] = []

    @cutedsl.lowering(torch.ops.aten.add.Tensor)
    def add(choices: Any, input_nodes: Any, layout: Any) -> None:
        for threads in (128, 256):
            reason = made.maybe_append_choice(choices, input_nodes, layout, THREADS=threads)
            reasons.append(reason)

    with caplog.at_level("WARNING", logger="tilewright"):
        check(lambda x, y: torch.relu(x + y), torch.randn(6, 8), torch.randn(6, 8))
    (warned,) = [r.message for r in caplog.records if "matrix_add" in r.message]
    assert warned.startswith("the template matrix_add is not used: ") and re.search(said, warned)
    assert launches == [] and all(isinstance(r, NotImplementedError) for r in reasons)


def test_a_template_that_hands_no_memory_on_is_not_fused(
    launches: Launches, caplog: pytest.LogCaptureFixture
) -> None:
    source = DOCS.read_text().split('r"""\n')[1].split('""")')[0]
    made = CuteDSLTemplate("matrix_add", source.replace('{{unpack_buffers("extra")}}', ""))

    @cutedsl.lowering(torch.ops.aten.add.Tensor)
    def add(choices: Any, input_nodes: Any, layout: Any) -> None:
        made.maybe_append_choice(choices, input_nodes, layout, THREADS=128)
        assert choices[0].withheld == (
            "the template does not call unpack_buffers: nothing can be fused"
        )

    before = counter("cutedsl_epilogue_fusion_counter")
    check(lambda x, y: torch.relu(x + y), torch.randn(6, 8), torch.randn(6, 8))
    assert len(launches) == 1 and counter("cutedsl_epilogue_fusion_counter") == before


EPILOGUES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "relu and a number": (lambda x, y: torch.relu(x + y) * 2.0, ((12, 8), (12, 8))),
    "a row": (lambda x, y, w: torch.relu(x + y) * w, ((12, 8), (12, 8), (1, 8))),
    "a column": (lambda x, y, w: (x + y) / (w.abs() + 1), ((12, 8), (12, 8), (12, 1))),
    "another type": (lambda x, y: torch.sigmoid(x + y).half(), ((12, 8), (12, 8))),
    "two results": (lambda x, y, w: (lambda z: (z, z * w))(x + y), ((12, 8), (12, 8), (12, 8))),
    "transposed operand": (lambda x, y, w: (x + y) - w.t(), ((12, 8), (12, 8), (8, 12))),
    "comparison": (lambda x, y: torch.where(x + y > 0, x + y, -1.0), ((12, 8), (12, 8))),
    "odd sizes": (lambda x, y: torch.tanh(x + y) * x, ((7, 5), (7, 5))),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(EPILOGUES))
def test_cd_m1_what_follows_is_part_of_the_kernel(name: str, dynamic: bool, launches: Launches
                                                  ) -> None:  # fmt: skip
    documented()
    f, sizes = EPILOGUES[name]
    before = counter("cutedsl_epilogue_fusion_counter")
    code = check(f, *(torch.randn(s) for s in sizes), dynamic=dynamic)
    assert len(launches) == 1 and "triton_" not in code
    assert counter("cutedsl_epilogue_fusion_counter") == before + 1


def test_cd_m2_what_makes_an_input_is_part_of_the_kernel(launches: Launches) -> None:
    documented()
    before = counter("cutedsl_prologue_fusion_counter")
    x, y = torch.randn(6, 8), torch.randn(6, 8).half()
    code = check(lambda x, y: x.half() * 0.5 + y, x, y)
    assert counter("cutedsl_prologue_fusion_counter") == before + 1
    assert len(launches) == 1 and "triton_" not in code
    assert code.count("empty_cuda(") == 1  # the result alone


def test_cd_m5_what_is_padded_is_loaded_where_it_is(launches: Launches) -> None:
    """CD-M2, CD-M5: a masked load in a kernel; beside it are zeros."""
    documented()
    before = counter("cutedsl_prologue_fusion_counter")
    x, y = torch.randn(5, 6), torch.randn(8, 14)
    check(lambda x, y: torch.nn.functional.pad(x, (3, 5, 1, 2)) + y, x, y)
    assert counter("cutedsl_prologue_fusion_counter") == before + 1
    assert len(launches) == 1


REFUSED: dict[str, Callable[..., Any]] = {
    "used elsewhere": lambda x, y: (lambda h: (h + y, h))(x.half() * 0.5),
    "a reduction": lambda x, y: x.half().sum(1, keepdim=True).expand(6, 8) + y,
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_cd_m2_prologues_that_are_not_fused(name: str, launches: Launches) -> None:
    documented()
    before = counter("cutedsl_prologue_fusion_counter")
    check(REFUSED[name], torch.randn(6, 8), torch.randn(6, 8).half())
    assert counter("cutedsl_prologue_fusion_counter") == before


def test_cd_m2_without_a_load_hook_the_input_is_in_memory(launches: Launches) -> None:
    plain(64)
    before = counter("cutedsl_prologue_fusion_counter")
    check(lambda x, y: x.half() * 0.5 + y, torch.randn(6, 8), torch.randn(6, 8).half())
    assert counter("cutedsl_prologue_fusion_counter") == before


BESIDE = r"""
{{gen_defines()}}
@cute.kernel
def {{kernel_name}}_kernel(x, y, out, extra):
    {{pick_instance("x", "y", "out", "extra")}}
    {{unpack_buffers("extra")}}
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(out):
        m, n = i // out.shape[1], i % out.shape[1]
        {{load_input("x", "a", "m", "n")}}
        {{load_input("y", "b", "m", "n")}}
        {{store_output("out", "a + b", "m", "n")}}

@cute.jit
def {{kernel_name}}_jit(x, y, out, extra, count, stream):
    blocks = cute.ceil_div(count, THREADS)
    {{kernel_name}}_kernel(x, y, out, extra).launch(
        grid=(blocks, 1, {{instances}}), block=(THREADS, 1, 1), stream=stream)

{{def_kernel("x", "y")}}
    {{kernel_name}}_jit(from_dlpack(x), from_dlpack(y), from_dlpack({{get_output()}}),
                        {{get_tensor_buffers()}}, x.shape[0] * x.shape[1], stream)
    return {{get_output()}}
"""


def beside(opted: bool = True) -> CuteDSLTemplate:
    made = CuteDSLTemplate("beside_add", BESIDE, beside=opted)

    @cutedsl.lowering(torch.ops.aten.add.Tensor)
    def add(choices: Any, input_nodes: Any, layout: Any) -> None:
        if all(x.size == layout.size for x in input_nodes):
            assert made.maybe_append_choice(choices, input_nodes, layout, THREADS=32) is None

    return made


TWO = {
    "alone": lambda x, y, u, v: (x + y, u + v),
    "with what follows": lambda x, y, u, v: (torch.relu(x + y) * u, torch.relu(u + v) * y),
    "an operand in common": lambda x, y, u, v: (x + y, y + v),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(TWO))
def test_cd_m3_calls_of_one_template_share_a_launch(name: str, dynamic: bool, launches: Launches
                                                    ) -> None:  # fmt: skip
    beside()
    before = counter("cutedsl_horizontal_fusion_counter")
    code = check(TWO[name], *(torch.randn(6, 11) for _ in range(4)), dynamic=dynamic)
    assert launches == [(3, 1, 2, 32, 1, 1)], code
    assert counter("cutedsl_horizontal_fusion_counter") == before + 1


APART: dict[str, tuple[Callable[..., Any], bool]] = {
    "not opted in": (lambda x, y, u, v: (x + y, u + v), False),
    "one needs the other": (lambda x, y, u, v: (x + y) + v, True),
    "other sizes": (lambda x, y, u, v: (x + y, u[1:] + v[1:]), True),
}


@pytest.mark.parametrize("name", list(APART))
def test_cd_m3_calls_that_do_not(name: str, launches: Launches, caplog: pytest.LogCaptureFixture
                                 ) -> None:  # fmt: skip
    f, opted = APART[name]
    beside(opted)
    before = counter("cutedsl_horizontal_fusion_counter")
    with caplog.at_level("DEBUG", logger="tilewright.choose"):
        check(f, *(torch.randn(6, 11) for _ in range(4)))
    assert counter("cutedsl_horizontal_fusion_counter") == before
    assert {grid[2] for grid in launches} <= {1}
    if not opted:
        assert "the template beside_add does not run beside itself" in caplog.text


PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda x, w, b: x @ w,
    "bias and gelu": lambda x, w, b: torch.nn.functional.gelu(torch.addmm(b, x, w)),
    "residual and two results": lambda x, w, b: (lambda z: (z, torch.relu(z) + x))(x @ w),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_of_programs(name: str, dynamic: bool) -> None:
    """With torch's own operations behind the call, as where the card refuses the kernel."""
    seen: list[str] = []

    def run(self: CuteSource, *args: Any) -> None:
        seen.append(self.name)
        assert self.otherwise is not None and len(args) == len(self.request.arguments)
        self.otherwise(*args)

    given = [torch.randn(s).to(torch.bfloat16) for s in ((64, 128), (128, 128), (128,))]
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CUTEDSL", "compile_threads": 1}
    with (
        fresh_cache(),
        as_cuda(),
        config.patch(options),
        mock.patch.object(CuteSource, "__call__", run),
    ):
        before = counter("cutedsl_epilogue_fusion_counter")
        code = check(PRODUCTS[name], *given, dynamic=dynamic)
    assert len(seen) == 1 and "cutedsl_quack" in code and "extern_" not in code
    assert counter("cutedsl_epilogue_fusion_counter") - before == (name != "mm")


def test_a_kernel_that_cannot_be_had_is_computed_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    request = build.Request("", "nothing", (build.Pointer(torch.float32),), "sm_90a")
    source = CuteSource("gone", request, 0, lambda x: x.fill_(7))
    x = torch.zeros(4)
    with fresh_cache(), config.patch(compile_threads=1), torch_may_take_over():
        source(x)
    assert x.tolist() == [7.0] * 4
    assert "gone is computed by torch's own operations" in caplog.text


def test_cd_m9_one_kernel_for_all_sizes(launches: Launches) -> None:
    """The documentation's template: three choices, a relu, `dynamic=True`, one compilation."""
    documented()
    missed = counter("cutedsl_kernel_cache_miss")
    f = torch.compile(lambda x, y: torch.relu(x + y), backend="tilewright", dynamic=True)
    for rows, columns in ((6, 20), (5, 7), (33, 3), (1, 9)):
        x, y = torch.randn(rows, columns), torch.randn(rows, columns)
        torch.testing.assert_close(f(x, y), torch.relu(x + y))
    assert len(launches) == 4
    assert counter("cutedsl_kernel_cache_miss") - missed == 2  # a row of one is a graph of its own


def test_a_lowering_that_is_forgotten_is_not_found_in_a_cache(launches: Launches) -> None:
    plain(32)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    assert "cutedsl_plain_add" in check(lambda x, y: x + y, x, y)
    cutedsl.lowering(torch.ops.aten.add.Tensor).forget()
    assert "cutedsl_plain_add" not in check(lambda x, y: x + y, x, y)


def test_kernels_of_a_program_are_kept_with_it(launches: Launches) -> None:
    """Never twice: they pickle, with what runs in their place, and compute the same."""
    documented()
    seen: list[tuple[CuteSource, tuple[Any, ...]]] = []
    launch = CuteSource.__call__

    def run(self: CuteSource, *args: Any) -> None:
        seen.append((self, args))
        launch(self, *args)

    x, y = torch.randn(6, 10), torch.randn(6, 10)
    with mock.patch.object(CuteSource, "__call__", run):
        check(lambda x, y: torch.relu(x + y), x, y)
    ((source, args),) = seen
    again: CuteSource = pickle.loads(pickle.dumps(source))
    assert again.request == source.request and again.otherwise is not None
    for compute in (again, again.otherwise):
        args[-1].fill_(-1.0)
        compute(*args)
        torch.testing.assert_close(args[-1], torch.relu(x + y))


def test_two_lowerings_of_one_operator_are_an_error(launches: Launches) -> None:
    plain(32)
    with pytest.raises(ValueError, match=r"aten.add.Tensor is computed by templates already"):
        cutedsl.lowering(torch.ops.aten.add.Tensor)(lambda *args: None)


def test_views_and_calls_that_go_the_ordinary_way(launches: Launches) -> None:
    documented()
    base = torch.randn(9, 17)
    check(lambda b: torch.relu(b[1:5, 2:10] + b[3:7, 5:13]), base)
    check(lambda x, y: x.t() + y, torch.randn(8, 4), torch.randn(4, 8))
    assert len(launches) == 2
    check(lambda x, y: torch.add(x, y, alpha=2), torch.randn(4, 8), torch.randn(4, 8))
    check(lambda x, y: x + y, torch.randn(4, 8), torch.randn(8))
    check(lambda x, y: x + y, torch.randn(4, 8), torch.randn(1, 8))
    check(lambda x: x + 1, torch.randn(4, 8))
    check(lambda x, y: x + y, torch.randn(0, 8), torch.randn(0, 8))
    assert len(launches) == 2
