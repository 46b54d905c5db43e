"""The contents of a cubin that determine how its functions run: instructions, constants, registers, memory; no names.

A cubin is a 64-bit ELF file. For a function `f` it has the sections `.text.f` (instructions of 16 bytes),
`.nv.constant<bank>.f`, `.nv.shared.f`, and `.nv.info.f`, a list of attributes; `.nv.info` has the attributes of all
functions. Debug sections, symbols and strings are ignored. So are `.nv.merc` and `.nv.capmerc`, which contain the same
code in a form that a driver can translate for other chips. A symbol is replaced by its meaning, so that renaming
changes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

Function = dict[str, Any]  # by field: "instructions", "registers", "constant bank 0", "attribute 0x1c", ...

# section types; formats of the entries of relocation sections
_SYMBOLS, _NO_BITS, _RELOCATIONS = 2, 8, {4: "<QQq", 9: "<QQ"}
_FUNCTION = 2  # symbol type
# Attributes (EIATTR) with separate fields in the result, except the fourth, whose value contains symbol numbers. Each
# entry of .nv.info starts with a symbol number, and so does the value of the third attribute.
_REGISTERS, _FRAME, _PARAMETERS, _EXTERNS, _BARRIERS = 0x2F, 0x11, 0x0A, 0x0F, 0x4C
_ADDRESSES = 4  # the constant bank that holds addresses of global variables
_READS_CONSTANTS, _BARRIER_OPERATION = (3, 5), 0x11D  # operand forms; for a barrier, they encode its number


class _Section(NamedTuple):
    name: str
    kind: int
    data: bytes
    size: int
    info: int


class _Symbol(NamedTuple):
    name: str
    kind: int
    section: int
    value: int
    size: int


def functions(elf: bytes) -> dict[str, Function]:
    """Return the functions of a cubin, including callees.

    A single kernel is "kernel", several are "kernel 1", "kernel 2", ...
    """
    sections = _sections(elf)
    symbols = _symbols(sections)
    every = []
    for number, section in enumerate(sections):
        if section.name.startswith(".text."):
            inside = {index for index, each in enumerate(symbols) if (each.kind, each.section) == (_FUNCTION, number)}
            every.append(_function(section, inside, sections, symbols))
    every.sort(key=lambda function: function["instructions"])
    return {f"kernel {number}" if len(every) > 1 else "kernel": function for number, function in enumerate(every, 1)}


def _function(text: _Section, inside: set[int], sections: list[_Section], symbols: list[_Symbol]) -> Function:
    """Read the function of a section .text.<name>; `inside` holds its own symbol numbers and those of its callees."""
    name = text.name.removeprefix(".text.")
    function: Function = {"instructions": text.data, "registers": 0, "stack bytes": 0, "shared bytes": 0, "barriers": 0}
    for attribute, value in _attributes(_data(sections, ".nv.info")):
        number, count = int.from_bytes(value[:4], "little"), int.from_bytes(value[4:], "little")
        field = {_REGISTERS: "registers", _FRAME: "stack bytes"}.get(attribute, f"attribute {attribute:#x}")
        if number in inside:
            function[field] = max(function.get(field, 0), count)
    for attribute, value in _attributes(_data(sections, f".nv.info.{name}")):
        field = f"attribute {attribute:#x}"
        if attribute == _BARRIERS:
            function["barriers"] = value[0]
        elif attribute == _EXTERNS:
            function[field] = " ".join(symbols[number].name for (number,) in struct.iter_unpack("<I", value))
        else:
            shown = value[4:] if attribute == _PARAMETERS else value
            function[field] = f"{function.get(field, '')} {shown.hex()}".strip()
    function["relocations"] = _relocations(text.name, sections, symbols)
    for section in sections:
        bank, _, of = section.name.removeprefix(".nv.constant").partition(".")
        if section.name == f".nv.shared.{name}":
            function["shared bytes"] = section.size
        elif section.name.startswith(".nv.constant") and of in ("", name):
            # The order of the addresses of variables that are never read depends on names.
            if bank != str(_ADDRESSES) or _reads_addresses(text.data):
                function[f"constant bank {bank}"] = section.data
                function[f"relocations of constant bank {bank}"] = _relocations(section.name, sections, symbols)
    return function


def _sections(elf: bytes) -> list[_Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin must be a 64-bit ELF file; got {elf[:5]!r}")
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, number, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQII", elf, start + size * index) for index in range(number)]
    strings = headers[names][4]
    return [
        _Section(_text(elf, strings + name), kind, elf[place : place + length] * (kind != _NO_BITS), length, info)
        for name, kind, _, _, place, length, _, info in headers
    ]


def _symbols(sections: list[_Section]) -> list[_Symbol]:
    strings = _data(sections, ".strtab")
    table = next(section.data for section in sections if section.kind == _SYMBOLS)
    return [
        _Symbol(_text(strings, name), info & 15, section, value, size)
        for name, info, _, section, value, size in struct.iter_unpack("<IBBHQQ", table)
    ]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield numbers and values of a .nv.info section; a value has two bytes, or in format 4 the size that it states."""
    place = 0
    while place < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, place)
        value = data[place + 4 : place + 4 + size] if form == 4 else data[place + 2 : place + 4]
        yield attribute, value
        place += 4 + (size if form == 4 else 0)


def _relocations(target: str, sections: list[_Section], symbols: list[_Symbol]) -> list[str]:
    """Return the relocations of a section: offset, type, meaning of the symbol, addend."""
    return [
        f"{offset:#x} {info & 0xFFFFFFFF} {_meaning(symbols[info >> 32], sections)} {sum(addend)}"
        for section in sections
        if section.kind in _RELOCATIONS and section.name in (f".rel{target}", f".rela{target}")
        for offset, info, *addend in sorted(struct.iter_unpack(_RELOCATIONS[section.kind], section.data))
    ]


def _meaning(symbol: _Symbol, sections: list[_Section]) -> str:
    """Return the meaning of a symbol: a function's code, a place in memory, a variable's value, or its name."""
    if not 0 < symbol.section < len(sections):
        return symbol.name
    section = sections[symbol.section]
    if section.name.startswith(".nv.global"):
        stored = section.data[symbol.value : symbol.value + symbol.size]
        return f"{symbol.size} bytes {stored.hex()}"
    kind = ".".join(section.name.split(".")[: 2 if section.name.startswith(".text") else 3])
    return f"{kind} {symbol.value:#x}"


def _reads_addresses(code: bytes) -> bool:
    """Return whether an instruction reads, or may read, an operand from the constant bank of addresses."""
    return any(
        low >> 54 & 31 == _ADDRESSES and low >> 9 & 7 in _READS_CONSTANTS and low & 0x1FF != _BARRIER_OPERATION
        for low, _ in struct.iter_unpack("<QQ", code)
    )


def _data(sections: list[_Section], name: str) -> bytes:
    return next((section.data for section in sections if section.name == name), b"")


def _text(data: bytes, place: int) -> str:
    return data[place : data.index(b"\0", place)].decode()
