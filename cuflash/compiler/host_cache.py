"""The disk cache of kernels that are compiled for the host: its folder, its size, and the removal of files."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from ..keywords import explains_keywords

MOST_BYTES = 1 << 30  # size limit of the cache; above it, the least recently used files are removed
# Names of the files and folders that `sim.compiler` stores. Folders of a running compiler have other names.
_STORED_NAME = re.compile(r"(kernel|runtime|prelude|handler)-[0-9a-f]{32}(\.so|\.cpp)?")
BUILDING = "building-"  # start of the names of the folders in which compilers run
_ABANDONED_SECONDS = 86400  # an older folder of a compiler was left by a process that was killed
_ADVICE = "set CUFLASH_CACHE_DIR to a folder of your own"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCache:
    """The disk cache of kernels that the simulator compiled for the host.

    Attributes
    ----------
    folder : pathlib.Path
        The folder of the cache, which may not exist yet.
    entries, nbytes : int
        Number of shared objects in the folder, and total size of all its files.
    """

    folder: Path
    entries: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.folder}: {self.entries} shared objects, {self.nbytes} bytes"


def folder() -> Path:
    """Return the folder in which kernels for the host are stored, which may not exist yet."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("cuflash", appauthor=False)) / "sim"


def fault(place: Path) -> str:
    """Return why libraries must not be stored in an existing folder, or "" if the folder is safe.

    Libraries from this folder run with the user's rights, so only the user may have write access to it.
    """
    status = place.stat()
    if not (os.access(place, os.W_OK | os.X_OK) and status.st_uid == os.getuid()):
        return f"{place} is not writable, or belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to {place}"
    if os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
        return f"libraries cannot be loaded from {place}, because its file system is mounted with noexec"
    return ""


def make_folder(place: Path) -> str:
    """Create a folder for libraries if it does not exist; return why it cannot be used, or "" if it can be."""
    if not place.is_absolute():
        return f"{place} is not an absolute path"
    try:
        for folder in (*reversed(place.parents), place):  # `parents=True` would make parents that others can write to
            folder.mkdir(mode=0o700, exist_ok=True)
        return fault(place)
    except OSError as error:
        return str(error)


def host_cache() -> HostCache:
    """Return a description of the cache, without creating its folder.

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
    return _describe(place, files)


@explains_keywords
def cache_clear() -> HostCache:
    """Remove the compiled kernels of the simulator from its disk cache.

    They are compiled again the next time they are used. Processes that have loaded kernels can continue to use them,
    and files that a process is about to load are not removed. CuPy's cache is not changed, because other programs use
    it too: to clear it, remove the folder that `cache_info` shows.

    Returns
    -------
    HostCache
        A printable record of the `folder`, and of the `entries` and `nbytes` that were removed from it.

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
    _remove_abandoned(was.folder)
    try:
        removed = {file: status for file, status in _files(was.folder).items() if _remove(file)}
    except OSError as error:
        advice = "remove the folder yourself"
        raise RuntimeError(f"kernels in {was.folder} cannot be removed ({error}): {advice}") from error
    return _describe(was.folder, removed)


def shrink(place: Path) -> None:
    """Remove the least recently used files from a folder until it holds at most `MOST_BYTES`, and abandoned folders."""
    _remove_abandoned(place)
    with suppress(OSError):  # a file that cannot be removed must not stop a call
        files = _files(place)
        excess = sum(status.st_size for status in files.values()) - MOST_BYTES
        for file, status in sorted(files.items(), key=lambda each: each[1].st_mtime_ns):
            if excess > 0 and _remove(file):
                excess -= status.st_size


def hold(file: IO[bytes]) -> bool:
    """Lock an open file of the cache against removal until it is closed, and set its time of use to now.

    Returns
    -------
    bool
        False if the file had already been removed or replaced.
    """
    import fcntl  # does not exist on Windows, where no kernel is compiled for the host

    with suppress(OSError):  # some file systems have no locks, and network file systems may be read-only
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(file.fileno())
    return _is_in_place(file)


def release(file: IO[bytes]) -> None:
    """Unlock an open file of the cache, so that it can be removed again."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of compilers that were killed, also if their dates are in the future after a clock change."""
    now = time.time()
    with suppress(OSError):
        for folder in place.glob(f"{BUILDING}*"):
            with suppress(FileNotFoundError):  # another process removes it
                if abs(now - folder.stat().st_mtime) > _ABANDONED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)


def _is_in_place(file: IO[bytes]) -> bool:
    """True if an open file still exists under its name; it may have been removed, or replaced by another file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _remove(file: Path) -> bool:
    """Remove a file that no process has locked, and the folder of a prelude with it; return whether it was removed."""
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
    if _STORED_NAME.fullmatch(file.parent.name):
        with suppress(OSError):  # another process is writing to the folder
            file.parent.rmdir()
    return True


def _files(place: Path) -> dict[Path, os.stat_result]:
    """Return the files that `sim.compiler` has stored in a folder; other processes may remove some at the same time."""
    files = {}
    for entry in place.iterdir() if place.is_dir() else ():
        if _STORED_NAME.fullmatch(entry.name):
            with suppress(FileNotFoundError):
                for file in entry.iterdir() if entry.is_dir() else (entry,):
                    if file.is_file():
                        files[file] = file.stat()
    return files


def _describe(place: Path, files: dict[Path, os.stat_result]) -> HostCache:
    entries = sum(file.suffix == ".so" for file in files)
    return HostCache(folder=place, entries=entries, nbytes=sum(status.st_size for status in files.values()))
