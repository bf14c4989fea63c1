"""Errors that say what failed, where in the user's program, in which stage, and what to do.

Every error holds strings only, never graph nodes, so it pickles and can cross from a worker
process to the one that waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch.fx

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
# Long compiler output is cut in the middle: the first error and the final summary matter.
_STDERR_LINES = 40


@dataclass(frozen=True)
class Site:
    """Where an operation comes from: its FX node as text, and the user's line that made it."""

    node: str
    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""

    @property
    def location(self) -> str:
        """`file:line`, or an empty string when the node carries no stack trace."""
        return f"{self.file}:{self.line}" if self.file else ""


def at_node(node: torch.fx.Node) -> Site:
    """The site of an FX node, taken from the stack trace that dynamo recorded on it. An argument
    has none: where it is first used tells the user more than its name in the graph."""
    text = node.format_node() or str(node)
    found = (_frame_of(n) for n in (node, *sorted(node.users)))
    site = next((frame for frame in found if frame is not None), None)
    if site is None:
        return Site(text)
    return Site(text, site.file, site.line, site.function, site.source)


def _frame_of(node: torch.fx.Node) -> Site | None:
    trace = node.meta.get("stack_trace")
    return user_frame(trace) if isinstance(trace, str) else None


def location_of(node: torch.fx.Node) -> str:
    """The user's file and line of an FX node, empty where it is not known."""
    site = _frame_of(node)
    return "" if site is None else site.location


@functools.lru_cache(maxsize=4096)  # many nodes come from one line
def user_frame(stack_trace: str) -> Site | None:
    """The innermost frame of a printed stack trace that is the user's own code.

    A call to `torch.nn.Linear` has its innermost frames inside torch: those tell the reader
    nothing, so the last frame outside torch is taken, and the very last one if all are inside.
    """
    frames: list[Site] = []
    lines = stack_trace.splitlines()
    for number, text in enumerate(lines):
        match = _FRAME.match(text)
        if match is None:
            continue
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        source = "" if _FRAME.match(following) else following
        frames.append(
            Site("", match["file"], int(match["line"]), (match["function"] or "").strip(), source)
        )
    outside = [frame for frame in frames if not _inside_torch(frame.file)]
    return (outside or frames or [None])[-1]


def _inside_torch(file: str) -> bool:
    parts = file.replace(os.sep, "/").split("/")
    return "torch" in parts[:-1] and ("site-packages" in parts or "dist-packages" in parts)


class TilewrightError(RuntimeError):
    """The base of every error this package raises on purpose."""

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        site: Site | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.site = site
        self.hint = hint

    def locate(self, *, stage: str = "", site: Site | None = None) -> Self:
        """Fill in what is not known yet; what is known came from nearer the fault and stays."""
        self.stage = self.stage or stage
        self.site = self.site or site
        return self

    def details(self) -> list[tuple[str, str]]:
        """The labelled lines printed under the message."""
        rows = [("stage", self.stage)]
        if self.site is not None:
            rows.append(("node", self.site.node))
            rows.append(("at", "  ".join(filter(None, (self.site.location, self.site.source)))))
        rows.append(("hint", self.hint))
        return rows

    def __str__(self) -> str:
        rows = [f"  {label + ':':<9}{text}" for label, text in self.details() if text]
        return "\n".join([self.message, *rows])

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have their own constructors; rebuilding from state suits all of them.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    cls: type[TilewrightError], args: tuple[Any, ...], state: dict[str, Any]
) -> TilewrightError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


@contextlib.contextmanager
def stage(name: str) -> Generator[None]:
    """Whatever goes wrong inside is reported with the name of this stage of the compiler."""
    try:
        yield
    except TilewrightError as error:
        raise error.locate(stage=name) from error.__cause__
    except Exception as error:
        raise TilewrightError(
            f"{type(error).__name__}: {error}",
            stage=name,
            hint="a fault in tilewright, not in your program: TILEWRIGHT_DEBUG=4 shows each stage",
        ) from error


class UnknownOptionError(TilewrightError, AttributeError):
    """An option name that does not exist. Also an AttributeError, so `hasattr` answers False."""

    def __init__(self, name: str, *, nearest: str = "", hint: str = "") -> None:
        if nearest and not hint:
            hint = f"did you mean {nearest!r}?"
        super().__init__(f"unknown option {name!r}", hint=hint)
        self.option = name
        self.nearest = nearest


class InvalidOptionError(TilewrightError, ValueError):
    """A value of the wrong type or out of range, from code or from the environment."""


class UnknownModeError(TilewrightError, ValueError):
    """A `mode=` that does not exist."""

    def __init__(self, mode: object, valid: Sequence[str]) -> None:
        super().__init__(f"unknown mode {mode!r}", hint=f"valid modes: {', '.join(valid)}")
        self.valid = tuple(valid)


class GraphPassError(TilewrightError):
    """A pass of the user's raised, or left a graph that is none."""


class LoweringError(TilewrightError):
    """An FX node could not be turned into loop nests, nor left to ATen."""


class ScheduleError(TilewrightError):
    """The scheduler found no legal order for what it was given."""


class CodegenError(TilewrightError):
    """No text could be generated for a group."""


class VerifyError(TilewrightError):
    """An IR invariant does not hold; the stage named is the one that broke it."""


class BuildError(TilewrightError):
    """A compiler refused a source; `line` is the one of it the compiler names, `why` its words."""

    def __init__(
        self,
        message: str,
        *,
        command: Sequence[str],
        stderr: str,
        stage: str = "build",
        site: Site | None = None,
        hint: str = "",
        line: int = 0,
        why: str = "",
    ) -> None:
        super().__init__(message, stage=stage, site=site, hint=hint)
        self.command = tuple(command)
        self.stderr = stderr
        self.line = line
        self.why = why

    def details(self) -> list[tuple[str, str]]:
        rows = super().details()
        rows.insert(1, ("command", shlex.join(self.command)))
        rows.append(("stderr", _shorten(self.stderr)))
        return rows


def _shorten(text: str) -> str:
    lines = text.strip().splitlines()
    if len(lines) > _STDERR_LINES:
        half = _STDERR_LINES // 2
        dropped = len(lines) - 2 * half
        lines = [*lines[:half], f"... {dropped} lines left out ...", *lines[-half:]]
    return "\n           ".join(lines)


class UserKernelError(TilewrightError):
    """A Triton kernel of the user's that Triton does not compile: its words, and where."""

    def __init__(self, message: str, *, where: str, report: str) -> None:
        super().__init__(message, stage="build")
        self.where = where
        self.report = report

    def details(self) -> list[tuple[str, str]]:
        return [*super().details(), ("at", self.where), ("triton", _shorten(self.report))]


class NoValidChoicesError(TilewrightError):
    """Every candidate for an operation was rejected; `reasons` says why, one by one."""

    def __init__(
        self,
        message: str,
        *,
        reasons: Mapping[str, str] | None = None,
        stage: str = "choose",
        site: Site | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, stage=stage, site=site, hint=hint)
        self.reasons = dict(reasons or {})

    def details(self) -> list[tuple[str, str]]:
        rejected = [("rejected", f"{name}: {reason}") for name, reason in self.reasons.items()]
        return [*super().details(), *rejected]
