"""The helpers of `tilewright.testing`, and the size report of this suite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import sizes
from tilewright import caches, config, metrics
from tilewright.gemm import choose, templates
from tilewright.gemm.cutlass import filter
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select


def test_run_and_get_code_collects_distinct_texts_in_order():
    def emit(*texts: str) -> int:
        for text in texts:
            for listener in metrics.on_code:
                listener(text)
        return len(texts)

    assert run_and_get_code(emit, "forward", "backward", "forward") == (3, ["forward", "backward"])
    assert metrics.on_code == []


def test_run_and_get_code_stops_listening_after_an_error():
    with pytest.raises(ZeroDivisionError):
        run_and_get_code(lambda: 1 // 0)
    assert metrics.on_code == []


def test_ma_a11_fresh_cache_is_empty_and_deleted():
    before = config.cache_root(), os.environ.get("TRITON_CACHE_DIR")
    with fresh_cache() as folder:
        assert config.cache_root() == folder
        assert list(folder.iterdir()) == []
        assert os.environ["TRITON_CACHE_DIR"].startswith(str(folder))
        (folder / "artefact").write_text("x")
    assert not folder.exists()
    assert before == (config.cache_root(), os.environ.get("TRITON_CACHE_DIR"))


def test_ma_a11_fresh_cache_is_kept_on_error():
    folders: list[Path] = []

    @fresh_cache()
    def fail() -> None:
        folders.append(config.cache_root())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert folders[0].exists()
    folders[0].rmdir()


def test_ma_a11_fresh_cache_decorates_and_gives_each_call_its_own():
    @fresh_cache()
    def where() -> str:
        return str(config.cache_root())

    assert where() != where()


def test_ma_a11_fresh_cache_clears_memory_on_entry_and_exit(monkeypatch):
    monkeypatch.setattr(caches, "_clearers", list(caches._clearers))
    memo = {"old": 1}
    caches.register(memo.clear)
    with fresh_cache():
        assert memo == {}
        memo["new"] = 2
    assert memo == {}


def test_ma_a11_fresh_cache_forgets_what_was_chosen_rendered_and_waited_for():
    """Who else keeps something in memory registers it as these do."""
    held: tuple[Any, ...] = (templates._generated, choose._memo, filter._filtered)
    for _ in range(2):
        with fresh_cache():
            assert not any(held) and not select._waited_for
            for each in held:
                each["key"] = None
            select._waited_for.add("key")
        assert not any(held) and not select._waited_for


def test_size_report(tmp_path):
    body = "\n".join(f"    x = {n}" for n in range(101))
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "big.py").write_text(f"def long():\n{body}\n")
    (tmp_path / "top.py").write_text('"""Words."""\n\n# why\nx = """a\nb"""\n')
    assert sizes.report(tmp_path) == [
        "stage/    102",
        "(top)       2",
        "total     104 code lines in 2 files",
        "largest file: stage/big.py, 102 lines",
        "functions over 100 lines: stage/big.py:long (102)",
    ]
