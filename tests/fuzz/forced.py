"""Which candidate computes each product of a random program: drawn, not measured.

Every template has its turn, fused and not, so that all of them meet all kinds of programs; nothing
is timed, and only what is taken is built.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tilewright import config
from tilewright.gemm.templates import TritonTemplate
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller

LIBRARY = "library"


def templates(device: str) -> tuple[str, ...]:
    """What takes turns: on a card each Triton template, on a CPU the C++ kernels."""
    return ("cpp",) if device == "cpu" else tuple(TritonTemplate.all_templates)


@contextmanager
def forced(seed: int, device: str) -> Generator[str]:
    """Products of the program with this seed are computed by one template, as far as it can."""
    turns = templates(device)
    name = turns[seed % len(turns)]
    rng = random.Random(seed)

    def picked(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        own = [c for c in choices if _template(c) == name]
        fused = [c for c in own if "logue" in c.name]
        pools: Sequence[list[ChoiceCaller]] = (fused if rng.random() < 0.8 else [], own, choices)
        return [rng.choice(next(pool for pool in pools if pool))] if choices else []

    options = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,CPP" if device == "cpu" else "ATEN,TRITON",
        "triton.enable_persistent_tma_matmul": "tma" in name,
    }
    with config.patch(options):
        select.add_preprocessing_fn(picked)
        try:
            yield name
        finally:
            select.clear_preprocessing_fns()


def _template(choice: ChoiceCaller) -> str:
    """`triton_mm_split_k_3_epilogue` is of `mm_split_k`."""
    kind, *words = choice.name.split("_")
    if kind != "triton":
        return kind if kind == "cpp" else LIBRARY
    return "_".join(words[: next(k for k, w in enumerate(words) if w.isdigit())])
