"""Whether what was measured meets what is asked of real models, and which rows do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.measure import EAGER, REFERENCE, geomean
from bench.real.child import OURS
from bench.real.tables import Record

SLOWER = {"cpu": 0.03, "cuda": 0.02}  # by how much a model may be, of noise
MODELS = {"cpu": 12, "cuda": 30}  # with inference, and training where they train
TUNED = 8  # models under max-autotune
LEAST_OVER_REFERENCE = 1.10  # in geomean, on a card
MOST_COMPILING = 1 / 3  # of the reference's time, on a card
GPT2_OVER_EAGER = 2.0  # in training, on a card
MOST_NAMED = 12


def verdict(records: Iterable[Record]) -> list[str]:
    """A line for each thing asked for, of every device that something was measured on."""
    by_device: dict[str, list[Record]] = {}
    for record in records:
        by_device.setdefault(record["device"], []).append(record)
    return [f"{device}: {line}" for device in sorted(by_device) for line in _of(by_device[device])]


def _of(records: Sequence[Record]) -> list[str]:
    device = records[0]["device"]
    said = [f"{_row(r)} ({why})" for r in records for why in r["failures"] if _is_line(why)]
    failed = [f"{_row(r)} ({why})" for r in records for why in r["failures"] if not _is_line(why)]
    margin, models = SLOWER[device], {r["model"] for r in records if r["mode"] == "default"}
    lines = [
        _line("every value is right, nothing fails", failed),
        _line("no line on the terminal", said),
        *(_line(f"none slower than {'eager' if base == EAGER else 'the reference'} by more than "
                f"{margin:.0%}", _slower(records, base, margin)) for base in (EAGER, REFERENCE)),
        _enough(f"{MODELS[device]} models in default mode", len(models), MODELS[device]),
    ]  # fmt: skip
    return lines if device == "cpu" else [*lines, *_of_a_card(records)]


def _of_a_card(records: Sequence[Record]) -> list[str]:
    tuned = {r["model"] for r in records if r["mode"].startswith("max-autotune")}
    recorded = {r["model"] for r in records if r["mode"] == "reduce-overhead"}
    gpt2 = [r for r in records if (r["model"], r["work"]) == ("gpt2", "training")]
    over = [r["speed"][REFERENCE] for r in records if REFERENCE in r.get("speed", {})]
    parts = {_row(r): part for r in records if (part := _compiling(r)) is not None}
    mean, compiling = (geomean(list(x)) if x else 0.0 for x in (over, parts.values()))
    slowest = sorted((row for row in parts if parts[row] > MOST_COMPILING), key=lambda r: -parts[r])
    return [
        _line(f"geomean {mean:.2f} over the reference, at least {LEAST_OVER_REFERENCE:.2f} asked",
              [] if mean >= LEAST_OVER_REFERENCE else ["all rows"]),
        _line(f"compiling takes {compiling:.2f} of the reference's time, at most "
              f"{MOST_COMPILING:.2f} asked",
              [] if 0 < compiling <= MOST_COMPILING
              else [f"{row} {parts[row]:.2f}" for row in slowest] or ["nothing measured"]),
        _enough(f"{TUNED} models under max-autotune", len(tuned), TUNED),
        _enough("a model under reduce-overhead", len(recorded), 1),
        _line(f"GPT-2 trains at {GPT2_OVER_EAGER} times eager's speed",
              [f"{_row(r)} {_speed(r, EAGER):.2f}" for r in gpt2
               if _speed(r, EAGER) < GPT2_OVER_EAGER] if gpt2 else ["not measured"]),
    ]  # fmt: skip


def _is_line(failure: str) -> bool:
    return failure.startswith("said: ")


def _row(record: Record) -> str:
    return f"{record['model']} {record['work']} {record['mode']}"


def _speed(record: Record, base: str) -> float:
    return record.get("speed", {}).get(base, 0.0)


def _slower(records: Sequence[Record], base: str, margin: float) -> list[str]:
    speeds = sorted((r["speed"][base], _row(r)) for r in records if base in r.get("speed", {}))
    return [f"{row} {speed:.2f}" for speed, row in speeds if speed < 1 / (1 + margin)]


def _compiling(record: Record) -> float | None:
    ours, theirs = (record.get("backends", {}).get(b, {}).get("compile_s")
                    for b in (OURS, REFERENCE))  # fmt: skip
    return ours / theirs if ours and theirs else None


def _enough(what: str, count: int, wanted: int) -> str:
    return _line(f"at least {what}", [] if count >= wanted else [f"{count} so far"])


def _line(what: str, broken: Sequence[str]) -> str:
    if not broken:
        return f"holds: {what}"
    more = f", and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
    return f"does not hold: {what}: {', '.join(broken[:MOST_NAMED])}{more}"
