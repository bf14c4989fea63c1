"""The Triton provider: each template with each of its configurations is a candidate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilewright import config
from tilewright.codegen import triton as codegen
from tilewright.gemm import composed, heuristics
from tilewright.gemm.heuristics import GemmConfig, MMTemplateHeuristic
from tilewright.gemm.hooks import UNITS
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Candidate, Effort, Kernel, register
from tilewright.gemm.templates import (
    COUNTERS,
    WORKSPACE,
    Rendered,
    TritonTemplate,
    persistent_template,
    split_k_template,
)
from tilewright.ir import index as ix
from tilewright.ir.expr import syms
from tilewright.runtime import store
from tilewright.runtime.triton_build import TritonConfig, TritonSource
from tilewright.tune.choices import is_filtered

FEWEST_SMS = 68  # a smaller card is better served by its libraries
MOST: dict[Effort, int | None] = {"none": 1, "quick": 8, "default": 20, "max": None}
_FETCHED = 0.95  # of the time, when the card fetches operands by itself
_SPECIALISED = 0.9  # and when that has warps of its own; by its makers, not measured here
_RESULTS = frozenset((torch.float16, torch.bfloat16, torch.float32))
_OPERANDS = frozenset((torch.float16, torch.bfloat16, torch.float32))


@dataclass(frozen=True)
class TritonCandidate:
    """A template with one configuration, for one problem."""

    problem: GemmProblem
    template: TritonTemplate
    config: GemmConfig
    name: str
    estimate: float
    provider: str = "TRITON"

    @property
    def description(self) -> str:
        facts = self.template.facts(self.problem, self.config)
        found = [f"{name}={facts[name]}" for name in sorted(facts)]
        found += [f"num_stages={self.config.num_stages}", f"num_warps={self.config.num_warps}"]
        return ", ".join(found)

    @property
    def key(self) -> str:
        return store.key("triton", _version(), self.template.digest, self.problem.key,
                         self.description)  # fmt: skip

    def kernel(self, label: str = "") -> Kernel:
        """`label` names what is fused: sorted operator names, joined by underscores."""
        name = f"triton_tem_fused_{label or self.problem.op}"
        made = self.template.render(self.problem, self.config, name)
        source = self._source(made, self.template)
        if made.assume:
            # where a descriptor's conditions do not hold, operands are read through pointers
            other = self._through_pointers if self.template.tma else self.template
            wide = self._source(other.render(self.problem, self._whole, name, wide=True), other)
            source = replace(source, wide=replace(wide, scratched=self.template.tma))
        arguments = tuple(argument for argument, _, _ in made.params)
        if self.template.tma:
            source = replace(source, scratched=True, unaligned=self._plain(name).source)
            arguments = (*arguments, ("ptr", WORKSPACE))
        return Kernel(name, source, arguments, made.checked, made.assume, made.workspace,
                      made.counters)  # fmt: skip

    @property
    def _through_pointers(self) -> TritonTemplate:
        return persistent_template if self.template.persistent else split_k_template

    @property
    def _whole(self) -> GemmConfig:
        """For templates that store a block at once, as those through pointers do."""
        return replace(self.config, epilogue_subtile=1) if self.template.tma else self.config

    def _plain(self, name: str) -> Kernel:
        """The same without descriptors, which need memory that starts at a multiple of 16."""
        other = self._through_pointers
        made = other.render(self.problem, self._whole, name)
        source = replace(self._source(made, other), aligned=frozenset(), scratched=True)
        return Kernel(name, source, tuple(argument for argument, _, _ in made.params))

    def _source(self, made: Rendered, template: TritonTemplate) -> TritonSource:
        """`template` is the one that was rendered: each has constants of its own."""
        p, c = self.problem, self.config
        constants = template.constants(p, c)
        params = tuple((name, kind) for _, name, kind in made.params)
        params += (("err", "*i64"),) if made.checked else ()
        major, minor = p.target.capability
        hints = {s.arg.name: s.arg.hint for s in p.symbols}
        return TritonSource(
            made.text,
            made.name,
            params,
            (TritonConfig(tuple(constants.items()), c.num_warps, c.num_stages),),
            capability=10 * major + minor,
            shared_memory=p.target.shared_memory,
            # the kernel without descriptors is for memory that starts elsewhere, not for odd sizes
            aligned=frozenset(name for (kind, of), name, _ in made.params if kind == "ptr"
                              or (not self.template.tma and (hints.get(of) or 1) % 16 == 0)),
            grid=((made.programs, "1"),),
            sample=(*(self._sample(made, of, hints) for (_, of), _, _ in made.params),
                    *([(torch.int64, 1)] if made.checked else [])),
            sizes=tuple(sorted((s.arg.name, ix.likely(s)) for s in syms(*p.sizes))),
            device=next((b.device.index or 0 for b in p.buffers), 0),
        )  # fmt: skip

    def _sample(self, made: Rendered, name: str, hints: dict[str, int | None]) -> object:
        if name == WORKSPACE:
            return torch.float32, max(1, ix.likely(made.workspace))
        if name == COUNTERS:
            return torch.int32, max(1, ix.likely(made.counters))
        if name in self.problem.memory:
            buffer = self.problem.memory[name]
            last = [(ix.likely(n) - 1) * ix.likely(s)
                    for n, s in zip(buffer.size, buffer.stride, strict=True)]  # fmt: skip
            return buffer.dtype, max(1, 1 + sum(last))
        return hints.get(name) or 16


@register
class TritonProvider:
    name = "TRITON"

    def supports(self, problem: GemmProblem) -> str:
        """Why no template may be offered, or an empty string."""
        target = problem.target
        if not target.is_gpu:
            return "Triton kernels run on cards"
        if target.sms < FEWEST_SMS:
            return f"a card of {target.sms} SMs is better served by its libraries"
        if not (config.max_autotune or config.max_autotune_gemm):
            return "nothing is measured without max_autotune or max_autotune_gemm"
        dtypes = {o.dtype for o in problem.operands}
        if len(dtypes) != 1 and not dtypes <= UNITS.keys():
            return "the operands have different types"
        whole = dtypes == {torch.int8} and problem.dtype == torch.int32
        scaled = problem.op == "_scaled_mm"
        kinds, results = (UNITS.keys(), _RESULTS | UNITS.keys()) if scaled else (
            _OPERANDS, _RESULTS)  # fmt: skip
        if not whole and not (dtypes <= kinds and problem.dtype in results):
            shown = " by ".join(sorted(map(str, dtypes)))
            return f"no template multiplies {shown} into {problem.dtype}"
        if any(ix.value_of(s) == 0 for s in problem.sizes[:3]):
            return "the result is empty"
        if problem.is_batched and any(o.is_plain and o.view.stride[0] is ix.ZERO
                                      for o in problem.operands):  # fmt: skip
            return "an operand is the same for the whole batch"
        return ""

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        if self.supports(problem):
            return []
        ordered = sorted(_all(problem), key=lambda found: found[2])
        found: list[Candidate] = [
            TritonCandidate(problem, template, chosen, f"triton_{template.name}_{k}", time)
            for k, (template, chosen, time) in enumerate(ordered[: _most(effort)])
        ]
        return found if effort == "none" else [*found, *composed.offered(problem)]


def _most(effort: Effort) -> int | None:
    """How many are offered. Options that leave some out look at all of them."""
    return None if is_filtered() else MOST[effort]


def _all(problem: GemmProblem) -> Iterator[tuple[TritonTemplate, GemmConfig, float]]:
    for template in TritonTemplate.all_templates.values():
        if template.limits(problem):
            continue
        found = heuristics.get_template_heuristic(template.uid, "cuda", problem.op)
        dot = not isinstance(found, MMTemplateHeuristic) or found.dot
        for chosen in found.get_template_configs(problem):
            time = heuristics.estimate(problem, chosen, dot, template.persistent)
            fetched = _SPECIALISED if template.specialised else _FETCHED
            yield template, chosen, time * (fetched if template.tma else 1.0)


@functools.cache
def _version() -> str:
    """Of what writes the kernels: measurements of another version's are not theirs."""
    folders = (Path(__file__).parent, Path(codegen.__file__).parent)
    return store.key(*(f.read_bytes() for d in folders for f in sorted(d.rglob("*.py"))))
