"""Why a candidate is rejected, in words, when building or running it raised."""

from __future__ import annotations

from tilewright.errors import BuildError
from tilewright.tune.memory import is_short

# Part of the driver's message -> what it means here.
_DRIVER = {
    "illegal memory access": "illegal memory access: a fault of its template or of its compiler",
    "misaligned address": "misaligned address: a fault of its template or of its compiler",
    "unspecified launch failure": "launch failure: config.autotune_in_subproc = True keeps such a "
    "candidate from harming this process",
    "invalid argument": "invalid argument: the card may be too small for it",
    "too many resources": "it needs more registers or shared memory than the card has",
}


SHORT = "out of memory"  # how the reason of a candidate begins that had too little


class Crashed(RuntimeError):
    """A candidate brought down the process that timed it, or would not end."""


def explained(error: BaseException) -> tuple[str, bool]:
    """Why, and whether the same would happen again."""
    text = str(error).partition("\n")[0] or type(error).__name__
    lower = str(error).lower()
    if isinstance(error, BuildError):
        # a compiler that was killed, or is not installed, has not said anything of this source
        return f"did not build: {text}", bool(error.stderr) and "ended" not in text
    if isinstance(error, Crashed):
        return text, True
    if isinstance(error, SystemExit):
        return f"it ended the program with exit code {error.code}", True
    if is_short(error):
        return f"{SHORT}: {text}", False
    for part, meaning in _DRIVER.items():
        if part in lower:
            return f"{meaning} ({text})", True
    if type(error).__name__ == "OutOfResources":
        return f"{_DRIVER['too many resources']} ({text})", True
    return f"{type(error).__name__}: {text}", False
