"""What a user of `torch.compile(backend="tilewright")` touches: modes, options, errors, dumps."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame  # pyright: ignore[reportMissingImports]
from torch._dynamo import eval_frame

from tilewright import config, metrics
from tilewright.errors import LoweringError
from tilewright.lower.table import LOWERINGS
from tilewright.runtime import native
from tilewright.testing import fresh_cache, run_and_get_code

aten = torch.ops.aten


def softened(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, dim=-1) + 1


def compiled(**how: Any) -> Any:
    return torch.compile(softened, backend="tilewright", **how)


@pytest.mark.parametrize(
    "mode", [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_every_mode_gives_the_result(mode: str | None) -> None:
    x = torch.randn(5, 7)
    torch.testing.assert_close(compiled(mode=mode)(x), softened(x))


def test_an_unknown_mode_lists_the_valid_ones() -> None:
    with pytest.raises(Exception, match=r"unknown mode 'fastest'[\s\S]*max-autotune-no-cudagraphs"):
        compiled(mode="fastest")(torch.randn(3))


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(Exception, match=r"did you mean .fallback_random.\?[\s\S]*max_fusion_size"):
        compiled(options={"fallback_randon": True})(torch.randn(3))


def test_an_option_of_the_wrong_type_says_which_is_right() -> None:
    with pytest.raises(Exception, match=r"cpp\.threads[\s\S]*int"):
        compiled(options={"cpp.threads": "many"})(torch.randn(3))


def test_options_hold_for_the_backward_graph_compiled_later() -> None:
    seen: list[bool] = []
    original = LOWERINGS[aten.neg.default]

    def spy(ctx: Any, *args: Any) -> Any:
        seen.append(config.fallback_random)
        return original(ctx, *args)

    x = torch.randn(4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOWERINGS, aten.neg.default, spy)
        call = torch.compile(
            lambda t: t.cos().sum(),
            backend="tilewright",
            options={"fallback_random": True, "force_disable_caches": True},
        )
        call(x).backward()
    assert seen == [True]
    assert config.fallback_random is False


def test_a_fault_in_a_lowering_names_node_stage_and_the_users_line() -> None:
    def broken(ctx: Any, *args: Any) -> Any:
        raise ZeroDivisionError("deliberate")

    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        patch.setitem(LOWERINGS, aten.add.Tensor, broken)
        with pytest.raises(Exception, match="deliberate") as caught:
            compiled()(torch.randn(3, 4))
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, LoweringError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    assert isinstance(cause, LoweringError)
    assert "ZeroDivisionError: deliberate" in str(cause)
    assert cause.stage == "lower"
    assert cause.site is not None
    assert "aten.add.Tensor" in cause.site.node
    assert cause.site.file == __file__
    assert cause.site.source == "return torch.softmax(x * 2, dim=-1) + 1"


def test_generated_code_is_shown_with_the_users_lines() -> None:
    with fresh_cache():
        _, (code,) = run_and_get_code(compiled(), torch.randn(30, 40))
    line = softened.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in code
    assert "def call(args):" in code
    assert "cpp_fused_" in code and "#pragma omp simd" in code


def test_code_is_shown_when_it_comes_from_the_cache_too() -> None:
    x = torch.randn(31, 40)
    with fresh_cache():
        _, first = run_and_get_code(compiled(), x)
        torch._dynamo.reset()
        _, second = run_and_get_code(compiled(), x)
        assert metrics.cache_hits == 1
    assert first == second


def test_debug_levels_write_every_stage(tmp_path: Path) -> None:
    with fresh_cache(), config.patch(debug=4, debug_dir=str(tmp_path)):
        compiled()(torch.randn(6, 5))
    names = {file.stem.split("_", 1)[1] for file in tmp_path.rglob("*") if file.is_file()}
    assert {"graph", "simplified", "lowered", "scheduled", "host"} <= names
    assert any(name.startswith("cpp_fused_mul__softmax_add") for name in names)


def test_the_first_levels_print_a_line_per_graph_and_the_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fresh_cache(), config.patch(debug=2):
        torch.compile(lambda x: (x @ x).exp().sum(0), backend="tilewright")(torch.randn(6, 6))
    shown = capsys.readouterr().err
    assert "tilewright: 1 kernels for 2 nodes, 1 ATen calls (aten.mm.default x1)" in shown
    assert re.search(r"^ +0 call .* mm ", shown, re.M)
    assert re.search(r"^ +1 kernel .* exp", shown, re.M)


def test_a_compiled_frame_has_no_events_for_profilers() -> None:
    assert torch._dynamo.config.record_runtime_overhead
    x, fn = torch.randn(5, 7), compiled()
    fn(x)
    assert torch._dynamo.config.record_runtime_overhead
    with torch.profiler.profile() as seen:
        fn(x)
    assert "Pregraph bytecode" not in {event.name for event in seen.events()}


callbacks: list[Any] = []  # of Dynamo's, as the operator below found them


@torch.library.custom_op("tilewright_test::watched", mutates_args=(), schema="(Tensor x) -> Tensor")
def watched(x: Tensor) -> Tensor:
    callbacks.append(set_eval_frame(None))
    if float(x.sum()) > 1e6:
        raise ZeroDivisionError("as it was told to")
    return x + 1


@watched.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def around(x: Tensor) -> Tensor:
    return watched(x * 2).cos()


def installed() -> dict[str, Any]:
    """What Dynamo has put into the globals here for frames it compiled."""
    return {name: v for name, v in globals().items() if name.startswith("__compiled_fn")}


@pytest.mark.parametrize("lean", [True, False], ids=["in C", "wrapped by Dynamo"])
def test_dynamo_sees_nothing_of_a_compiled_program(
    lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Its callback is gone while the program runs and there again behind it, also after an error;
    and Dynamo's own wrapper, which does that otherwise, is as before."""
    assert native.module() is not None
    if not lean:
        monkeypatch.setattr(native, "set_eval_frame", None)
    before, wrap = installed(), eval_frame.DisableContext.__call__
    with fresh_cache(), torch.no_grad():
        x = torch.randn(5, 7)
        result = torch.compile(around, backend="tilewright", fullgraph=True)(x)
        torch.testing.assert_close(result, (x * 2 + 1).cos())
        (made,) = [v for name, v in installed().items() if name not in before]
        assert native.is_entry(made) == lean
        assert eval_frame.DisableContext.__call__ is wrap
        callbacks.clear()
        set_eval_frame(False)  # as in a frame that Dynamo runs
        try:
            with pytest.raises(ZeroDivisionError, match="as it was told to"):
                made(torch.full((5, 7), 1e9))
            made(x)
        finally:
            after = set_eval_frame(None)
        assert callbacks == [None, None] and after is False


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before(enabled: bool) -> None:
    seen: list[bool] = []
    metrics.on_code.append(lambda code: seen.append(gc.isenabled()))
    if not enabled:
        gc.disable()
    try:
        x = torch.randn(5, 7, requires_grad=True)
        (compiled()(x) * 3).sum().backward()
        assert gc.isenabled() == enabled
    finally:
        metrics.on_code.pop()
        gc.enable()
    assert seen == [False, False]


def test_plain_programs_are_called_directly() -> None:
    """Whatever the mode of gradients, results have none, and it is as it was."""
    x = torch.randn(5, 7)
    for fn in (softened, lambda x: (softened(x) @ x.t()).relu()):
        call = torch.compile(fn, backend="tilewright")
        for enabled in (True, False, True):
            with torch.set_grad_enabled(enabled):
                result = call(x)
                assert torch.is_grad_enabled() == enabled
            torch.testing.assert_close(result, fn(x))
            assert not result.requires_grad and result.grad_fn is None


def test_quiet_by_default() -> None:
    script = (
        "import torch\n"
        "f = torch.compile(lambda x: x.exp().sum(0), backend='tilewright')\n"
        "f(torch.randn(5, 6))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert done.stderr == ""


@pytest.mark.parametrize(("threads", "clause"), [(1, None), (3, "num_threads(3)")])
def test_cpp_threads_decides_how_many_run(threads: int, clause: str | None) -> None:
    x = torch.randn(300, 400)
    with fresh_cache(), config.patch({"cpp.threads": threads}):
        result, (code,) = run_and_get_code(compiled(), x)
    torch.testing.assert_close(result, softened(x))
    assert ("omp parallel" in code) == (threads > 1)
    assert clause is None or clause in code
