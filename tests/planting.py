"""A copy of the CUDA sources with one edit, in the place of the library's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cuflash import simulated
from cuflash import source as sources


def chosen(edits: Mapping[str, object]) -> list[str]:
    """The names of all edits; every third of them, unless CUFLASH_PROFILE=long: each takes a second or more."""
    return list(edits) if os.environ.get("CUFLASH_PROFILE") == "long" else list(edits)[::3]


def without_their_line(edits: Mapping[str, tuple[str, str, str]]) -> list[str]:
    """Names of edits that fit the sources no more: their line is gone, or stands twice."""
    texts = {file: (sources.KERNELS / file).read_text("utf-8") for file, _, _ in edits.values()}
    return [name for name, (file, line, _) in edits.items() if texts[file].count(line) != 1]


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
