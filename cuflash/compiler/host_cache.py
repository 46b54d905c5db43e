"""The folder on disk that keeps kernels compiled for the host: its place, faults and size, and how it is emptied."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ..keywords import explains_keywords

# Names of what `sim.compiler` keeps. Folders in which a compiler is at work have other names, and stay.
_KEPT = re.compile(r"(kernel|runtime|prelude)-[0-9a-f]{32}(\.so|\.cpp)?")
_ADVICE = "set CUFLASH_CACHE_DIR to a folder of your own"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCache:
    """Kernels that the simulator compiled for the host and keeps on disk.

    Attributes
    ----------
    folder : pathlib.Path
        It need not exist.
    entries, nbytes : int
        Shared objects in the folder, and the size of all that is kept there.
    """

    folder: Path
    entries: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.folder}: {self.entries} shared objects, {self.nbytes} bytes"


def folder() -> Path:
    """Return where kernels for the host are kept; the folder need not exist."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("cuflash", appauthor=False)) / "sim"


def fault(place: Path) -> str:
    """Return why libraries must not be kept in a folder that exists, or "" if they may.

    Libraries that are loaded from this folder run with the user's rights, so the user alone may write to it.
    """
    status = place.stat()
    if not (os.access(place, os.W_OK | os.X_OK) and status.st_uid == os.getuid()):
        return f"{place} is not writable, or not this user's"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to {place}"
    if os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
        return f"no library may be loaded from {place}, whose file system is mounted with noexec"
    return ""


def made(place: Path) -> str:
    """Make a folder for libraries, and return why it cannot serve, or "" if it can."""
    if not place.is_absolute():
        return f"{place} is not an absolute path"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return fault(place)
    except OSError as error:
        return str(error)


def host_cache() -> HostCache:
    """Describe what is kept, without making the folder.

    Raises
    ------
    RuntimeError
        The folder cannot be read.
    """
    place = folder()
    try:
        kept = list(_kept(place))
        files = [file for entry in kept for file in (entry.iterdir() if entry.is_dir() else (entry,))]
        nbytes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise RuntimeError(f"the simulator's cache folder {place} cannot be read ({error}): {_ADVICE}") from error
    return HostCache(folder=place, entries=sum(entry.suffix == ".so" for entry in kept), nbytes=nbytes)


@explains_keywords
def cache_clear() -> HostCache:
    """Remove the kernels that the simulator compiled and keeps on disk.

    They are compiled anew when they are next used. Kernels that a process has loaded stay usable there. CuPy's cache
    serves all programs that use CuPy, and stays: remove the folder that `cache_info` shows to clear it.

    Returns
    -------
    HostCache
        A record that prints itself: the `folder`, and the `entries` and `nbytes` that were removed from it.

    Raises
    ------
    RuntimeError
        The folder cannot be read, or a file in it cannot be removed.

    Examples
    --------
    >>> import os, tempfile, unittest.mock
    >>> with tempfile.TemporaryDirectory() as empty, unittest.mock.patch.dict(os.environ, CUFLASH_CACHE_DIR=empty):
    ...     cache_clear().entries
    0
    """
    was = host_cache()
    try:
        for entry in list(_kept(was.folder)):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
    except OSError as error:
        advice = "remove the folder yourself"
        raise RuntimeError(f"kernels in {was.folder} cannot be removed ({error}): {advice}") from error
    return was


def _kept(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from (entry for entry in place.iterdir() if _KEPT.fullmatch(entry.name))
