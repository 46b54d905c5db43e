"""Compilation of specifications to machine code by NVRTC, and CuPy's cache of machine code.

CuPy compiles the kernels that run, and stores them on disk. `cubin` compiles the same text without CuPy, driver or GPU,
for tests and as a replacement if CuPy's cache fails.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

from ..arrays import Namespace
from ..errors import CompileError
from ..keywords import explains_keywords
from ..planning.routing import family_of
from ..planning.spec import KernelSpec
from .earlier_failure import raise_earlier
from .host_cache import HostCache, host_cache
from .source import source

# Compiler options in addition to the architecture. CuPy adds the options in _CUPY_OPTIONS itself.
_OPTIONS = ("-std=c++17", "-lineinfo")
_CUPY_OPTIONS = {"ftz": True, "device_as_default_execution_space": True}

_FIRST_WITH_NO_CACHE = (12, 9)  # the first NVRTC version that knows the option no-cache
_DEFAULT_DYNAMIC_SHARED = 48 << 10  # bytes of dynamic shared memory that every kernel may use
_PACKAGES = "pip install '.[cuda13]' in a clone of cuflash, or '.[cuda12]' for a driver older than CUDA 13"

_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\(C\d{4}\)|\bwarning\b")
_CACHE_ENTRY = re.compile(r"[0-9a-f]{40}\.cubin")


class Resources(NamedTuple):
    """The resources of one thread of a kernel, and the shared memory of one block."""

    registers: int
    stack_bytes: int  # spilled registers and arrays
    shared_bytes: int  # static shared memory
    spill_bytes: int | None  # bytes of spill stores and loads; None if the driver reported the resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled kernel for one architecture, and how it was compiled.

    Attributes
    ----------
    spec : KernelSpec
    architecture : str
    seconds : float
        Time to compile the kernel or to read it from CuPy's cache, and to load it on the GPU if there is one.
    is_from_cache : bool
    resources : Resources
    log : str
        The messages of the compiler.
    code : bytes
        The cubin; empty if the kernel was loaded on a GPU.
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
        """The lines of the log that are warnings, for example about serialized wgmma (C7510) or an unused variable."""
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
    """The kernel caches: CuPy's, which all programs of the user share, the simulator's, and this process's kernels.

    Attributes
    ----------
    folder : pathlib.Path or None
        The folder of CuPy's cache, or None if CuPy stores nothing on disk.
    entries, nbytes : int
        The number of files in the folder, and their total size.
    compiled : tuple of Compiled
        The kernels of cuflash that this process compiled with NVRTC or loaded.
    simulator : HostCache
        The disk cache of the simulator: `folder`, `entries` and `nbytes`.
    """

    folder: Path | None
    entries: int
    nbytes: int
    compiled: tuple[Compiled, ...]
    simulator: HostCache

    def __str__(self) -> str:
        place = "in memory" if self.folder is None else f"{self.folder}: {self.entries} kernels, {self.nbytes} bytes"
        return "\n".join([place, f"simulator: {self.simulator}", *map(str, self.compiled)])


_Key = tuple[KernelSpec, str, int]  # specification, architecture, number of the device


class _Loaded:
    """A kernel that is, or will be, loaded on a device; the first thread holds the lock and compiles, others wait."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.function: Any = None
        self.shared_bytes = _DEFAULT_DYNAMIC_SHARED


_guard = Lock()
_loaded: dict[_Key, _Loaded] = {}
_compiled: dict[_Key, Compiled] = {}
_process: int | None = None  # id of the first process that used CUDA
_is_started = False  # True if this process has used CUDA
_has_warned = False


def architecture(spec: KernelSpec, compute_capability: tuple[int, int]) -> str:
    """Return NVRTC's name of the architecture that a kernel is compiled for, to run on a chip.

    Raises
    ------
    UnsupportedProblem
        The kernel's family does not support the chip.
    """
    return family_of(spec).architecture(compute_capability)


def cubin(spec: KernelSpec, architecture: str) -> Compiled:
    """Compile a kernel without a GPU, a driver or a cache.

    Raises
    ------
    CompileError
        NVRTC rejects the text.
    RuntimeError
        A package is missing, or NVRTC does not support the architecture.
    """
    started = perf_counter()
    code, log = _nvrtc(spec, architecture)
    compiled_kernel = Compiled(
        spec=spec, architecture=architecture, seconds=perf_counter() - started, is_from_cache=False,
        resources=_resources(log), log=log, code=code,
    )  # fmt: skip
    _compiled[spec, architecture, -1] = replace(compiled_kernel, code=b"")
    return compiled_kernel


def kernel(spec: KernelSpec, compute_capability: tuple[int, int], *, shared_bytes: int = 0) -> Any:
    """Return the kernel as a cupy.cuda.Function of the current device, which the first call compiles.

    Parameters
    ----------
    spec : KernelSpec
    compute_capability : (int, int)
        Compute capability of the current device.
    shared_bytes : int
        The largest amount of dynamic shared memory of all launches.

    Raises
    ------
    CompileError
        NVRTC rejects the text.
    RuntimeError
        A package or the GPU is missing, a version is too old, or the process was forked from one that used CUDA.
    """
    name = architecture(spec, compute_capability)
    cupy, device = current_device()
    return _kernel(cupy, device, spec, name, shared_bytes)


def is_loaded(spec: KernelSpec, compute_capability: tuple[int, int], shared_bytes: int = 0) -> bool:
    """True if `kernel` returns without compiling or loading."""
    _, device = current_device()
    loaded = _loaded.get((spec, architecture(spec, compute_capability), device))
    return loaded is not None and loaded.function is not None and shared_bytes <= loaded.shared_bytes


def compiled(spec: KernelSpec, compute_capability: tuple[int, int]) -> Compiled | None:
    """Return the record of a kernel that this process compiled for a compute capability, or None if it did not."""
    name = architecture(spec, compute_capability)
    return next((one for (each, chip, _), one in list(_compiled.items()) if (each, chip) == (spec, name)), None)


def precompile(specs: Iterable[KernelSpec], target: tuple[int, int] | str) -> tuple[Compiled, ...]:
    """Compile many kernels in parallel, with one thread per core, the longest texts first.

    Parameters
    ----------
    specs : iterable of KernelSpec
    target : (int, int) or str
        The compute capability of the current device: the kernels are loaded there, and CuPy's cache stores them.
        Or an architecture such as "sm_90a": no GPU is needed, and only the result holds the kernels.

    Raises
    ------
    CompileError, RuntimeError
        The error of a kernel that fails.
    """
    from concurrent.futures import ThreadPoolExecutor  # not by a module whose first import may be at the exit of Python

    specs = tuple(specs)
    # NVRTC parses one text at a time, so that the kernel whose text takes longest to compile must not wait for others.
    longest_first = sorted(specs, key=lambda spec: len(source(spec)), reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if isinstance(target, str):
            by_spec = dict(zip(longest_first, pool.map(lambda spec: cubin(spec, target), longest_first)))
            return tuple(by_spec[spec] for spec in specs)
        names = {spec: architecture(spec, target) for spec in longest_first}
        cupy, device = current_device()
        list(pool.map(lambda spec: _kernel(cupy, device, spec, names[spec], 0), names))
        return tuple(_compiled[spec, names[spec], device] for spec in specs)


@explains_keywords
def cache_info() -> CacheInfo:
    """Return a description of CuPy's and the simulator's caches, and of the kernels that this process compiled.

    This neither starts CuPy or CUDA nor creates a folder. `cache_clear` empties the simulator's cache.

    Returns
    -------
    CacheInfo
        A printable record. Each item of `compiled` has `spec`, `architecture`, `seconds`, `is_from_cache` and
        `resources`. `simulator` has the `folder`, `entries` and `nbytes` of the simulator's cache.

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
    """Return the size of a file of CuPy's cache, or None for any other file and for one that has just been removed."""
    if not _CACHE_ENTRY.fullmatch(entry.name):
        return None
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return None


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC, without CuPy and without a driver.

    Raises
    ------
    RuntimeError
        NVRTC is missing.
    """
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"cuda-bindings or NVRTC is missing ({_first_line(error)}): {_PACKAGES}") from error
    return major, minor


def _nvrtc(spec: KernelSpec, architecture: str) -> tuple[bytes, str]:
    """Compile a kernel in memory, and return its machine code and the compiler's log."""
    version = nvrtc_version()
    try:
        with _guard:  # the first import of cuda.core is not thread-safe
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise RuntimeError(f"cuda-core is missing ({error}): {_PACKAGES}") from error
    text = source(spec)
    dumped = _dump(spec, architecture, text)
    log = io.StringIO()
    options = ProgramOptions(
        name=f"{spec.name}.cu",  # without a name cuda.core writes the text to a temporary file
        arch=architecture, std="c++17", lineinfo=True, ptxas_options=["-v"], **_CUPY_OPTIONS,
        # NVRTC logs nothing if it finds the code in the driver's cache.
        no_cache=version >= _FIRST_WITH_NO_CACHE,
    )  # fmt: skip
    try:
        code = Program(text, "c++", options=options).compile("cubin", logs=log).code
    except Exception as error:  # the class NVRTCError is not public
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
            f"NVRTC {version[0]}.{version[1]} does not compile for {architecture}: install a newer version, "
            f"or an older version for a chip before sm_75 ({_PACKAGES})"
        )
    return CompileError(str(spec), architecture, log, dumped)


def _resources(log: str) -> Resources:
    """Return the resources that ptxas reports for a kernel and for the functions that it did not inline."""
    registers = [int(count) for count in _REGISTERS.findall(log)]
    stacks = [tuple(map(int, counts)) for counts in _STACK.findall(log)]
    if not registers or not stacks:
        raise RuntimeError(f"NVRTC's log names no registers: cuflash does not support this version of NVRTC:\n{log}")
    return Resources(
        registers=max(registers),
        stack_bytes=max(stack for stack, _, _ in stacks),
        shared_bytes=max(map(int, _SHARED.findall(log)), default=0),
        spill_bytes=sum(stored + loaded for _, stored, loaded in stacks),
    )


def current_device() -> tuple[Namespace, int]:
    """Return CuPy and the number of its current device; refuse a process that was forked after CUDA was used.

    Raises
    ------
    RuntimeError
        CuPy or the GPU is missing, an earlier kernel failed, or the process was forked from one that used CUDA.
    """
    global _process, _is_started
    if not _is_started and _process not in (None, os.getpid()):
        raise RuntimeError(
            "this process was forked from one that had used CUDA, which does not survive a fork: start it with "
            "multiprocessing.get_context('spawn') or 'forkserver'"
        )
    cupy = _cupy()
    try:
        device = int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise_earlier(error)
        advice = "python -m cuflash shows what this machine has"
        raise RuntimeError(f"CuPy finds no usable GPU ({error}): {advice}") from error
    try:
        cupy.cuda.get_current_stream().is_capturing()  # unlike getDevice(), this query reports earlier failures
    except RuntimeError as error:
        raise_earlier(error)
    if not _is_started:
        _process, _is_started = os.getpid(), True
    return cupy, device


def current_number() -> int:
    """Return the number of CuPy's current device, faster than `current_device` does after its first call."""
    number: int = sys.modules["cupy"].cuda.runtime.getDevice() if _is_started else current_device()[1]
    return number


def _after_fork() -> None:
    global _is_started
    _is_started = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _cupy() -> Namespace:
    if "cupy" not in sys.modules:
        _redirect_cupy_cache()
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"CuPy is missing ({_first_line(error)}): {_PACKAGES}") from error
    return cupy


def _redirect_cupy_cache() -> None:
    """Let CuPy work without a disk cache if its cache folder cannot be created; otherwise its import would fail."""
    try:
        _environment().cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn(f"CuPy's cache folder cannot be made ({error}), so each process compiles its kernels again")
        os.environ.update(CUPY_CACHE_DIR=tempfile.gettempdir(), CUPY_CACHE_IN_MEMORY="1")


def _kernel(cupy: Namespace, device: int, spec: KernelSpec, architecture: str, shared_bytes: int) -> Any:
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
    """A log that records whether CuPy compiled a kernel: CuPy then writes to the log, even if only an empty text."""

    is_written = False

    def write(self, text: str, /) -> int:
        self.is_written = True
        return super().write(text)


def _load(cupy: Namespace, spec: KernelSpec, architecture: str) -> tuple[Any, Compiled]:
    """Load a kernel on the current device through CuPy's cache, or without the cache if that fails."""
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
        function, messages, is_from_cache = module.get_function(spec.name).kernel, log.getvalue(), not log.is_written
    except cupy.cuda.compiler.CompileException as error:
        raise _failure(spec, architecture, str(error), version, dumped) from None
    except (OSError, cupy.cuda.driver.CUDADriverError) as error:
        raise_earlier(error)
        function, messages = _load_past_the_cache(cupy, spec, architecture, error)
        is_from_cache = False
    compiled_kernel = Compiled(
        spec=spec, architecture=architecture, seconds=perf_counter() - started, is_from_cache=is_from_cache,
        resources=_resources_loaded(cupy, function), log=messages.replace("\0", ""),
    )  # fmt: skip
    return function, compiled_kernel


def _load_past_the_cache(cupy: Namespace, spec: KernelSpec, architecture: str, fault: Exception) -> tuple[Any, str]:
    """Compile a kernel in memory and load it. If this fails too, the cache is not the cause."""
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
    _warn(f"CuPy's cache does not work ({fault}), so kernels are compiled again: see cuflash.cache_info()")
    return function, log


def _resources_loaded(cupy: Namespace, function: Any) -> Resources:
    driver = cupy.cuda.driver
    return Resources(
        registers=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr),
        stack_bytes=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr),
        shared_bytes=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr),
        spill_bytes=None,
    )


def _raise_shared_limit(cupy: Namespace, spec: KernelSpec, function: Any, shared_bytes: int) -> None:
    """Raise the kernel's limit on dynamic shared memory above the default, which is the same on all chips."""
    driver, runtime = cupy.cuda.driver, cupy.cuda.runtime
    try:
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    except driver.CUDADriverError as error:
        static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
        most = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, runtime.getDevice())
        raise RuntimeError(
            f"{spec} needs {shared_bytes} bytes of dynamic and {static} bytes of static shared memory; "
            f"a block of this GPU has {most} ({error})"
        ) from error


class _Environment(NamedTuple):
    dump: Path | None
    cache: Path
    in_memory: bool


def _environment() -> _Environment:
    """Return the settings of environment variables: CUFLASH_DUMP, and CuPy's cache folder as CuPy itself reads it."""
    dump = os.environ.get("CUFLASH_DUMP")
    cache = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY") == "1"
    return _Environment(Path(dump) if dump else None, Path(cache), in_memory)


def _dump(spec: KernelSpec, architecture: str, text: str) -> str:
    """Write a source text to the folder named by CUFLASH_DUMP, and return its path, or "" if the variable is unset."""
    folder = _environment().dump
    if folder is None:
        return ""
    path = folder / f"{spec.name}-{architecture}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.cu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise RuntimeError(
            f"CUFLASH_DUMP must name a writable folder; got {folder} ({error}): name a different one, or unset it"
        ) from error
    return str(path)


def _warn(message: str) -> None:
    """Issue a warning once per process, since it would be the same for every kernel."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
