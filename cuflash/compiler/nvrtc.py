"""Compile a specification to machine code: NVRTC, CuPy's cache of machine code, and the faults of either.

CuPy compiles and keeps what runs. `cubin` compiles the same text without CuPy, driver or GPU: for tests, and for where
CuPy's cache fails.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

from ..errors import CompileError
from ..keywords import explains_keywords
from ..planning.routing import family_of
from ..planning.spec import KernelSpec
from .host_cache import HostCache, host_cache
from .source import source

# Options of CuPy beside the architecture; it adds the last two itself.
_OPTIONS = ("-std=c++17", "-lineinfo")
_CUPY_OPTIONS = {"ftz": True, "device_as_default_execution_space": True}

_FIRST_WITH_NO_CACHE = (12, 9)  # NVRTC: older ones refuse the option
_DEFAULT_DYNAMIC_SHARED = 48 << 10  # dynamic shared memory, bytes
_PACKAGES = "pip install '.[cuda13]' in a clone of cuflash, or '.[cuda12]' for a driver older than CUDA 13"

_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\(C\d{4}\)|\bwarning\b")
_CACHE_ENTRY = re.compile(r"[0-9a-f]{40}\.cubin")


class Resources(NamedTuple):
    """Resources of one thread of a kernel; shared memory is that of one block."""

    registers: int
    stack_bytes: int  # spilled registers and arrays
    shared_bytes: int  # static
    spill_bytes: int | None  # stored and loaded; None where the driver was asked, which does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel for one architecture, and how it came to be.

    Attributes
    ----------
    spec : KernelSpec
    architecture : str
    seconds : float
        Time to compile, or to find it in CuPy's cache, and to load it where there is a GPU.
    is_from_cache : bool
    resources : Resources
    log : str
        What the compiler said.
    code : bytes
        The cubin; empty where the driver holds it.
    """

    spec: KernelSpec
    architecture: str
    seconds: float
    is_from_cache: bool
    resources: Resources
    log: str = field(repr=False)
    code: bytes = field(repr=False, default=b"")

    @property
    def advisories(self) -> tuple[str, ...]:
        """Lines of the log that warn: a serialised wgmma (C7510), an unused variable."""
        return tuple(line for line in self.log.splitlines() if _ADVISORY.search(line))

    def __str__(self) -> str:
        registers, stack, shared, _ = self.resources
        origin = "CuPy's cache" if self.is_from_cache else "compiled"
        return (
            f"{self.spec}, {self.architecture}: {origin} in {self.seconds:.2f} s, {registers} registers, "
            f"{stack} bytes of stack, {shared} bytes of shared memory"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """Caches of kernels: CuPy's, of all programs of this user, the simulator's, and what this process compiled.

    Attributes
    ----------
    folder : pathlib.Path or None
        None where CuPy keeps nothing on disk.
    entries, nbytes : int
        Files in the folder, and their size.
    compiled : tuple of Compiled
        Each kernel of cuflash that this process compiled by NVRTC or loaded.
    simulator : HostCache
        Kernels that the simulator compiled and keeps on disk: `folder`, `entries` and `nbytes`.
    """

    folder: Path | None
    entries: int
    nbytes: int
    compiled: tuple[Compiled, ...]
    simulator: HostCache

    def __str__(self) -> str:
        place = "in memory" if self.folder is None else f"{self.folder}: {self.entries} kernels, {self.nbytes} bytes"
        return "\n".join([place, f"simulator: {self.simulator}", *map(str, self.compiled)])


_Key = tuple[KernelSpec, str, int]  # the last is a device


class _Loaded:
    """A kernel on a device, once it is there; the lock makes the first thread compile and the others wait."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.function: Any = None
        self.shared_bytes = _DEFAULT_DYNAMIC_SHARED


_guard = Lock()
_loaded: dict[_Key, _Loaded] = {}
_compiled: dict[_Key, Compiled] = {}
_process: int | None = None  # that used CUDA first
_is_started = False  # this process is the one
_warned = False


def architecture(spec: KernelSpec, compute_capability: tuple[int, int]) -> str:
    """NVRTC's name of a kernel's machine code for a chip.

    Raises
    ------
    UnsupportedProblem
        The kernel's family needs another chip.
    """
    return family_of(spec).architecture(compute_capability)


def cubin(spec: KernelSpec, architecture: str) -> Compiled:
    """Compile without a GPU, a driver or a cache.

    Raises
    ------
    CompileError
        NVRTC refuses the text.
    RuntimeError
        A package is missing, or NVRTC does not know the architecture.
    """
    started = perf_counter()
    code, log = _nvrtc(spec, architecture)
    seconds = perf_counter() - started
    compiled_kernel = Compiled(
        spec=spec, architecture=architecture, seconds=seconds, is_from_cache=False,
        resources=_resources(log), log=log, code=code,
    )  # fmt: skip
    _compiled[spec, architecture, -1] = replace(compiled_kernel, code=b"")
    return compiled_kernel


def kernel(spec: KernelSpec, compute_capability: tuple[int, int], *, shared_bytes: int = 0) -> Any:
    """The kernel as a cupy.cuda.Function of the current device, compiled by the first call that asks for it.

    Parameters
    ----------
    spec : KernelSpec
    compute_capability : (int, int)
        Of the current device.
    shared_bytes : int
        The most dynamic shared memory that a launch will ask for.

    Raises
    ------
    CompileError
        NVRTC refuses the text.
    RuntimeError
        A package or the GPU is missing, a version is too old, or the process was forked from one that used CUDA.
    """
    name = architecture(spec, compute_capability)
    cupy, device = current_device()
    return _kernel(cupy, device, spec, name, shared_bytes)


def is_loaded(spec: KernelSpec, compute_capability: tuple[int, int], shared_bytes: int = 0) -> bool:
    """Return whether `kernel` would answer at once."""
    _, device = current_device()
    loaded = _loaded.get((spec, architecture(spec, compute_capability), device))
    return loaded is not None and loaded.function is not None and shared_bytes <= loaded.shared_bytes


def compiled(spec: KernelSpec, compute_capability: tuple[int, int]) -> Compiled | None:
    """Return the resources of a kernel as this process compiled it for a compute capability; None if it did not."""
    name = architecture(spec, compute_capability)
    found = [
        compiled_kernel for (each, chip, _), compiled_kernel in list(_compiled.items()) if (each, chip) == (spec, name)
    ]
    return found[0] if found else None


def precompile(specs: Iterable[KernelSpec], target: tuple[int, int] | str) -> tuple[Compiled, ...]:
    """Compile many kernels at once, on as many threads as there are cores.

    Parameters
    ----------
    specs : iterable of KernelSpec
    target : (int, int) or str
        The compute capability of the current device: kernels are loaded there, and CuPy's cache keeps them.
        Or an architecture, "sm_90a" say: no GPU is needed, and nothing is kept but what is returned.

    Raises
    ------
    CompileError, RuntimeError
        Of the first kernel that fails.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if isinstance(target, str):
            return tuple(pool.map(lambda spec: cubin(spec, target), specs))
        keys = [(spec, architecture(spec, target)) for spec in specs]
        cupy, device = current_device()
        list(pool.map(lambda key: _kernel(cupy, device, key[0], key[1], 0), keys))
        return tuple(_compiled[spec, name, device] for spec, name in keys)


@explains_keywords
def cache_info() -> CacheInfo:
    """Describe the caches of CuPy and of the simulator, and the kernels that this process compiled.

    Neither CuPy nor CUDA is started, and no folder is made. `cache_clear` empties the simulator's.

    Returns
    -------
    CacheInfo
        A record that prints itself; each of its `compiled` has `spec`, `architecture`, `seconds`, `is_from_cache` and
        `resources`. Its `simulator` has the `folder`, `entries` and `nbytes` of the simulator's cache.

    Raises
    ------
    RuntimeError
        A folder cannot be read.

    Examples
    --------
    >>> info = cache_info()
    >>> info.nbytes >= info.entries
    True
    """
    environment = _environment()
    folder = None if environment.in_memory else environment.cache
    files = []
    try:
        if folder is not None and folder.is_dir():
            files = [size for entry in os.scandir(folder) if (size := _entry_bytes(entry)) is not None]
    except OSError as error:
        advice = "set CUPY_CACHE_DIR to a folder of your own"
        raise RuntimeError(f"CuPy's cache folder {folder} cannot be read ({error}): {advice}") from error
    return CacheInfo(
        folder=folder, entries=len(files), nbytes=sum(files), compiled=tuple(_compiled.values()), simulator=host_cache()
    )  # fmt: skip


def _entry_bytes(entry: os.DirEntry[str]) -> int | None:
    """The size of a file of CuPy's cache; None for other files, and for one that another process has just removed."""
    if not _CACHE_ENTRY.fullmatch(entry.name):
        return None
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return None


def nvrtc_version() -> tuple[int, int]:
    """The version of the compiler, without CuPy and without a driver.

    Raises
    ------
    RuntimeError
        It is not there.
    """
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"cuda-bindings or NVRTC is missing ({_first_line(error)}): {_PACKAGES}") from error
    return major, minor


def _nvrtc(spec: KernelSpec, architecture: str) -> tuple[bytes, str]:
    """Machine code and log, out of memory and into memory."""
    version = nvrtc_version()
    try:
        with _guard:  # its first import is not safe from several threads
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise RuntimeError(f"cuda-core is missing ({error}): {_PACKAGES}") from error
    text = source(spec)
    dumped = _dump(spec, architecture, text)
    log = io.StringIO()
    options = ProgramOptions(
        name=f"{spec.name}.cu",  # without a name the text goes through a temporary file
        arch=architecture, std="c++17", lineinfo=True, ptxas_options=["-v"], **_CUPY_OPTIONS,
        # If there is a driver, NVRTC finds code in the driver's cache, and then logs nothing.
        no_cache=version >= _FIRST_WITH_NO_CACHE,
    )  # fmt: skip
    try:
        code = Program(text, "c++", options=options).compile("cubin", logs=log).code
    except Exception as error:  # NVRTCError has no public name
        if "NVRTC_ERROR" not in str(error):
            raise
        raise _failure(spec, architecture, str(error), version, dumped) from None
    return bytes(code), log.getvalue().replace("\0", "")


def _failure(
    spec: KernelSpec, architecture: str, log: str, version: tuple[int, int], dumped: str
) -> CompileError | RuntimeError:
    log = log.replace("\0", "").partition("compilation log:")[2].strip() or log.replace("\0", "").strip()
    if "--gpu-architecture" in log:
        return RuntimeError(
            f"NVRTC {version[0]}.{version[1]} does not compile for {architecture}: install a newer one, "
            f"or an older one for a chip before sm_75 ({_PACKAGES})"
        )
    return CompileError(str(spec), architecture, log, dumped)


def _resources(log: str) -> Resources:
    """Return the resources that ptxas reports of a kernel and the functions that it did not inline."""
    registers = [int(found) for found in _REGISTERS.findall(log)]
    stacks = [tuple(map(int, found)) for found in _STACK.findall(log)]
    if not registers or not stacks:
        raise RuntimeError(f"NVRTC's log names no registers, so this version of it is not known to cuflash:\n{log}")
    return Resources(
        registers=max(registers),
        stack_bytes=max(stack for stack, _, _ in stacks),
        shared_bytes=max(map(int, _SHARED.findall(log)), default=0),
        spill_bytes=sum(stored + loaded for _, stored, loaded in stacks),
    )


def current_device() -> tuple[Any, int]:
    """CuPy and the number of its current device, in the one process that may use them.

    Raises
    ------
    RuntimeError
        CuPy or the GPU is missing, or the process was forked from one that used CUDA.
    """
    global _process, _is_started
    if not _is_started and _process not in (None, os.getpid()):
        raise RuntimeError(
            "this process was forked from one that had used CUDA, which does not survive a fork: start it by "
            "multiprocessing.get_context('spawn') or 'forkserver'"
        )
    cupy = _cupy()
    try:
        device = int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        advice = "python -m cuflash says what this machine has"
        raise RuntimeError(f"CuPy finds no usable GPU ({error}): {advice}") from error
    if not _is_started:
        _process, _is_started = os.getpid(), True
    return cupy, device


def current_number() -> int:
    """Return the number of CuPy's current device, faster than `current_device` once that was called."""
    number: int = sys.modules["cupy"].cuda.runtime.getDevice() if _is_started else current_device()[1]
    return number


def _after_fork() -> None:
    global _is_started
    _is_started = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _cupy() -> Any:
    if "cupy" not in sys.modules:
        _redirect_cupy_cache()
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"CuPy is missing ({_first_line(error)}): {_PACKAGES}") from error
    return cupy


def _redirect_cupy_cache() -> None:
    """CuPy does not import where it cannot make the folder of its cache: name one that is there, keep nothing in it."""
    try:
        _environment().cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn(f"CuPy's cache folder cannot be made ({error}), so kernels are compiled anew in each process")
        os.environ.update(CUPY_CACHE_DIR=tempfile.gettempdir(), CUPY_CACHE_IN_MEMORY="1")


def _kernel(cupy: Any, device: int, spec: KernelSpec, architecture: str, shared_bytes: int) -> Any:
    with _guard:
        loaded = _loaded.setdefault((spec, architecture, device), _Loaded())
    if loaded.function is not None and shared_bytes <= loaded.shared_bytes:
        return loaded.function
    with loaded.lock, cupy.cuda.Device(device):
        if loaded.function is None:
            function, compiled_kernel = _load(cupy, spec, architecture)
            _compiled[spec, architecture, device] = compiled_kernel
            loaded.function = function
        if shared_bytes > loaded.shared_bytes:
            _raise_shared_limit(cupy, spec, loaded.function, shared_bytes)
            loaded.shared_bytes = shared_bytes
    return loaded.function


class _Log(io.StringIO):
    """CuPy writes to it, if only an empty text, exactly when it compiles."""

    is_written = False

    def write(self, text: str, /) -> int:
        self.is_written = True
        return super().write(text)


def _load(cupy: Any, spec: KernelSpec, architecture: str) -> tuple[Any, Compiled]:
    """The kernel on the current device, through CuPy's cache, or past it where that fails."""
    started = perf_counter()
    try:
        version = cupy.cuda.nvrtc.getVersion()
    except RuntimeError as error:
        raise RuntimeError(f"NVRTC is missing ({_first_line(error)}): {_PACKAGES}") from error
    text = source(spec)
    dumped = _dump(spec, architecture, text)
    log = _Log()
    module = cupy.RawModule(code=text, options=(*_OPTIONS, f"-arch={architecture}"))
    try:
        module.compile(log_stream=log)
        function, said, is_from_cache = module.get_function(spec.name).kernel, log.getvalue(), not log.is_written
    except cupy.cuda.compiler.CompileException as error:
        raise _failure(spec, architecture, str(error), version, dumped) from None
    except (OSError, cupy.cuda.driver.CUDADriverError) as error:
        function, said = _load_past_the_cache(cupy, spec, architecture, error)
        is_from_cache = False
    compiled_kernel = Compiled(
        spec=spec, architecture=architecture, seconds=perf_counter() - started, is_from_cache=is_from_cache,
        resources=_resources_loaded(cupy, function), log=said.replace("\0", ""),
    )  # fmt: skip
    return function, compiled_kernel


def _load_past_the_cache(cupy: Any, spec: KernelSpec, architecture: str, fault: Exception) -> tuple[Any, str]:
    """Compile in memory and load. What fails here too is no fault of the cache."""
    code, log = _nvrtc(spec, architecture)
    module = cupy.cuda.Module()
    try:
        module.load(code)
        function = module.get_function(spec.name)
    except cupy.cuda.driver.CUDADriverError as error:
        major, minor = nvrtc_version()
        raise RuntimeError(
            f"the driver does not load {spec.name}, compiled for {architecture} by NVRTC {major}.{minor} ({error}): "
            "it may be older than that NVRTC (python -m cuflash shows both), or an earlier kernel of any library failed"
        ) from error
    _warn(f"CuPy's cache does not work ({fault}), so kernels are compiled anew: see cuflash.cache_info()")
    return function, log


def _resources_loaded(cupy: Any, function: Any) -> Resources:
    driver = cupy.cuda.driver
    return Resources(
        registers=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr),
        stack_bytes=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr),
        shared_bytes=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr),
        spill_bytes=None,
    )


def _raise_shared_limit(cupy: Any, spec: KernelSpec, function: Any, shared_bytes: int) -> None:
    """Let launches have more dynamic shared memory than every chip has."""
    driver, runtime = cupy.cuda.driver, cupy.cuda.runtime
    try:
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    except driver.CUDADriverError as error:
        static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
        most = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, runtime.getDevice())
        raise RuntimeError(
            f"{spec} asks for {shared_bytes} bytes of shared memory beside its own {static}; "
            f"a block of this GPU has {most} ({error})"
        ) from error


class _Environment(NamedTuple):
    dump: Path | None
    cache: Path
    in_memory: bool


def _environment() -> _Environment:
    """CUFLASH_DUMP, and where CuPy keeps its cache, read as CuPy reads it."""
    dump = os.environ.get("CUFLASH_DUMP")
    cache = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY") == "1"
    return _Environment(Path(dump) if dump else None, Path(cache), in_memory)


def _dump(spec: KernelSpec, architecture: str, text: str) -> str:
    """Write a text to the folder that CUFLASH_DUMP names, if there is one; return the path."""
    folder = _environment().dump
    if folder is None:
        return ""
    path = folder / f"{spec.name}-{architecture}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.cu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise RuntimeError(
            f"CUFLASH_DUMP must name a folder that can be written to; got {folder} ({error}): name another, or unset it"
        ) from error
    return str(path)


def _warn(message: str) -> None:
    """Once a process: every kernel would say the same."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
