"""The simulator's cache survives processes that are killed, full and foreign folders, and many processes at once."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache as cache_of_calls
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from library_parts import part

import cuflash
from cuflash.compiler import host_cache

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
ROOT = Path(__file__).parents[2]


def published(room: Any, number: int = 0, nbytes: int = 12) -> Path:
    """Return a file of the cache, which `cp` makes in place of a compiler."""
    with tempfile.NamedTemporaryFile() as original:
        original.write(b"x" * nbytes)
        original.flush()
        target: Path = room.cache_directory() / f"kernel-{number:032x}.so"
        commands = [["cp", original.name, target.name]]
        room._cached_file(target, lambda: room._publish(commands, target, "kernel twice")).close()
        return target


def is_whole(room: Any, file: Path) -> bool:
    opened = room._opened(file)
    if opened is not None:
        opened.close()
    return opened is not None


def run(code: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return what a process of its own prints."""
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=environment)
    assert child.returncode == 0, child.stderr
    return child.stdout


# Processes that are killed, at any line.

KILLED = """
import os, signal, sys
from pathlib import Path
from cuflash.compiler import host_cache
from cuflash.sim import compiler

folder = Path(sys.argv[1])
original = folder.parent / "original"
original.write_bytes(b"machine code" * 9)

def cached(name):
    target = folder / name
    commands = [["cp", str(original), target.name]]
    return compiler._cached_file(target, lambda: compiler._publish(commands, target, "a file"))

def is_killed(line, name):
    if (child := os.fork()) == 0:
        count = 0
        def trace(frame, event, _):
            nonlocal count
            if frame.f_code.co_filename not in (compiler.__file__, host_cache.__file__):
                return None
            count += event == "line"
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        cached(name).close()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

for name in ("kernel-{:032x}.so", "prelude-{:032x}/prelude.hpp.gch"):
    line = 1
    while is_killed(line, name.format(line)):
        with cached(name.format(line)) as file:
            file.seek(0)
            assert file.read().startswith(original.read_bytes()), line
        line += 1
    print(line - 1)
"""


def test_a_process_killed_at_any_line_leaves_nothing_that_lasts(tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    folder.mkdir()
    lines = list(map(int, run(KILLED, str(folder)).split()))
    assert min(lines) > 50
    left = [*folder.glob(f"{host_cache.BUILDING}*")]
    assert len(left) > 20
    for number, each in enumerate(left):
        day = 86400 * (1.5 if number % 2 else -1.5)  # the clock may have been set back since
        os.utime(each, (each.stat().st_mtime + day,) * 2)
    working = folder / f"{host_cache.BUILDING}now"
    working.mkdir()
    host_cache.shrink(folder)
    assert [*folder.glob(f"{host_cache.BUILDING}*")] == [working]
    assert len([*folder.glob("kernel-*")]) == lines[0] + 1


# Folders that take no file.


@contextmanager
def fresh(library: ModuleType, cache: Path, nbytes: int = 12) -> Iterator[Any]:
    """Yield `sim.compiler` of a library in the state of a new process, with a cache, and with `cp` as the compiler.

    Its `build` returns the file of a kernel, of this size.
    """
    room = part(library, "sim.compiler")
    make = room._temporary_directory.__wrapped__
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:

        @cache_of_calls
        def temporary(reason: str) -> SimpleNamespace:
            return SimpleNamespace(name=undo.enter_context(make(reason)))

        patch.setattr(room, "_temporary_directory", temporary)
        patch.setattr(room, "_unusable", {})
        patch.setattr(room, "_built", lambda compiler, text, *_: published(room, len(text), nbytes))
        patch.setenv("CUFLASH_CACHE_DIR", str(cache))
        yield room


def failing(code: int, place: str) -> Callable[..., Any]:
    """Return a stand-in for a function of the system that fails for a path in a folder, and else does as before."""
    real: Callable[..., Any] = getattr(os, "replace")

    def fail(*paths: Any) -> Any:
        if str(paths[-1]).startswith(place):
            raise OSError(code, os.strerror(code), str(paths[-1]))
        return real(*paths)

    return fail


def check_a_folder_that_stores_nothing_is_passed(library: ModuleType, folder: Path, code: int) -> None:
    """Check that a process compiles in a temporary folder, with one warning, while a cache's disk takes no file."""
    with fresh(library, folder) as room, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing(code, str(folder)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            files = [room.build(text, "twice") for text in ("a", "ab", "a")]
        assert all(is_whole(room, file) for file in files) and files[0] == files[2] != files[1]
        assert not any(file.is_relative_to(folder) for file in files)
        (message,) = [str(each.message) for each in caught]
        assert message.startswith("every process compiles its kernels for the host again: kernel twice must be stored")
        assert os.strerror(code) in message


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "ENAMETOOLONG", "ESTALE"])
def test_a_folder_that_stores_nothing_is_passed_with_one_warning(tmp_path: Path, name: str) -> None:
    check_a_folder_that_stores_nothing_is_passed(cuflash, tmp_path, getattr(errno, name))


def test_where_no_folder_stores_anything_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh(cuflash, tmp_path) as room:
        monkeypatch.setattr(os, "replace", failing(errno.ENOSPC, "/"))
        with pytest.warns(RuntimeWarning), pytest.raises(room.BuildError, match="No space left .*: free disk space"):
            room.build("a", "twice")
        assert [*tmp_path.glob("sim/*")] == []


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """Use a file system in memory, or skip the test where a process may not mount it."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_of_64_kib_is_passed_with_one_warning(tmp_path: Path) -> None:
    """The compiler itself fails here, and says so in its own words."""
    with mounted(tmp_path / "small", "size=64k,mode=700"), fresh(cuflash, tmp_path / "small", 1 << 20) as room:
        with pytest.warns(RuntimeWarning, match="(?s)for the host again: .*No space left on device") as caught:
            files = [room.build(text, "twice") for text in ("a", "ab")]
        assert all(is_whole(room, file) for file in files) and len(caught) == 1


def test_a_disk_that_cannot_be_written_is_passed_with_one_warning(tmp_path: Path) -> None:
    with mounted(tmp_path / "fixed", "ro"), fresh(cuflash, tmp_path / "fixed") as room:
        with pytest.warns(RuntimeWarning, match="Read-only file system") as caught:
            files = [room.build(text, "twice") for text in ("a", "ab")]
        assert all(is_whole(room, file) for file in files) and len(caught) == 1


def test_a_folder_of_another_user_or_open_to_others_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sim").mkdir(0o700)
    with fresh(cuflash, tmp_path) as room:
        assert room.cache_directory() == tmp_path / "sim"
        (tmp_path / "sim").chmod(0o777)
        with pytest.warns(RuntimeWarning, match="other users can write"):
            assert room.cache_directory() != tmp_path / "sim"
        (tmp_path / "sim").chmod(0o700)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.warns(RuntimeWarning, match="belongs to another user"):
            assert room.cache_directory() != tmp_path / "sim"


@pytest.mark.parametrize("name", ["caf\u00e9 \u6f22", "x" * 240, "link"])
def test_a_folder_of_any_name_stores_files(tmp_path: Path, name: str) -> None:
    if name == "link":
        (tmp_path / "real").mkdir()
        (tmp_path / name).symlink_to(tmp_path / "real")
    with fresh(cuflash, tmp_path / name) as room:
        file = room.build("a", "twice")
        assert file.is_relative_to(tmp_path / name) and is_whole(room, file)
        assert cuflash.cache_info().simulator.entries == 1


def test_a_folder_that_is_deleted_in_between_is_made_again(tmp_path: Path) -> None:
    with fresh(cuflash, tmp_path) as room:
        for _ in range(3):
            assert is_whole(room, room.build("a", "twice"))
            shutil.rmtree(tmp_path / "sim")


# Users' environments.


def check_folders_are_private(library: ModuleType, place: Path) -> None:
    """Check that all folders that the cache makes are the user's alone, whatever the umask."""
    for mask in (0o000, 0o077):
        before = os.umask(mask)
        try:
            assert part(library, "compiler.host_cache").make_folder(place / f"{mask:o}" / "cuflash" / "sim") == ""
        finally:
            os.umask(before)
        folders = [path for path in (place / f"{mask:o}").rglob("*")]
        assert len(folders) == 2 and all(path.stat().st_mode & 0o777 == 0o700 for path in folders)


def test_folders_of_the_cache_are_private_under_any_umask(tmp_path: Path) -> None:
    check_folders_are_private(cuflash, tmp_path)


HOMELESS = """
import os, numpy as np, cuflash
from cuflash.compiler import nvrtc
from cuflash.sim import compiler
assert "HOME" not in os.environ
place, (_, cache, _) = compiler.cache_directory(), nvrtc._environment()
q = np.random.default_rng(0).standard_normal((2, 9, 8))
print(cuflash.attention(q, q, q, causal=True).tobytes().hex(), place.is_absolute(), cache.is_absolute())
"""


def test_results_do_not_depend_on_home_locale_or_umask() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    printed = {
        run(f"import os; os.umask({mask}){HOMELESS}", environment={**environment, "LC_ALL": locale, "PYTHONUTF8": "0"})
        for mask, locale in ((0o022, "C.UTF-8"), (0o000, "C"), (0o077, "POSIX"), (0o022, "xx_YY"))
    }
    assert len(printed) == 1 and printed.pop().endswith(" True True\n")


def test_files_from_the_future_are_used_and_can_be_removed(tmp_path: Path) -> None:
    with fresh(cuflash, tmp_path) as room:
        file = room.build("a", "twice")
        os.utime(file, (1e10, 1e10))
        assert is_whole(room, file) and file.stat().st_mtime < 1e10  # its use is dated to now
        os.utime(file, (1e10, 1e10))
        assert cuflash.cache_clear().entries == 1


# Many processes at once.

CROWD = """
import os, random, sys
from pathlib import Path
import cuflash
from cuflash.compiler import host_cache
from cuflash.sim import compiler

folder, processes, rounds = Path(sys.argv[1]) / "sim", int(sys.argv[2]), int(sys.argv[3])
os.environ["CUFLASH_CACHE_DIR"] = sys.argv[1]
os.nice(10)
host_cache.MOST_BYTES = 1 << 13  # so that files are removed at any time

def cached(number):
    original, target = folder.parent / f"original-{number}", compiler.cache_directory() / f"kernel-{number:032x}.so"
    publish = lambda: compiler._publish([["cp", str(original), target.name]], target, "a file")
    return compiler._cached_file(target, publish), original

def work(seed):
    drawn = random.Random(seed)
    for _ in range(rounds):
        for number in drawn.sample(range(20), 20):
            file, original = cached(number)
            with file:
                file.seek(0)
                assert file.read()[:-compiler._SEAL_BYTES] == original.read_bytes()
        if drawn.random() < 0.2:
            cuflash.cache_clear()

for number in range(20):
    (folder.parent / f"original-{number}").write_bytes(bytes([number]) * (100 + 60 * number))
children = []
for seed in range(processes):
    if (child := os.fork()) == 0:
        status = 1
        try:
            work(seed)
            status = 0
        finally:
            os._exit(status)
    children.append(child)
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.slow
def test_64_processes_share_a_cache_whose_files_come_and_go(tmp_path: Path) -> None:
    rounds = 20 if os.environ.get("CUFLASH_PROFILE") == "long" else 1
    assert run(CROWD, str(tmp_path), "64", str(rounds)) == "0\n"
    left = [path.name for path in (tmp_path / "sim").iterdir()]
    assert all(name.startswith("kernel-") for name in left), left
    with fresh(cuflash, tmp_path) as room:
        assert all(is_whole(room, tmp_path / "sim" / name) for name in left)
