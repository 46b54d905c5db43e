"""A copy of the CUDA sources with one edit, in the place of the library's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cuflash import simulated
from cuflash import source as sources


@contextmanager
def planted(folder: Path, file: str, line: str, replacement: str) -> Iterator[None]:
    """Kernels are made of the edited copy meanwhile; an edit whose line is gone, or stands twice, fails."""
    original = sources.KERNELS
    shutil.copytree(original, folder, dirs_exist_ok=True)
    path = folder / file
    text = path.read_text("utf-8")
    if text.count(line) != 1:
        raise LookupError(f"{line!r} stands {text.count(line)} times in {file}: bring the edit up to date")
    path.write_text(text.replace(line, replacement), "utf-8")
    try:
        sources.KERNELS = folder
        _forget()
        yield
    finally:
        sources.KERNELS = original
        _forget()


def _forget() -> None:
    sources.source.cache_clear()
    simulated._kernel.cache_clear()
