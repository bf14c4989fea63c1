"""Importing the package is cheap, and the package is what its metadata says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib

import tilewright


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_tilewright_imports_neither_torch_nor_triton():
    code = "import sys, tilewright; print([m for m in ('torch', 'triton') if m in sys.modules])"
    assert run(code) == "[]"


def test_a_process_that_times_starts_without_torch():
    """In a tenth of a second: torch comes with the first candidate."""
    assert run("import sys, tilewright.tune.child; print('torch' in sys.modules)") == "False"


def test_importing_the_backend_does_not_import_triton():
    # torch's front end may import triton by itself; what counts is what we add to it.
    code = (
        "import sys, torch, torch._dynamo, torch._functorch.aot_autograd\n"
        "before = 'triton' in sys.modules\n"
        "import tilewright.backend\n"
        "print(before or 'triton' not in sys.modules)"
    )
    assert run(code) == "True"


def test_torch_finds_the_backend_by_its_entry_point():
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="tilewright")
    assert entry.value == "tilewright.backend:compile_fx"
    assert callable(entry.load())


def test_version_is_the_same_everywhere(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert tilewright.__version__ == project["version"] == importlib.metadata.version("tilewright")


def test_requirements_leave_room_for_torchs_own_triton_pin(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if "==" in line.partition(";")[0]]
    constraints = (root / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in constraints
    assert not any(line.startswith("triton") for line in constraints)
