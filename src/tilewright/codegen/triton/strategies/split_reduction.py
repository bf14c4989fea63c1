"""Long rows that are reduced once, in parts: the last program of a row to finish goes on alone."""

from __future__ import annotations

from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.tiling import Shape, cannot_share


def split_reduction(facts: KernelFacts) -> Shape | str:
    """The shape with rows in parts, where they are reduced once and too few for SMs to have
    equally much to do: as many parts as all run at once (H200: smoothed losses of 151 rows of
    100277 floats 20.4 us by seven, 23.6 us by eight, of which some wait, 24.3 us by one; losses
    of 290 rows of 128256 bfloat16 24.1 us by four, 27.2 us by eight, 25.9 us by one). What only
    adds up is read as fast by one program for each row, and what leaves its reductions as they
    are is a part already (softmax of a row of 2**26 107 us, 110 us in parts of parts)."""
    shape = facts.shape
    if reason := facts.not_rows or facts.not_plain or facts.draws:
        return reason
    if shape.reread:
        return "rows are read again after a reduction"
    if shape.row_programs and not shape.ticketed:
        return "all programs of a row run at once already"
    if shape.persistent:
        return "rows fit in registers"
    (x,), (r,) = shape.parallel, shape.inner
    if not x.size or not r.size:
        return "sizes are known only at the call"
    if "welford" in facts.shape.reductions or "exp" not in facts.shape.ops:
        return "it only adds up: one program for each row is as fast"
    if all(axis is r for _, axis in shape.segments):
        return "it leaves its reductions as they are: it is a part already"
    count = min(
        rules.SPLIT_PROGRAMS.limit * facts.target.sms // x.size, r.size // rules.SPLIT_PART.limit
    )
    if count < 2:
        return "there are enough rows for all SMs, or rows are too short for parts"
    new = replace(shape, row_programs=count, ticketed=True, pipelined=False)
    return cannot_share(new) or new
