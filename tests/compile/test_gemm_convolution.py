"""Convolutions as products: in the interpreter, who is offered, and compiled for a card."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.compile.as_cuda import as_cuda
from tests.programs import compiled
from tilewright import config
from tilewright.gemm import choose
from tilewright.gemm.triton import TritonCandidate
from tilewright.runtime import triton_worker
from tilewright.runtime.triton_build import TritonSource
from tilewright.testing import run_and_get_code
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller

LAST = torch.channels_last
TUNED: dict[str, Any] = {
    "max_autotune": True, "test_configs.max_mm_configs": 1, "max_autotune_conv_backends": "TRITON",
    "max_autotune_gemm_backends": "TRITON",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    choose._memo.clear()
    yield
    select.clear_preprocessing_fns()


def code_of(function: Callable[..., Any], *args: Tensor, dynamic: bool | None = None,
            **options: Any) -> str:  # fmt: skip
    """The program, run in the interpreter and compared with eager; no kernel of it failed."""
    with as_cuda(), torch.no_grad():
        call = compiled(function, options={**TUNED, **options}, dynamic=dynamic)
        result, code = run_and_get_code(call, *args)
        wanted = function(*args)
    torch.testing.assert_close(result, wanted, rtol=2e-3, atol=2e-3)
    assert result.stride() == wanted.stride()
    assert not any("is replaced by torch's own" in c for c in code)
    return "\n".join(code)


def noted() -> list[ChoiceCaller]:
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    return seen


def r(*shape: int, last: bool = False) -> Tensor:
    made = torch.randn(*shape) / 3
    return made.to(memory_format=LAST) if last else made


FORMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "planes": (lambda x, w: F.conv2d(x, w, padding=1), (r(2, 8, 9, 7), r(12, 8, 3, 3))),
    "channels last": (lambda x, w: F.conv2d(x, w, padding=1),
                      (r(2, 8, 9, 7, last=True), r(12, 8, 3, 3, last=True))),
    "weights as they are": (lambda x, w: F.conv2d(x, w, padding=1),
                            (r(2, 8, 9, 7, last=True), r(12, 8, 3, 3))),
    "steps": (lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=(2, 0)),
              (r(2, 8, 9, 7), r(12, 8, 3, 3))),
    "steps, channels last": (lambda x, w: F.conv2d(x, w, stride=2, padding=1),
                             (r(2, 8, 9, 7, last=True), r(12, 8, 3, 3, last=True))),
    "spread": (lambda x, w: F.conv2d(x, w, dilation=2, padding=2), (r(1, 4, 9, 9), r(5, 4, 3, 3))),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (r(2, 8, 6, 7), r(12, 4, 3, 3))),
    "groups, channels last": (lambda x, w: F.conv2d(x, w, groups=2, padding=1),
                              (r(2, 8, 6, 7, last=True), r(12, 4, 3, 3, last=True))),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=8, padding=1), (r(2, 8, 6, 7), r(8, 1, 3, 3))),
    "a line": (lambda x, w: F.conv1d(x, w, padding=2), (r(3, 4, 17), r(6, 4, 5))),
    "a volume": (lambda x, w: F.conv3d(x, w, padding=1), (r(1, 3, 4, 5, 6), r(4, 3, 3, 3, 3))),
    "one point of planes": (lambda x, w: F.conv2d(x, w, stride=2), (r(2, 8, 9, 7), r(12, 8, 1, 1))),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
def test_ma_g7_convolutions_as_products(form: str) -> None:
    """One kernel; nothing of the image is copied."""
    function, args = FORMS[form]
    code = code_of(function, *args, layout_optimization=False)
    assert re.search(r"triton_tem_fused_\w*convolution", code) and "extern_" not in code
    assert code.count("@triton.jit") == 1


@pytest.mark.parametrize("last", [False, True])
def test_ma_g7_with_what_follows(last: bool) -> None:
    """Bias, batch norm as inference has it, a residual and an activation, all in one kernel."""
    x, w, b = r(2, 8, 9, 7, last=last), r(12, 8, 3, 3, last=last), r(12)
    scale, more = r(12, 1, 1), r(2, 12, 9, 7, last=last)

    def function(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, more: Tensor) -> Tensor:
        return (F.conv2d(x, w, b, padding=1) * scale + more).relu()

    code = code_of(function, x, w, b, scale, more)
    assert "triton_tem_fused_" in code and "triton_poi_fused" not in code


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "it is transposed": (lambda x, w: F.conv_transpose2d(x, w), (r(1, 4, 6, 6), r(4, 5, 3, 3))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_ma_g7_what_is_the_librarys(why: str, caplog: pytest.LogCaptureFixture) -> None:
    function, args = REFUSED[why]
    with caplog.at_level("DEBUG", "tilewright.choose"):
        code = code_of(function, *args)
    assert "triton_tem_fused_" not in code and why in caplog.text


def test_ma_g7_both_are_offered() -> None:
    seen = noted()
    code = code_of(FORMS["planes"][0], *FORMS["planes"][1],
                   max_autotune_conv_backends="aten, Triton")  # fmt: skip
    assert {c.provider for c in seen} == {"ATEN", "TRITON"} and seen[0].name == "convolution"
    assert "extern_aten_convolution" in code  # there is no card to measure on


@pytest.mark.parametrize(
    ("backends", "offered"),
    [(" triton ", {"TRITON"}), ("ATEN", {"ATEN"}), ("Aten,TRITON", {"ATEN", "TRITON"}),
     ("cutlass, aten", {"ATEN"})],
)  # fmt: skip
def test_ma_a5_the_backends_of_convolutions(backends: str, offered: set[str]) -> None:
    """In any case, with blanks; those of products say nothing about them."""
    seen = noted()
    code_of(FORMS["planes"][0], *FORMS["planes"][1], max_autotune_conv_backends=backends,
            max_autotune_gemm_backends="")  # fmt: skip
    assert {c.provider for c in seen} == offered


def test_ma_a5_nothing_is_asked_where_nothing_is_tuned() -> None:
    """The library is there, whatever the list says."""
    code = code_of(FORMS["planes"][0], *FORMS["planes"][1], max_autotune=False,
                   max_autotune_conv_backends="")  # fmt: skip
    assert "convolution" in code and "triton_tem_fused_" not in code


SPACES = ["DEFAULT", "EXHAUSTIVE"]


@pytest.mark.parametrize("space", SPACES)
def test_ma_g1_one_point_of_an_image_with_its_channels_last(space: str) -> None:
    args = r(4, 3, 32, 32, last=True), r(16, 3, 1, 1), r(16)
    code = code_of(lambda x, w, b: F.conv2d(x, w, b), *args, max_autotune_gemm_search_space=space)
    assert "triton_tem_fused_" in code and "extern_" not in code


def test_ma_g2_sizes_that_depend_on_data() -> None:
    """The library's, for every size."""
    w = r(64, 3, 1, 1)

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h, v = a.nonzero().size(0), b.nonzero().size(0)
        torch._check(h >= 2), torch._check(v >= 2)  # type: ignore[func-returns-value]
        torch._check(h <= 24), torch._check(v <= 24)  # type: ignore[func-returns-value]
        return F.conv2d(x[:, :, :h, :v], w)

    x = r(4, 3, 24, 24, last=True)
    with as_cuda(), torch.no_grad(), torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):  # fmt: skip
        call = compiled(function, options={**TUNED, "max_autotune_gemm_backends": "ATEN,TRITON"},
                        fullgraph=False)  # fmt: skip
        for seed in (1, 2):
            torch.manual_seed(seed)
            a, b = torch.randint(0, 2, (24,)), torch.randint(0, 2, (24,))
            torch.testing.assert_close(call(x, a, b), function(x, a, b), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("space", SPACES)
def test_ma_g4_beside_itself_in_a_concatenation(space: str) -> None:
    """What is added and both halves of the concatenation: the values of every run agree."""
    args = r(2, 3, 16, 16), r(8, 3, 3, 3)

    def function(x: Tensor, w: Tensor) -> Tensor:
        x = F.conv2d(x, w, padding=1)
        return torch.cat((x, x + 1))

    codes = [code_of(function, *args, max_autotune_gemm_search_space=space) for _ in range(2)]
    assert codes[0] == codes[1] and "triton_" in codes[0]


def test_ma_g5_nobody_may_compute_it() -> None:
    """MA-G5, MA-Q3."""
    options = {**TUNED, "max_autotune_conv_backends": "", "layout_optimization": False}
    with as_cuda(), torch.no_grad(), pytest.raises(BackendCompilerFailed,
                                                   match="NoValidChoicesError"):  # fmt: skip
        compiled(lambda x, w: F.conv2d(x, w), options=options)(r(2, 3, 16, 16), r(3, 3, 1, 1))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_ma_g6_no_images(space: str, kernel: int) -> None:
    """MA-G6, MA-I5."""
    code_of(lambda x, w: F.conv2d(x, w), torch.empty(0, 16, 14, 14), r(16, 16, kernel, kernel),
            max_autotune_gemm_search_space=space, max_autotune_gemm_backends="ATEN,TRITON",
            max_autotune_conv_backends="ATEN,TRITON")  # fmt: skip


def test_ma_g8_one_point_is_a_product_where_the_channels_are_last() -> None:
    """While tuning without being asked; of planes only if asked, and else a convolution."""
    planes, last = r(1, 8, 6, 7), r(2, 8, 6, 7, last=True)
    w = r(12, 8, 1, 1)
    one = lambda x, w: F.conv2d(x, w)  # noqa: E731
    assert "triton_tem_fused_convolution" in code_of(one, planes, w)
    for args, options in (((last, w), {}), ((planes, w), {"conv_1x1_as_mm": True})):
        code = code_of(one, *args, **options)
        assert "triton_tem_fused_" in code and "convolution" not in code.partition("@triton")[2]


@pytest.mark.parametrize("last", [False, True])
def test_ma_g7_compiled_for_a_card(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the matrix units."""
    sources: list[TritonSource] = []
    build = triton_worker.build
    kernel = TritonCandidate.kernel

    def seen(self: TritonCandidate, label: str = "") -> Any:
        found = kernel(self, label)
        assert isinstance(found.source, TritonSource)
        sources.append(found.source)
        return found

    monkeypatch.setattr(TritonCandidate, "kernel", seen)
    x, w = r(4, 64, 14, 14, last=last).half(), r(64, 64, 3, 3, last=last).half()
    with config.patch({"cuda.arch": "sm_90"}):
        code_of(lambda x, w: F.conv2d(x, w, padding=1), x, w,
                **{"test_configs.autotune_choice_name_regex": r"triton_(b?)mm_\d"})  # fmt: skip
    found = build(sources[0].order(sources[0].configs[0]))
    assert "wgmma" in found["ptx"] or "mma.sync" in found["ptx"]


@pytest.mark.parametrize("space", SPACES)
def test_ma_g3_a_volume_on_the_cpu(space: str) -> None:
    """It is the library's."""
    x, w = torch.randn(1, 3, 8, 16, 32), torch.randn(3, 3, 7, 7, 7)
    options = {"max_autotune": True, "max_autotune_gemm_search_space": space}
    call = compiled(lambda x, w: F.conv3d(x, w), options=options)
    torch.testing.assert_close(call(x, w), F.conv3d(x, w), atol=6e-5, rtol=1e-3)
