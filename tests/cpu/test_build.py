"""Building kernels and keeping them: hits, errors, many processes, and a cache that goes away."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tilewright import caches, config
from tilewright.errors import BuildError
from tilewright.runtime import compilers, cxx, store

SCALE = """#include "tw.h"
extern "C" void {name}(const float* __restrict x, float* __restrict o, int64_t n, double by) {{
    #pragma omp parallel for simd
    for (int64_t i = 0; i < n; ++i) o[i] = tw::mul(x[i], float(by)) + {constant};
}}"""
ARGS: tuple[cxx.ArgKind, ...] = ("ptr", "ptr", "int", "float")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    caches.clear()
    with config.patch(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"
    caches.clear()


def source(constant: float = 1.0, name: str = "scale") -> cxx.CxxSource:
    return cxx.CxxSource(SCALE.format(constant=constant, name=name), name, ARGS)


def check(kernel: cxx.Loaded, constant: float = 1.0) -> None:
    x = torch.arange(1000, dtype=torch.float32)
    out = torch.empty_like(x)
    kernel(x.data_ptr(), out.data_ptr(), x.numel(), 2.0)
    assert torch.equal(out, 2 * x + constant)


def forbid_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(cxx, "_run", refuse)


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-g++"
    path.write_text(f'#!/bin/sh\n{textwrap.dedent(script)}\nexec g++ "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# ----------------------------------------------------------------------------------------- building


def test_builds_and_runs() -> None:
    kernels = cxx.build([source(1.0), source(2.0), source(3.0)])
    for kernel, constant in zip(kernels, (1.0, 2.0, 3.0), strict=True):
        check(kernel, constant)
        assert kernel.name == "scale" and kernel.address != 0
        assert str(constant) in kernel.source.read_text()


def test_equal_sources_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    run = cxx._run  # pyright: ignore[reportPrivateUsage]

    def count(wanted: cxx.CxxSource, *rest: object) -> None:
        built.append(wanted.text)
        run(wanted, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cxx, "_run", count)
    first, second, other = cxx.build([source(), source(), source(5.0)])
    assert first is second and other is not first
    assert len(built) == 2


def test_kernels_come_out_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    cxx.build([source()])
    caches.clear()
    forbid_compiler(monkeypatch)
    check(cxx.build([source()])[0])


def test_flags_text_and_headers_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = source()
    scalar = cxx.CxxSource(plain.text, plain.name, ARGS, flags=())
    libraries = {kernel.library for kernel in cxx.build([plain, scalar, source(9.0)])}
    monkeypatch.setattr(cxx, "_headers", lambda: "another tw.h")
    libraries.add(cxx.build([plain])[0].library)
    assert len(libraries) == 4


def test_another_version_of_the_compiler_builds_again(tmp_path: Path) -> None:
    libraries: set[Path] = set()
    for version in ("12.2", "12.3"):
        compiler = fake_compiler(tmp_path, f'[ "$1" != --version ] || exec echo g++ {version}')
        caches.clear()  # as another process would find it
        with config.patch({"cpp.cxx": compiler}):
            libraries.add(cxx.build([source()])[0].library)
    assert len(libraries) == 2


def test_submit_returns_before_the_compiler_does(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f'[ "$1" = --version ] || while [ ! -e {gate} ]; do sleep 0.01; done'
    with config.patch({"cpp.cxx": fake_compiler(tmp_path, script)}):
        pending = cxx.submit([source()])
        assert not pending.done()
        gate.touch()
        check(pending.result()[0])
        assert pending.done()


def test_one_openmp_runtime() -> None:
    """Torch's and ours must be the same library, or every parallel loop has two thread pools."""
    script = f"""
    import torch
    from tilewright.runtime import cxx
    text = {SCALE.format(constant=1.0, name="scale")!r}
    kernel = cxx.build([cxx.CxxSource(text, "scale", {ARGS!r})])[0]
    x, out = torch.ones(100000), torch.empty(100000)
    (x + 1).sum()
    kernel(x.data_ptr(), out.data_ptr(), 100000, 2.0)
    maps = open("/proc/self/maps").read().split()
    print(len({{f for f in maps if "libgomp" in f or "libiomp" in f or "libomp" in f}}))
    """
    done = python(script)
    assert done.stdout.strip() == "1", done.stderr


def python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _preamble() + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _preamble() -> str:
    return f"from tilewright import config\nconfig.cache_dir = {str(config.cache_root())!r}\n"


# ------------------------------------------------------------------------------------------- errors


def test_a_refused_source_names_command_and_file() -> None:
    broken = cxx.CxxSource("this is not C++;", "nothing", ())
    with pytest.raises(BuildError, match="refused the kernel nothing") as caught:
        cxx.build([broken])
    text = str(caught.value)
    assert "error:" in caught.value.stderr and "-O3" in caught.value.command
    written = next(word for word in text.split() if word.endswith(".cpp"))
    assert Path(written).read_text() == broken.text
    # The failure is not remembered as a kernel, and a good one beside it is still built.
    pending = cxx.submit([broken, source()])
    check(pending.futures[1].result())
    with pytest.raises(BuildError):
        pending.result()


def test_undefined_symbols_fail_while_building() -> None:
    text = 'extern "C" void elsewhere(); extern "C" void run() { elsewhere(); }'
    with pytest.raises(BuildError, match="refused") as caught:
        cxx.build([cxx.CxxSource(text, "run", ())])
    assert "elsewhere" in caught.value.stderr


def test_a_missing_function_is_named() -> None:
    with pytest.raises(BuildError, match="defines no function of that name"):
        cxx.build([cxx.CxxSource(source().text, "other", ARGS)])


def test_a_missing_compiler_is_one_clear_line() -> None:
    with (
        config.patch({"cpp.cxx": "no-such-compiler"}),
        pytest.raises(BuildError, match="'no-such-compiler' is not on the PATH") as caught,
    ):
        cxx.build([source()])
    assert "install g++" in caught.value.hint and "\n" not in caught.value.message


def test_a_killed_compiler_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "died"
    script = f'[ "$1" = --version ] || [ -e {mark} ] || {{ touch {mark}; kill -9 $$; }}'
    with config.patch({"cpp.cxx": fake_compiler(tmp_path, script)}):
        check(cxx.build([source()])[0])
    assert mark.exists()


def test_a_compiler_killed_twice_is_an_error(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, '[ "$1" = --version ] || kill -9 $$')
    with (
        config.patch({"cpp.cxx": compiler}),
        pytest.raises(BuildError, match="killed twice") as caught,
    ):
        cxx.build([source()])
    assert "compile_threads" in caught.value.hint


def test_a_compiler_waits_for_room_for_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has a limit on processes, and compilers of one process may reach it: for a while,
    here and inside the compiler, is no error; for good is one that says what to do."""
    begin, refused = subprocess.Popen.__init__, [0]

    def crowded(self: Any, *args: Any, **more: Any) -> None:
        refused[0] -= 1
        if refused[0] >= 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        begin(self, *args, **more)

    monkeypatch.setattr(subprocess.Popen, "__init__", crowded)
    monkeypatch.setattr(compilers, "CROWDED", 0.5)
    refused[0] = 2
    check(cxx.build([source()])[0])
    refused[0] = 1 << 30
    with pytest.raises(BuildError, match="temporarily unavailable") as raised:
        cxx.build([source(2.0)])
    assert "ulimit -u" in str(raised.value)
    caches.clear()
    with config.patch({"cpp.cxx": fake_compiler(tmp_path, "")}):
        with pytest.raises(BuildError, match="cannot be started") as raised:
            cxx.build([source(2.0)])
        assert "ulimit -u" in str(raised.value)
    refused[0] = 0
    once = f"""
        if [ "$1" != --version ] && mkdir {tmp_path}/once 2> /dev/null; then
            echo "g++: fatal error: cannot execute cc1plus: Resource temporarily unavailable" >&2
            exit 1
        fi
    """
    with config.patch({"cpp.cxx": fake_compiler(tmp_path, once)}):
        check(cxx.build([source(3.0)])[0], 3.0)


# ------------------------------------------------------------------------------------- the store


def test_processes_build_the_same_kernel_at_once(cache: Path) -> None:
    script = f"""
    import torch
    from tilewright.runtime import cxx
    text = {SCALE.format(constant=4.0, name="scale")!r}
    kernel = cxx.build([cxx.CxxSource(text, "scale", {ARGS!r})])[0]
    x, out = torch.ones(100), torch.empty(100)
    kernel(x.data_ptr(), out.data_ptr(), 100, 2.0)
    print(out.sum().item(), kernel.library)
    """
    command = [sys.executable, "-c", _preamble() + textwrap.dedent(script)]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [child.communicate(timeout=120) for child in children]
    assert len({out for out, _ in answers}) == 1, answers
    assert answers[0][0].startswith("600.0 ")
    files = [file.name for file in cache.rglob("*") if file.is_file()]
    assert not [name for name in files if name.endswith(".tmp")]
    assert len([name for name in files if name.endswith(".so")]) == 1


def test_a_damaged_library_is_built_again() -> None:
    library = cxx.build([source(6.0)])[0].library
    caches.clear()
    store.put_atomic(library, b"half a libr")
    check(cxx.build([source(6.0)])[0], 6.0)


def test_a_deleted_cache_is_filled_again(cache: Path) -> None:
    first = cxx.build([source(7.0)])[0]
    shutil.rmtree(cache)
    check(first, 7.0)  # loaded code stays
    check(cxx.build([source(8.0)])[0], 8.0)
    caches.clear()
    check(cxx.build([source(7.0)])[0], 7.0)


def test_a_cache_deleted_under_the_compiler(tmp_path: Path, cache: Path) -> None:
    mark = tmp_path / "deleted"
    script = f'[ "$1" = --version ] || [ -e {mark} ] || {{ rm -rf {cache}; touch {mark}; }}'
    with config.patch({"cpp.cxx": fake_compiler(tmp_path, script)}):
        check(cxx.build([source()])[0])
    assert mark.exists()


def test_disabled_caches_leave_no_trace(cache: Path) -> None:
    with config.patch(force_disable_caches=True):
        check(cxx.build([source()])[0])
    assert not cache.exists()


def test_keys_depend_on_every_part_and_its_place() -> None:
    keys = [store.key("ab", "c"), store.key("a", "bc"), store.key("abc"), store.key("c", "ab")]
    assert len(set(keys)) == 4
    assert store.key("ab", b"c") == keys[0]


def test_readers_see_whole_files_only() -> None:
    target = store.path(store.key("x"), ".bin")
    contents = [bytes([n]) * 300_000 for n in range(4)]
    store.put_atomic(target, contents[0])
    stop = threading.Event()

    def write(data: bytes) -> None:
        while not stop.is_set():
            store.put_atomic(target, data)

    writers = [threading.Thread(target=write, args=(data,)) for data in contents]
    for writer in writers:
        writer.start()
    try:
        seen = [store.get(target) for _ in range(300)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(data in contents for data in seen)
    assert [file.name for file in target.parent.iterdir()] == [target.name]


def test_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Those that nobody can still be writing, by the next one that writes there."""
    old, new = tmp_path / ".a.so.1.0.tmp", tmp_path / ".b.so.2.0.tmp"
    for draft in (old, new):
        draft.write_bytes(b"half")
    long_ago = time.time() - 2 * store.ABANDONED
    os.utime(old, (long_ago, long_ago))
    store.put_atomic(tmp_path / "c.bin", b"whole")
    assert sorted(f.name for f in tmp_path.iterdir() if f.is_file()) == [new.name, "c.bin"]


def test_compilers_are_ended_and_started_again() -> None:
    """An interrupt ends what is being built; what is asked for again is built then."""
    sources = [cxx.CxxSource(f'extern "C" void kernel(long* out) {{ *out = {k}; }}', "kernel",
                             ("ptr",)) for k in range(6)]  # fmt: skip
    under_way = cxx.submit(sources)
    cxx.abandon()
    for future in under_way.futures:
        with contextlib.suppress(CancelledError, compilers.Ended):
            future.result(timeout=20)
    assert any(f.cancelled() or f.exception() is not None for f in under_way.futures)
    out = torch.zeros(1, dtype=torch.int64)
    for k, kernel in enumerate(cxx.build(sources)):
        kernel.function(out)
        assert out.item() == k


def test_a_failed_writer_leaves_nothing(cache: Path) -> None:
    target = store.path(store.key("y"), ".bin")

    def write_half(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        store.put_atomic(target, write_half)
    assert store.get(target) is None
    assert [file.name for file in cache.rglob("*") if file.is_file()] == [".key"]


def test_an_unusable_folder_says_what_to_set(tmp_path: Path, caplog: Any) -> None:
    """What is built is then there for the process alone."""
    (tmp_path / "file").write_text("")
    with config.patch(cache_dir=str(tmp_path / "file" / "cache")):
        target = store.path(store.key("z"), ".bin")
        store.put_atomic(target, b"here")
        assert store.get(store.path(store.key("z"), ".bin")) == b"here"
        assert store.get(store.path(store.key("y"), ".bin")) is None
    (record,) = caplog.records
    assert "cannot be written to (Not a directory)" in record.getMessage()
    assert "set config.cache_dir (or TILEWRIGHT_CACHE_DIR)" in record.getMessage()


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_is_not_written_to_is_read(cache: Path, code: int) -> None:
    target = store.path(store.key("kept", str(code)), ".bin")
    store.put_atomic(target, b"kept")
    caches.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(code, "no")))
        assert store.path(store.key("kept", str(code)), ".bin") == target
        new = store.put_atomic(store.path(store.key("new", str(code)), ".bin"), b"new")
        assert store.get(new) == b"new" and cache not in new.parents
        (kernel,) = cxx.build(
            [cxx.CxxSource(SCALE.format(name="scale", constant=2), "scale", ARGS)]
        )
        x, out = torch.randn(8), torch.empty(8)
        kernel.function(x, out, 8, 3.0)
        assert torch.equal(out, x * 3 + 2) and cache not in kernel.library.parents
    caches.clear()
