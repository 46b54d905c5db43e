"""Access to the modules of a copy of the library, which has another name than cuflash."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def part(library: ModuleType, name: str) -> Any:
    """Return a module of a copy of the library by its name within the package."""
    return importlib.import_module(f"{library.__name__}.{name}")
