"""`fault`: what is wrong with a host program, before it is kept.

Two questions, each asked once per program. Of its text: is every name bound when it is used, used
by nobody after it was freed, and freed once? Of its steps: does every kernel take just what its
group touches, is every buffer written before it is read, and does no living buffer lie where
another is written? Both are answered by one walk; the text and the steps are looked at apart, so
that neither the scheduler nor the assembly can be wrong unnoticed.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tilewright.host.program import KernelCall
from tilewright.ir import index as ix
from tilewright.ir.program import Program, View
from tilewright.schedule.memory import Step

OWN = frozenset(("workspace", "counters"))  # memory of a kernel, that no buffer is
_WORD = re.compile(r"[A-Za-z_]\w*")
# a word, unless it is an attribute, a keyword of a call, or inside of a string or a comment
_NAME = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\#.*|\b(?<![\w.])([A-Za-z_]\w*)\b(?!=[^=])"""
)
_TARGETS = re.compile(r"\s*([A-Za-z_][\w, ]*) = ")
_RESERVED = frozenset((*dir(builtins), *keyword.kwlist))
_COMPOUND = frozenset(("if", "for", "while", "with", "try", "def", "class", "match", "async"))


def fault(program: Program, steps: Sequence[Step], calls: Sequence[KernelCall | None],
          text: str, known: Collection[str]) -> str:  # fmt: skip
    """Why the program cannot run, or an empty string. `known` are the names its text is given."""
    return misused_memory(program, steps, calls) or misused_name(text, known)


# ---- the text


def misused_name(text: str, known: Collection[str]) -> str:
    """The first name of `call` that is not bound where it is used; `known` are bound outside.

    The text is ours: a line is an assignment, a call, a deletion or the return. So words are looked
    at, not a syntax tree, which takes ten times as long to make.
    """
    head, found, body = text.partition("def call(args):\n")
    if not found:
        return "it has no function `call`"
    outside = {*known, *_RESERVED, *_WORD.findall(head)}
    names = _Names(outside, {"args"})
    return next(filter(None, map(names.misused, body.splitlines())), "")


@dataclass
class _Names:
    """The names that are bound before a line, and those that were."""

    outside: set[str]
    bound: set[str]
    freed: set[str] = field(default_factory=set[str])

    def misused(self, line: str) -> str:
        first, _, rest = line.strip().partition(" ")
        if first == "del":
            return self._freed(_WORD.findall(rest))
        if first in _COMPOUND:
            return f"`{line.strip()}` is neither a call, an assignment nor a deletion"
        targets = _TARGETS.match(line)
        value = line[targets.end() :] if targets else line
        for name in _NAME.findall(value):
            if name and name not in self.bound and name not in self.outside:
                was = name in self.freed
                return f"{name} is used {'after it was freed' if was else 'and nothing makes it'}"
        if targets:
            made = _WORD.findall(targets[1])
            self.bound.update(made)
            self.freed.difference_update(made)
        return ""

    def _freed(self, names: Iterable[str]) -> str:
        for name in names:
            if name not in self.bound:
                twice = name in self.freed
                return f"{name} is freed {'twice' if twice else 'and nothing made it'}"
            self.bound.remove(name)
            self.freed.add(name)
        return ""


# ---- the steps


def misused_memory(program: Program, steps: Sequence[Step],
                   calls: Sequence[KernelCall | None]) -> str:  # fmt: skip
    """The first step that touches memory it does not have."""
    memory = _Memory(program)
    for step, call in zip(steps, calls, strict=True):
        reason = memory.taken(step) or memory.touched(step, call) or memory.given_back(step)
        if reason:
            return f"{step.group.nodes[0].name}: {reason}"
    for output in program.outputs:
        if isinstance(output, View) and output.buffer not in memory.written:
            return f"{output.buffer} is returned, and nothing writes it"
    return ""


class _Memory:
    """Which buffers exist, and which of them hold something."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.visible = program.visible
        self.live = {b.name for b in program.buffers.values() if b.kind != "temporary"}
        self.written = set(self.live)
        self.pools: dict[str, dict[str, tuple[int, int]]] = {}  # pool -> buffer -> its bytes

    def taken(self, step: Step) -> str:
        """What is wrong with the memory a step begins with."""
        carved = [slot.buffer for slot in step.carve]
        for name in (*step.allocate, *carved, *(new for new, _ in step.reuse)):
            if name in self.live:
                return f"{name} is made twice"
            self.live.add(name)
            self.written.discard(name)
        for pool in step.pools:
            self.pools[pool.name] = {}
        for slot in step.carve:
            reason = self._carved(slot.pool, slot.buffer, ix.likely(slot.start))
            if reason:
                return reason
        return next(filter(None, (self._reused(new, old) for new, old in step.reuse)), "")

    def _carved(self, pool: str, name: str, start: int) -> str:
        if pool not in self.pools:
            return f"{name} lies in {pool}, which is not there"
        end = start + ix.likely(self.program.buffers[name].bytes)
        for other, (first, last) in self.pools[pool].items():
            if start < last and first < end:
                return f"{name} lies where {other} is still needed"
        self.pools[pool][name] = start, end
        return ""

    def _reused(self, new: str, old: str) -> str:
        if old not in self.live:
            return f"{new} takes the memory of {old}, which is not there"
        is_ours = self.program.buffers[old].kind == "temporary" or old in self.program.donated
        if old in self.visible or not is_ours:
            return f"{new} takes the memory of {old}, which is needed after the call"
        for places in self.pools.values():
            if old in places:
                places[new] = places.pop(old)
        return ""

    def touched(self, step: Step, call: KernelCall | None) -> str:
        """What is wrong with what a step reads and writes."""
        group = step.group
        reads, writes = group.reads - group.local, group.writes - group.local
        made = {r for r in group.call.results if r} if group.call is not None else set[str]()
        for name in sorted((reads | writes) - self.live - made):
            return f"it touches {name}, which is not there"
        for name in sorted(reads - writes - self.written):
            return f"it reads {name}, which nothing has written"
        for new, old in step.reuse:
            if old in reads and new in writes:
                return f"it reads {old} and writes {new}, which is the same memory"
        reason = "" if call is None else self._passed(call, reads, writes)
        self.live |= made
        self.written |= writes
        self.written.update(new for new, old in step.reuse if old in writes)
        return reason

    def _passed(self, call: KernelCall, reads: set[str], writes: set[str]) -> str:
        """What is wrong with the arguments of a kernel."""
        if call.launch is not None:  # a user's: the text has its arguments
            return ""
        words = (_WORD.findall(name) if kind == "address" else (name,)
                 for kind, name in call.args if kind in ("ptr", "address"))  # fmt: skip
        given = {w for found in words for w in found if w in self.program.buffers}
        for name in sorted(given - reads - writes):
            return f"{call.name} is given {name}, which its group does not touch"
        for name in sorted(writes - given):
            return f"{call.name} is not given {name}, which it is to write"
        return ""

    def given_back(self, step: Step) -> str:
        """What is wrong with the memory a step ends with."""
        for name in (*step.free, *(old for _, old in step.reuse)):
            if name not in self.live:
                return f"{name} is freed, and is not there"
            if name in self.visible:
                return f"{name} is freed, and is a result"
            self.live.remove(name)
            self.written.discard(name)
            for places in self.pools.values():
                places.pop(name, None)
        return ""


__all__ = ["fault", "misused_memory", "misused_name"]
