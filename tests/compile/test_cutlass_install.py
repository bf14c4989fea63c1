"""Finding CUTLASS, its key, the architecture, the toolkit and nvcc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewright import caches, config
from tilewright.gemm.cutlass import install
from tilewright.gemm.provider import PROVIDERS
from tilewright.runtime import nvcc
from tilewright.testing import fresh_cache


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    install._root.cache_clear()
    install._imported.cache_clear()
    install._key.cache_clear()
    yield
    caches.clear()


def child(script: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_cu_a1_the_wheel_is_importable() -> None:
    script = """
from tilewright.gemm.cutlass.install import try_import_cutlass
assert try_import_cutlass() is True
import cutlass_library.generator, cutlass_library.library, cutlass_library.manifest
import cutlass_library.gemm_operation, pycute, importlib.util
assert importlib.util.find_spec("cutlass_cppgen") is not None
"""
    done = child(script)
    assert done.returncode == 0, done.stderr


def test_cu_a2_what_is_found_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-A2: for the process; nothing is looked for again."""
    assert install.try_import_cutlass() is True
    monkeypatch.setattr(install, "_root", lambda named: pytest.fail("it is looked for again"))
    assert install.try_import_cutlass() is True


def test_cu_a2_nothing_found_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CU-A2: and the provider says how to get it."""
    monkeypatch.setattr(install, "_wheel", lambda: None)
    with caplog.at_level("WARNING"):
        assert install.try_import_cutlass() is False
        assert install.try_import_cutlass() is False
    said = [r.message for r in caplog.records if "CUTLASS" in r.message]
    assert len(said) == 1 and "cuda.cutlass_dir" in said[0] and "pip install" in said[0]


def test_cu_a3_both_halves_come_from_one_place(tmp_path: Path) -> None:
    """CU-A3: a folder that is no checkout is not half used."""
    wheel = install.root()
    assert wheel is not None
    (tmp_path / "include").mkdir()
    with config.patch({"cuda.cutlass_dir": str(tmp_path)}):
        assert install.root() == wheel
    package = tmp_path / "python" / "cutlass_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("mine = 1\n")
    install._root.cache_clear()
    script = f"""
from tilewright import config
from tilewright.gemm.cutlass import install
import cutlass_library
with config.patch({{"cuda.cutlass_dir": {str(tmp_path)!r}}}):
    assert install.try_import_cutlass()
    import cutlass_library
    assert cutlass_library.mine == 1
    assert all(p.startswith({str(tmp_path)!r}) for p in install.include_paths())
assert install.try_import_cutlass()
library = install.module("library")
assert not hasattr(library, "mine") and hasattr(library, "DataType")
"""
    done = child(script)
    assert done.returncode == 0, done.stderr


def test_cu_a4_optional_packages_are_not_needed() -> None:
    script = """
import sys
for name in ("cuda", "scipy", "pydot", "treelib", "rmm", "cupy"):
    sys.modules[name] = None
from tilewright.gemm.cutlass import install, operations
assert install.try_import_cutlass()
assert operations.operations(90, "13.0")
"""
    done = child(script)
    assert done.returncode == 0, done.stderr


def test_cu_a5_nothing_is_left_in_the_users_folder(tmp_path: Path) -> None:
    script = """
from tilewright import config
from tilewright.gemm.cutlass import install, operations
assert install.try_import_cutlass() and operations.operations(90, "13.0")
"""
    tmp_path.chmod(0o555)
    try:
        done = child(script, tmp_path)
        assert done.returncode == 0, done.stderr
        assert not list(tmp_path.iterdir())
    finally:
        tmp_path.chmod(0o755)


def test_cu_a6_the_key_is_of_every_file(tmp_path: Path) -> None:
    assert len(install.cutlass_key()) == 40
    script = "from tilewright.gemm.cutlass import install; print(install.cutlass_key().decode())"
    assert child(script).stdout.strip() == install.cutlass_key().decode()
    package = tmp_path / "python" / "cutlass_library"
    package.mkdir(parents=True)
    header = tmp_path / "include" / "cutlass" / "cutlass.h"
    header.parent.mkdir(parents=True)
    seen: set[bytes] = set()
    for file in (package / "__init__.py", header, header.with_name("x.hpp")):
        file.write_text("a")
        with config.patch({"cuda.cutlass_dir": str(tmp_path)}):
            install._root.cache_clear()
            install._key.cache_clear()
            seen.add(install.cutlass_key())
            file.write_text("b")
            install._key.cache_clear()
            seen.add(install.cutlass_key())
    assert len(seen) == 6


def test_cu_a7_folders_have_no_links(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "python" / "cutlass_library").mkdir(parents=True)
    (real / "include").mkdir()
    (tmp_path / "link").symlink_to(real)
    with config.patch({"cuda.cutlass_dir": str(tmp_path / "link")}):
        found = install.include_paths()
    assert found == tuple(
        str(real / p)
        for p in ("include", "tools/library/include", "tools/library/src", "tools/util/include")
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("70", 70),
        ("74", 70),
        ("75", 75),
        ("79", 75),
        ("80", 80),
        ("sm_89", 80),
        ("90", 90),
        ("90a", 90),
        ("sm_90a", 90),
        ("99", 90),
        ("100", 100),
        ("102", 100),
        ("103", 103),
    ],
)
def test_cu_a8_architectures(text: str, number: int) -> None:
    assert install.normalized(text) == number


def test_cu_a8_odd_architectures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert install.normalized("120") == 120
    assert "sm_120" in caplog.text
    with pytest.raises(NotImplementedError, match="sm_61"):
        install.normalized("61")
    with pytest.raises(ValueError, match="names no architecture"):
        install.normalized("hopper")
    with config.patch({"cuda.arch": "sm_90a"}):
        assert install.architecture() == 90


def test_cu_a9_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.patch({"cuda.version": "12.4.0"}):
        assert install.version() == "12.4"
    monkeypatch.setattr(torch.version, "cuda", "12.8.1")
    assert install.version() == "12.8"


def test_cu_a10_where_nvcc_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str) -> str:
        file = tmp_path / name / "bin" / "nvcc"
        file.parent.mkdir(parents=True)
        file.write_text("")
        file.chmod(0o755)
        return str(file)

    path, home, cxx, named = (fake(n) for n in ("path", "home", "cxx", "named"))
    for name in ("CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.path.dirname(path))
    assert nvcc.find() == path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert nvcc.find() == home
    monkeypatch.setenv("CUDACXX", cxx)
    assert nvcc.find() == cxx
    with config.patch({"cuda.cuda_cxx": named}):
        assert nvcc.find() == named
    with config.patch({"cuda.cuda_cxx": "/nowhere/nvcc"}):
        assert nvcc.find() == cxx
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    assert nvcc.find() == home


def test_no_nvcc_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider is off, and says what to install."""
    from tests.compile.cutlass import ON
    from tests.products import problem

    made = problem(
        "mm", torch.empty(128, 64, dtype=torch.half), torch.empty(64, 128, dtype=torch.half)
    )
    with fresh_cache(), config.patch(ON):
        monkeypatch.setattr(nvcc, "find", lambda: "")
        reason = PROVIDERS["CUTLASS"].supports(made.problem)
        assert "nvcc" in reason and "install the CUDA toolkit" in reason and "\n" not in reason
        monkeypatch.setattr(install, "try_import_cutlass", lambda: False)
        reason = PROVIDERS["CUTLASS"].supports(made.problem)
        assert "pip install" in reason and "\n" not in reason


@pytest.mark.parametrize("first", ["cutlass", "cutlass_library"])
def test_cu_a11_cute_dsl_lives_beside_it(first: str) -> None:
    script = f"""
import {first}
from tilewright.gemm.cutlass import install
assert install.try_import_cutlass()
assert install.module("library").DataType
import cutlass, cutlass_library
assert hasattr(cutlass, "cute")
"""
    done = child(script)
    assert done.returncode == 0, done.stderr
