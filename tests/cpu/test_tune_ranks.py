"""Ranks of a distributed job: each problem is tuned once, all take the same choice, and a rank that
dies hangs nobody. Ranks are forks of one process that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RANKS = """
import json, os, signal, sys, tempfile, time
import torch, torch.distributed as dist
from tilewright import config, metrics
from tests.cpu.fake_trials import Fake, FakeClock, aten, subject
from tilewright.tune import clock, ranks, select

how, folder, world, problems = sys.argv[1], sys.argv[2], 4, 3

def work(rank):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=world)
    config.cache_dir = f"{folder}/cache{rank}"
    config.autotune_rank_timeout_seconds = 1.5
    clock.of = lambda device: FakeClock()
    if how == "dies" and rank == 0:
        measured = select._Tuning._measured
        def dies(self, order):
            os.kill(os.getpid(), signal.SIGKILL)
        select._Tuning._measured = dies
    elif how == "dies":
        time.sleep(0.5)
    chosen = []
    for k in range(problems):
        # every rank would find another winner
        trials = [aten(100.0), *(Fake(f"t{j}", 50.0 + (j - rank) % world) for j in range(world))]
        chosen.append(select.choose(subject(f"problem {k}"), trials).winner.name)
    counts = metrics.counters["ranks"]
    said = {"chosen": chosen, "measured": counts["measured"], "adopted": counts["adopted"],
            "over": counts["taken over"],
            "tunings": metrics.counters["inductor"]["select_algorithm_autotune"]}
    open(f"{folder}/{rank}.json", "w").write(json.dumps(said))

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


def ranks(how: str, folder: Path) -> tuple[list[int], list[dict[str, object]]]:
    done = subprocess.run([sys.executable, "-c", RANKS, how, str(folder)], capture_output=True,
                          text=True, timeout=110, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout, done.stderr
    said = [json.loads(f.read_text()) for f in sorted(folder.glob("?.json"))]
    return json.loads(done.stdout), said


def test_four_ranks_tune_each_problem_once_and_choose_the_same(tmp_path):
    codes, said = ranks("all live", tmp_path)
    assert codes == [0, 0, 0, 0]
    assert len({tuple(s["chosen"]) for s in said}) == 1
    assert sum(s["tunings"] for s in said) == 3
    assert sum(s["measured"] for s in said) == 3 and sum(s["adopted"] for s in said) == 9


def test_a_rank_that_dies_hangs_nobody(tmp_path):
    codes, said = ranks("dies", tmp_path)
    assert codes[0] == -9 and codes[1:] == [0, 0, 0]
    assert len({tuple(s["chosen"]) for s in said}) == 1
    assert sum(s["over"] for s in said) == 1 and sum(s["tunings"] for s in said) == 3
