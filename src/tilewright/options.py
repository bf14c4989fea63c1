"""The machinery behind `tilewright.config`: declared, typed, documented, patchable options.

`config.py` is the list of options and nothing else; this file turns that list into a module
whose attributes are plain values to read, and are checked when set.

An assignment (`config.debug = 1`) holds for the process: its value lives in the module's (or the
group's) own `__dict__`. A patch holds for the context that entered it, so that one thread's options
are never another's: its values are layers over those, in a `ContextVar`.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from tilewright.errors import InvalidOptionError, UnknownOptionError
from tilewright.known_options import known

T = TypeVar("T")

ENV_PREFIX = "TILEWRIGHT_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
NEARLY = 0.88  # alike, prefix and all: a letter or two
ABSENT: Any = object()
log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class GraphPass:
    """Functions of the user's that change a graph, one after the other.

    In cache keys they are what their `uuid()` says; the programs of one that has none, or that says
    None, are not kept. They stay in the process: another one is told their names alone.
    """

    functions: tuple[Callable[..., Any], ...]
    uuids: tuple[str | None, ...]

    @classmethod
    def of(cls, value: object) -> object:
        """A function, or several, as a pass; anything else as it is."""
        if isinstance(value, GraphPass):  # what a function says of itself may have changed
            return cls.of(value.functions) if value.functions else value
        given = cast("list[object]", value) if isinstance(value, (list, tuple)) else [value]
        functions = tuple(f for f in given if callable(f))
        if not functions or len(functions) < len(given):
            return value
        return cls(functions, tuple(map(_uuid, functions)))

    @property
    def has_identity(self) -> bool:
        return None not in self.uuids

    def __repr__(self) -> str:
        return f"GraphPass{self.uuids}"

    def __reduce__(self) -> Any:
        return GraphPass, ((), self.uuids)


def _uuid(function: object) -> str | None:
    say: Any = getattr(function, "uuid", None)
    said: object = say() if callable(say) else None
    return None if said is None else repr(said)


Value = bool | int | float | str | GraphPass | None


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
    def ignored(self) -> str:
        """Why the option has no effect; empty if it has one."""
        return self.doc.partition("Accepted and ignored: ")[2]

    @property
    def type_name(self) -> str:
        name = "function of a graph" if self.kind is GraphPass else self.kind.__name__
        return name + (" or None" if self.optional else "")

    def convert(self, value: object) -> Value:
        """The value as it is stored, or an InvalidOptionError."""
        if isinstance(value, str) and self.kind is bool:
            value = {"1": True, "0": False}.get(value, value)  # as environment variables have it
        if self.kind is float and type(value) is int:
            value = float(value)
        if self.kind is GraphPass:
            value = GraphPass.of(value)
        if self.kind is str and isinstance(value, (list, tuple)):
            parts = cast("list[object]", value)
            if all(type(part) is int for part in parts):  # numbers, which text has with commas
                value = ",".join(map(str, parts))
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
        if self.kind in (str, GraphPass):  # nothing that can be written is a pass
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


@dataclass(frozen=True)
class Layer:
    """What a patch in force changes, and all that it and those around it have changed."""

    owner: Patch
    changes: Mapping[str, Value]
    below: Layer | None
    values: Mapping[str, Value]

    @classmethod
    def over(cls, below: Layer | None, owner: Patch, changes: Mapping[str, Value]) -> Layer:
        return cls(owner, changes, below, {**(below.values if below else {}), **changes})


class _Read:
    """An option as an attribute: this context's value of it, or else the process's."""

    def __init__(self, name: str, store: dict[str, Any], layer: ContextVar[Layer | None]) -> None:
        self.name, self.leaf, self.store, self.layer = name, name.rpartition(".")[2], store, layer

    def __get__(self, instance: object, owner: type) -> Any:
        layer = self.layer.get()
        if layer is not None and self.name in layer.values:
            return layer.values[self.name]
        return self.store[self.leaf]

    def __set__(self, instance: object, value: object) -> None:  # has it come before `__dict__`
        raise AssertionError("options are set through their registry")


class Registry:
    """Every option by dotted name, and where its value is kept."""

    def __init__(self, module: types.ModuleType, aliases: Mapping[str, str]) -> None:
        self.options: dict[str, Option] = {}
        self.layer: ContextVar[Layer | None] = ContextVar("tilewright_options", default=None)
        self._aliases = dict(aliases)  # other names of groups
        self._stores: dict[str, dict[str, Any]] = {}
        self._told: set[str] = set()  # options without effect that were set
        self._collect("", module.__dict__, typing.get_type_hints(module), module.__dict__)
        for prefix, group in list(module.__dict__.items()):
            if isinstance(group, Group):
                store = group.__dict__
                store["_registry"] = self
                store["_prefix"] = prefix
                declared = dict(vars(type(group)))
                self._collect(prefix + ".", declared, typing.get_type_hints(type(group)), store)
                for leaf, read in self.readers(prefix + "."):
                    setattr(type(group), leaf, read)
        self._misspelt()

    def readers(self, prefix: str) -> Iterator[tuple[str, _Read]]:
        """The attributes of the class whose options have this prefix."""
        for name, store in self._stores.items():
            group, dot, leaf = name.rpartition(".")
            if group + dot == prefix:
                yield leaf, _Read(name, store, self.layer)

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
        layer = self.layer.get()
        if layer is not None and name in layer.values:
            return layer.values[name]
        return self._stores[name][name.rpartition(".")[2]]

    def set(self, name: str, value: object) -> None:
        """For the process; inside a patch of this option, until that ends."""
        if self._without_effect(name, value):
            return
        found = self.find(name).convert(value)
        layer = self.layer.get()
        if layer is not None and name in layer.values:
            self.layer.set(replace(layer, values={**layer.values, name: found}))
        else:
            self._stores[name][name.rpartition(".")[2]] = found

    def _without_effect(self, name: str, value: object) -> bool:
        """Whether the name is the reference's alone. One that changes nothing here, ours too, is
        said to, once."""
        own, theirs = self.options.get(name), known(name)
        if own is not None:
            why = own.ignored if value != own.default else ""
        elif theirs is not None and not theirs.refused:
            why = theirs.why
        else:
            return False
        if why and name not in self._told:
            self._told.add(name)
            log.warning("option %r has no effect: %s", name, why)
        return own is None

    def find(self, name: str) -> Option:
        if name not in self.options:
            raise self.unknown(name)
        return self.options[name]

    def unknown(self, name: str) -> UnknownOptionError:
        found = known(name)
        if found is not None:
            return UnknownOptionError(name, hint=found.why)
        nearest, valid = self.nearest(name), ", ".join(self.options)
        near = f"did you mean {nearest!r}? " if self._is_near(name, nearest) else ""
        return UnknownOptionError(name, nearest=nearest if near else "",
                                  hint=f"{near}The options are: {valid}")  # fmt: skip

    @staticmethod
    def _is_near(name: str, valid: str) -> bool:
        """Whether one may be a slip for the other: a hint that is far off misleads."""
        leaves = name.rpartition(".")[2], valid.rpartition(".")[2]
        pairs = (name, valid), leaves
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs) >= 0.75

    def nearest(self, name: str) -> str:
        """The valid name most like `name`; a right leaf in the wrong group counts as close."""

        def likeness(valid: str) -> float:
            whole = difflib.SequenceMatcher(None, name, valid).ratio()
            leaves = name.rpartition(".")[2], valid.rpartition(".")[2]
            return max(whole, 0.95 * difflib.SequenceMatcher(None, *leaves).ratio())

        return max(self.options, key=likeness)

    def checked(self, changes: Mapping[str, object]) -> dict[str, Value]:
        """The changes with names and values checked and converted."""
        named = {self._spelt(name): value for name, value in changes.items()}
        return {name: self.find(name).convert(value) for name, value in named.items()
                if not self._without_effect(name, value)}  # fmt: skip

    def _spelt(self, name: str) -> str:
        """The name as it is declared."""
        group, dot, leaf = name.replace("-", "_").rpartition(".")
        return f"{self._aliases.get(group, group)}{dot}{leaf}"


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

    The values are seen by the context that entered the patch alone. What is compiled later, perhaps
    in another thread (a backward graph), is given the options it is to have as a snapshot.
    """

    def __init__(self, registry: Registry, changes: Mapping[str, object]) -> None:
        self._registry = registry
        self._changes = registry.checked(changes)

    def __call__(self, func: Any) -> Any:
        """A function, or the tests of a class."""
        if not isinstance(func, type):
            return super().__call__(func)
        for name, member in list(vars(func).items()):
            if not name.startswith("test"):
                continue
            if isinstance(member, (staticmethod, classmethod)):
                setattr(func, name, type(member)(super().__call__(member.__func__)))
            elif callable(member):
                setattr(func, name, super().__call__(member))
        return func

    def __enter__(self) -> None:
        layer = self._registry.layer
        layer.set(Layer.over(layer.get(), self, self._changes))

    def __exit__(self, *_: object) -> None:
        layer = self._registry.layer
        top = layer.get()
        layer.set(top.below if top is not None and top.owner is self else _without(top, self))


def _without(layer: Layer | None, owner: Patch) -> Layer | None:
    """The layers but for the last one of a patch that ends before those entered after it."""
    if layer is None:
        return None
    if layer.owner is owner:
        return layer.below
    return Layer.over(_without(layer.below, owner), layer.owner, layer.changes)


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


def install(module_name: str, aliases: Mapping[str, str] | None = None) -> Registry:
    """Turn the declarations of a module into live options, and return their registry."""
    module = sys.modules[module_name]
    registry = Registry(module, aliases or {})
    module.__dict__["_registry"] = registry
    module.__class__ = type("ConfigModule", (ConfigModule,), dict(registry.readers("")))
    return registry
