"""All public names with their signatures, as one text: what a release must not change.

    python tests/repository/public_surface.py          prints it
    python tests/repository/public_surface.py --write  writes it to public_surface.txt

`test_public_surface.py` compares the file with the library, so that a changed name, parameter or default is a change of
the file.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

SURFACE = Path(__file__).with_name("public_surface.txt")
MODULES = (
    "cuflash", "cuflash.masks", "cuflash.patterns", "cuflash.scores", "cuflash.selectors", "cuflash.reference",
    "cuflash.study", "cuflash.testing", "cuflash.distributed",
)  # fmt: skip
# public names of modules that also contain private ones
BY_NAME = ("cuflash.diagnosis.doctor", "cuflash.errors.CompileError")


def surface() -> str:
    """Return a line for each public name, and one for each public member of a class."""
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        for member in sorted(module.__all__):
            lines += _lines(f"{name}.{member}", getattr(module, member))
    for path in BY_NAME:
        module_name, _, member = path.rpartition(".")
        lines += _lines(path, getattr(importlib.import_module(module_name), member))
    return "\n".join(lines) + "\n"


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"{path}: module"
    elif inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        for name, member in _members(value):
            yield f"{path}.{name}{_member(member)}"
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members that a class or one of cuflash's bases defines."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("cuflash")]
    names = {name for base in bases for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    for name in sorted(names):
        if not name.startswith("_"):
            yield name, inspect.getattr_static(cls, name, None)


def _member(member: Any) -> str:
    function = getattr(member, "__func__", member)
    if inspect.isfunction(function):
        return _signature(function)
    return ": attribute"


def _signature(call: Any) -> str:
    """Return names, order and defaults of parameters, without annotations; objects as defaults appear as their type."""
    parameters = []
    for each in inspect.signature(call).parameters.values():
        default = each.default
        is_plain = default is each.empty or isinstance(default, (bool, int, float, str, tuple, type(None)))
        if not is_plain:
            default = _Named(type(default).__name__)
        parameters.append(each.replace(annotation=each.empty, default=default))
    return str(inspect.Signature(parameters))


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    text = surface()
    if "--write" in sys.argv[1:]:
        SURFACE.write_text(text, "utf-8")
    else:
        print(text, end="")
