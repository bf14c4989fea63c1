"""The reference's entry, options, counters and generated texts lead to tilewright's.

To be called before a file of tests is imported: these take names out of the reference's modules.
"""

from __future__ import annotations

import functools
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch._inductor.metrics
import torch._inductor.test_case  # what is read at import is read before anything is replaced
import torch.testing._internal.inductor_utils as utilities
from torch._inductor import compile_fx as entry
from torch._inductor.codecache import output_code_log
from torch._inductor.graph import GraphLowering
from torch.testing._internal import triton_utils

import tilewright.backend
from tilewright import config, metrics

graphs_seen = 0


def count_graphs() -> None:
    """For the reference's own run: nothing is changed, only counted."""
    _shared()
    theirs = entry.compile_fx

    @functools.wraps(theirs)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        global graphs_seen
        graphs_seen += 1
        return theirs(*args, **kwargs)

    entry.compile_fx = compile_fx


def to_tilewright() -> None:
    _shared()
    entry.compile_fx = _compile_fx(entry.compile_fx)
    metrics.on_code.append(_show)
    _same_counters()


def _compile_fx(theirs: Callable[..., Any]) -> Callable[..., Any]:
    inner = entry.compile_fx_inner

    @functools.wraps(theirs)
    def compile_fx(model_: Any, example_inputs_: Any, inner_compile: Any = inner,
                   config_patches: dict[str, Any] | None = None, **kwargs: Any) -> Any:  # fmt: skip
        global graphs_seen
        if inner_compile is not inner:  # a test of a piece of the reference
            return theirs(model_, example_inputs_, inner_compile, config_patches, **kwargs)
        graphs_seen += 1
        options = _options(config_patches or {})
        return tilewright.backend.compile_fx(model_, example_inputs_, options=options)

    return compile_fx


def _options(patches: dict[str, Any]) -> dict[str, Any]:
    """What a test has set of the reference's options, as far as ours has them too."""
    theirs: Any = torch._inductor.config
    now = {n: v for n, v in theirs.shallow_copy_dict().items() if not theirs._is_default(n)}
    ours = {option.name for option in config.declared()}
    return {name: value for name, value in {**now, **patches}.items() if name in ours - _OWN}


# Options of the same name that say where things are kept and what is shown: a run has its own.
_OWN = {"debug", "cache_dir"}


def _show(code: str) -> None:
    """Generated text, where `run_and_get_code` and `run_and_get_cpp_code` listen for it."""
    if GraphLowering.save_output_code is not None:
        GraphLowering.save_output_code(code)
    output_code_log.debug("%s", code)


def _sum(name: str, ours: str) -> property:
    def get(self: types.ModuleType) -> int:
        return vars(self)[name] + getattr(metrics, ours)

    def put(self: types.ModuleType, value: int) -> None:
        vars(self)[name] = value - getattr(metrics, ours)

    return property(get, put)


class _Counters(types.ModuleType):
    """The reference's module of counters: what it counts itself, and what we do."""

    generated_kernel_count = _sum("generated_kernel_count", "generated_kernel_count")
    num_bytes_accessed = _sum("num_bytes_accessed", "num_bytes_accessed")
    ir_nodes_pre_fusion = _sum("ir_nodes_pre_fusion", "ir_nodes")


def _same_counters() -> None:
    module: Any = torch._inductor.metrics
    theirs = module.reset

    def reset() -> None:
        theirs()
        metrics.reset()

    module.reset = reset
    module.__class__ = _Counters


def _shared() -> None:
    """What is left out of the tests for both.

    Tests of test_torchinductor_codegen_dynamic_shapes compile and run a program, and then look for
    a loop with the reference's names in its text. Tests of control flow that have a case for the
    CPU are skipped, that case too, where there is no card.
    """
    utilities._check_has_dynamic_shape = lambda self, code: None
    triton_utils.requires_gpu = _unless_for_cpu


def _unless_for_cpu(test: Any) -> Any:
    if isinstance(test, type):
        return test

    @functools.wraps(test)
    def run(self: unittest.TestCase, *args: Any, **kwargs: Any) -> Any:
        if "cpu" not in self.id():
            raise unittest.SkipTest("it needs a card")
        return test(self, *args, **kwargs)

    return run
