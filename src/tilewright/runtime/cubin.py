"""What a cubin says of its kernel, read off the file: registers, stack and parameters.

A cubin is an ELF file. Its sections `.nv.info` and `.nv.info.<kernel>` are lists of attributes: a
byte of format, a byte of attribute, two bytes of size (or value), and the value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_FRAME_SIZE = 0x11
_PARAMETER = 0x17
_REGISTERS = 0x2F
_SIZED = 4  # the format whose value follows


@dataclass(frozen=True)
class Facts:
    registers: int
    stack: int  # bytes of local memory per thread: spills, or arrays the compiler could not place
    parameters: tuple[int, ...]  # bytes of each, in order


def facts(cubin: bytes, kernel: str) -> Facts:
    registers = stack = 0
    parameters: dict[int, int] = {}
    symbols = _symbols(cubin)
    for name, data in _sections(cubin):
        if name not in (".nv.info", f".nv.info.{kernel}"):
            continue
        for attribute, value in _attributes(data):
            if attribute in (_REGISTERS, _FRAME_SIZE):
                symbol, number = struct.unpack("<II", value[:8])
                if symbols.get(symbol) == kernel:
                    registers = number if attribute == _REGISTERS else registers
                    stack = number if attribute == _FRAME_SIZE else stack
            elif attribute == _PARAMETER:
                _, ordinal, _, flags = struct.unpack("<IHHI", value[:12])
                parameters[ordinal] = flags >> 18
    return Facts(registers, stack, tuple(parameters[k] for k in sorted(parameters)))


def _headers(elf: bytes) -> list[tuple[int, ...]]:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, _ = struct.unpack_from("<HHH", elf, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", elf, offset + k * size) for k in range(count)]


def _text(table: bytes, start: int) -> str:
    return table[start : table.index(0, start)].decode()


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    headers = _headers(elf)
    (names,) = struct.unpack_from("<H", elf, 0x3E)
    table = elf[headers[names][4] : headers[names][4] + headers[names][5]]
    for header in headers:
        body = b"" if header[1] == 8 else elf[header[4] : header[4] + header[5]]
        yield _text(table, header[0]), body


def _symbols(elf: bytes) -> dict[int, str]:
    """Symbol number -> name."""
    headers = _headers(elf)
    for header in headers:
        if header[1] == 2:  # a symbol table; `link` is its table of names
            names = headers[header[6]]
            table = elf[names[4] : names[4] + names[5]]
            starts = range(header[4], header[4] + header[5], 24)
            return {k: _text(table, struct.unpack_from("<I", elf, at)[0])
                    for k, at in enumerate(starts)}  # fmt: skip
    return {}


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size
