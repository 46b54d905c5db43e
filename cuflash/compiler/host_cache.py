"""The folder on disk that keeps kernels compiled for the host: its place, faults and size, and how it is emptied."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from ..keywords import explains_keywords

MOST_BYTES = 1 << 30  # that are kept; beyond it, what was used least recently is removed
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
        files = _files(place)
    except OSError as error:
        raise RuntimeError(f"the simulator's cache folder {place} cannot be read ({error}): {_ADVICE}") from error
    return _described(place, files)


@explains_keywords
def cache_clear() -> HostCache:
    """Remove the kernels that the simulator compiled and keeps on disk.

    They are compiled again when they are next used. A process that has loaded kernels can go on using them, and files
    that a process is about to load stay. CuPy's cache, which other programs use too, is left alone: to clear it, remove
    the folder that `cache_info` shows.

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
        removed = {file: status for file, status in _files(was.folder).items() if _remove(file)}
    except OSError as error:
        advice = "remove the folder yourself"
        raise RuntimeError(f"kernels in {was.folder} cannot be removed ({error}): {advice}") from error
    return _described(was.folder, removed)


def shrink(place: Path) -> None:
    """Remove what was used least recently from a folder that holds more than `MOST_BYTES`."""
    with suppress(OSError):  # what cannot be removed is no reason to refuse a kernel
        files = _files(place)
        excess = sum(status.st_size for status in files.values()) - MOST_BYTES
        for file, status in sorted(files.items(), key=lambda each: each[1].st_mtime_ns):
            if excess > 0 and _remove(file):
                excess -= status.st_size


def hold(file: IO[bytes]) -> bool:
    """Mark an open file of the folder as used now, and keep it from being removed until it is closed.

    Returns
    -------
    bool
        False if it was removed or replaced before.
    """
    import fcntl  # Windows, on which no kernel is compiled for the host, has no such module

    with suppress(OSError):  # some file systems have no locks, and those of other machines may be read-only
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(file.fileno())
    return _is_in_place(file)


def release(file: IO[bytes]) -> None:
    """Let an open file of the folder be removed again."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_in_place(file: IO[bytes]) -> bool:
    """Return whether an open file still has its name: it may have been removed, or replaced by another of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _remove(file: Path) -> bool:
    """Remove a file that no process holds, and the folder of a prelude with it; return whether the file was removed."""
    import fcntl

    try:
        with file.open("rb") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
            if not _is_in_place(opened):
                return False
            file.unlink()
    except FileNotFoundError:  # another process was faster
        return False
    if _KEPT.fullmatch(file.parent.name):
        with suppress(OSError):  # another process writes to it
            file.parent.rmdir()
    return True


def _files(place: Path) -> dict[Path, os.stat_result]:
    """Return the files that `sim.compiler` keeps in a folder; other processes may remove some meanwhile."""
    files = {}
    for entry in place.iterdir() if place.is_dir() else ():
        if _KEPT.fullmatch(entry.name):
            with suppress(FileNotFoundError):
                for file in entry.iterdir() if entry.is_dir() else (entry,):
                    if file.is_file():
                        files[file] = file.stat()
    return files


def _described(place: Path, files: dict[Path, os.stat_result]) -> HostCache:
    entries = sum(file.suffix == ".so" for file in files)
    return HostCache(folder=place, entries=entries, nbytes=sum(status.st_size for status in files.values()))
