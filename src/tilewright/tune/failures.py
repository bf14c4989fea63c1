"""Why a candidate is rejected, in words, when building or running it raised; and errors that end
the tuning."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright import config
from tilewright.errors import BuildError, NoValidChoicesError, TilewrightError
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


def harmed(who: str, broken: str) -> TilewrightError:
    """A candidate left the card so that nothing runs on it any more."""
    return TilewrightError(
        f"{who} left the card unusable for this process: {broken}",
        stage="tune",
        hint="run the program again: this candidate is remembered and will not be tried; "
        "config.autotune_effort = 'none' tries none at all",
    )


def nothing_left(title: str, offered: bool, reasons: Mapping[str, str]) -> NoValidChoicesError:
    """No choice was offered, or all were rejected."""
    hint = (
        "add ATEN to config.max_autotune_gemm_backends (for a convolution: "
        "config.max_autotune_conv_backends), so that there is a library's call to take"
    )
    filters = config.test_configs
    if filters.autotune_choice_name_regex or filters.autotune_choice_desc_regex:
        hint = (
            "config.test_configs.autotune_choice_name_regex or ..._desc_regex may leave nothing; "
            + hint
        )
    why = "all were rejected" if offered else "none was offered"
    return NoValidChoicesError(f"no choices to select for {title}: {why}", reasons=dict(reasons),
                               hint=hint)  # fmt: skip
