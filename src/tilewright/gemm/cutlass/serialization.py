"""Operations of CUTLASS's own library as JSON, and back.

Every attribute is kept, whatever the kind of operation: what a later version of the library adds to
its classes goes along.
"""

from __future__ import annotations

import enum
import functools
import json
from typing import Any

from tilewright import caches
from tilewright.gemm.cutlass import install

_MODULES = ("library", "gemm_operation")
_DERIVED = ("_procedural_name",)  # computed again where it is needed


class CUTLASSOperationSerializer:
    """GEMM operations alone."""

    @classmethod
    def serialize(cls, operation: Any, indent: int | None = None) -> str:
        known = install.module("gemm_operation").GemmOperation
        assert isinstance(operation, known), (
            f"only GemmOperation is serialised, and this is {type(operation).__name__}"
        )
        return json.dumps(_plain(operation), indent=indent)

    @classmethod
    def deserialize(cls, text: str) -> Any:
        return _made(json.loads(text))


def get_cutlass_operation_serializer() -> type[CUTLASSOperationSerializer] | None:
    """The class that does it; none where there is no CUTLASS."""
    return CUTLASSOperationSerializer if install.try_import_cutlass() else None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "value": value.name}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {"dict": [[_plain(k), _plain(v)] for k, v in value.items()]}  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    fields = {k: _plain(v) for k, v in vars(value).items() if k not in _DERIVED}
    return {"class": type(value).__name__, "fields": fields}


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, dict):
        return value
    if "enum" in value:
        return _named(value["enum"])[value["value"]]
    if "dict" in value:
        return {_made(k): _made(v) for k, v in value["dict"]}
    made = object.__new__(_named(value["class"]))
    for name, field in value["fields"].items():
        setattr(made, name, _made(field))
    return made


@functools.cache
def _named(name: str) -> Any:
    for module in _MODULES:
        found = getattr(install.module(module), name, None)
        if found is not None:
            return found
    raise TypeError(f"CUTLASS has no class {name}")


caches.register(_named.cache_clear)
