"""Nothing is compiled twice: not in this process, not in the next."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright import config, metrics
from tilewright.graph.boundary import EVERYTHING
from tilewright.host import artifact
from tilewright.testing import fresh_cache

SCRIPT = """
import json, torch
from tilewright import metrics
from tilewright.runtime import compilers

started = []
run = compilers.run
def spy(command, *args, **kwargs):
    started.append(command)
    return run(command, *args, **kwargs)
compilers.run = spy

def f(x, w):
    return (torch.nn.functional.layer_norm(x, (16,), w) * 2).sum(), x.gelu() if False else x.tanh()

x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)
torch.manual_seed(0)
total, _ = torch.compile(f, backend="tilewright")(x, w)
total.backward()
print(json.dumps({
    "compilers": len([c for c in started if "-x" in c]), "hits": metrics.cache_hits,
    "misses": metrics.cache_misses, "kernels": metrics.generated_kernel_count,
    "bytes": metrics.num_bytes_accessed, "native": metrics.native_nodes,
}))
"""


def run_script() -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing_and_counts_the_same(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    first, second = run_script(), run_script()
    assert first["misses"] == 2 and first["hits"] == 0 and first["compilers"] > 0
    assert second["misses"] == 0 and second["hits"] == 2 and second["compilers"] == 0
    for name in ("kernels", "bytes", "native"):
        assert first[name] == second[name] > 0


def scaled(x: Tensor) -> Tensor:
    return x.exp() * 3


def compile_again(function: Any, *args: Any, **how: Any) -> tuple[int, int]:
    """(hits, misses) of one compilation from a fresh dynamo."""
    torch._dynamo.reset()
    metrics.reset()
    out = torch.compile(function, backend="tilewright", **how)(*args)
    torch.testing.assert_close(out, function(*args))
    return metrics.cache_hits, metrics.cache_misses


def test_what_matters_to_the_code_is_in_the_key() -> None:
    x = torch.randn(6, 8)
    with fresh_cache():
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(scaled, x) == (1, 0)
        assert compile_again(scaled, torch.randn(6, 9)) == (0, 1)
        assert compile_again(scaled, x.double()) == (0, 1)
        assert compile_again(scaled, torch.randn(8, 6).t()) == (0, 1)
        assert compile_again(scaled, x, dynamic=True) == (0, 1)
        assert compile_again(lambda t: t.exp() * 4, x) == (0, 1)
        assert compile_again(scaled, x, options={"cpp.simdlen": 1}) == (0, 1)


def test_the_place_in_the_file_is_not_in_the_key() -> None:
    x = torch.randn(6, 8)

    def elsewhere(x: Tensor) -> Tensor:
        return x.exp() * 3

    with fresh_cache():
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(elsewhere, x) == (1, 0)


def test_an_error_from_a_cached_program_names_the_current_line() -> None:
    def first(x: Tensor, i: Tensor) -> Tensor:
        return x[i] + 1

    def second(x: Tensor, i: Tensor) -> Tensor:
        return x[i] + 1

    x, good, bad = torch.randn(5), torch.tensor([0, 4]), torch.tensor([0, 5])
    with fresh_cache():
        compile_again(first, x, good)
        torch._dynamo.reset()
        metrics.reset()
        call = torch.compile(second, backend="tilewright")
        call(x, good)
        assert metrics.cache_hits == 1
        with pytest.raises(
            IndexError, match=f"test_graph_cache.py:{second.__code__.co_firstlineno + 1}"
        ):
            call(x, bad)


def test_constants_are_told_apart_by_their_values() -> None:
    x = torch.randn(3)
    with fresh_cache():
        assert compile_again(lambda t: t + torch.tensor([1.0, 2.0, 3.0]), x) == (0, 1)
        assert compile_again(lambda t: t + torch.tensor([1.0, 2.0, 4.0]), x) == (0, 1)
        assert compile_again(lambda t: t + torch.tensor([1.0, 2.0, 3.0]), x)[1] == 0


def test_the_cache_can_be_switched_off() -> None:
    x = torch.randn(6, 8)
    with fresh_cache(), config.patch(fx_graph_cache=False):
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(scaled, x) == (0, 1)


def test_a_damaged_entry_is_compiled_anew() -> None:
    x = torch.randn(6, 8)
    with fresh_cache() as folder:
        assert compile_again(scaled, x) == (0, 1)
        (entry,) = folder.rglob("*.graph")
        entry.write_bytes(b"not a pickle")
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(scaled, x) == (1, 0)


def test_the_same_graph_in_another_role_is_another_artefact() -> None:
    graph = torch.fx.Graph()
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    roles = [replace(EVERYTHING, role=role) for role in ("inference", "backward")]
    assert len({artifact.key(gm, boundary) for boundary in roles}) == 2
