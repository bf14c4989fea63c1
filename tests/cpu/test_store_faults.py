"""Faults of the cache folder, each injected: the compilation succeeds with the right result,
nothing torn or foreign is ever loaded, and what was damaged is made again."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tilewright import caches, config, metrics
from tilewright.errors import TilewrightError
from tilewright.runtime import cxx, native, seal, store
from tilewright.testing import fresh_cache

X = torch.linspace(-3, 5, 1000)
KEY = "ab" * 20


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2 + x).exp().clamp(max=7)


def run(function: Any = program) -> None:
    """Compile as a new process would, and compare with eager."""
    torch._dynamo.reset()
    caches.clear()
    torch.testing.assert_close(torch.compile(function, backend="tilewright")(X), function(X))


def found(folder: Path, suffix: str) -> list[Path]:
    return sorted(f for f in folder.rglob(f"*{suffix}") if f.is_file())


@pytest.fixture
def folder():
    with fresh_cache() as folder:
        run()
        native.module()
        metrics.reset()
        yield folder


def replace(file: Path, data: bytes) -> None:
    """In its place, as another file: this process may have the one that is there in use."""
    draft = file.with_suffix(".harm")
    draft.write_bytes(data)
    draft.chmod(0o600)
    os.replace(draft, file)


def cut(file: Path) -> None:
    replace(file, file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    replace(file, bytes(data))


def empty(file: Path) -> None:
    replace(file, b"")


def garbage(file: Path) -> None:
    replace(file, b"\xff\xfe garbage \x80")


def in_the_way(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [cut, flip, empty, garbage, in_the_way])
@pytest.mark.parametrize("suffix", [".so", ".cxx", ".graph", ".captured"])
def test_a_damaged_file_is_dropped_and_made_again(folder, suffix, harm):
    damaged = [f for f in found(folder, suffix) if not f.name.endswith(".launch.so")]
    assert damaged
    for file in damaged:
        harm(file)
    run()
    if harm is not in_the_way:
        assert metrics.counters["store"]["dropped"] >= 1
    metrics.reset()
    run()
    assert metrics.counters["store"]["dropped"] == 0, "what was made again is whole"
    assert metrics.counters["capture"]["hit"] == 1


def python(text: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "TILEWRIGHT_CACHE_DIR": str(folder), **env},
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip


# what a new process does, with counts of what was not found
PROGRAM = """
import torch, logging
from tilewright import metrics
from tilewright.runtime import native, compilers
ran, before = [], compilers.run
def run(command, **kwargs):
    ran.append(command[0])
    return before(command, **kwargs)
compilers.run = run
def program(x):
    return (x.sin() * 2 + x).exp().clamp(max=7)
x = torch.linspace(-3, 5, 1000)
torch.testing.assert_close(torch.compile(program, backend="tilewright")(x), program(x))
print("compilers", len(ran), "native", native.module() is not None,
      "hits", metrics.cache_hits, "misses", metrics.cache_misses)
"""
WARM = "compilers 0 native True hits 1 misses 0"


def test_damaged_extension_modules_are_built_again(tmp_path):
    """A `.launch.so` that was cut short killed every later process."""
    cache = tmp_path / "cache"
    assert "misses 1" in python(PROGRAM, cache).stdout
    for harm in (cut, empty):
        (module,) = found(cache, ".launch.so")
        harm(module)
        done = python(PROGRAM, cache)
        assert "compilers 1 native True hits 1" in done.stdout, done.stderr
    assert python(PROGRAM, cache).stdout.strip() == WARM


def test_a_kernel_in_the_place_of_another_is_not_run(folder):
    """Both are whole and signed; only the names are not theirs."""
    run(lambda x: x.cos() * 3 - x)
    one, two = (f for f in found(folder, ".so") if not f.name.endswith(".launch.so"))
    data = one.read_bytes()
    replace(one, two.read_bytes())
    replace(two, data)
    run()
    run(lambda x: x.cos() * 3 - x)
    assert metrics.counters["store"]["dropped"] == 2


class Malice:
    done: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return Malice.done.append, ("executed",)


@pytest.mark.parametrize("suffix", [".graph", ".captured"])
def test_what_somebody_else_wrote_is_not_unpickled(folder, suffix):
    """Even with a seal: the signature is by a key that only this user can read."""
    for file in found(folder, suffix):
        replace(file, pickle.dumps(Malice()))
    run()
    for file in found(folder, suffix):
        replace(file, seal.sealed(pickle.dumps(Malice()), file.name, b"another key"))
    run()
    assert Malice.done == []


def test_folders_and_files_are_the_users_alone(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for part in folder.rglob("*"):
        private = stat.S_IMODE(part.stat().st_mode) & 0o077
        assert not private or part.suffix in (".cpp", ".db-shm", ".db-wal"), part
        assert not stat.S_IMODE(part.stat().st_mode) & 0o022


def test_a_folder_others_can_write_to_is_passed_over(tmp_path, caplog):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    with config.patch(cache_dir=str(shared)):
        run()
        assert store.root() != shared
    assert list(shared.iterdir()) == []
    (told,) = [r for r in caplog.records if "others can write to it" in r.getMessage()]
    assert f"chmod go-w {shared}" in told.getMessage()


def test_a_folder_of_another_user_is_passed_over(tmp_path, monkeypatch, caplog):
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    caches.clear()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with config.patch(cache_dir=str(theirs)):
        assert store._unusable_because(theirs, os.getpid()).startswith("it belongs to another user")
    caches.clear()
    assert list(theirs.iterdir()) == []


def test_no_home_folder(monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    caches.clear()
    with config.patch(cache_dir=None):
        run()
        assert store.root().name.startswith("tilewright-")
    assert any("there is no home folder" in r.getMessage() for r in caplog.records)
    caches.clear()


def test_a_full_disk_costs_what_is_kept_and_nothing_else(tmp_path, monkeypatch, caplog):
    """Neither what we write nor what a compiler writes fits in the cache folder."""
    cache = tmp_path / "cache"
    script = tmp_path / "g++"
    script.write_text(
        f"""#!/bin/sh
        for a in "$@"; do case "$a" in {cache}/*)
            echo "ld: final link failed: No space left on device" >&2; exit 1;; esac; done
        exec g++ "$@"
        """
    )
    script.chmod(0o700)
    write = store._write

    def full(draft: Path, data: bytes) -> None:
        if cache in draft.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(draft, data)

    monkeypatch.setattr(store, "_write", full)
    caches.clear()
    metrics.reset()
    with config.patch({"cache_dir": str(cache), "cpp.cxx": str(script)}):
        run()
        assert metrics.counters["store"]["not kept"] >= 1
        assert metrics.counters["store"]["built elsewhere"] >= 1
        assert found(cache, ".so") == []
    assert any("No space left" in r.getMessage() for r in caplog.records)


def test_where_no_disk_has_room_kernels_are_in_memory(tmp_path, monkeypatch):
    """The folder in memory may be one that nothing is executed from."""
    caches.clear()
    put = store.put_atomic

    def full(target: Path, content: Any, **kwargs: Any) -> Path:
        if not target.is_relative_to(store.MEMORY):
            raise store.unusable(target.parent, OSError()) from OSError(errno.ENOSPC, "full")
        return put(target, content, **kwargs)

    monkeypatch.setattr(store, "put_atomic", full)
    with config.patch(cache_dir=str(tmp_path / "cache")):
        text = 'extern "C" void k(long* out) { *out = 41; }'
        (kernel,) = cxx.build([cxx.CxxSource(text, "k", ("ptr",))])
        out = torch.zeros(1, dtype=torch.int64)
        kernel.function(out)
    assert out.item() == 41 and kernel.library.is_relative_to(store.MEMORY)
    caches.clear()


def test_libraries_are_loaded_where_nothing_may_be_executed(tmp_path, monkeypatch):
    """A home folder that is mounted `noexec`: the loader refuses whatever lies in it."""
    caches.clear()
    library, statvfs = ctypes.CDLL, os.statvfs

    def refusing(path: str) -> ctypes.CDLL:
        if Path(path).is_relative_to(tmp_path):
            raise OSError(f"{path}: failed to map segment from shared object")
        return library(path)

    def mounted(path: Path) -> Any:
        facts = statvfs(path)
        flags = facts.f_flag | (os.ST_NOEXEC if path.is_relative_to(tmp_path) else 0)
        return types.SimpleNamespace(f_flag=flags)

    monkeypatch.setattr(cxx.ctypes, "CDLL", refusing)
    monkeypatch.setattr(os, "statvfs", mounted)
    with config.patch(cache_dir=str(tmp_path / "cache")):
        run()
        assert len(found(tmp_path, ".so")) >= 1
        before = len(os.listdir("/proc/self/fd"))
        answers: list[int] = []
        for k in range(3):  # each is itself, and none keeps a file open
            out = torch.zeros(1, dtype=torch.int64)
            cxx.build([cxx.CxxSource(f'extern "C" void f(long *x) {{ *x = {k}; }}', "f", ("ptr",))
                       ])[0](out)  # fmt: skip
            answers.append(int(out))
        assert answers == [0, 1, 2]
        assert len(os.listdir("/proc/self/fd")) == before
    caches.clear()


def test_drafts_are_on_the_disk_before_they_are_renamed(folder, monkeypatch):
    did: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (did.append("sync"), sync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (did.append("rename"), replace(a, b))[1])
    store.put_atomic(store.path(KEY, ".bin"), b"data")
    assert did == ["sync", "rename"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "ab", "AB" * 20, KEY + "/x"])
def test_names_cannot_leave_the_store(folder, name):
    with pytest.raises(ValueError, match="no name of an artefact"):
        store.path(name, ".so")
    with pytest.raises(ValueError, match="no name of an artefact"):
        store.path(KEY, "/../../x")
    assert store.split(f"../{KEY}.so") is None and store.split(f"{KEY}.so") == (KEY, ".so")


def test_a_link_is_not_followed(folder, tmp_path):
    outside = tmp_path / "outside"
    target = store.path(KEY, ".bin")
    store.put_atomic(target, b"data")
    shutil.move(target, outside)
    target.symlink_to(outside)
    assert store.get(target) is None


def test_what_was_not_used_for_longest_is_forgotten(tmp_path):
    with config.patch(cache_dir=str(tmp_path / "c"), cache_max_bytes=10_000):
        caches.clear()
        names = [store.key("file", str(k)) for k in range(12)]
        for k, name in enumerate(names):
            put = store.put_atomic(store.path(name, ".bin"), bytes(1000))
            os.utime(put, (1_000_000 + k, 1_000_000 + k))
            if k >= 4:
                assert store.get(store.path(names[0], ".bin")) is not None  # it is in use
        left = {f.name for f, _ in store.files(store.root())}
        assert f"{names[0]}.bin" in left and f"{names[-1]}.bin" in left
        assert f"{names[1]}.bin" not in left
        assert sum(f.stat().st_size for f, _ in store.files(store.root())) <= 10_000
    caches.clear()


def test_a_clock_that_goes_backwards_loses_nothing(folder, monkeypatch):
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before - 10 * 86400)
    metrics.reset()
    run()
    run(lambda x: x.cosh() - 1)
    run(lambda x: x.cosh() - 1)
    assert metrics.counters["store"] == {}
    assert metrics.counters["capture"]["hit"] == 2


def test_read_only_folders_are_looked_into(tmp_path):
    """Somebody's image holds a cache; ours begins empty, and nothing is built."""
    image, own = tmp_path / "image", tmp_path / "own"
    caches.clear()
    with config.patch(cache_dir=str(image)):
        run()
        native.module()
    before = sorted(image.rglob("*"))
    with config.patch(cache_dir=str(own), cache_read_only_dirs=str(image)):
        metrics.reset()
        run()
        assert metrics.cache_misses == 0 and metrics.counters["capture"]["hit"] == 1
        assert found(own, ".so") == found(own, ".graph") == []
        for file in found(image, ".so"):
            cut(file)
        run()  # damaged there: it is built here
        assert len(found(own, ".so")) >= 1
    assert sorted(image.rglob("*")) == before
    image.chmod(0o777)
    with config.patch(cache_dir=str(tmp_path / "third"), cache_read_only_dirs=str(image)):
        caches.clear()
        assert store.layers() == []
    caches.clear()


def test_a_key_that_is_lost_costs_what_it_signed(folder):
    (folder / ".key").unlink()
    run()
    assert metrics.counters["store"]["dropped"] >= 3
    metrics.reset()
    run()
    assert metrics.counters["store"]["dropped"] == 0


FORMS = {
    "a folder": Path.mkdir,
    "a pipe": lambda key: os.mkfifo(key, 0o600),
    "a link to itself": lambda key: key.symlink_to(key),
    "a link to another": lambda key: key.symlink_to("/etc/hostname"),
    "too short": lambda key: key.write_bytes(b"short"),
    "readable by others": lambda key: (key.write_bytes(bytes(32)), key.chmod(0o644)),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_key_makes_way_for_one(tmp_path, form):
    caches.clear()
    with config.patch(cache_dir=str(tmp_path)):
        file = store.path(store.key("x"), ".graph")
        assert store.keep(file, b"before")
        (tmp_path / ".key").unlink()
        FORMS[form](tmp_path / ".key")
        assert store.keep(file, b"after") and store.get(file) == b"after"
        caches.clear()
        assert store.root() == tmp_path and store.get(file) == b"after"
    caches.clear()


def test_a_folder_that_goes_away_costs_what_is_kept(tmp_path, caplog):
    caches.clear()
    with config.patch(cache_dir=str(tmp_path / "cache")):
        assert store.root() == tmp_path / "cache"
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("a file in its place")
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(X), program(X))
        assert store.root() != tmp_path / "cache"
    assert "cannot be made again" in caplog.text
    caches.clear()


def test_nowhere_to_write_is_an_error_that_says_so(monkeypatch):
    caches.clear()
    monkeypatch.setattr(store, "_temporary", no_room)
    store._private_root.cache_clear()
    store._memory_root.cache_clear()
    refused = pytest.raises(TilewrightError, match="no place for what is built")
    with config.patch(force_disable_caches=True), refused as raised:
        store.root()
    assert "set config.cache_dir" in str(raised.value)


def no_room(where: str | None) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("taken", [0o777, 0o177, 0o000])
def test_an_unusual_umask_takes_nothing_from_the_owner(tmp_path, taken):
    caches.clear()
    before = os.umask(taken)
    try:
        with config.patch(cache_dir=str(tmp_path / "in" / "cache")):
            run()
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in found(tmp_path, "")}
    assert modes == {0o600}
    folders = [p for p in (tmp_path / "in").rglob("*") if p.is_dir()]
    assert folders and {p.stat().st_mode & 0o777 for p in folders} == {0o700}
    assert (tmp_path / "in").stat().st_mode & 0o777 == 0o700
    caches.clear()


def test_two_machines_with_processes_of_one_number_write_drafts_of_their_own(folder, monkeypatch):
    """Two containers that share a folder: both have a process 1, at the same artefact."""
    seen: list[str] = []

    def note(draft: Path) -> None:
        seen.append(draft.name)
        draft.write_bytes(b"x")

    for _ in range(2):
        monkeypatch.setattr(store, "_serial", itertools.count())
        store._own_name.cache_clear()
        store.put_atomic(store.path(store.key("x"), ".graph"), note)
    assert len(set(seen)) == 2


def test_another_home_install_path_and_no_compiler(tmp_path):
    """One cache: filled here, used by a copy of the package elsewhere, with another home, without
    g++ on the PATH."""
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    assert "misses 1" in python(PROGRAM, cache).stdout
    source = Path(cxx.__file__).parents[2]
    shutil.copytree(source / "tilewright", copy / "tilewright",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    bare = tmp_path / "bin"
    bare.mkdir()
    done = python(PROGRAM, cache, HOME=str(tmp_path / "home"), PATH=str(bare),
                  PYTHONPATH=os.pathsep.join([str(copy), *sys.path]))  # fmt: skip
    assert done.stdout.strip() == WARM, done.stderr
    other = python(PROGRAM.replace("* 2 + x", "* 3 + x"), cache, PATH=str(bare))
    assert "no C++ compiler: 'g++' is not on the PATH" in other.stderr
    assert "apt install g++" in other.stderr


def test_a_miss_says_which_part_differed(folder, caplog):
    caplog.set_level(logging.INFO, "tilewright.generate")
    torch._dynamo.reset()
    caches.clear()
    torch.compile(program, backend="tilewright", options={"max_fusion_size": 17})(X)
    told = "missed: option max_fusion_size 64 -> 17"
    assert metrics.counters["graph_cache"] == {told: 1}
    assert any("max_fusion_size 64 -> 17" in r.getMessage() for r in caplog.records)


def test_caches_can_be_forbidden(tmp_path):
    with config.patch(cache_dir=str(tmp_path / "c"), force_disable_caches=True):
        run()
        run()
        assert metrics.counters["capture"]["hit"] == 0
    assert not (tmp_path / "c").exists()


def test_a_writer_that_is_killed_leaves_nothing_torn(tmp_path):
    """SIGKILL at any moment of writing the same files again and again."""
    script = """
    import os, sys
    from tilewright.runtime import store
    print("ready", flush=True)
    for k in range(10**9):
        store.put_atomic(store.path(store.key(str(k % 7)), ".bin"), bytes([k % 7]) * 200_000)
    """
    env = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "c")}
    for k in range(4):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=env,
                                   stdout=subprocess.PIPE)  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.03 * k)
        process.kill()
        process.wait()
    caches.clear()
    with config.patch(cache_dir=str(tmp_path / "c")):
        metrics.reset()
        for k in range(7):
            data = store.get(store.path(store.key(str(k)), ".bin"))
            assert data is None or data == bytes([k]) * 200_000
        assert metrics.counters["store"] == {}
    caches.clear()


def test_a_temporary_folder_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with config.patch(cache_dir=str(tmp_path / "c")):
        run()
    caches.clear()
