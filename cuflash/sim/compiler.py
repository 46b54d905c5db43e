"""Compilation of kernel sources to host libraries by g++, and the storage of these libraries in the disk cache."""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from ..compiler import host_cache
from .launch import Kernel

Sanitizer = Literal["", "address", "undefined", "thread", "blocks"]

_COMPILER = "g++"
_COMPILER_SECONDS = 600
_RUNTIME = Path(__file__).parent / "runtime"
_PRELUDE = "prelude.hpp"
# -ffp-contract=off gives the same bits on every host. -fno-strict-aliasing matches CUDA compilers, which do not assume
# strict aliasing, so that kernels may reinterpret memory.
_COMMON = ("-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-psabi")
_KERNEL = ("-Og", "-g1", "-fno-strict-aliasing", "-fvisibility=hidden", "-fno-gnu-unique", "-Wno-unknown-pragmas")
# This option removes the compiler's temporary folder from the names of source files in debug information.
_PREFIX_MAP = ("-fdebug-prefix-map={folder}=.",)
# The runtime implements the callbacks of UndefinedBehaviorSanitizer, so kernels do not need the sanitizer's library.
_UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
_SANITIZE: dict[str, tuple[str, ...]] = {
    "": (),
    "undefined": _UNDEFINED,
    "address": ("-fsanitize=address", *_UNDEFINED),
    "thread": ("-fsanitize=thread",),
    # The compiler inserts a call before each memory access; the runtime implements these calls to record the accesses.
    "blocks": ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
}
# Kernels link to no library: the functions that they call are in the runtime, or in libraries loaded before Python.
_LINK = ("-shared", "-nostdlib")
# Compiler flags of the runtime for each sanitizer.
_FLAVOUR: dict[str, tuple[str, ...]] = {"address": ("-DCUFLASH_SIM_ADDRESS",), "thread": ("-DCUFLASH_SIM_THREAD",)}
_TSAN_SYMBOL = "__tsan_create_fiber"
# Libraries that must be loaded before Python starts, each with a symbol that exists if the library is loaded.
_PRELOAD = {"address": ("libasan.so", "__asan_init"), "thread": ("libtsan.so", _TSAN_SYMBOL)}


class BuildError(RuntimeError):
    """The error for a kernel that cannot be compiled for the host: no compiler, no sanitizer, or invalid source."""


class _StorageError(BuildError):
    """The error for a library that cannot be stored in a folder, or cannot be loaded from it."""


def build(text: str, entry: str, *, sanitize: Sanitizer = "") -> Kernel:
    """Compile a kernel for the host.

    >>> text = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
    >>> build(text, "twice")                                             # doctest: +SKIP
    <Kernel twice for the host, parameters of [8] bytes>

    Parameters
    ----------
    text : str
        CUDA C++ without includes; ``#line`` directives name the files and lines that it comes from.
    entry : str
        Name of an ``extern "C" __global__`` function with trivially copyable parameters.
    sanitize : "", "address", "undefined", "thread" or "blocks"
        "undefined" ends a launch that executes undefined behaviour of C++ with a SimulationError. "address" also
        detects reads and writes outside arrays, and "thread" detects races in shared memory; both print a report, end
        the process, and require that it was started with `preload_environment`. "blocks" detects races between blocks
        in global memory, which end a launch with a SimulationError, if the schedule has several `resident_blocks`.

    Raises
    ------
    BuildError
        g++ is missing, the text does not compile (the message names file and line), or the library cannot be stored or
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
        raise BuildError("sanitize='blocks' must run in a process without libtsan.so, which defines the same functions")
    with suppress(_StorageError):  # another process may have removed the folder in between
        return _built(compiler, text, entry, sanitize)
    try:
        return _built(compiler, text, entry, sanitize)
    except _StorageError as error:
        folder = host_cache.folder()
        if folder in _unusable:
            raise
        _unusable[folder] = str(error)
    return _built(compiler, text, entry, sanitize)


def _built(compiler: str, text: str, entry: str, sanitize: str) -> Kernel:
    # The runtime and the kernel are independent, so they are compiled in parallel.
    from concurrent.futures import ThreadPoolExecutor  # not by a module whose first import may be at the exit of Python

    with ExitStack() as files, ThreadPoolExecutor(max_workers=2) as pool:
        runtime = pool.submit(lambda: files.enter_context(_build_runtime(compiler, sanitize)))
        library = files.enter_context(_build_kernel(compiler, text, entry, sanitize))
        return _loaded(Path(library.name), Path(runtime.result().name), entry)


def _loaded(library: Path, runtime: Path, entry: str) -> Kernel:
    try:
        return Kernel(library, runtime, entry)
    except OSError as error:
        fault = host_cache.make_folder(library.parent)
        raise _StorageError(
            f"kernel {entry} must be loaded from {library.parent}, which fails ({error}{fault and f'; {fault}'}): "
            f"set CUFLASH_CACHE_DIR, or TMPDIR, to a different folder"
        ) from error


def host_library(kind: str, source: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a source file of the package for the host, or take it from the cache, and load it.

    Parameters
    ----------
    kind : str
        The start of the library's name in the cache.
    source : pathlib.Path
    flags : tuple of str
        Flags of the compiler.

    Raises
    ------
    BuildError
        g++ is missing, or the library cannot be compiled, stored or loaded.
    """
    compiler = _compiler()
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared", *flags)
    target = _target(kind, _identity(compiler), source.read_text("utf-8"), *flags)

    def publish() -> IO[bytes]:
        return _publish([[compiler, *flags, str(source), "-o", target.name]], target, str(source))

    with _cached_file(target, publish) as file:
        try:
            return ctypes.CDLL(file.name)
        except OSError as error:
            raise _StorageError(f"{source} must be loaded from {target.parent}, which fails ({error})") from error


def preload_environment(sanitize: Sanitizer) -> dict[str, str]:
    """Return the environment variables that a child process needs for ``build(..., sanitize=...)``.

    >>> preload_environment("undefined")
    {}
    """
    if sanitize not in _PRELOAD:
        return {}
    name = _PRELOAD[sanitize][0]
    path = _run([_compiler(), f"-print-file-name={name}"]).stdout.strip()
    if not os.path.isabs(path):
        raise BuildError(f"{_COMPILER} has no {name}; on Debian or Ubuntu, run apt install g++")
    # Leaks of Python itself are not reported, and BLAS has one thread because its threads would be reported as races.
    # All blocks use the same shared memory, so races at equal addresses are reported again.
    return {
        "LD_PRELOAD": path,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "suppress_equal_addresses=0",
        "OPENBLAS_NUM_THREADS": "1",
    }


# The reason why this process no longer stores kernels in a folder, such as a full disk.
_unusable: dict[Path, str] = {}


def cache_directory() -> Path:
    """Return the folder of compiled kernels: the disk cache, or a temporary folder if the cache is unusable."""
    folder = host_cache.folder()
    fault = _unusable.get(folder) or host_cache.make_folder(folder)
    return Path(_temporary_directory(fault).name) if fault else folder


@functools.lru_cache(maxsize=None)
def _temporary_directory(reason: str) -> tempfile.TemporaryDirectory[str]:
    """Create a folder that is removed when the process ends; warn that every process compiles its kernels again."""
    warnings.warn(f"every process compiles its kernels for the host again: {reason}", RuntimeWarning, stacklevel=2)
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
    """Return the text of all files of the runtime, which is part of the cache key of kernels and of the runtime."""
    paths = sorted(path for path in _RUNTIME.rglob("*") if path.suffix in (".hpp", ".cpp"))
    return "\n".join(f"{path.relative_to(_RUNTIME)}\n{path.read_text('utf-8')}" for path in paths)


def _build_runtime(compiler: str, sanitize: str) -> IO[bytes]:
    flags = (*_COMMON, "-O2", "-fno-semantic-interposition", *_FLAVOUR.get(sanitize, ()))
    target = _target("runtime", _identity(compiler), _runtime_text(), *flags)

    def publish() -> IO[bytes]:
        source = _RUNTIME / "runtime.cpp"
        command = [compiler, *flags, "-shared", str(source), "-o", target.name, "-ldl"]
        return _publish([command], target, f"the simulator's runtime, {source}")

    return _cached_file(target, publish)


def _build_kernel(compiler: str, text: str, entry: str, sanitize: str) -> IO[bytes]:
    flags = (*_COMMON, *_KERNEL, *_SANITIZE[sanitize])
    source = f'#line 1 "kernel.cu"\n{text}\n{_glue(entry)}'
    target = _target("kernel", _identity(compiler), _runtime_text(), source, *flags, *_LINK)

    def publish() -> IO[bytes]:
        source_name = target.with_suffix(".cpp").name
        with _prelude(compiler, flags) as folder:
            # If the compiler cannot use the precompiled prelude, it reads the prelude's text in _RUNTIME.
            prelude = (f"-I{folder}", f"-I{_RUNTIME}", "-include", _PRELUDE)
            to_object = [compiler, *flags, *_PREFIX_MAP, *prelude, "-c", source_name, "-o", "kernel.o"]
            to_library = [compiler, *_LINK, "kernel.o", "-lgcc", "-o", target.name]
            return _publish([to_object, to_library], target, f"kernel {entry}", source)

    return _cached_file(target, publish)


# Precompiled preludes that this process has used. They stay open, because reading one again takes longer than linking.
_preludes: dict[Path, IO[bytes]] = {}


@contextmanager
def _prelude(compiler: str, flags: tuple[str, ...]) -> Iterator[Path]:
    """Yield the folder of the precompiled prelude, which halves the time to compile a small kernel.

    The prelude is not removed inside the `with` block. If another thread leaves its own block first, the prelude may be
    removed, and the compiler reads the text instead.
    """
    folder = _target("prelude", _identity(compiler), _runtime_text(), *flags).with_suffix("")
    target = folder / f"{_PRELUDE}.gch"

    def publish() -> IO[bytes]:
        source = _RUNTIME / _PRELUDE
        command = [compiler, *flags, "-x", "c++-header", str(source), "-o", target.name]
        return _publish([command], target, f"the prelude of kernels, {source}")

    prelude = _preludes.get(target)
    if prelude is None or not host_cache.hold(prelude):
        prelude = _preludes[target] = _cached_file(target, publish)
        atexit.register(prelude.close)
    try:
        yield folder
    finally:
        host_cache.release(prelude)


def _glue(entry: str) -> str:
    """Return the text of the functions that a kernel's library exports for launches."""
    export = '__attribute__((visibility("default")))'
    return f"""#line 1 "(launch of {entry})"
extern "C" {export} void cuflash_sim_kernel(void** arguments) {{ ::cuflash::sim::call(&{entry}, arguments); }}
extern "C" {export} const size_t* cuflash_sim_parameter_sizes() {{ return ::cuflash::sim::parameter_sizes(&{entry}); }}
"""


def _target(kind: str, *parts: str) -> Path:
    digest = hashlib.sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()[:32]
    return cache_directory() / f"{kind}-{digest}.so"


def _cached_file(target: Path, publish: Callable[[], IO[bytes]]) -> IO[bytes]:
    """Open a file of the cache, which cannot be removed until it is closed; publish it first if it does not exist."""
    for _ in range(_MOST_ATTEMPTS):
        if (file := _opened(target)) is not None:
            return file
        with publish():
            if (file := _opened(target)) is not None:
                return file
    fix = "set CUFLASH_CACHE_DIR to a different folder"
    raise _StorageError(f"another process removes or changes {target} as soon as it is written: {fix}")


def _opened(target: Path) -> IO[bytes] | None:
    """Open a file, which cannot be removed until it is closed, or return None if it is missing or not complete.

    A full disk or a crash may have truncated it.
    """
    try:
        file = target.open("rb")
    except OSError:
        return None
    is_in_place = host_cache.hold(file)
    data = file.read()
    if is_in_place and data[-_SEAL_BYTES:] == _seal(data[:-_SEAL_BYTES]):
        return file
    file.close()
    return None


def _seal(data: bytes) -> bytes:
    """Return the digest that is appended to a library or a prelude, which the loader and g++ ignore."""
    return hashlib.sha256(data).digest()


_SEAL_BYTES = hashlib.sha256().digest_size
_LEAST_FREE_BYTES = 64 << 20  # more than a compiler writes for a prelude
_MOST_ATTEMPTS = 3  # to open a file that other processes remove or replace


def _publish(commands: list[list[str]], target: Path, what: str, source: str = "") -> IO[bytes]:
    """Run the compiler in a temporary folder, then move its complete result to `target` atomically.

    Returns
    -------
    file
        The result, which cannot be removed until it is closed.
    """
    folder = target.parent if target.suffix == ".so" else target.parent.parent  # each prelude has its own subfolder
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=host_cache.BUILDING) as temporary, ExitStack() as undo:
            source_path = target.with_suffix(".cpp")
            (Path(temporary) / source_path.name).write_text(source, "utf-8")
            for command in commands:
                command = [word.format(folder=temporary) if "{folder}" in word else word for word in command]
                run = _run(command, temporary)
                if run.returncode:
                    if source:
                        os.replace(Path(temporary) / source_path.name, source_path)
                    where = f"\nThe whole text is in {source_path}" if source else ""
                    output = run.stderr.strip() or _end(run)
                    kind = _StorageError if _is_full(folder) else BuildError
                    raise kind(f"{_COMPILER} does not compile {what}:\n{output}{where}")
            result = Path(temporary) / target.name
            file = undo.enter_context(result.open("ab"))
            data = result.read_bytes()
            file.write(_seal(data))
            file.flush()
            host_cache.hold(file)
            if (others := _opened(target)) is not None:  # another process was faster, and may be about to load its file
                return others
            if target.is_dir():
                target.rmdir()
            _move(result, target)
            _shrink_at_times(folder, len(data) + _SEAL_BYTES)
            undo.pop_all()
            return file
    except OSError as error:
        raise _StorageError(
            f"{what} must be stored in {folder}, which fails ({error}): free disk space, or remove that folder"
        ) from error


def _is_full(folder: Path) -> bool:
    """True if a disk has so little space that a compiler may have failed for that reason."""
    return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES


# Bytes that this process has published in each folder since it last examined the size of the folder.
_added: dict[Path, int] = {}


def _shrink_at_times(folder: Path, nbytes: int) -> None:
    """Shrink the folder when this process adds its first file, then each time it has added another 1/64 of the limit.

    Examining the thousands of files in a full folder takes a third of the time to compile a small kernel.
    """
    _added[folder] = _added.get(folder, host_cache.MOST_BYTES) + nbytes
    if _added[folder] >= host_cache.MOST_BYTES // 64:
        _added[folder] = 0
        host_cache.shrink(folder)


def _move(file: Path, target: Path) -> None:
    """Move a file to a folder that another process may remove while it is empty."""
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
        del environment["LD_PRELOAD"]  # a sanitizer would slow the compiler down by half
    try:
        # File names are in the user's encoding, and messages show bytes that are invalid in it as escapes.
        return subprocess.run(
            command, cwd=folder, capture_output=True, encoding="utf-8", errors="backslashreplace",
            timeout=_COMPILER_SECONDS, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        message = f"{command[0]} did not end within {_COMPILER_SECONDS} s; the command was {shlex.join(command)}"
        raise BuildError(message) from error
    except OSError as error:
        raise BuildError(f"{command[0]} does not start ({error}): reinstall {_COMPILER}") from error
