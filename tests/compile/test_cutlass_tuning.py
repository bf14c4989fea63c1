"""CUTLASS kernels among others: where they are timed, what fails, and what is tried first."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.compile.cutlass import ON, by_torch, ran
from tilewright import config
from tilewright.gemm import choose as choosing
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.provider import Cutlass
from tilewright.gemm.plan import Described, Memory, Plan
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer
from tilewright.tune import child, select
from tilewright.tune.choices import CUTLASSTemplateCaller, caller


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    choosing._memo.clear()


def _seen(monkeypatch: pytest.MonkeyPatch, backends: str) -> tuple[list[bool | None], list[Plan]]:
    """Whether a process of its own was asked for, and the plans."""
    asked: list[bool | None] = []
    plans: list[Plan] = []
    original = choosing._Chooser._selected

    def selected(self: Any, given: Any) -> Any:
        asked.append(config.autotune_in_subproc)
        plans.extend(given)
        return original(self, given)

    monkeypatch.setattr(choosing._Chooser, "_selected", selected)
    a, b = torch.randn(64, 32).half(), torch.randn(32, 48).half()
    ran(torch.mm, a, b, max_autotune_gemm_backends=backends)
    assert config.autotune_in_subproc is None
    return asked, plans


def test_cu_g4_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-G4: asked for by nobody, and all of the choices go there."""
    asked, plans = _seen(monkeypatch, "ATEN,CUTLASS")
    assert asked == [True]
    assert {p.provider for p in plans} == {"ATEN", "CUTLASS"}
    assert all(p.compiles and p.is_foreign for p in plans if p.provider == "CUTLASS")


def test_cu_g5_not_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = _seen(monkeypatch, "ATEN,TRITON")
    assert asked == [None]  # as it was


def test_cu_g13_what_is_sent_is_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-G13: a plan pickles with sources, descriptions of memory and numbers."""
    _, plans = _seen(monkeypatch, "ATEN,CUTLASS")
    plan = next(p for p in plans if p.provider == "CUTLASS")
    sent = pickle.loads(pickle.dumps(plan.remote()))
    (source,) = [p.source for p in sent.parts if isinstance(p.source, CutlassSource)]
    assert source.key == plan.candidate.kernel().source.key  # type: ignore[union-attr]
    assert sent.memory == plan.work.bench.memory.described
    assert b"_rebuild_tensor" not in pickle.dumps(plan.remote())
    assert "cache_dir" in dict(child.Settings.now().options), "where kernels are found goes along"


def test_cu_g13_memory_is_made_there_as_far_as_windows_reach() -> None:
    """Strided operands that begin somewhere: as many elements as are read, of the same numbers."""
    cpu = torch.device("cpu")
    size, stride = (ix.as_index(4), ix.as_index(8)), (ix.as_index(20), ix.ONE)
    buffers = tuple(Buffer(n, torch.float32, cpu, size, stride) for n in "abc")
    described = Described(buffers, (), ("c",), extents=(("b", 3 * 20 + 8 + 5),), filled=("c",))
    here, there = (Memory(d).sets[0] for d in (described, pickle.loads(pickle.dumps(described))))
    assert [len(here[n]) for n in "abc"] == [3 * 20 + 8, 3 * 20 + 8 + 5, 3 * 20 + 8]
    assert all(torch.equal(here[n], there[n]) for n in "abc")
    assert here["a"].std() > 0.5 and not torch.equal(here["a"], here["b"][: len(here["a"])])


def test_cu_d11_a_lone_choice_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(64, 32).half(), torch.randn(32, 48).half()
    called, _ = ran(
        torch.mm, a, b, cutlass_max_profiling_configs=1, cutlass_max_profiling_swizzle_options=[4]
    )
    assert [s.swizzle for s in called] == [4]


def test_choices_are_callers_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-B18, CU-D5: what a preprocessing function of the user's is given."""
    _, plans = _seen(monkeypatch, "ATEN,CUTLASS")
    found = [caller(p) for p in plans]
    ours = [c for c in found if isinstance(c, CUTLASSTemplateCaller)]
    assert len(ours) == len([p for p in plans if p.provider == "CUTLASS"]) > 0
    assert all(c.info_dict()["op_conf_name"].startswith("cutlass3x_sm90") for c in ours)
    assert len({c.hash_key() for c in ours}) == len(ours)


def test_filters_of_the_user_see_them() -> None:
    a, b = torch.randn(64, 32).half(), torch.randn(32, 48).half()

    def pingpong(choices: Any) -> Any:
        return [c for c in choices if "pingpong" in c.description]

    select.add_preprocessing_fn(pingpong)
    try:
        called, _ = ran(torch.mm, a, b)
    finally:
        select.clear_preprocessing_fns()
    assert "pingpong" in called[0].label


def test_cu_c4_arguments_keep_their_order() -> None:
    """CU-C4, CU-G10, CU-G11: addmm with a bias of one row; each tensor is where the kernel reads
    it."""
    bias, x, w = torch.randn(64).bfloat16(), torch.randn(32, 48).bfloat16(), torch.randn(48, 64)
    called, _ = ran(torch.addmm, bias, x, w.bfloat16(), max_autotune_gemm_backends="CUTLASS")
    source = called[0]
    memory = source.problem.memory
    text = source.source.text
    order = [source.names[k] for k in source.addresses]
    assert order == ["a", "b", "bias", "c"] and set(order) == set(memory)
    assert text.index("(p0)") < text.index("(p1)")


def test_cu_f11_nothing_to_offer_is_no_failure() -> None:
    a, b = torch.randn(100, 10).half(), torch.randn(10, 100).half()
    called, code = ran(torch.mm, a, b, max_autotune_gemm_backends="CUTLASS,Triton,ATen")
    assert not called and code


def test_cu_g9_what_does_not_build_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-G9, CU-G14: a provider that raises takes nothing with it when others are asked."""
    reasons = []
    original = Cutlass.supports

    def supports(self: Cutlass, problem: Any) -> str:
        reasons.append(original(self, problem))
        return "broken for this test"

    monkeypatch.setattr(Cutlass, "supports", supports)
    a, b = torch.randn(64, 32).half(), torch.randn(32, 48).half()
    called, _ = ran(torch.mm, a, b, max_autotune_gemm_backends="CUTLASS,ATEN")
    assert reasons == [""] and not called


def test_both_spellings_of_an_option() -> None:
    """0.1: `cuda.` and `cutlass.` are one group; a list of numbers will do."""
    with config.patch({"cutlass.cutlass_tma_only": True, "cuda.arch": "sm_90"}):
        assert config.cuda.cutlass_tma_only and config.cutlass.cutlass_tma_only
        assert config.cutlass.arch == "sm_90"
    with config.patch({"cutlass.cutlass_max_profiling_swizzle_options": [1, 2]}):
        assert config.cuda.cutlass_max_profiling_swizzle_options == "1,2"
    with by_torch() as called:
        f = torch.compile(
            torch.mm,
            backend="tilewright",
            options={**ON, "cutlass.cutlass_op_allowlist_regex": "stream_k"},
        )
        f(torch.randn(64, 32).half(), torch.randn(32, 48).half())
    assert "stream_k" in called[0].label


def test_what_the_library_multiplies_by_is_another_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that times keeps what the library computed: of the same call with the same factors
    alone (on a card, `2 * (a @ b) + 0.4 * c` was compared with `a @ b + c`)."""
    plans: list[Plan] = []
    original = choosing._Chooser._selected

    def selected(self: Any, given: Any) -> Any:
        plans.append(given[0])
        return original(self, given)

    monkeypatch.setattr(choosing._Chooser, "_selected", selected)
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 48).half(), torch.randn(64, 48).half()
    for alpha, beta in ((1.0, 1.0), (2.0, 1.0), (2.0, 0.5), (1.0, 1.0)):
        choosing._memo.clear()
        ran(lambda c, a, b, p=alpha, q=beta: torch.addmm(c, a, b, alpha=p, beta=q), c, a, b,
            max_autotune_gemm_backends="ATEN,CUTLASS")  # fmt: skip
    sites = [plan.remote().site for plan in plans]
    assert len(set(sites)) == 3 and sites[0] == sites[3]
