"""Programs that are drawn for a card: every kind runs, and a seed is always the same programs."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

from bench.drawn_programs import GROUPS, Draw, drawn, program
from bench.gpu_memory import fewest_bytes, run_program


def test_every_kind_runs() -> None:
    """On tensors without memory."""
    draw = Draw(0)
    for kind in (kind for group in GROUPS for kind in group):
        one = program(kind, draw, (60e6, 500e6), "cpu")
        with FakeTensorMode():
            args = one.inputs()
            result = run_program(one, one.fn, args)
            assert fewest_bytes(one, args, result) > 40e6 or "embedding" in one.name, one.name


def test_a_seed_is_the_same_programs() -> None:
    assert [p.name for p in drawn(30, 5)] == [p.name for p in drawn(30, 5)]
    assert [p.name for p in drawn(30, 5)] != [p.name for p in drawn(30, 6)]
