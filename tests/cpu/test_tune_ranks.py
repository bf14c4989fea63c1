"""Ranks of a distributed job: each problem is tuned once, all take the same choice, and a rank that
dies hangs nobody. Ranks are forks of one process that has imported torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = """
import json, os, signal, sys, tempfile, time
import torch, torch.distributed as dist
from tilewright import config, metrics
from tests.cpu.fake_trials import Fake, FakeClock, aten, subject
from tilewright.tune import clock, ranks, select

how, folder, meet, world, problems = sys.argv[1], sys.argv[2], sys.argv[3], 4, 3

def work(rank):
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    open(f"{folder}/met{rank}", "w").close()
    while how == "dies" and rank == 0 and not all(
        os.path.exists(f"{folder}/met{r}") for r in range(world)
    ):
        time.sleep(0.01)  # one that dies before the others have met it is gloo's affair
    config.cache_dir = f"{folder}/cache{rank}"
    config.autotune_rank_timeout_seconds = 60.0 if how == "fails" else 1.5
    clock.of = lambda device: FakeClock()
    if how == "dies" and rank == 0:
        measured = select._Tuning._measured
        def dies(self, order):
            os.kill(os.getpid(), signal.SIGKILL)
        select._Tuning._measured = dies
    elif how == "fails" and rank == 0:
        measured = select._Tuning._measured
        def fails(self, order):
            time.sleep(0.5)
            raise RuntimeError("it goes wrong here")
        select._Tuning._measured = fails
    elif how != "all live":
        time.sleep(0.5)
    chosen = []
    for k in range(problems):
        # every rank would find another winner
        trials = [aten(100.0), *(Fake(f"t{j}", 50.0 + (j - rank) % world) for j in range(world))]
        try:
            chosen.append(select.choose(subject(f"problem {k}"), trials).winner.name)
        except RuntimeError:
            chosen.append("nothing")
            select._Tuning._measured = measured
    counts = metrics.counters["ranks"]
    said = {"chosen": chosen, "measured": counts["measured"], "adopted": counts["adopted"],
            "over": counts["taken over"],
            "tunings": metrics.counters["inductor"]["select_algorithm_autotune"]}
    open(f"{folder}/{rank}.json", "w").write(json.dumps(said))
    if how == "all live":
        dist.barrier()  # the first one serves the store, in some jobs

children = []
for rank in range(world):
    child = os.fork()
    if not child:
        try:
            work(rank)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]))
"""


def ranks(how: str, folder: Path, served: bool = False) -> tuple[list[int], list[dict[str, Any]]]:
    """The ranks meet in a file, or at a server that is in the first of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = f"tcp://127.0.0.1:{port}" if served else f"file://{folder}/meet"
    done = subprocess.run([sys.executable, "-c", RANKS, how, str(folder), meet], text=True,
                          capture_output=True, timeout=110, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout, done.stderr
    said = [json.loads(f.read_text()) for f in sorted(folder.glob("?.json"))]
    return json.loads(done.stdout), said


@pytest.mark.parametrize("served", [False, True])
def test_four_ranks_tune_each_problem_once_and_choose_the_same(tmp_path, served):
    codes, said = ranks("all live", tmp_path, served)
    assert codes == [0, 0, 0, 0]
    assert len({tuple(s["chosen"]) for s in said}) == 1
    assert sum(s["tunings"] for s in said) == 3
    assert sum(s["measured"] for s in said) == 3 and sum(s["adopted"] for s in said) == 9


def test_a_rank_that_dies_hangs_nobody(tmp_path):
    codes, said = ranks("dies", tmp_path)
    assert codes[0] == -9 and codes[1:] == [0, 0, 0]
    assert len({tuple(s["chosen"]) for s in said}) == 1
    assert sum(s["over"] for s in said) == 1 and sum(s["tunings"] for s in said) == 3


def test_the_rank_that_serves_the_store_dies(tmp_path):
    """The others measure for themselves."""
    codes, said = ranks("dies", tmp_path, served=True)
    assert codes[0] == -9 and codes[1:] == [0, 0, 0]
    assert all(len(s["chosen"]) == 3 and s["tunings"] == 3 for s in said)


def test_a_rank_that_fails_is_not_waited_for(tmp_path):
    """Its own error is its own; of the others one takes over at once, and they choose the same."""
    codes, said = ranks("fails", tmp_path)
    assert codes == [0, 0, 0, 0]
    assert said[0]["chosen"][0] == "nothing" and said[0]["chosen"][1:] == said[1]["chosen"][1:]
    assert len({tuple(s["chosen"]) for s in said[1:]}) == 1
    assert sum(s["over"] for s in said) == 1 and sum(s["tunings"] for s in said) == 3
