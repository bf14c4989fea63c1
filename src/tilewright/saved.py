"""Programs that a user keeps in a file: `torch.compile(f, ...).aot_compile(...)`, saved and loaded.

AOTAutograd would write such a program itself, if it consisted of the reference's classes. Ours is
what `capture` keeps of every program, with its graphs' artefacts in the same file: sources, which
are built where the file is loaded, or found built in the cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._dynamo.aot_compile_types import SerializableCallable
from torch._functorch import config as functorch_config

from tilewright import capture
from tilewright.errors import TilewrightError
from tilewright.pipeline import Origin, load_artifact

# What `aot_compile` asks of AOTAutograd, for the reference's sake. Only the backward graph that is
# compiled at once, without a call of it, stays.
_NOT_OURS = ("strict_autograd_cache", "bypass_autograd_cache_key", "bundled_autograd_cache",
             "force_autograd_cache")  # fmt: skip


def is_wanted() -> bool:
    """Whether the program that is being compiled may be saved later."""
    return bool(getattr(functorch_config, "bundled_autograd_cache", False))


def asked_plainly() -> Any:
    """AOTAutograd without a cache of its own."""
    names = [name for name in _NOT_OURS if hasattr(functorch_config, name)]
    return functorch_config.patch(dict.fromkeys(names, False))


@dataclass(frozen=True)
class _File:
    entry: capture.Entry
    graphs: dict[str, tuple[Any, dict[str, str]]]  # role -> its artefact, and the user's lines


class Saved(SerializableCallable):
    """A compiled function with what it takes to have it again elsewhere."""

    def __init__(self, function: Callable[..., Any], recording: capture.Recording | None,
                 file: _File | None = None) -> None:  # fmt: skip
        self._function = function
        self._recording = recording
        self._file = file

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """Called by torch, when the user saves the function."""
        try:
            return pickle.dumps(fn._file or _written(fn._recording))
        except (pickle.PicklingError, TypeError, AttributeError) as why:
            raise TilewrightError(f"this program cannot be saved: {why}") from why

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        file: _File = pickle.loads(data)
        roles = ("inference",) if "inference" in file.graphs else ("forward", "backward")
        parts = (file.entry.forward, file.entry.backward)
        given = [(part, role) for part, role in zip(parts, roles, strict=False) if part is not None]
        programs = [_loaded(part, *file.graphs[role]) for part, role in given]
        return cls(capture.rebuilt(file.entry, programs), None, file)


def _written(recording: capture.Recording) -> _File:
    entry = recording.entry()
    if entry is None:
        why = recording.refused or "its backward pass was not compiled"
        raise TilewrightError(f"this program cannot be saved: {why}",
                              hint="call the compiled function without saving it")  # fmt: skip
    return _File(entry, {role: (program.artifact, dict(program.origin.locations))
                         for role, program in recording.programs.items()})  # fmt: skip


def _loaded(part: capture.Part, artifact: Any, locations: dict[str, str]) -> Any:
    return load_artifact(artifact, Origin(part.artifact, part.constants, locations))
