"""Which configurations of a loop kernel are tried beyond those its model lists."""

from __future__ import annotations

from dataclasses import replace

from tilewright.runtime.triton_build import TritonConfig, TritonSource
from tilewright.tune import kernels


def source(*configs: TritonConfig) -> TritonSource:
    return TritonSource("", "kernel", (), configs, capability=90, shared_memory=1 << 16,
                        grid=(("3072", "XBLOCK"),))  # fmt: skip


def test_a_block_never_exceeds_what_the_kernel_was_written_for() -> None:
    """An axis that all listed blocks divide has no mask."""
    listed = [TritonConfig((("XBLOCK", x), ("RBLOCK", 2048))) for x in (512, 1024)]
    found = list(kernels._neighbours(source(*listed), listed[1]))
    blocks = {dict(c.constants)["XBLOCK"] for c in found}
    assert blocks == {512, 1024}
    smallest = replace(listed[0], constants=(("XBLOCK", 1), ("RBLOCK", 2048)))
    found = list(kernels._neighbours(source(*listed), smallest))
    assert {dict(c.constants)["XBLOCK"] for c in found} == {1, 2}


def test_a_row_that_is_held_whole_stays_whole() -> None:
    listed = [TritonConfig((("XBLOCK", x), ("RBLOCK", 2048))) for x in (1, 2)]
    found = list(kernels._neighbours(source(*listed), listed[0]))
    assert {dict(c.constants)["RBLOCK"] for c in found} == {2048}
    looped = [TritonConfig((("XBLOCK", 1), ("RBLOCK", r))) for r in (512, 2048)]
    found = list(kernels._neighbours(source(*looped), looped[1]))
    assert {dict(c.constants)["RBLOCK"] for c in found} == {1024, 2048}
