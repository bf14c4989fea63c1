"""Every option of tilewright, in one typed list.

Read them as attributes (`config.max_autotune`, `config.cpp.simdlen`), set them the same way, or
for a while with `config.patch(...)`. Each can be given in the environment when the process
starts: `TILEWRIGHT_MAX_AUTOTUNE=1`, `TILEWRIGHT_CPP_SIMDLEN=256`. An option declared with
`affects_code=True` is part of every cache key, through `code_key()`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tilewright import options
from tilewright.errors import UnknownModeError
from tilewright.options import (
    REGEX,
    Check,
    Group,
    Option,
    Patch,
    Value,
    at_least,
    each_of,
    one_of,
    option,
)

# What a run shows and checks ---------------------------------------------------------------

debug: int = option(
    0,
    "How much is shown: 1 a line per graph, 2 groups and why others were not fused, "
    "3 generated sources in `debug_dir`, 4 the IR after every stage as well.",
    affects_code=False,
    choices=(0, 1, 2, 3, 4),
)
debug_dir: str | None = option(
    None,
    "Folder for dumps; none: `tilewright_debug` in the current folder.",
    affects_code=False,
)
verify_ir: bool = option(
    False, "Check every IR invariant between stages, not only the cheap ones.", affects_code=False
)

# Caches and builds -------------------------------------------------------------------------

cache_dir: str | None = option(
    None,
    "Folder of the artefact store; none: `$XDG_CACHE_HOME/tilewright` or `~/.cache/tilewright`.",
    affects_code=False,
)
force_disable_caches: bool = option(
    False, "Neither read nor write any cache that outlives the process.", affects_code=False
)
fx_graph_cache: bool = option(
    True, "Keep whole compiled graphs, so that a new process lowers nothing.", affects_code=False
)
compile_threads: int = option(
    0,
    "Kernels built at the same time; 0: one per core.",
    affects_code=False,
    check=at_least(0),
)

# Semantics ---------------------------------------------------------------------------------

fallback_random: bool = option(
    False,
    "Draw the random numbers that eager would draw, at the cost of fusion.",
    affects_code=True,
)
emulate_precision_casts: bool = option(
    True, "Round low-precision results wherever eager stores a tensor.", affects_code=True
)

# Graph and lowering ------------------------------------------------------------------------

pattern_matcher: bool = option(
    True,
    "Rewrite products into richer library forms, such as a bias into addmm.",
    affects_code=True,
)
layout_optimization: bool = option(
    True,
    "Lay out images with their channels last for convolutions on the CPU, in inference.",
    affects_code=True,
)
realize_opcount_threshold: int = option(
    30, "Store a value once computing it takes more operations than this.", affects_code=True
)
realize_reads_threshold: int = option(
    4, "Store a value used more than once when it reads more buffers than this.", affects_code=True
)
realize_acc_reads_threshold: int = option(
    8, "Store a value when it reads more buffers than this, however used.", affects_code=True
)
realize_acc_reads_size_threshold: int | None = option(
    None,
    "Most bytes one kernel reads of what others made; none: no limit. A limit lets memory be freed "
    "earlier, at the price of more traffic.",
    affects_code=True,
    check=at_least(0),
)
unroll_reductions_threshold: int = option(
    8, "Write out reductions over fewer elements than this as plain arithmetic.", affects_code=True
)
max_pointwise_cat_inputs: int = option(
    8, "Compute a concatenation of up to this many inputs in one loop.", affects_code=True
)

batch_fusion: str = option(
    "",
    "Which ops that are alike and need nothing of each other are one batched op: `linear`, "
    "`group_linear` (of different sizes), `layer_norm`, `pointwise`, separated by commas.",
    affects_code=True,
    check=each_of("linear", "group_linear", "layer_norm", "pointwise"),
)
batch_fusion_min_size: int = option(
    5, "Fewest ops that are worth a batch.", affects_code=True, check=at_least(2)
)
batch_fusion_max_size: int = option(300, "Most ops of one batch.", affects_code=True)

epilogue_fusion_user_defined_triton_kernel: bool = option(
    False,
    "Let a Triton kernel of the user's store what a pointwise op makes of its result.",
    affects_code=True,
)
comprehensive_padding: bool = option(
    False,
    "Let rows of values in between start at multiples of `padding_alignment_bytes`, at the price "
    "of some memory.",
    affects_code=True,
)
pad_outputs: bool = option(
    False,
    "Give the results of inference that pitch as well; their strides are then not eager's.",
    affects_code=True,
)
padding_alignment_bytes: int = option(
    128, "What the pitch of padded rows is a multiple of.", affects_code=True, check=at_least(1)
)
padding_stride_threshold: int = option(
    1024, "Strides of up to this many elements are not padded.", affects_code=True
)

# Scheduling --------------------------------------------------------------------------------

max_fusion_size: int = option(64, "Most loop nests in one fused kernel.", affects_code=True)
combo_kernels: bool = option(
    False, "Let kernels that need nothing of each other share a launch.", affects_code=True
)
combo_kernels_pointwise_only: bool = option(
    False, "Leave reductions out of shared launches.", affects_code=True
)
combo_kernel_max_num_nodes: int = option(
    8, "Most kernels in one shared launch.", affects_code=True, check=at_least(1)
)
combo_kernel_max_num_args: int = option(
    400, "Most buffers of one shared launch.", affects_code=True, check=at_least(1)
)
inplace_buffers: bool = option(
    True, "Let a kernel write over an input that nobody reads again.", affects_code=True
)
allow_buffer_reuse: bool = option(
    True, "Give the memory of dead buffers to later ones.", affects_code=True
)
reorder_for_peak_memory: bool = option(
    True, "Run kernels in the order that keeps the least memory alive.", affects_code=True
)
memory_planning: bool = option(
    False, "Carve buffers that live at the same time out of one allocation.", affects_code=True
)

# Tuning ------------------------------------------------------------------------------------

max_autotune: bool = option(
    False,
    "Measure candidates: configurations of loop kernels, and who computes products.",
    affects_code=True,
)
max_autotune_gemm: bool = option(
    False, "Measure candidates for products and convolutions only.", affects_code=True
)
max_autotune_pointwise: bool = option(
    False, "Measure configurations of loop kernels on the card.", affects_code=True
)
max_autotune_gemm_backends: str = option(
    "ATEN,CUBLASLT,TRITON,CPP",
    "Comma list, in any case, of who may offer products; empty: nobody.",
    affects_code=True,
)
max_autotune_conv_backends: str = option(
    "ATEN,TRITON",
    "No effect yet. Comma list, in any case, of who may offer convolutions; empty: nobody.",
    affects_code=True,
)
max_autotune_gemm_search_space: str = option(
    "DEFAULT",
    "Candidates templates offer for products: `EXHAUSTIVE` offers and tries all; any case.",
    affects_code=True,
    check=one_of("DEFAULT", "EXHAUSTIVE"),
)
max_autotune_allow_flexible_layouts: bool = option(
    False, "Accepted and ignored: layouts are decided before anything is chosen.", affects_code=True
)
max_autotune_prune_choices_based_on_shared_mem: bool = option(
    False,
    "Accepted and ignored: what does not fit in shared memory is never offered.",
    affects_code=True,
)
max_autotune_report_choices_stats: bool = option(
    True, "Have the table of choices among what `autotune_show` shows.", affects_code=False
)
autotune_effort: Literal["none", "quick", "default", "max"] = option(
    "default",
    "How much is tried: `none` (the model or what was measured before), `quick` (what is "
    "estimated near the best), `default`, `max` (everything).",
    affects_code=True,
)
autotune_budget_seconds: float | None = option(
    None,
    "Wall-clock seconds one graph may spend on tuning, up to the candidate under way; "
    "none: no limit. The best so far is taken, and the next run goes on from there.",
    affects_code=True,
    check=at_least(0),
)
autotune_show: bool = option(
    False, "Show progress and a table of every choice on stderr.", affects_code=False
)
autotune_num_choices_displayed: int | None = option(
    10,
    "Rows of that table, fastest first; none: all.",
    affects_code=False,
    check=at_least(0),
)
autotune_local_cache: bool = option(
    True, "Take measurements of earlier runs from the cache folder.", affects_code=False
)
autotune_remote_cache: bool | None = option(
    None,
    "No effect yet. Share measurements through a server; none: if there is one.",
    affects_code=False,
)
autotune_in_subproc: bool = option(
    False,
    "Time candidates for products in a process of its own: a crash or a hang costs the candidate.",
    affects_code=False,
)
autotune_multi_device: bool = option(
    False,
    "Accepted and ignored: candidates are timed on the card they are for.",
    affects_code=False,
)
max_autotune_subproc_result_timeout_seconds: float = option(
    60.0, "Seconds one candidate may take there.", affects_code=False, check=at_least(0)
)
precompilation_timeout_seconds: int = option(
    300,
    "Accepted and ignored: each compiler has a time limit of its own.",
    affects_code=False,
)
pipeline_max_autotune_gemm: bool = option(
    False,
    "Accepted and ignored: candidates are always built while others are timed.",
    affects_code=False,
)
autotune_fallback_to_aten: bool = option(False, "Accepted and ignored.", affects_code=False)
epilogue_fusion: bool = option(
    True, "Let a product compute what is done to its result.", affects_code=True
)
prologue_fusion: bool = option(
    True, "Let a product compute what is done to its operands.", affects_code=True
)
benchmark_epilogue_fusion: bool = option(
    True,
    "Time products with their epilogue; off: it is decided by bytes, registers and occupancy.",
    affects_code=True,
)
max_epilogue_benchmarked_choices: int = option(
    1,
    "Fastest products whose epilogue is looked at when `benchmark_epilogue_fusion` is off.",
    affects_code=True,
)
benchmark_fusion: bool = option(
    False, "Accepted and ignored: fusion is decided by the bytes it saves.", affects_code=True
)
benchmark_kernel: bool = option(False, "Accepted and ignored.", affects_code=True)
inductor_default_autotune_warmup: int = option(
    25, "Accepted and ignored: warming up ends when the times are steady.", affects_code=False
)
inductor_default_autotune_rep: int = option(
    100, "Accepted and ignored: measuring ends when the noise is small.", affects_code=False
)
enable_caching_generated_triton_templates: bool = option(
    True, "Render the text of equal requests once.", affects_code=False
)
shape_padding: bool = option(
    True,
    "Let a product on a card be tried with operands copied to rows that start where it can load.",
    affects_code=True,
)
deterministic: bool = option(
    False,
    "Measure nothing: a library's call, or else the first candidate, is taken.",
    affects_code=True,
)
coordinate_descent_tuning: bool = option(
    False,
    "Refine the best measured configuration one parameter at a time.",
    affects_code=True,
)


class Triton(Group):
    """Triton kernels and how they are launched."""

    enable_persistent_tma_matmul: bool = option(
        False,
        "Offer products whose operands the card fetches through tensor descriptors (sm_90 on). "
        "Off, they are offered where rows of the result start anywhere: libraries are slow there.",
        affects_code=True,
    )
    cudagraphs: bool = option(
        False, "Record the launches of a program in a CUDA graph and replay it.", affects_code=True
    )
    cooperative_reductions: bool = option(
        False,
        "Fold a few huge rows in one launch whose programs wait for each other.",
        affects_code=True,
    )
    enable_pdl: bool = option(
        False,
        "Start a kernel while the one before it still runs; it waits before it reads (sm_90 on).",
        affects_code=True,
    )


class Cuda(Group):
    """What is generated for NVIDIA cards."""

    arch: str | None = option(
        None,
        "Generate for this architecture (`sm_90`); none: the card's own.",
        affects_code=True,
    )


class Cpp(Group):
    """C++ kernels for the CPU."""

    threads: int = option(
        -1,
        "OpenMP threads of a kernel; -1: what `torch.get_num_threads()` says.",
        affects_code=True,
        check=Check(lambda n: n == -1 or n > 0, "-1 or at least 1"),
    )
    simdlen: int | None = option(
        None,
        "Vector bits to generate for, 1 meaning scalar code; none: the widest here.",
        affects_code=True,
        choices=(None, 1, 256, 512),
    )
    cxx: str = option(
        "g++", "The C++ compiler: a name on the PATH or a full path.", affects_code=True
    )


class TestConfigs(Group):
    """Hooks for tests; no program needs them."""

    autotune_choice_name_regex: str | None = option(
        None,
        "Keep only candidates whose name matches somewhere.",
        affects_code=True,
        check=REGEX,
    )
    autotune_choice_desc_regex: str | None = option(
        None,
        "Keep only candidates whose description matches somewhere.",
        affects_code=True,
        check=REGEX,
    )
    max_mm_configs: int | None = option(
        None,
        "No effect yet. Most configurations a template may offer for one product.",
        affects_code=True,
    )


triton = Triton()
cuda = Cuda()
cpp = Cpp()
test_configs = TestConfigs()

_MODES: dict[str, dict[str, Value]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "coordinate_descent_tuning": True},
    "max-autotune": {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "triton.cudagraphs": True,
    },
}

_registry = options.install(__name__)


def patch(
    changes: str | Mapping[str, object] | None = None,
    value: object = options.ABSENT,
    /,
    **named: object,
) -> Patch:
    """Change options for a `with` block or for the calls of a decorated function.

    Three spellings: `patch(max_autotune=True)`, `patch({"cpp.threads": 1})` and
    `patch("cpp.threads", 1)`. Names and values are checked at once; leaving restores the values
    found on entry, after an exception too.
    """
    return options.patch_of(_registry, changes, value, named)


def options_for_mode(mode: str | None) -> dict[str, Value]:
    """The options a `mode=` of torch.compile stands for."""
    name = mode or "default"
    if name not in _MODES:
        raise UnknownModeError(mode, tuple(_MODES))
    return dict(_MODES[name])


def checked(changes: Mapping[str, object]) -> dict[str, Value]:
    """The `options=` of torch.compile with every name and value checked."""
    return _registry.checked(changes)


def code_key() -> tuple[tuple[str, Value], ...]:
    """The options that shape generated code, as a sorted and hashable part of a cache key."""
    return tuple(
        (name, _registry.get(name))
        for name, spec in sorted(_registry.options.items())
        if spec.affects_code
    )


def snapshot() -> dict[str, Value]:
    """All options with their values now; `patch(snapshot)` brings them back elsewhere."""
    return {name: _registry.get(name) for name in _registry.options}


def declared() -> tuple[Option, ...]:
    """Every option as it was declared, in the order of this file."""
    return tuple(_registry.options.values())


def table() -> str:
    """The reference of all options in Markdown; `docs/config.md` is made from it."""
    return "\n".join(options.markdown(_registry)).rstrip() + "\n"


def cache_root() -> Path:
    """The folder of the artefact store, as the options and the environment have it now."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewright"


def debug_root() -> Path:
    """The folder that dumps go to."""
    return Path(debug_dir).expanduser() if debug_dir is not None else Path("tilewright_debug")
