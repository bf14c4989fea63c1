"""Programs compiled ahead of time, written to a file and read by another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewright import config
from tilewright.errors import TilewrightError
from tilewright.runtime import native

LOAD = """
import sys, torch
from tilewright import metrics
with open(sys.argv[1], "rb") as file:
    f = torch.compiler.load_compiled_function(file)
x, w, wanted, gradient = torch.load(sys.argv[2])
w.requires_grad_(gradient is not None)
found = f(x, w)
torch.testing.assert_close(found.detach(), wanted)
if gradient is not None:
    found.sum().backward()
    torch.testing.assert_close(w.grad, gradient)
print(metrics.cache_misses)
"""


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    with torch._dynamo.config.patch(enable_aot_compile=True):  # as it is since torch 2.12
        yield


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.sin() @ w, dim=-1) * w.cos().sum()


@pytest.mark.parametrize(("train", "cached"), [(False, True), (True, True), (True, False)])
def test_a_saved_program_runs_in_another_process(tmp_path: Path, train: bool, cached: bool):
    x, w = torch.randn(7, 5), torch.randn(5, 9, requires_grad=train)
    with config.patch(force_disable_caches=not cached):
        compiled = torch.compile(program, backend="tilewright", fullgraph=True)
        ahead = compiled.aot_compile(((x, w), {}))
    wanted = program(x, w)
    torch.testing.assert_close(ahead(x, w), wanted)
    gradient = torch.autograd.grad(wanted.sum(), w)[0] if train else None
    ahead.save_compiled_function(str(tmp_path / "program"))
    torch.save((x, w.detach(), wanted.detach(), gradient), tmp_path / "values")
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path / "program", tmp_path / "values"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"]  # nothing is compiled from a graph again


def test_a_saved_program_with_dynamic_sizes_takes_other_sizes(tmp_path: Path):
    x, w = torch.randn(7, 5), torch.randn(5, 9)
    torch._dynamo.mark_dynamic(x, 0)
    ahead = torch.compile(program, backend="tilewright", fullgraph=True).aot_compile(((x, w), {}))
    path = tmp_path / "program"
    ahead.save_compiled_function(str(path))
    with path.open("rb") as file:
        again = torch.compiler.load_compiled_function(file)
    for n in (7, 4, 31):
        x = torch.randn(n, 5)
        torch.testing.assert_close(again(x, w), program(x, w))
    with pytest.raises(RuntimeError, match="GuardManager check failed"):
        again(torch.randn(7, 5, dtype=torch.float64), w)


def test_a_program_that_cannot_be_saved_runs_and_says_why(tmp_path: Path):
    x = torch.randn(6)

    def shares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1

    ahead = torch.compile(shares, backend="tilewright", fullgraph=True).aot_compile(
        ((x[:4], x[1:5]), {})
    )
    wanted = x.clone()
    torch.testing.assert_close(ahead(x[:4], x[1:5]), shares(wanted[:4], wanted[1:5]))
    with pytest.raises(TilewrightError, match="cannot be saved: inputs that"):
        ahead.save_compiled_function(str(tmp_path / "program"))


def test_what_dynamo_calls_has_the_code_of_its_program():
    """Tools that show what became of a function (depyf) look for it there."""
    program = native.module()
    assert program is not None
    assert program.Entry(test_what_dynamo_calls_has_the_code_of_its_program).__code__.co_name == (
        "test_what_dynamo_calls_has_the_code_of_its_program"
    )
    with pytest.raises(AttributeError, match="__code__"):
        assert program.Entry(len).__code__
