"""What became of a graph, for a reader: kernels, library calls, what they move, why no further."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilewright import config
from tilewright.codegen.triton.launch import Summary
from tilewright.gemm import fuse
from tilewright.gemm.place import Implementation
from tilewright.gemm.roofline import LAUNCH, bandwidth, roofline
from tilewright.ir.program import Buffer, Node, Program
from tilewright.ir.show import brief
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.plan import Schedule
from tilewright.target import Target

LIBRARY = "a library call takes its operands from memory, and leaves its results there"
PRODUCT = "the product's kernel was fastest with this apart, or cannot take it in"


@dataclass(frozen=True)
class Part:
    """One kernel, or one library call. `least` bytes would move if nothing but arguments, results
    and operands of library calls had to be in memory; `moved` do."""

    number: int
    ops: tuple[str, ...]
    location: str
    is_kernel: bool
    moved: int
    least: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    chosen: str = ""  # of a product: who computes it, and why
    plan: Summary | None = None  # of a loop kernel of a card: how it is written, and why not so
    nearest: int = 0  # parts between the arguments and it, on the shortest way
    farthest: int = 0  # and on the longest
    at_best: float = 0.0  # microseconds on a card like that, at best; of a CPU nothing is said

    @property
    def name(self) -> str:
        return "_".join(self.ops) or "nothing"


@dataclass(frozen=True)
class Refusal:
    """Two parts that share memory and are not one kernel."""

    first: int
    second: int
    shared: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Graph:
    """One captured graph: the whole of an inference program, or one pass of a trained one."""

    role: str
    parts: tuple[Part, ...]
    refusals: tuple[Refusal, ...]
    hints: tuple[str, ...] = ()  # what costs time, and why: `TORCH_LOGS=perf_hints`

    @property
    def moved(self) -> int:
        return sum(part.moved for part in self.parts)

    @property
    def least(self) -> int:
        return sum(part.least for part in self.parts)

    def __str__(self) -> str:
        kernels = sum(part.is_kernel for part in self.parts)
        calls = len(self.parts) - kernels
        lines = [f"{self.role}: {_many(kernels, 'kernel')}, {_many(calls, 'library call')}"]
        lines[0] += f", moves {_bytes(self.moved)}, at least {_bytes(self.least)}"
        for part in self.parts:
            kind = "kernel" if part.is_kernel else "call"
            bytes_ = f"{_bytes(part.moved):>9} of at least {_bytes(part.least):>9}"
            lines.append(f"  {part.number:>3} {kind:6} {bytes_}  {part.name}  {part.location}")
            lines += [f"      by {part.chosen}"] if part.chosen else []
            lines += [] if part.plan is None else [f"      {line}" for line in _planned(part.plan)]
        for r in self.refusals:
            lines.append(f"  {r.first} and {r.second} share {', '.join(r.shared)}: {r.reason}")
        return "\n".join(lines)


def graph(role: str, plan: Schedule, plans: Mapping[int, Summary] | None = None) -> Graph:
    """`plans` are those of its loop kernels, by the number of their step, where they are known."""
    groups = [step.group for step in plan.steps]
    names = {b.name: _describe(b) for b in plan.program.buffers.values()}

    def named(buffers: set[str]) -> tuple[str, ...]:
        return tuple(names[b] for b in sorted(buffers) if b in names)

    away = _distances(groups)
    parts = tuple(
        Part(k, _ops(group), _location(group), group.is_kernel, b.moved, b.least,
             named(group.reads - group.local), named(group.writes - group.local), _chosen(group),
             (plans or {}).get(k), *away[k], _at_best(plan.program, group, b.moved))
        for k, (group, b) in enumerate(zip(groups, plan.bytes, strict=True))
    )  # fmt: skip
    refusals = tuple(_refusals(groups, names))
    return Graph(role, parts, refusals, tuple(_hints(parts, refusals, groups)))


def _hints(parts: Sequence[Part], refusals: Sequence[Refusal],
           groups: Sequence[Group]) -> Iterator[str]:  # fmt: skip
    for part in sorted(parts, key=lambda part: part.least - part.moved):
        if part.moved > part.least:
            why = [r.reason for r in refusals if part.number in (r.first, r.second)]
            yield (f"{_placed(part)} moves {_bytes(part.moved)} where {_bytes(part.least)} would "
                   f"do: {'; '.join(dict.fromkeys(why))}")  # fmt: skip
    tuned = config.max_autotune or config.max_autotune_gemm
    for part, group in zip(parts, groups, strict=True):
        measured = fuse.is_product(group)
        if part.is_kernel or (measured and tuned):
            continue
        call = f"{_placed(part)} is a library's call, and nothing is fused with it"
        yield call + (': mode="max-autotune" has others measured' if measured else "")


def _placed(part: Part) -> str:
    return f"{part.name} ({part.location})" if part.location else part.name


def _planned(plan: Summary) -> list[str]:
    alike: dict[str, list[str]] = {}
    for strategy, reason in plan.declined:
        alike.setdefault(reason, []).append(strategy)
    return [
        f"{plan.strategy}: {', '.join(plan.tiling)}",
        f"residency {plan.residency}; {plan.cooperation}; access {plan.access}",
        plan.config,
        *([] if plan.predicted is None else [f"predicted {plan.predicted}"]),
        *(f"not {', '.join(strategies)}: {reason}" for reason, strategies in alike.items()),
    ]


def _distances(groups: list[Group]) -> list[tuple[int, int]]:
    """Of each group, in the order they run: how many are on the shortest and on the longest way
    from an argument to it."""
    found: list[tuple[int, int]] = []
    made: dict[str, tuple[int, int]] = {}
    for group in groups:
        used = [made.get(b, (-1, -1)) for b in group.reads - group.local]
        ends = [n for n, _ in used], [n for _, n in used]
        found.append((min(ends[0], default=-1) + 1, max(ends[1], default=-1) + 1))
        made |= dict.fromkeys(group.writes, found[-1])
    return found


def _at_best(program: Program, group: Group, moved: int) -> float:
    """Microseconds, by what a card sustains: arithmetic of a product, or bytes."""
    written = next((program.buffers[b] for b in sorted(group.writes) if b in program.buffers), None)
    if written is None or written.device.type != "cuda" or not moved:
        return 0.0
    target = Target.of(written.device)
    call = group.call
    if call is not None and isinstance(call.target, Implementation):
        return roofline(call.target.problem)
    if call is not None and fuse.is_product(group):
        alone = fuse.alone(program, call)
        if not isinstance(alone, str):
            return roofline(alone.problem)
    return moved / bandwidth(target) + LAUNCH


def _chosen(group: Group) -> str:
    target = None if group.call is None else group.call.target
    return target.chosen if isinstance(target, Implementation) else ""


def _describe(buffer: Buffer) -> str:
    """A name, a type and sizes: `buf0 float32[10, 20]`."""
    sizes = ", ".join(brief(n) for n in buffer.size)
    return f"{buffer.name} {str(buffer.dtype).removeprefix('torch.')}[{sizes}]"


def _refusals(groups: list[Group], names: dict[str, str]) -> Iterator[Refusal]:
    users: dict[str, list[int]] = {}
    for k, group in enumerate(groups):
        for b in (group.reads | group.writes) & names.keys():
            users.setdefault(b, []).append(k)
    shared: dict[tuple[int, int], list[str]] = {}
    for b, ks in sorted(users.items()):
        for one, other in pairwise(ks):
            shared.setdefault((one, other), []).append(names[b])
    for (one, other), buffers in sorted(shared.items()):
        reason = _reason(groups[one], groups[other])
        if reason:
            yield Refusal(one, other, tuple(buffers), reason)


def _reason(a: Group, b: Group) -> str:
    calls = [g.call for g in (a, b) if g.call is not None]
    if calls:
        return PRODUCT if all(call.generated for call in calls) else LIBRARY
    return a.refused.get(b.nodes[0].name) or b.refused.get(a.nodes[0].name) or (
        "nothing would move less if they were one"
    )  # fmt: skip


def _ops(group: Group) -> tuple[str, ...]:
    """What the user wrote, as far as it has a name, in order."""
    if group.call is not None and not group.call.generated:
        name = getattr(group.call.target, "__name__", None)
        return (str(name or group.call.target).partition(".")[0],)
    names = (n for node in group.nodes for n in node.origin.nodes)
    return tuple(dict.fromkeys(n.rstrip("0123456789").rstrip("_") for n in names))[:8]


def _location(group: Group) -> str:
    nodes: tuple[Node, ...] = group.nodes
    return next((n.origin.location for n in nodes if n.origin.location), "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError
