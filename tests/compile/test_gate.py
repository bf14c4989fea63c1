"""`python -m bench.gate`: a change of any kernel is seen, and nothing else is one."""

from __future__ import annotations

from bench.pretend import pretended


@pretended
def test_a_change_of_a_kernel_is_seen_and_shown() -> None:
    from bench import gate  # believes in a card when it is imported

    program = next(p for p in gate.lists()["list"] if p.name.startswith("softmax 8192x8192"))
    found = gate.kept(program, ("sm_90", "sm_80"))
    assert sorted(found) == ["sm_80 inference 0", "sm_90 inference 0"]
    assert found == gate.kept(program, ("sm_90", "sm_80"))
    assert gate.compare(found, found, 1) == 0

    for fact in ("text", "params", "grid", "configs", "launch"):
        before = found["sm_90 inference 0"]
        after = {**before, fact: before[fact][1:]}
        assert gate.compare(found, {**found, "sm_90 inference 0": after}, 0) == 1
        assert f"--- {fact} before" in gate.difference("softmax", before, after)
