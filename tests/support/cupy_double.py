"""A test double of the part of CuPy that compiles and loads kernels: its disk cache, with the faults of CuPy's own.

As in CuPy 14's `cupy/cuda/_compiler_cache.py`, an entry is the SHA-1 of the code, followed by the code. An entry with a
wrong digest is a miss, file-system errors propagate from reads and writes, and a forged entry reaches the driver.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MACHINE_CODE = b"\x7fELF"
STATIC_BYTES, MOST_BYTES = 1024, 232448
FUNCTION_ATTRIBUTES = {"NUM_REGS": 40, "LOCAL_SIZE_BYTES": 0, "SHARED_SIZE_BYTES": STATIC_BYTES}


class CUDARuntimeError(RuntimeError):
    status = 1


class CUDADriverError(RuntimeError):
    status = 1


def sticky(kind: type[Any]) -> Any:
    """Return an error that CUDA reports at every call after a kernel read outside of its arrays."""
    error = kind("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    error.status = 700
    return error


class CompileException(Exception):
    pass


class Function:
    def __init__(self, name: str, module: Module) -> None:
        self.name, self.module, self.ptr = name, module, id(self)
        self.allowed = 48 << 10
        self.device = -1


class Module:
    def __init__(self) -> None:
        self.code = b""

    def load(self, code: bytes) -> None:
        if not code.startswith(MACHINE_CODE):
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self.code = code

    def get_function(self, name: str) -> Function:
        if name.encode() not in self.code:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return Function(name, self)


class Double(ModuleType):
    """The module that `import cupy` returns once it is in sys.modules.

    Attributes
    ----------
    compiled : list of str
        The texts that NVRTC would have compiled.
    most_at_once : int
        The largest number of threads that compiled concurrently.
    """

    def __init__(self, cache: Path, seconds: float = 0) -> None:
        super().__init__("cupy")
        self.cache, self.seconds = cache, seconds
        self.compiled: list[str] = []
        self.options: list[tuple[str, ...]] = []
        self.functions: list[Function] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._thread = threading.local()
        cache.mkdir(parents=True, exist_ok=True)
        double = self

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                self.before, double._thread.device = double.device, self.number

            def __exit__(self, *error: Any) -> None:
                double._thread.device = self.before

        class RawModule:
            """A module that loads its code once when it is compiled and once for each function, like CuPy's."""

            def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
                self.code, self.options = code, options

            def compile(self, log_stream: Any) -> None:
                double._loaded(self.code, self.options, log_stream)

            def get_function(self, name: str) -> SimpleNamespace:
                function = double._function(double._loaded(self.code, self.options, None), self.code, name)
                double.functions.append(function)
                function.device = double.device
                return SimpleNamespace(kernel=function)

        constants = {f"CU_FUNC_ATTRIBUTE_{name}": name for name in FUNCTION_ATTRIBUTES}
        self.RawModule = RawModule
        self.cuda = SimpleNamespace(
            Device=Device,
            Module=Module,
            get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: False),
            compiler=SimpleNamespace(CompileException=CompileException),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            driver=SimpleNamespace(
                CUDADriverError=CUDADriverError,
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="allowed",
                funcGetAttribute=lambda attribute, pointer: FUNCTION_ATTRIBUTES[attribute],
                funcSetAttribute=self._set,
                **constants,
            ),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
                getDevice=lambda: self.device,
                deviceGetAttribute=lambda attribute, device: {97: MOST_BYTES}[attribute],
            ),
        )

    @property
    def device(self) -> int:
        return getattr(self._thread, "device", 0)

    def _set(self, pointer: int, attribute: str, value: int) -> None:
        assert attribute == "allowed"
        if value + STATIC_BYTES > MOST_BYTES:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        (function,) = (function for function in self.functions if function.ptr == pointer)
        function.allowed = value

    def _loaded(self, code: str, options: tuple[str, ...], log_stream: Any) -> Module:
        entry = hashlib.sha1(f"{options} {code}".encode()).hexdigest() + ".cubin"
        module = Module()
        payload = self._read(entry)
        if payload is None:
            payload = self._nvrtc(code, options)
            if log_stream is not None:
                log_stream.write("")
            self._write(entry, payload)
        module.load(payload)
        return module

    def _function(self, module: Module, code: str, name: str) -> Function:
        return module.get_function(name)

    def _nvrtc(self, code: str, options: tuple[str, ...]) -> bytes:
        with self._lock:
            self.compiled.append(code)
            self.options.append(options)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.seconds)
        with self._lock:
            self._at_once -= 1
        if re.search("no_such_member", code):
            raise CompileException('kernels_cu/simt/broken.cu(4): error: no member "no_such_member"\0')
        return MACHINE_CODE + code.encode()

    def _read(self, entry: str) -> bytes | None:
        path = self.cache / entry
        if not path.exists():
            return None
        data = path.read_bytes()
        return data[40:] if data[:40] == hashlib.sha1(data[40:]).hexdigest().encode() else None

    def _write(self, entry: str, payload: bytes) -> None:
        temporary = self.cache / f"tmp{threading.get_ident()}"
        temporary.write_bytes(hashlib.sha1(payload).hexdigest().encode() + payload)
        os.replace(temporary, self.cache / entry)
