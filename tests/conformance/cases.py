"""Which files of `test/inductor` are run, and which of their tests are drawn."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Files whose tests compile programs for a CPU and compare what comes out. Left out: tests of single
# pieces of the reference (its IR, caches, workers, packages), and those that need a card.
FILES = (
    "test_torchinductor",
    "test_torchinductor_dynamic_shapes",
    "test_torchinductor_codegen_dynamic_shapes",
    "test_torchinductor_opinfo",
    "test_control_flow",
    "test_unbacked_symints",
    "test_cpu_repro",
    "test_auto_functionalize",
    "test_compiled_autograd",
    "test_compiled_optimizers",
    "test_custom_post_grad_passes",
    "test_distributed_patterns",
    "test_embedding",
    "test_efficient_conv_bn_eval",
    "test_flex_attention",
    "test_foreach",
    "test_fp8",
    "test_fused_attention",
    "test_inductor_freezing",
    "test_inplacing_pass",
    "test_layout_optim",
    "test_mkldnn_pattern_matcher",
    "test_mmdecomp",
    "test_needs_exact_strides",
    "test_online_softmax",
    "test_optimize_indexing",
    "test_pattern_matcher",
    "test_perf",
    "test_scatter_optimization",
    "test_torchbind",
)
# Never drawn: what is about programs of the reference's for use without Python, needs a card, or
# (513 tests of one name) ends by counting the patterns that the reference matched.
LEFT_OUT = re.compile("aoti|aot_inductor|cpp_wrapper|cuda|lstm_packed")
OURS, REFERENCE = "tilewright", "reference"


@dataclass(frozen=True)
class Result:
    """What became of one test with one backend. `graphs` is how many the backend was given; `place`
    is the statement of the test that failed, or the last one of PyTorch's tests on the way."""

    file: str
    test: str
    backend: str
    status: str  # passed, failed, skipped, expected failure, crashed, out of time
    seconds: float
    graphs: int = 0
    error: str = ""
    place: str = ""
    trace: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "crashed", "out of time")


def drawn(tests: Sequence[str], file: str, seed: int, number: int) -> list[str]:
    """`number` of a file's tests: a larger number draws the same ones and more."""
    order = sorted(tests)
    random.Random(f"{seed}/{file}").shuffle(order)
    return [test for test in order if not LEFT_OUT.search(test)][:number]


def shares(sizes: Mapping[str, int], sample: int, least: int) -> dict[str, int]:
    """How many tests of each file are drawn: as many as its part of all, and at least `least`."""
    whole = sum(sizes.values())
    return {f: min(n, max(least, math.ceil(sample * n / whole))) for f, n in sizes.items()}


def is_checked(file: str, test: str, seed: int, part: float) -> bool:
    """Whether a test that passes with ours is among those also run with the reference."""
    return random.Random(f"{seed}/{file}/{test}/reference").random() < part
