"""Options of the reference that a user may have in their code: each works, says that it has no
effect, or is refused with what to use instead."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._inductor import config as reference

from tilewright import backend, config
from tilewright.errors import InvalidOptionError, UnknownOptionError
from tilewright.gemm import provider
from tilewright.known_options import KNOWN, known

assert backend  # it registers those who offer products

NO_OPTIONS = {"TYPE_CHECKING", "is_nightly_or_source"}


def test_every_option_of_the_reference_is_known():
    ours = {spec.name for spec in config.declared()}
    ours |= {f"cutlass.{name.removeprefix('cuda.')}" for name in ours if name.startswith("cuda.")}
    names = {name for name in reference._config if not name.startswith("_")} - NO_OPTIONS
    assert not {name for name in names if name not in ours and known(name) is None}


def test_an_option_without_effect_says_so_once(caplog: pytest.LogCaptureFixture):
    config._registry._told.discard("size_asserts")
    with caplog.at_level(logging.WARNING, "tilewright"):
        with config.patch(size_asserts=False):
            pass
        f = torch.compile(torch.sin, backend="tilewright", options={"size_asserts": True})
        assert torch.equal(f(torch.zeros(3)), torch.zeros(3))
    lines = [r.getMessage() for r in caplog.records if "size_asserts" in r.getMessage()]
    assert lines == [f"option 'size_asserts' has no effect: {KNOWN['size_asserts'].why}"]


def test_one_of_ours_without_effect_says_so_too(caplog: pytest.LogCaptureFixture):
    config._registry._told.discard("triton.native_matmul")
    with caplog.at_level(logging.WARNING, "tilewright"):
        for asked in (False, True, True):
            with config.patch({"triton.native_matmul": asked}):
                assert config.triton.native_matmul is asked
    why = "a product is a library's call or a template, never a loop."
    assert [r.getMessage() for r in caplog.records] == [
        f"option 'triton.native_matmul' has no effect: {why}"
    ]


def test_a_backend_that_is_not_here_is_named_once(caplog: pytest.LogCaptureFixture):
    provider._told.discard("NVGEMM")
    named = config.patch(max_autotune_gemm_backends="aten, nvgemm")
    with caplog.at_level(logging.WARNING, "tilewright"), named:
        assert [p.name for p in provider.enabled() + provider.enabled()] == ["ATEN", "ATEN"]
    (line,) = [r.getMessage() for r in caplog.records]
    said = "option 'max_autotune_gemm_backends' names NVGEMM, which is no backend here: there are "
    assert line == said + ", ".join(sorted(provider.PROVIDERS))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("freezing_discard_parameters", "kept beside"),
        ("cpp_wrapper", "aot_compile"),
        ("aot_inductor.output_path", "aot_compile"),
        ("force_layout_optimization", "use `layout_optimization`"),
    ],
)
def test_a_refused_option_names_what_to_use(name: str, hint: str):
    with pytest.raises(UnknownOptionError) as refused:
        config.patch({name: True})
    assert hint in str(refused.value)
    assert "did you mean" not in str(refused.value)


def test_no_hint_misleads():
    with pytest.raises(UnknownOptionError) as far:
        config.patch(entirely_else=True)
    assert "did you mean" not in str(far.value)
    with pytest.raises(UnknownOptionError, match="did you mean 'max_autotune'"):
        config.patch(max_autotne=True)


@pytest.mark.parametrize("value", ["yes", "true", "", 1, None])
def test_wrong_types_are_errors(value: object):
    with pytest.raises(InvalidOptionError, match="it must be bool"):
        config.patch(max_autotune=value)


def test_patch_decorates_the_tests_of_a_class():
    @config.patch(max_autotune=True)
    class Tests:
        wanted = config.max_autotune

        def test_inside(self) -> bool:
            return config.max_autotune

        @staticmethod
        def test_static() -> bool:
            return config.max_autotune

        @classmethod
        def test_of_class(cls) -> bool:
            return config.max_autotune

        def other(self) -> bool:
            return config.max_autotune

    tests = Tests()
    assert tests.test_inside() and tests.test_static() and tests.test_of_class()
    assert not tests.other() and not Tests.wanted
    assert not config.max_autotune
