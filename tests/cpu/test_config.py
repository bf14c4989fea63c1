"""`tilewright.config`: typed options, patches, environment, modes, the cache key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright
from tilewright import config
from tilewright.errors import (
    InvalidOptionError,
    TilewrightError,
    UnknownModeError,
    UnknownOptionError,
)


def read_in_child(name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The repr of an option in a new process with some environment variables set."""
    return subprocess.run(
        [sys.executable, "-c", f"from tilewright import config; print(repr(config.{name}))"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_misspelt_environment_variable_is_told():
    done = read_in_child("autotune_effort", {"TILEWRIGHT_AUTOTUNE_EFORT": "max",
                                             "TILEWRIGHT_SOMEBODYS_OWN": "1"})  # fmt: skip
    assert done.stdout == "'default'\n"
    (line,) = done.stderr.splitlines()
    assert "TILEWRIGHT_AUTOTUNE_EFORT" in line
    assert line.endswith("did you mean TILEWRIGHT_AUTOTUNE_EFFORT?")


def test_defaults_are_typed_values():
    assert config.max_autotune is False
    assert config.emulate_precision_casts is True
    assert config.realize_opcount_threshold == 30
    assert config.cpp.simdlen is None
    assert config.triton.cudagraphs is False


@pytest.mark.parametrize(
    "patch",
    [
        lambda: config.patch({"cpp.threads": 3}),
        lambda: config.patch("cpp.threads", 3),
        lambda: config.patch({"cpp.threads": 3}, max_autotune=True),
    ],
)
def test_patch_spellings(patch):
    with patch():
        assert config.cpp.threads == 3
    assert config.cpp.threads == -1
    assert config.max_autotune is False


def test_ma_a3_patch_nests_and_restores_after_an_exception():
    def fail_inside() -> None:
        with config.patch(max_fusion_size=1):
            with config.patch(max_fusion_size=2, debug=1):
                assert (config.max_fusion_size, config.debug) == (2, 1)
            assert (config.max_fusion_size, config.debug) == (1, 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert config.max_fusion_size == 64


def test_ma_a3_truthy_strings_act_as_booleans():
    with config.patch(max_autotune="1", inplace_buffers="0"):
        assert config.max_autotune is True
        assert config.inplace_buffers is False


def test_patch_decorates_a_recursive_function():
    @config.patch({"cpp.threads": 1})
    def depth(n: int) -> int:
        assert config.cpp.threads == 1
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(3) == 3
    assert config.cpp.threads == -1


def test_a_bad_patch_changes_nothing():
    with pytest.raises(UnknownOptionError):
        config.patch({"max_autotune": True, "no_such_thing": 1})
    assert config.max_autotune is False


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_autotune_gem", "max_autotune_gemm"),
        ("cpp.thread", "cpp.threads"),
        ("simdlen", "cpp.simdlen"),
        ("triton.cuda_graphs", "triton.cudagraphs"),
    ],
)
def test_unknown_names_say_the_nearest(wrong, right):
    with pytest.raises(UnknownOptionError, match=f"'{wrong}'(.|\n)*did you mean '{right}'"):
        config.patch({wrong: 1})


def test_unknown_attributes():
    with pytest.raises(UnknownOptionError, match="max_autotune"):
        config.max_autotun = True
    with pytest.raises(UnknownOptionError, match=r"cpp\.simdlen"):
        config.cpp.simd_len = 1
    with pytest.raises(UnknownOptionError, match=r"cpp\.threads"):
        _ = config.cpp.thread
    assert not hasattr(config, "max_autotun")
    assert not hasattr(config.cpp, "thread")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_autotune", 3, "bool"),
        ("max_autotune", "perhaps", "bool"),
        ("max_fusion_size", True, "int"),
        ("max_fusion_size", None, "int"),
        ("max_autotune_gemm_backends", ["ATEN"], "str"),
        ("cache_dir", 3, "str or None"),
        ("cpp.simdlen", 128, "one of None, 1, 256, 512"),
        ("debug", 6, "one of 0, 1, 2"),
        ("cpp.threads", 0, r"int, -1 \(as many as torch uses\) or 1 to \d+"),
        ("test_configs.autotune_choice_name_regex", "(", "str or None, a regular expression"),
        ("autotune_budget_seconds", -1, "float or None, at least 0"),
        ("max_autotune_gemm_search_space", "some", "str, DEFAULT or EXHAUSTIVE"),
    ],
)
def test_wrong_values_name_what_is_expected(name, value, expected):
    with pytest.raises(InvalidOptionError, match=f"{name}(.|\n)*it must be {expected}"):
        config.patch(name, value)


def test_setting_an_attribute_checks_it():
    with pytest.raises(InvalidOptionError):
        config.cpp.threads = "many"
    with config.patch():
        before = config.cpp.threads
        config.cpp.threads = 2
        assert config.cpp.threads == 2
        config.cpp.threads = before


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("TILEWRIGHT_DEBUG", "3", "debug", "3"),
        ("TILEWRIGHT_MAX_AUTOTUNE", "yes", "max_autotune", "True"),
        ("TILEWRIGHT_INPLACE_BUFFERS", "0", "inplace_buffers", "False"),
        ("TILEWRIGHT_CPP_SIMDLEN", "256", "cpp.simdlen", "256"),
        ("TILEWRIGHT_CPP_SIMDLEN", "none", "cpp.simdlen", "None"),
        ("TILEWRIGHT_MAX_AUTOTUNE_GEMM_BACKENDS", "", "max_autotune_gemm_backends", "''"),
    ],
)
def test_environment_overrides(variable, text, name, value):
    child = read_in_child(name, {variable: text})
    assert child.stdout.strip() == value, child.stderr


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("TILEWRIGHT_DEBUG", "loud", "one of 0, 1"),
        ("TILEWRIGHT_MAX_AUTOTUNE", "maybe", "it must be bool"),
        ("TILEWRIGHT_CPP_SIMDLEN", "77", "one of None, 1, 256, 512"),
    ],
)
def test_bad_environment_names_the_variable(variable, text, expected):
    child = read_in_child("debug", {variable: text})
    assert child.returncode != 0
    assert f"environment variable {variable} cannot be {text!r}" in child.stderr
    assert expected in child.stderr


def test_ma_a2_modes():
    tuned = {"max_autotune": True, "coordinate_descent_tuning": True}
    graphs = {"triton.cudagraphs": True}
    assert config.options_for_mode(None) == config.options_for_mode("default") == {}
    assert config.options_for_mode("reduce-overhead") == graphs
    assert config.options_for_mode("max-autotune-no-cudagraphs") == tuned
    assert config.options_for_mode("max-autotune") == {**tuned, **graphs}
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        config.checked(config.options_for_mode(mode))


def test_ma_a2_options_and_modes_are_listed():
    assert tilewright.list_options() == [o.name for o in config.declared()]
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    assert tilewright.list_mode_options() == {m: config.options_for_mode(m) for m in modes}
    assert tilewright.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}


def test_ma_a2_unknown_mode_lists_the_valid_ones():
    with pytest.raises(RuntimeError) as caught:
        config.options_for_mode("fastest")
    assert isinstance(caught.value, UnknownModeError)
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert mode in str(caught.value)


def test_code_key_holds_what_shapes_code_and_nothing_else():
    key = config.code_key()
    assert hash(key) == hash(config.code_key())
    assert [name for name, _ in key] == sorted(o.name for o in config.declared() if o.affects_code)
    with config.patch({"cpp.simdlen": 1}):
        assert config.code_key() != key
    with config.patch(debug=4, cache_dir="elsewhere", compile_threads=1, verify_ir=False):
        assert config.code_key() == key


def test_snapshot_patches_back():
    with config.patch({"cpp.threads": 7}, debug=2):
        taken = config.snapshot()
    with config.patch(taken):
        assert (config.cpp.threads, config.debug) == (7, 2)


def test_every_option_is_documented_and_has_its_own_variable():
    declared = config.declared()
    assert all(o.doc.endswith(".") for o in declared)
    assert len({o.env for o in declared}) == len(declared)
    assert all(f"`{o.name}`" in config.table() for o in declared)


def test_folders(monkeypatch, tmp_path):
    with config.patch(cache_dir=str(tmp_path), debug_dir=str(tmp_path / "d")):
        assert config.cache_root() == tmp_path
        assert config.debug_root() == tmp_path / "d"
    with config.patch(cache_dir=None):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert config.cache_root() == tmp_path / "tilewright"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert config.cache_root() == Path.home() / ".cache" / "tilewright"


def test_patch_without_a_value_is_refused():
    with pytest.raises(TilewrightError, match="has no value"):
        config.patch("cpp.threads")


# ---- the options of the specification

OTHERWISE = {
    "max_autotune_gemm_backends": "the library's algorithms are offered one by one as well",
    "comprehensive_padding": "memory is not spent unasked: products are tried with padded copies",
    "autotune_in_subproc": "none: candidates that are not of this package are, the others are not",
}
"""Options whose default is not the reference's, and why."""


def specified() -> dict[str, str]:
    """Table A-T: names, and defaults as they are written there."""
    text = (Path(__file__).parents[2] / "docs" / "spec" / "max_autotune.md").read_text()
    table = next(line for line in text.splitlines() if line.startswith("**Table A-T"))
    found: dict[str, str] = {}
    for part in table.replace("/`_rep`", "").replace("`..._desc_regex`", "").split(";"):
        names, _, value = part.rpartition(": ")
        for name in re.findall(r"`([\w.]+)`", names or part):
            found[name] = "" if "`" in value else value.strip(" .").partition(" (")[0]
    return found


def test_ma_a3_every_specified_option_is_known_with_its_default() -> None:
    known = {o.name: o for o in config.declared()}
    found = specified()
    assert len(found) > 50 and found.keys() <= known.keys()
    for name, text in found.items():
        default = known[name].default
        same = str(default).strip("'") == text.strip('"') or (
            (name == "layout_optimization" and default is True)
            or (name == "inductor_default_autotune_warmup" and default == 25)
            or text in ("accepted, ignored", "")
        )  # fmt: skip
        assert same == (name not in OTHERWISE), (name, default, text)


def test_what_is_ignored_says_why() -> None:
    for option in config.declared():
        said = option.doc.partition("Accepted and ignored")[2]
        if "Accepted and ignored" in option.doc:
            assert len(said) > 20, option.name
