"""Every option of tilewright, in one typed list.

Read them as attributes (`config.max_autotune`, `config.cpp.simdlen`), set them the same way for the
process, or for a while and this thread with `config.patch(...)`. Each can be given in the
environment when the process starts: `TILEWRIGHT_MAX_AUTOTUNE=1`, `TILEWRIGHT_CPP_SIMDLEN=256`.
An option declared with `affects_code=True` is part of every cache key, through `code_key()`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tilewright import options
from tilewright.errors import UnknownModeError
from tilewright.options import (
    REGEX,
    Check,
    GraphPass,
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
cache_read_only_dirs: str = option(
    "",
    "Folders, separated as in PATH, that are looked into for what the store does not have: yours "
    "or the system's, and not writable by others.",
    affects_code=False,
)
cache_max_bytes: int | None = option(
    16 << 30,
    "Size the artefact store is kept below, by forgetting what was not used for longest; none: no "
    "limit.",
    affects_code=False,
    check=at_least(0),
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

# The user's own passes ---------------------------------------------------------------------

pre_grad_custom_pass: GraphPass | None = option(
    None,
    "Functions that change the graph Dynamo captured, before it is differentiated. A program is "
    "kept in the caches if each of them has a `uuid()`, here and below.",
    affects_code=True,
)
joint_custom_pre_pass: GraphPass | None = option(
    None,
    "Functions that change the joint graph, forward and backward, before anything of ours; the "
    "graph itself where there are no gradients.",
    affects_code=True,
)
joint_custom_post_pass: GraphPass | None = option(
    None, "The same, right before the joint graph is parted.", affects_code=True
)
post_grad_custom_pre_pass: GraphPass | None = option(
    None,
    "Functions that change each ATen graph (forward, backward, inference) before anything of ours.",
    affects_code=True,
)
post_grad_custom_post_pass: GraphPass | None = option(
    None, "The same, right before the graph is lowered.", affects_code=True
)

# Graph and lowering ------------------------------------------------------------------------

pattern_matcher: bool = option(
    True,
    "Rewrite products into richer library forms, such as a bias into addmm.",
    affects_code=True,
)
layout_optimization: bool = option(
    True,
    "Lay out images with their channels last for convolutions on the CPU, where it pays.",
    affects_code=True,
)
freezing: bool = option(
    False,
    "Compute what a program of inference makes of weights alone once, for as long as they stay as "
    "they are, and join batch norms with what they normalise. A write through `.data` is not seen.",
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
force_pointwise_cat: bool = option(
    False, "Compute every concatenation in one loop, whatever it costs.", affects_code=True
)
split_cat_fx_passes: bool = option(
    True,
    "Accepted and ignored: no pass turns concatenations and splits into each other; loops over "
    "them are cut where that saves bytes.",
    affects_code=False,
)
delay_realize_cheap_outputs: bool = option(
    True,
    "Accepted and ignored: what is computed from positions alone is never stored for its readers.",
    affects_code=False,
)
conv_1x1_as_mm: bool = option(
    False,
    "Have convolutions of one point, with steps of one and no margin, computed as products: who "
    "offers products then offers them.",
    affects_code=True,
)
unbacked_symint_fallback: int = option(
    8192,
    "What a size that is read from data is taken for while deciding; nothing that runs depends on "
    "it.",
    affects_code=True,
    check=at_least(0),
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
attention: bool = option(
    True,
    "Compute `scaled_dot_product_attention` by kernels of ours where they are better.",
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
    "Comma list, in any case, of who may offer convolutions while tuning; empty: nobody.",
    affects_code=True,
)
max_autotune_gemm_search_space: str = option(
    "DEFAULT",
    "Candidates templates offer for products: `EXHAUSTIVE` offers and tries all; any case.",
    affects_code=True,
    check=one_of("DEFAULT", "EXHAUSTIVE"),
)
cutedsl_enable_autotuning: bool = option(
    False,
    "Try several configurations of grouped products in the CuTe DSL, not the first alone.",
    affects_code=True,
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
    "Wall-clock seconds one graph may spend on tuning, up to the candidate under way; the best so "
    "far is taken, and the next run goes on from there. None: 20 s of measuring per product, or "
    "two runs of the library's where that is more, and ten minutes per graph.",
    affects_code=True,
    check=at_least(0),
)
autotune_show: bool = option(
    False, "Show progress and a table of every choice on stderr.", affects_code=False
)
autotune_progress: bool = option(
    True,
    "On a terminal: a bar with the time left while tuning a graph lasts over two seconds, and a "
    "line when it ends.",
    affects_code=False,
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
    "Share what was measured, and with a secret what was built, through a server; none: if there "
    "is one.",
    affects_code=False,
)
remote_cache_url: str | None = option(
    None,
    "Redis server to share through (`redis://host:port/0`); none: there is none.",
    affects_code=False,
)
remote_cache_secret: str | None = option(
    None,
    "What those who share kernels through the server know and others do not: kernels are programs, "
    "so without it only measurements are shared.",
    affects_code=False,
)
remote_cache_timeout_seconds: float = option(
    0.5,
    "Seconds the server may take for one answer; after two failures it is left alone for a minute.",
    affects_code=False,
    check=at_least(0),
)
cache_key_tag: str = option(
    "", "Text that keeps measurements and kernels apart from others'.", affects_code=True
)
autotune_in_subproc: bool | None = option(
    None,
    "Time candidates for products in a process of its own: a crash or a hang costs the candidate; "
    "none: those that are not of this package.",
    affects_code=False,
)
autotune_multi_device: bool = option(
    False,
    "Look at candidates on every card of the same kind at once, each by a process of its own; and "
    "have `tilewright.tune` measure on all of them.",
    affects_code=False,
)
autotune_rank_timeout_seconds: float = option(
    60.0,
    "Of ranks of a `torch.distributed` job one measures and the others take its choice; seconds "
    "without a sign of it after which another one does.",
    affects_code=False,
    check=at_least(0),
)
max_autotune_subproc_result_timeout_seconds: float = option(
    60.0, "Seconds one candidate may take there.", affects_code=False, check=at_least(0)
)
precompilation_timeout_seconds: int = option(
    300,
    "Seconds after which the candidates of a product that are not built yet are not awaited.",
    affects_code=False,
    check=at_least(0),
)
pipeline_max_autotune_gemm: bool = option(
    False,
    "Time candidates for products in one process beside the compiler, and fetch what it found when "
    "it is needed.",
    affects_code=False,
)
autotune_fallback_to_aten: bool = option(
    False,
    "Accepted and ignored: the library is among the candidates, and taken where all others fail.",
    affects_code=False,
)
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
benchmark_kernel: bool = option(
    False,
    "Accepted and ignored: kernels are timed by the tuner, and none is a program of its own.",
    affects_code=True,
)
inductor_default_autotune_warmup: int = option(
    25, "Accepted and ignored: warming up ends when the times are steady.", affects_code=False
)
inductor_default_autotune_rep: int = option(
    100, "Accepted and ignored: measuring ends when the noise is small.", affects_code=False
)
enable_caching_generated_triton_templates: bool = option(
    True, "Render the text of equal requests once.", affects_code=False
)
use_mixed_mm: bool = option(
    True,
    "Let a product convert an int8 operand where it reads it, where a provider can.",
    affects_code=True,
)
shape_padding: bool = option(
    True,
    "Let a product on a card be tried with operands copied to rows that start where it can load; "
    "without max-autotune a model decides.",
    affects_code=True,
)
force_shape_pad: bool = option(
    False, "Pad every product that `shape_padding` might, whatever it costs.", affects_code=True
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
    enable_template_tma_store: bool = option(
        False,
        "Templates that read operands through tensor descriptors store results through them too, "
        "and compute nothing else: rows of results must start at multiples of 16 bytes.",
        affects_code=True,
    )
    enable_epilogue_subtiling: bool = option(
        False,
        "Warp-specialised templates store a block of the result in two pieces at least; off, also "
        "as a whole.",
        affects_code=True,
    )
    native_matmul: bool = option(
        False,
        "Accepted and ignored: a product is a library's call or a template, never a loop.",
        affects_code=False,
    )
    num_decompose_k_splits: int = option(
        10,
        "Into how many numbers of parts a long k is tried to be cut, each a batched product and a "
        "sum of its parts. 0: none, and templates do not split it among programs either.",
        affects_code=True,
        check=at_least(0),
    )
    decompose_k_threshold: int = option(
        32,
        "How many times as long as rows and columns k has to be for a sum to be cut into parts. "
        "Templates split it among programs by the model and by measuring.",
        affects_code=True,
        check=at_least(0),
    )
    autotune_cublasLt: bool = option(
        True, "Offer the algorithms of cuBLASLt one by one.", affects_code=True
    )
    disallow_failing_autotune_kernels_TESTING_ONLY: bool = option(
        False,
        "A candidate that cannot be built, run or measured is an error and not a rejection.",
        affects_code=False,
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

    # CUTLASS; `cutlass.` means the same group.

    version: str | None = option(
        None,
        "Toolkit that CUTLASS kernels are listed for (`13.0`); none: torch's, or else nvcc's.",
        affects_code=True,
    )
    cuda_cxx: str | None = option(
        None, "nvcc; none: `CUDACXX`, `CUDA_HOME`, then the PATH.", affects_code=True
    )
    cutlass_dir: str | None = option(
        os.environ.get("TORCHINDUCTOR_CUTLASS_DIR"),
        "A checkout of CUTLASS; none, or anything else: the `nvidia-cutlass` wheel.",
        affects_code=True,
    )
    compile_opt_level: str = option(
        "-O1",
        "How far nvcc optimises CUTLASS kernels.",
        affects_code=True,
        choices=("-O0", "-O1", "-O2", "-O3", "-OS"),
    )
    enable_cuda_lto: bool = option(
        False, "Keep what a linker optimises in CUTLASS kernels.", affects_code=True
    )
    enable_ptxas_info: bool = option(
        False, "Have the assembler tell the registers of CUTLASS kernels.", affects_code=True
    )
    enable_debug_info: bool = option(
        False, "Keep the lines of the source in CUTLASS kernels.", affects_code=True
    )
    use_fast_math: bool = option(
        False, "Let nvcc take faster and less exact functions in epilogues.", affects_code=True
    )
    cutlass_max_profiling_configs: int | None = option(
        None,
        "Operations of CUTLASS that are offered for a product, by their names; none: those the "
        "model of the card finds best, as many as the effort asks for.",
        affects_code=True,
        check=at_least(1),
    )
    cutlass_max_profiling_swizzle_options: str = option(
        "1,2,4,8",
        "Orders of tiles each of them is offered in; they share one binary. A list will do.",
        affects_code=True,
        check=Check(lambda t: bool(re.fullmatch(r"\d+(,\d+)*", t)), "numbers with commas"),
    )
    cutlass_epilogue_fusion_enabled: bool = option(
        os.environ.get("CUTLASS_EPILOGUE_FUSION") == "1",
        "Let CUTLASS kernels compute what is done to the product.",
        affects_code=True,
    )
    cutlass_tma_only: bool = option(
        False, "Offer only operations that store through tensor descriptors.", affects_code=True
    )
    cutlass_backend_min_gemm_size: int = option(
        1, "Smallest m*n*k that CUTLASS is offered for.", affects_code=True
    )
    generate_test_runner: bool = option(
        False, "Add a program that runs the kernel alone to its source.", affects_code=True
    )
    cutlass_op_allowlist_regex: str | None = option(
        None, "Offer only operations with this in their names.", affects_code=True, check=REGEX
    )
    cutlass_op_denylist_regex: str | None = option(
        None, "Offer no operation with this in its name.", affects_code=True, check=REGEX
    )
    cutlass_instantiation_level: str = option(
        "0",
        "How many operations CUTLASS lists, a digit for each kind of choice; 0: its own default. "
        "Above `1111` there are millions.",
        affects_code=True,
    )
    cutlass_hash_with_compile_cmd: bool = option(
        False, "Keep binaries under the whole command that made them.", affects_code=True
    )
    cutlass_prescreening: bool = option(
        True,
        "Time ten kernels or more in one order of their tiles first, others for the fastest alone.",
        affects_code=True,
    )
    cutlass_enabled_ops: str = option(
        "all",
        "Products CUTLASS is offered for: `all`, or of `mm`, `addmm`, `bmm`, `int_mm`, "
        "`scaled_mm`, `sparse_semi_structured_mm`, separated by commas, in any case.",
        affects_code=True,
    )
    enable_caching_codegen: bool = option(
        True, "Render the source of equal requests once.", affects_code=False
    )
    cutlass_dynamic_cluster_shape: str = option(
        "2,1,1",
        "Blocks that share what they load, of operations that leave it to the call (sm_100).",
        affects_code=True,
        check=Check(lambda t: bool(re.fullmatch(r"\d+,\d+,1", t)), "rows, columns and 1"),
    )
    cutlass_dynamic_cluster_fallback: str = option(
        "2,1,1",
        "The same where so large a cluster does not fit.",
        affects_code=True,
        check=Check(lambda t: bool(re.fullmatch(r"\d+,\d+,1", t)), "rows, columns and 1"),
    )


# Threads beyond the cores only wait; a million of them do not fit in memory.
MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))


class Cpp(Group):
    """C++ kernels for the CPU."""

    threads: int = option(
        -1,
        "OpenMP threads of a kernel; -1: what `torch.get_num_threads()` says. A forked process has "
        "one.",
        affects_code=True,
        check=Check(
            lambda n: n == -1 or 0 < n <= MOST_THREADS,
            f"-1 (as many as torch uses) or 1 to {MOST_THREADS} on this machine",
        ),
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
    force_extern_kernel_in_multi_template: bool = option(
        False,
        "Choose among libraries' calls alone wherever there is one.",
        affects_code=True,
    )
    max_mm_configs: int | None = option(
        None,
        "Most configurations a template may offer for one product.",
        affects_code=True,
    )


triton = Triton()
cuda = Cuda()
cpp = Cpp()
test_configs = TestConfigs()

MODES: dict[str, dict[str, Value]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "coordinate_descent_tuning": True},
    "max-autotune": {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "triton.cudagraphs": True,
    },
}

_registry = options.install(__name__, aliases={"cutlass": "cuda"})
cutlass = cuda  # a newer name of the group


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
    if name not in MODES:
        raise UnknownModeError(mode, tuple(MODES))
    return dict(MODES[name])


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


def passes_without_identity() -> tuple[str, ...]:
    """The user's passes that no cache key can tell from others."""
    given = {name: _registry.get(name) for name, spec in _registry.options.items()
             if spec.kind is GraphPass}  # fmt: skip
    return tuple(n for n, p in given.items() if isinstance(p, GraphPass) and not p.has_identity)


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
    """The folder of the artefact store, as the options and the environment have it now. Raises
    `RuntimeError` where there is neither an option nor a home folder to say."""
    given = _registry.get("cache_dir")
    if given is not None:
        return Path(str(given)).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewright"


def debug_root() -> Path:
    """The folder that dumps go to."""
    given = _registry.get("debug_dir")
    return Path(str(given)).expanduser() if given is not None else Path("tilewright_debug")
