"""The machinery behind `tilewright.config`: declared, typed, documented, patchable options.

`config.py` is the list of options and nothing else; this file turns that list into a module
whose attributes are plain values to read, and are checked when set. Values live in the
module's (or the group's) own `__dict__`, so reading one costs an ordinary attribute access.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from tilewright.errors import InvalidOptionError, UnknownOptionError

Value = bool | int | float | str | None
T = TypeVar("T")

ENV_PREFIX = "TILEWRIGHT_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
NEARLY = 0.88  # alike, prefix and all: a letter or two
ABSENT: Any = object()
log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class Check:
    """What a value must be beside its type, and the words for it in an error message."""

    holds: Callable[[Any], bool]
    words: str


@dataclass
class Option:
    """One declared option. `name` and the type come from where it is declared."""

    default: Value
    doc: str
    affects_code: bool
    choices: tuple[Value, ...] = ()
    check: Check | None = None
    name: str = ""
    kind: type = str
    optional: bool = False

    @property
    def env(self) -> str:
        """The environment variable that overrides the default."""
        return ENV_PREFIX + self.name.replace(".", "_").upper()

    @property
    def expected(self) -> str:
        """What a value must be, in words for an error message."""
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        return self.type_name if self.check is None else f"{self.type_name}, {self.check.words}"

    @property
    def type_name(self) -> str:
        return self.kind.__name__ + (" or None" if self.optional else "")

    def convert(self, value: object) -> Value:
        """The value as it is stored, or an InvalidOptionError."""
        if isinstance(value, str) and self.kind is bool:
            value = _bool_from_text(value, value)  # a truthy string such as "1" acts as True
        if self.kind is float and type(value) is int:
            value = float(value)
        allowed = type(value) is self.kind or (value is None and self.optional)
        if allowed and self.choices and value not in self.choices:
            allowed = False
        if allowed and self.check is not None and value is not None:
            allowed = self.check.holds(value)
        if not allowed:
            raise InvalidOptionError(
                f"option {self.name!r} cannot be {value!r}", hint=f"it must be {self.expected}"
            )
        return cast(Value, value)

    def parse(self, text: str) -> Value:
        """The value an environment variable stands for, or an InvalidOptionError naming it."""
        try:
            return self.convert(self._from_text(text))
        except ValueError as error:
            raise InvalidOptionError(
                f"environment variable {self.env} cannot be {text!r}",
                hint=f"it must be {self.expected}",
            ) from error

    def _from_text(self, text: str) -> object:
        word = text.strip()
        if self.optional and word.lower() in ("", "none"):
            return None
        if self.kind is bool:
            return _bool_from_text(word, None)
        if self.kind is str:
            return text
        return self.kind(word)


def _bool_from_text(text: str, otherwise: object) -> object:
    word = text.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else otherwise


def option(
    default: T,
    doc: str,
    *,
    affects_code: bool,
    choices: tuple[Value, ...] = (),
    check: Check | None = None,
) -> T:
    """Declare an option. Typed as its value, because that is what a reader will find there."""
    declared = Option(cast(Value, default), doc, affects_code, choices, check)
    return cast(T, declared)


def at_least(least: float) -> Check:
    return Check(lambda n: n >= least, f"at least {least}")


def one_of(*names: str) -> Check:
    """A name in any case."""
    return Check(lambda name: name.upper() in names, " or ".join(names))


def each_of(*names: str) -> Check:
    """A list of names with commas, which may be empty."""
    words = "any of " + ", ".join(names)
    return Check(lambda t: {n.strip() for n in t.split(",")} <= {*names, ""}, words)


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


REGEX = Check(_is_regex, "a regular expression")


class Group:
    """A named group of options (`config.cpp`); subclasses declare the options as attributes."""

    _registry: Registry
    _prefix: str

    def __setattr__(self, name: str, value: object) -> None:
        self._registry.set(f"{self._prefix}.{name}", value)

    # Unseen by type checkers, which would take every misspelt option for a known one.
    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise _missing(self._registry, name, f"{self._prefix}.{name}")


class ConfigModule(types.ModuleType):
    """The class of the config module once its options are installed."""

    _registry: Registry

    def __setattr__(self, name: str, value: object) -> None:
        # Dunders belong to the import system; functions of the module may be replaced in tests.
        if name.startswith("__") or (name in self.__dict__ and name not in self._registry.options):
            super().__setattr__(name, value)
        else:
            self._registry.set(name, value)

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise _missing(self._registry, name, name)


def _missing(registry: Registry, leaf: str, name: str) -> AttributeError:
    # Python itself probes dunders; those questions deserve its own, cheap, answer.
    return AttributeError(leaf) if leaf.startswith("__") else registry.unknown(name)


class Registry:
    """Every option by dotted name, and where its value is kept."""

    def __init__(self, module: types.ModuleType) -> None:
        self.options: dict[str, Option] = {}
        self._stores: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._collect("", module.__dict__, typing.get_type_hints(module), module.__dict__)
        for prefix, group in list(module.__dict__.items()):
            if isinstance(group, Group):
                store = group.__dict__
                store["_registry"] = self
                store["_prefix"] = prefix
                declared = dict(vars(type(group)))
                self._collect(prefix + ".", declared, typing.get_type_hints(type(group)), store)
        self._misspelt()

    def _misspelt(self) -> None:
        """Warn of environment variables that are nearly those of an option: others may have a
        meaning to somebody else."""
        known = [spec.env for spec in self.options.values()]
        for name in sorted(n for n in os.environ if n.startswith(ENV_PREFIX) and n not in known):
            near = max(known, key=lambda k: difflib.SequenceMatcher(None, name, k).ratio())
            part = difflib.SequenceMatcher(None, name, near).ratio()
            if part >= NEARLY:
                log.warning("environment variable %s is of no option: did you mean %s?", name, near)

    def _collect(
        self,
        prefix: str,
        declared: Mapping[str, Any],
        hints: Mapping[str, Any],
        store: dict[str, Any],
    ) -> None:
        for leaf, spec in list(declared.items()):
            if not isinstance(spec, Option):
                continue
            spec.name = prefix + leaf
            spec.kind, spec.optional, choices = _describe(hints[leaf])
            spec.choices = spec.choices or choices
            self.options[spec.name] = spec
            self._stores[spec.name] = store
            text = os.environ.get(spec.env)
            store[leaf] = spec.convert(spec.default) if text is None else spec.parse(text)

    def get(self, name: str) -> Value:
        self.find(name)
        return self._stores[name][name.rpartition(".")[2]]

    def set(self, name: str, value: object) -> None:
        self._store(name, self.find(name).convert(value))

    def _store(self, name: str, value: Value) -> None:
        self._stores[name][name.rpartition(".")[2]] = value

    def find(self, name: str) -> Option:
        if name not in self.options:
            raise self.unknown(name)
        return self.options[name]

    def unknown(self, name: str) -> UnknownOptionError:
        nearest, valid = self.nearest(name), ", ".join(self.options)
        hint = f"did you mean {nearest!r}? The options are: {valid}"
        return UnknownOptionError(name, nearest=nearest, hint=hint)

    def nearest(self, name: str) -> str:
        """The valid name most like `name`; a right leaf in the wrong group counts as close."""

        def likeness(valid: str) -> float:
            whole = difflib.SequenceMatcher(None, name, valid).ratio()
            leaves = name.rpartition(".")[2], valid.rpartition(".")[2]
            return max(whole, 0.95 * difflib.SequenceMatcher(None, *leaves).ratio())

        return max(self.options, key=likeness)

    def checked(self, changes: Mapping[str, object]) -> dict[str, Value]:
        """The changes with names and values checked and converted."""
        named = {name.replace("-", "_"): value for name, value in changes.items()}
        return {name: self.find(name).convert(value) for name, value in named.items()}

    def exchange(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Store checked values, and return those they replace."""
        with self._lock:
            before = {name: self.get(name) for name in values}
            for name, value in values.items():
                self._store(name, value)
        return before


def _describe(hint: Any) -> tuple[type, bool, tuple[Value, ...]]:
    """Split a type annotation into (plain type, may it be None, literal choices)."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), False, choices
    members = typing.get_args(hint)
    plain = [member for member in members if member is not type(None)]
    if not members:
        return hint, False, ()
    if len(plain) != 1:
        raise TypeError(f"an option cannot be annotated {hint!r}: one type, or one type and None")
    return plain[0], True, ()


class Patch(contextlib.ContextDecorator):
    """Options changed for a while: a context manager, and a decorator of functions.

    The values are seen by every thread, because a backward graph may be compiled in another
    thread than the one that entered the patch.
    """

    def __init__(self, registry: Registry, changes: Mapping[str, object]) -> None:
        self._registry = registry
        self._changes = registry.checked(changes)
        # A decorated function may call itself, so one patch may be entered more than once.
        self._saved: list[dict[str, Value]] = []

    def __enter__(self) -> None:
        self._saved.append(self._registry.exchange(self._changes))

    def __exit__(self, *_: object) -> None:
        self._registry.exchange(self._saved.pop())


def patch_of(
    registry: Registry,
    changes: str | Mapping[str, object] | None,
    value: object,
    named: Mapping[str, object],
) -> Patch:
    """Build a Patch from the three spellings `config.patch` accepts."""
    merged = dict(named)
    if isinstance(changes, str):
        if value is ABSENT:
            raise InvalidOptionError(
                f"patch({changes!r}) has no value", hint=f"write patch({changes!r}, value)"
            )
        merged[changes] = value
    elif changes is not None:
        merged.update(changes)
    return Patch(registry, merged)


def markdown(registry: Registry) -> Iterator[str]:
    """The lines of a table of all options, top level first and then one section per group."""
    groups: dict[str, list[Option]] = {}
    for spec in registry.options.values():
        groups.setdefault(spec.name.rpartition(".")[0], []).append(spec)
    for group, specs in groups.items():
        yield f"## `{group}`" if group else "## Top level"
        yield ""
        yield "| option | type | default | environment | in cache key | what it does |"
        yield "|---|---|---|---|---|---|"
        for spec in specs:
            kind = " or ".join(f"`{c!r}`" for c in spec.choices) or spec.type_name
            key = "yes" if spec.affects_code else "no"
            yield (
                f"| `{spec.name}` | {kind} | `{spec.default!r}` "
                f"| `{spec.env}` | {key} | {spec.doc} |"
            )
        yield ""


def install(module_name: str) -> Registry:
    """Turn the declarations of a module into live options, and return their registry."""
    module = sys.modules[module_name]
    registry = Registry(module)
    module.__dict__["_registry"] = registry
    module.__class__ = ConfigModule
    return registry
