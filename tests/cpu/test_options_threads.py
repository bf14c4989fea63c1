"""Options belong to the context that sets them: no thread sees another's, and a backward graph has
those of its forward, wherever it is compiled."""

from __future__ import annotations

import concurrent.futures
import contextvars
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from tilewright import config
from tilewright.errors import InvalidOptionError
from tilewright.testing import fresh_cache


def in_thread(work):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_patch_is_of_the_context_that_entered_it():
    with config.patch({"cpp.threads": 2}, max_fusion_size=17):
        assert in_thread(lambda: (config.cpp.threads, config.max_fusion_size)) == (-1, 64)
        here = contextvars.copy_context()
        assert in_thread(lambda: here.run(lambda: config.max_fusion_size)) == 17
        assert (config.cpp.threads, config.max_fusion_size) == (2, 17)


def test_an_assignment_is_of_the_process():
    before = config.realize_opcount_threshold
    try:
        config.realize_opcount_threshold = 31
        assert in_thread(lambda: config.realize_opcount_threshold) == 31
    finally:
        config.realize_opcount_threshold = before


def test_an_assignment_inside_a_patch_ends_with_it():
    with config.patch(max_fusion_size=3):
        config.max_fusion_size = 4
        assert config.max_fusion_size == 4
        assert in_thread(lambda: config.max_fusion_size) == 64
    assert config.max_fusion_size == 64


def test_a_patch_that_ends_before_an_inner_one():
    outer, inner = config.patch(max_fusion_size=3, debug=1), config.patch(max_fusion_size=4)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    assert (config.max_fusion_size, config.debug) == (4, 0)
    inner.__exit__()
    assert config.max_fusion_size == 64


def test_threads_share_one_patch_object():
    """A decorated function may run in several threads at once."""
    met = threading.Barrier(4, timeout=30)

    @config.patch(max_fusion_size=5)
    def work():
        met.wait()
        found = config.max_fusion_size
        met.wait()
        return found

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [f.result() for f in [pool.submit(work) for _ in range(4)]] == [5] * 4
    assert config.max_fusion_size == 64


@pytest.mark.parametrize("count", [0, -2, 1_000_000])
def test_a_number_of_threads_that_cannot_be(count):
    with pytest.raises(InvalidOptionError, match=r"as many as torch uses.*on this machine"):
        config.patch("cpp.threads", count)


def test_threads_with_options_of_their_own_train():
    """Eight threads, each with its options, forward and backward: values are eager's, nothing is
    left behind, and every artefact is under the key of the options it was made with."""
    before = config.snapshot()

    def train(k: int) -> tuple[float, set[int]]:
        sizes: set[int] = set()

        def f(x, w):
            return (torch.tanh(x @ w) * (k + 1) + x.sum(0, keepdim=True)).relu().mean()

        options = {"max_fusion_size": 1 + k, "realize_opcount_threshold": 20 + k}
        g = torch.Generator().manual_seed(k)
        x, w = torch.randn(9 + k, 5, generator=g), torch.randn(5, 5, generator=g)
        a, b = (x.clone().requires_grad_(), w.clone().requires_grad_()), None
        torch.compile(f, backend="tilewright", options=options)(*a).backward()
        b = x.clone().requires_grad_(), w.clone().requires_grad_()
        f(*b).backward()
        sizes.add(config.max_fusion_size)
        return max(float((p.grad - q.grad).abs().max()) for p, q in zip(a, b, strict=True)), sizes

    with fresh_cache(), concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(train, k) for k in range(8)]:
            error, sizes = future.result()
            assert error < 1e-5
            assert sizes == {64}
    assert config.snapshot() == before


def test_a_backward_graph_has_the_options_of_its_forward(monkeypatch):
    from tilewright import backend

    seen: list[tuple[str, int]] = []
    compile_graph = backend.compile_graph

    def spy(gm, boundary):
        seen.append((boundary.role, config.max_fusion_size))
        return compile_graph(gm, boundary)

    with fresh_cache():
        # under its own name: captures are kept for the real one alone
        monkeypatch.setattr(backend, "compile_graph", spy)
        x = torch.randn(7, 3, requires_grad=True)
        y = torch.compile(lambda t: (t.sin() * 2).sum(), backend="tilewright",
                          options={"max_fusion_size": 9})(x)  # fmt: skip
        with config.patch(max_fusion_size=3):
            in_thread(y.backward)
    assert seen == [("forward", 9), ("backward", 9)]


FIRST_IN_THREADS = """
import threading, torch
found, failed = [], []
start = threading.Barrier(8)
def work(k):
    try:
        start.wait()
        x = torch.arange(10.0 + k)
        y = torch.compile(lambda t: t * 2 + k, backend="tilewright")(x)
        found.append(torch.equal(y, x * 2 + k))
    except BaseException as error:
        failed.append(repr(error))
threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(found.count(True), failed)
"""

FORKED = """
import torch
from torch.utils.data import DataLoader, Dataset
double = torch.compile(lambda t: (t * 2).sin() + t.sum(), backend="tilewright",
                       options={"cpp.threads": 2})
x = torch.randint(-8, 8, (40000,)).float()  # whose sum is exact, in whatever order
expected = (x * 2).sin() + x.sum()
torch.testing.assert_close(double(x), expected)
class Data(Dataset):
    def __len__(self): return 2
    def __getitem__(self, k): return double(x)
for y in DataLoader(Data(), batch_size=None, num_workers=1, timeout=60,
                    multiprocessing_context="fork"):
    torch.testing.assert_close(y, expected)
print("done")
"""


def python(text: str, tmp_path) -> str:
    env = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], env=env, timeout=110,
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.stdout.strip() or done.stderr


def test_the_first_compilation_may_be_in_many_threads(tmp_path):
    assert python(FIRST_IN_THREADS, tmp_path) == "8 []"


def test_kernels_with_threads_run_in_a_forked_worker(tmp_path):
    assert python(FORKED, tmp_path) == "done"
