"""Compile the text of a kernel to a library of the host by g++, once, and keep it on disk."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal

from ..compiler import host_cache
from .launch import Kernel

Sanitizer = Literal["", "address", "undefined", "thread", "blocks"]

_COMPILER = "g++"
_COMPILER_SECONDS = 600
_RUNTIME = Path(__file__).parent / "runtime"
_PRELUDE = "prelude.hpp"
# No contraction: the same bits on every host. No strict aliasing: CUDA compilers assume none, and kernels reinterpret.
_COMMON = ("-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-psabi")
_KERNEL = ("-Og", "-g1", "-fno-strict-aliasing", "-fvisibility=hidden", "-fno-gnu-unique", "-Wno-unknown-pragmas")
# Debug information names our files, not the folder of the compilation.
_HERE = ("-fdebug-prefix-map={here}=.",)
# The runtime answers UndefinedBehaviorSanitizer itself, so that kernels link without its library.
_UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
_SANITIZE: dict[str, tuple[str, ...]] = {
    "": (),
    "undefined": _UNDEFINED,
    "address": ("-fsanitize=address", *_UNDEFINED),
    "thread": ("-fsanitize=thread",),
    # The runtime answers what the compiler inserts, and so learns of every access to global memory.
    "blocks": ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
}
# Kernels name no library: what they call is in the process, with the runtime or before Python.
_LINK = ("-shared", "-nostdlib")
# Flavours of the runtime.
_FLAVOUR: dict[str, tuple[str, ...]] = {"address": ("-DCUFLASH_SIM_ADDRESS",), "thread": ("-DCUFLASH_SIM_THREAD",)}
_TSAN_SYMBOL = "__tsan_create_fiber"
# Libraries that must be in the process before Python starts, and a symbol of each that shows its presence.
_PRELOAD = {"address": ("libasan.so", "__asan_init"), "thread": ("libtsan.so", _TSAN_SYMBOL)}


class BuildError(RuntimeError):
    """A kernel cannot be compiled for the host: no compiler, no sanitizer, or an error in the text."""


def build(text: str, entry: str, *, sanitize: Sanitizer = "") -> Kernel:
    """Compile a kernel for the host.

    >>> text = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
    >>> build(text, "twice")                                             # doctest: +SKIP
    <Kernel twice for the host, parameters of [8] bytes>

    Parameters
    ----------
    text : str
        CUDA C++ without includes; ``#line`` says where its lines come from.
    entry : str
        Name of an ``extern "C" __global__`` function of any trivially copyable parameters.
    sanitize : "", "address", "undefined", "thread" or "blocks"
        "undefined" ends a launch that does what C++ leaves undefined with a SimulationError. "address" sees reads and
        writes outside arrays besides, "thread" sees races in shared memory; both print a report, end the process, and
        need it to be started with `preload_environment`. "blocks" sees races between blocks
        in global memory, which end a launch with a SimulationError, where a schedule has `resident_blocks`.

    Raises
    ------
    BuildError
        No g++, or the text does not compile: its message has our file and line. Or what g++ made cannot be kept or
        loaded.
    """
    if sanitize not in _SANITIZE:
        raise ValueError(f"sanitize must be one of {', '.join(map(repr, _SANITIZE))}; got {sanitize!r}")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", entry):
        raise ValueError(f"entry must be the name of an extern \"C\" function; got {entry!r}")
    compiler = _compiler()
    if sanitize in _PRELOAD and not hasattr(ctypes.CDLL(None), _PRELOAD[sanitize][1]):
        raise BuildError(
            f"sanitize={sanitize!r} needs {_PRELOAD[sanitize][0]} in the process before Python starts: "
            f"run it as a child with the variables that sim.preload_environment({sanitize!r}) returns"
        )
    if sanitize == "blocks" and hasattr(ctypes.CDLL(None), _TSAN_SYMBOL):
        raise BuildError("sanitize='blocks' must run in a process without libtsan.so, which would answer in its place")
    try:
        return _built(compiler, text, entry, sanitize)
    except BuildError as error:
        if not isinstance(error.__cause__, OSError):
            raise
    return _built(compiler, text, entry, sanitize)  # somebody may have removed the folder meanwhile


def _built(compiler: str, text: str, entry: str, sanitize: str) -> Kernel:
    # Neither needs the other, so they compile side by side.
    with ExitStack() as held, ThreadPoolExecutor(max_workers=2) as together:
        runtime = together.submit(lambda: held.enter_context(_build_runtime(compiler, sanitize)))
        library = held.enter_context(_build_kernel(compiler, text, entry, sanitize))
        return _loaded(Path(library.name), Path(runtime.result().name), entry)


def _loaded(library: Path, runtime: Path, entry: str) -> Kernel:
    try:
        return Kernel(library, runtime, entry)
    except OSError as error:
        fault = host_cache.made(library.parent)
        raise BuildError(
            f"kernel {entry} must be loaded from {library.parent}, which fails ({error}{fault and f'; {fault}'}): "
            f"set CUFLASH_CACHE_DIR, or TMPDIR, to another folder"
        ) from error


def preload_environment(sanitize: Sanitizer) -> dict[str, str]:
    """Variables for a child process in which ``build(..., sanitize=...)`` works.

    >>> preload_environment("undefined")
    {}
    """
    if sanitize not in _PRELOAD:
        return {}
    name = _PRELOAD[sanitize][0]
    found = _run([_compiler(), f"-print-file-name={name}"]).stdout.strip()
    if not os.path.isabs(found):
        raise BuildError(f"{_COMPILER} has no {name}; on Debian or Ubuntu it comes with: apt install g++")
    # Python's own memory is none of our business, and BLAS threads would be reported as racing.
    # Blocks use the same shared memory, so an address that raced once may do so again elsewhere.
    return {
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "suppress_equal_addresses=0",
        "OPENBLAS_NUM_THREADS": "1",
    }


def cache_directory() -> Path:
    """Return the folder of compiled kernels: the one that is kept, or one of this process if that cannot serve."""
    folder = host_cache.folder()
    fault = host_cache.made(folder)
    return Path(_temporary_directory(fault).name) if fault else folder


@functools.lru_cache(maxsize=None)
def _temporary_directory(reason: str) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    warnings.warn(f"kernels for the host are compiled anew in every process: {reason}", RuntimeWarning, stacklevel=2)
    return tempfile.TemporaryDirectory(prefix="cuflash-sim-")


def _compiler() -> str:
    path = shutil.which(_COMPILER)
    if path is None:
        raise BuildError(
            f"executor='sim' needs the C++ compiler {_COMPILER}, version 11 or newer, to run CUDA kernels on the host; "
            f"got none on the path: on Debian or Ubuntu, apt install g++"
        )
    return path


@functools.lru_cache(maxsize=None)
def _identity(compiler: str) -> str:
    return f"{compiler} {platform.machine()} {_run([compiler, '--version']).stdout}"


@functools.lru_cache(maxsize=None)
def _runtime_text() -> str:
    """All that a kernel or the runtime is compiled with."""
    paths = sorted(path for path in _RUNTIME.rglob("*") if path.suffix in (".hpp", ".cpp"))
    return "\n".join(f"{path.relative_to(_RUNTIME)}\n{path.read_text('utf-8')}" for path in paths)


def _build_runtime(compiler: str, sanitize: str) -> IO[bytes]:
    flags = (*_COMMON, "-O2", "-fno-semantic-interposition", *_FLAVOUR.get(sanitize, ()))
    target = _target("runtime", _identity(compiler), _runtime_text(), *flags)

    def publish() -> IO[bytes]:
        source = _RUNTIME / "runtime.cpp"
        command = [compiler, *flags, "-shared", str(source), "-o", target.name, "-ldl"]
        return _publish([command], target, f"the simulator's runtime, {source}")

    return _kept_file(target, publish)


def _build_kernel(compiler: str, text: str, entry: str, sanitize: str) -> IO[bytes]:
    flags = (*_COMMON, *_KERNEL, *_SANITIZE[sanitize])
    source = f'#line 1 "kernel.cu"\n{text}\n{_glue(entry)}'
    target = _target("kernel", _identity(compiler), _runtime_text(), source, *flags, *_LINK)

    def publish() -> IO[bytes]:
        kept = target.with_suffix(".cpp")
        with _prelude(compiler, flags) as folder:
            # A compiler that cannot use the precompiled prelude finds its text here.
            prelude = (f"-I{folder}", f"-I{_RUNTIME}", "-include", _PRELUDE)
            to_object = [compiler, *flags, *_HERE, *prelude, "-c", kept.name, "-o", "kernel.o"]
            to_library = [compiler, *_LINK, "kernel.o", "-lgcc", "-o", target.name]
            return _publish([to_object, to_library], target, f"kernel {entry}", source)

    return _kept_file(target, publish)


# Precompiled preludes that this process has used: they stay open, and reading one again takes longer than linking.
_preludes: dict[Path, IO[bytes]] = {}


@contextmanager
def _prelude(compiler: str, flags: tuple[str, ...]) -> Iterator[Path]:
    """Give the folder of the precompiled prelude: half of what a small kernel takes to compile is reading its text.

    The prelude stays in its place meanwhile; where another thread ends first, a compiler may have to read the text.
    """
    folder = _target("prelude", _identity(compiler), _runtime_text(), *flags).with_suffix("")
    target = folder / f"{_PRELUDE}.gch"

    def publish() -> IO[bytes]:
        source = _RUNTIME / _PRELUDE
        command = [compiler, *flags, "-x", "c++-header", str(source), "-o", target.name]
        return _publish([command], target, f"the prelude of kernels, {source}")

    held = _preludes.get(target)
    if held is None or not host_cache.hold(held):
        held = _preludes[target] = _kept_file(target, publish)
        atexit.register(held.close)
    try:
        yield folder
    finally:
        host_cache.release(held)


def _glue(entry: str) -> str:
    """Return the text of the function that a kernel's library exports for launches."""
    export = '__attribute__((visibility("default")))'
    return f"""#line 1 "(launch of {entry})"
extern "C" {export} void cuflash_sim_kernel(void** arguments) {{ ::cuflash::sim::call(&{entry}, arguments); }}
extern "C" {export} const size_t* cuflash_sim_parameter_sizes() {{ return ::cuflash::sim::parameter_sizes(&{entry}); }}
"""


def _target(kind: str, *parts: str) -> Path:
    digest = hashlib.sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()[:32]
    return cache_directory() / f"{kind}-{digest}.so"


def _kept_file(target: Path, publish: Callable[[], IO[bytes]]) -> IO[bytes]:
    """Open a file that is kept; publish it first if it is not there. It stays until it is closed."""
    for _ in range(_MOST_ATTEMPTS):
        if (file := _opened(target)) is not None:
            return file
        with publish():
            if (file := _opened(target)) is not None:
                return file
    raise BuildError(f"{target} is removed or changed as soon as it is made: set CUFLASH_CACHE_DIR to another folder")


def _opened(target: Path) -> IO[bytes] | None:
    """Open a file, which stays until it is closed, or return None if it is not there as `_publish` left it.

    A disk that was full, or a crash, may have cut it short.
    """
    try:
        file = target.open("rb")
    except OSError:
        return None
    is_there = host_cache.hold(file)
    data = file.read()
    if is_there and data[-_SEAL_BYTES:] == _seal(data[:-_SEAL_BYTES]):
        return file
    file.close()
    return None


def _seal(data: bytes) -> bytes:
    """Return the digest that is appended to a library or a prelude; the loader and g++ ignore it."""
    return hashlib.sha256(data).digest()


_SEAL_BYTES = hashlib.sha256().digest_size
_MOST_ATTEMPTS = 3  # at a file that other processes remove or replace


def _publish(commands: list[list[str]], target: Path, what: str, source: str = "") -> IO[bytes]:
    """Run the compiler in a folder of its own, then move the result into place: all of it or nothing is seen.

    Returns
    -------
    file
        The result, which stays in its place until the file is closed.
    """
    folder = target.parent if target.suffix == ".so" else target.parent.parent  # a prelude has a folder of its own
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as here, ExitStack() as undo:
            kept = target.with_suffix(".cpp")
            (Path(here) / kept.name).write_text(source, "utf-8")
            for command in commands:
                command = [word.format(here=here) if "{here}" in word else word for word in command]
                run = _run(command, here)
                if run.returncode:
                    if source:
                        os.replace(Path(here) / kept.name, kept)
                    where = f"\nThe whole text is in {kept}" if source else ""
                    told = f"{_COMPILER} does not compile {what}:\n{run.stderr.strip() or _end(run)}{where}"
                    raise BuildError(told)
            result = Path(here) / target.name
            file = undo.enter_context(result.open("ab"))
            data = result.read_bytes()
            file.write(_seal(data))
            file.flush()
            host_cache.hold(file)
            if (others := _opened(target)) is not None:  # another process was faster, and may be about to load it
                return others
            if target.is_dir():
                target.rmdir()
            _move(result, target)
            _shrink_at_times(folder, len(data) + _SEAL_BYTES)
            undo.pop_all()
            return file
    except OSError as error:
        raise BuildError(
            f"{what} must be kept in {folder}, which fails ({error}): make room there, or remove that folder"
        ) from error


# Bytes that this process has published in a folder since it last looked at all files there.
_added: dict[Path, int] = {}


def _shrink_at_times(folder: Path, nbytes: int) -> None:
    """Shrink the folder with the first file of this process, then after each 64th of what it may hold.

    A look at the thousands of files of a full folder takes a third of what a small kernel takes to compile.
    """
    _added[folder] = _added.get(folder, host_cache.MOST_BYTES) + nbytes
    if _added[folder] >= host_cache.MOST_BYTES // 64:
        _added[folder] = 0
        host_cache.shrink(folder)


def _move(file: Path, target: Path) -> None:
    """Move a file, to a folder that another process may be removing because it is empty."""
    while True:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            return os.replace(file, target)
        except FileNotFoundError:
            if not file.exists():
                raise


def _end(run: subprocess.CompletedProcess[str]) -> str:
    """Describe the end of a program that printed nothing."""
    how = f"exit status {run.returncode}" if run.returncode > 0 else f"signal {-run.returncode}"
    return f"it printed nothing and ended with {how}; the command was {shlex.join(run.args)}"


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if environment.get("LD_PRELOAD", "").endswith(tuple(library for library, _ in _PRELOAD.values())):
        del environment["LD_PRELOAD"]  # a sanitizer, which would make the compiler slower by half
    try:
        # Names of files come in the user's encoding, and whatever they hold is shown.
        return subprocess.run(
            command, cwd=folder, capture_output=True, encoding="utf-8", errors="backslashreplace",
            timeout=_COMPILER_SECONDS, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        told = f"{command[0]} did not end within {_COMPILER_SECONDS} s; the command was {shlex.join(command)}"
        raise BuildError(told) from error
    except OSError as error:
        raise BuildError(f"{command[0]} does not start ({error}): install {_COMPILER} anew") from error
