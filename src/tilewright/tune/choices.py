"""Choices under trial, and what decides which of them are tried.

A `ChoiceCaller` is a trial with what has become known of it. Before anything is built, the choices
pass the filters of `config.test_configs` and then the user's functions (`add_preprocessing_fn`);
those the model finds too slow for the effort asked are left out.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilewright import config
from tilewright.tune.clock import WAITED, Bench
from tilewright.tune.failures import SHORT
from tilewright.tune.results import ADVANTAGE, Subject, Timing, Trial, timing

if TYPE_CHECKING:
    from tilewright.tune.child import Remote

Effort = Literal["none", "quick", "default", "max"]
# For each effort: how far beyond the best estimate is still tried, and how many at most.
_REACH: dict[Effort, tuple[float, int]] = {
    "none": (1.0, 0),
    "quick": (1.3, 8),
    "default": (2.0, 40),
    "max": (math.inf, 1 << 30),
}
SURPASSED = 0.95  # of its estimate: what takes less is better than the model thought
FEW = 3  # undisturbed samples, at least, that a time is of
DOUBT = 1.25  # times what was measured: estimates below it may be too high
# Kernels of CUTLASS, so many at least, are timed in one order of their tiles first; others are for
# the fastest of them: orders differ by percents, kernels by factors.
SCREENED, SCREENING = 10, "2"
LEAST_KEPT = 8


@dataclass(eq=False)
class ChoiceCaller:
    """A trial, and what is known of it so far."""

    trial: Trial
    reason: str = ""  # why it is rejected
    lasting: bool = False  # whether it would be rejected next time too
    samples: list[float] = field(default_factory=list[float])  # microseconds
    timing: Timing | None = None  # where not simply that of the samples
    bench: Bench | None = None
    ready: bool = False  # built and loaded
    checked: bool = False  # its result was compared, and is right
    final: bool = False  # it was in the finals
    lost: bool = False  # and another of them is to be taken
    behind: float = 0.0  # part of a library's time it loses to it on a card that has rested
    margin: float = 0.0  # part of its time by which it may seem slower than others and be taken
    outdone: bool = False  # it is rejected by its estimate alone
    remembered: bool = False  # its time is of an earlier run
    earlier: Timing | None = None  # what an earlier run found, where it is measured again
    is_quiet: bool = True  # whether its samples are as often too short as too long
    clean: list[float] = field(default_factory=list[float])  # samples that nobody made longer
    waited: float = 0.0  # microseconds by which others may have made the next sample longer
    at_least: float = 0.0  # microseconds that it takes, by its samples without those
    build_seconds: float = 0.0
    after: ChoiceCaller | None = None  # the same kernel, whose time decides whether this is tried

    @property
    def name(self) -> str:
        return self.trial.name

    @property
    def description(self) -> str:
        return self.trial.description

    @property
    def provider(self) -> str:
        return self.trial.provider

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else's code is tried: it may do anything."""
        return bool(getattr(self.trial, "is_foreign", False))

    def hash_key(self) -> str:
        return self.trial.key

    def kernel_hash_key(self) -> str:
        """Of what is built for it, which others may share."""
        return self.hash_key()

    @property
    def time(self) -> Timing:
        """As far as it is known; infinite without a sample."""
        return self.sampled if self.timing is None else self.timing

    @property
    def sampled(self) -> Timing:
        """By its samples alone. Others only ever make one longer: of those that nobody is known to
        have made longer the shorter half counts, or else the shortest."""
        if not self.samples:
            return Timing(math.inf, 0.0, 0)
        if self.is_quiet:
            return timing(self.samples)
        if len(self.clean) < FEW:
            return Timing(min(self.samples), 0.0, 1)
        return timing(sorted(self.clean)[: (len(self.clean) + 1) // 2])

    def took(self, us: float) -> None:
        """One more sample."""
        self.samples.append(us)
        self.at_least = max(self.at_least, us - self.waited)
        if self.waited <= WAITED * us:
            self.clean.append(us)

    def may_be_within(self, us: float) -> bool:
        """Whether it may take so long at most, for all that is known."""
        return min(self.time.median_us, self.at_least) <= us

    def reject(self, reason: str, *, lasting: bool) -> None:
        self.reason, self.lasting = reason, lasting
        self.bench = None

    def __str__(self) -> str:
        return f"{self.name}({self.description})"


class ExternKernelCaller(ChoiceCaller):
    """A library's call."""


class TritonTemplateCaller(ChoiceCaller):
    """A kernel of a Triton template."""


class CUTLASSTemplateCaller(ChoiceCaller):
    """An operation of CUTLASS in one order of its tiles."""

    def info_dict(self) -> dict[str, str]:
        """What the operation is; little is known of one that was made without."""
        candidate: Any = getattr(self.trial, "candidate", None)
        if candidate is None:
            return {"backend": "CUDA", "op_type": "unknown"}
        return candidate.info_dict()

    def kernel_hash_key(self) -> str:
        """Of the binary, which all orders of tiles share."""
        candidate: Any = getattr(self.trial, "candidate", None)
        return self.trial.key if candidate is None else candidate.kernel_hash_key()

    def hash_key(self) -> str:
        candidate: Any = getattr(self.trial, "candidate", None)
        return self.trial.key if candidate is None else f"{candidate.hash_key()}-{self.trial.key}"


def is_filtered() -> bool:
    """Whether options say which choices are tried: then they look at all that there are."""
    asked = config.test_configs
    return bool(asked.autotune_choice_name_regex or asked.autotune_choice_desc_regex)


CALLERS: dict[str, type[ChoiceCaller]] = {
    "TRITON": TritonTemplateCaller,
    "CUTLASS": CUTLASSTemplateCaller,
}


def caller(trial: Trial) -> ChoiceCaller:
    if trial.is_library:
        return ExternKernelCaller(trial)
    return CALLERS.get(trial.provider, ChoiceCaller)(trial)


# ---- filters and the user's functions

Preprocessing = Callable[[list[ChoiceCaller]], Iterable[ChoiceCaller]]


def by_name(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """Those whose name matches `config.test_configs.autotune_choice_name_regex`."""
    return _matching(choices, config.test_configs.autotune_choice_name_regex, lambda c: c.name)


def by_description(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """Those whose description matches `config.test_configs.autotune_choice_desc_regex`."""
    pattern = config.test_configs.autotune_choice_desc_regex
    return _matching(choices, pattern, lambda c: c.description)


def _matching(choices: list[ChoiceCaller], pattern: str | None,
              text: Callable[[ChoiceCaller], str]) -> list[ChoiceCaller]:  # fmt: skip
    if pattern is None:
        return choices
    found = re.compile(pattern)
    return [c for c in choices if found.search(text(c))]


FILTERS: tuple[Preprocessing, ...] = (by_name, by_description)
_OPTION: dict[Preprocessing, str] = {
    by_name: "test_configs.autotune_choice_name_regex",
    by_description: "test_configs.autotune_choice_desc_regex",
}


def preprocessed(choices: Sequence[ChoiceCaller], functions: Sequence[Preprocessing]
                 ) -> list[ChoiceCaller]:  # fmt: skip
    """What the functions leave, each applied to what the one before left."""
    kept = list(choices)
    for function in functions:
        before, kept = kept, list(function(kept))
        for choice in before:
            if choice not in kept:
                choice.reject(_removed_by(function), lasting=False)
    return _distinct(kept)


def _removed_by(function: Preprocessing) -> str:
    option = _OPTION.get(function)
    if option is None:
        return f"removed by the preprocessing function {getattr(function, '__name__', function)!r}"
    group, leaf = option.split(".")
    return f"left out by config.{option} = {getattr(getattr(config, group), leaf)!r}"


def _distinct(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """Without those that would run what an earlier one runs."""
    first: dict[str, ChoiceCaller] = {}
    for choice in choices:
        same = first.setdefault(choice.hash_key(), choice)
        if same is not choice:
            choice.reject(f"is the same as {same.name}", lasting=False)
    return list(first.values())


# ---- the order, and the cut


def remote_of(choice: ChoiceCaller, to_be_ended: bool = False) -> Remote | None:
    """The choice as it is sent to the process that times, where that is wanted and it can be: by
    the options, or for who is not ours, or where a run may have to be ended."""
    made = getattr(choice.trial, "remote", None)
    wanted = config.autotune_in_subproc
    if wanted is None:
        wanted = to_be_ended or choice.is_foreign
    return made() if made is not None and wanted else None


def own_first(choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
    """What may harm the card, or this process, is tried last: there is something to take then."""
    return sorted(choices, key=lambda c: c.is_foreign)


def effort() -> Effort:
    """What the options ask for."""
    if config.max_autotune_gemm_search_space.upper() == "EXHAUSTIVE":
        return "max"
    return config.autotune_effort


def ordered(choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
    """Libraries first, so that there is something to take from the start; then by the model."""
    return sorted(choices, key=lambda c: (not c.trial.is_library, _estimate(c)))


def _estimate(choice: ChoiceCaller) -> float:
    estimate = choice.trial.estimate
    return estimate if estimate > 0 else 0.0  # no model: among the first


def out_of_reach(choices: Sequence[ChoiceCaller], effort: Effort) -> dict[ChoiceCaller, str]:
    """Those not to build, of choices in order, and why. Libraries are always tried."""
    factor, most = _REACH[effort]
    modelled = [e for c in choices if (e := _estimate(c)) > 0]
    limit = factor * min(modelled, default=0.0)
    others = [c for c in choices if not c.trial.is_library]
    effort_text = f"(config.autotune_effort = {effort!r})"
    found = _screened_out(choices)
    found |= dict.fromkeys(others[most:], f"{most} with better estimates are tried {effort_text}")
    for choice in others:
        if _estimate(choice) > limit:
            found[choice] = (
                f"estimated at {choice.trial.estimate:.3g} us, when {factor:.3g} times the best "
                f"estimate is {limit:.3g} us {effort_text}"
            )
    return found


def prescreen_choices(choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
    """Those to time first: libraries and others, then one order of tiles of each CUTLASS kernel.
    None where all may as well be timed at once."""
    orders = config.cuda.cutlass_max_profiling_swizzle_options.split(",")
    if not config.cuda.cutlass_prescreening or len(orders) < 2:
        return []
    ours = [c for c in choices if isinstance(c, CUTLASSTemplateCaller)]
    first = [c for c in ours if c.info_dict().get("swizzle") == SCREENING]
    if len(first) < SCREENED:
        return []
    return [*(c for c in choices if c not in ours), *first]


def prune_choices_postscreen(
    choices: Sequence[ChoiceCaller], milliseconds: Mapping[ChoiceCaller, float]
) -> list[ChoiceCaller]:
    """Those to go on with: of CUTLASS's kernels the fastest, in every order of their tiles."""
    most = max(LEAST_KEPT, int(math.sqrt(len(choices)) / 4))
    timed = [(ms, c.kernel_hash_key()) for c, ms in milliseconds.items()
             if isinstance(c, CUTLASSTemplateCaller) and math.isfinite(ms)]  # fmt: skip
    kept = {key for _, key in sorted(timed)[:most]}
    return [c for c in choices
            if not isinstance(c, CUTLASSTemplateCaller) or c.kernel_hash_key() in kept]  # fmt: skip


def _screened_out(choices: Sequence[ChoiceCaller]) -> dict[ChoiceCaller, str]:
    """Orders of tiles that are not tried yet, or not at all. Which kernel each of them waits for is
    settled when the choices are first seen: later those that failed are not among them."""
    if not any(c.after for c in choices):
        _wait(choices)
    waiting = [c for c in choices if c.after is not None]
    heads = {c: c for c in (c.after for c in waiting) if c is not None}
    if any(not c.reason and not c.time.samples for c in heads):
        return dict.fromkeys((c for c in waiting if c.after is not c),
                             "another order of its tiles is timed first")  # fmt: skip
    times = {c: math.inf if c.reason else c.time.median_us / 1000 for c in heads}
    kept = prune_choices_postscreen(choices, times)
    return {c: f"the kernel was not among the fastest with swizzle={SCREENING}"
            for c in waiting if c not in kept}  # fmt: skip


def _wait(choices: Sequence[ChoiceCaller]) -> None:
    first = [c for c in prescreen_choices(choices) if isinstance(c, CUTLASSTemplateCaller)]
    heads = {c.kernel_hash_key(): c for c in first}
    for c in choices if first else ():
        if isinstance(c, CUTLASSTemplateCaller):
            c.after = heads.get(c.kernel_hash_key())


def all_are_short(choices: Sequence[ChoiceCaller]) -> bool:
    """Whether none could be tried for want of memory."""
    return bool(choices) and all(c.reason.startswith(SHORT) for c in choices)


def outdone(choices: Sequence[ChoiceCaller], best: ChoiceCaller, effort: Effort
            ) -> dict[ChoiceCaller, str]:  # fmt: skip
    """Those not to compile, and why, once the best of those that need no compiler was timed.

    Estimates are of what a card sustains. Where one that was timed does clearly better, this shows
    by how much they are too high, for others as well; where not, they are open to doubt.
    """
    took, expected = best.time.median_us, _estimate(best)
    if effort == "max" or expected <= 0:
        return {}
    scale = min(1.0, took / expected)
    limit = (1 - ADVANTAGE) * took if scale < SURPASSED else DOUBT * took
    return {
        c: f"estimated at {scale * _estimate(c):.3g} us, when {best.name} takes {took:.3g} us"
        for c in choices
        if scale * _estimate(c) > limit
    }


def is_doubtful(choice: ChoiceCaller, best: ChoiceCaller) -> bool:
    """Whether the model has a choice slower than one that was timed."""
    return not choice.trial.is_library and _estimate(choice) > best.time.median_us


def not_awaited(choice: ChoiceCaller, best: ChoiceCaller) -> str:
    return (f"takes long to build, and is estimated at {_estimate(choice):.3g} us, when "
            f"{best.name} takes {best.time.median_us:.3g} us")  # fmt: skip


# ---- feedback

Saver = Callable[..., None]


def tell(savers: Sequence[Saver], subject: Subject, choices: Sequence[ChoiceCaller],
         milliseconds: Mapping[ChoiceCaller, float]) -> None:  # fmt: skip
    """Call every saver with (timings, name, inputs, choices, function giving the timings[, build
    seconds by choice]): five arguments if that is all it takes."""
    inputs = list(subject.facts.get("inputs", ()))
    name = str(subject.facts.get("op", subject.title))
    builds = {c: c.build_seconds for c in choices if c.ready}
    for saver in savers:
        given = [dict(milliseconds), name, inputs, list(choices), lambda: dict(milliseconds)]
        saver(*given, *([builds] if _takes_six(saver) else []))


def _takes_six(saver: Saver) -> bool:
    try:
        inspect.signature(saver).bind(*range(6))
    except TypeError:
        return False
    return True
