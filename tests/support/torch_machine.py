"""A test double of PyTorch on a GPU, next to `cupy_machine`: tensors in host memory that report a CUDA device.

Kernels run on the simulator as soon as they are launched, on PyTorch's current stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_machine
import torch

from cuflash import layouts
from cuflash.executors import torch_gpu
from cuflash.torch import _passes, _tensors


class DeviceTensor(torch.Tensor):
    """A tensor in host memory that reports the CUDA device `number`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # results of operations are plain tensors
    number = 0

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)

    def get_device(self) -> int:
        return self.number


def on_device(array: Any, number: int = 0) -> Any:
    """Return a copy of an array or tensor that reports a device."""
    kind = DeviceTensor if number == 0 else type("OtherTensor", (DeviceTensor,), {"number": number})
    return torch.as_tensor(array).detach().clone().as_subclass(kind)


class Torch(ModuleType):
    """The `torch` of modules that access a GPU: PyTorch, except for functions that need CUDA.

    Attributes
    ----------
    streams : list of cupy_machine.Stream
        The last one is PyTorch's current stream.
    pool : list of tensors
        Allocations of captures, which a PyTorch graph owns.
    allocated : list of weak references
        To all tensors allocated so far.
    """

    def __init__(self, cupy: cupy_machine.Cupy) -> None:
        super().__init__("torch")
        self.streams, self.pool, self.allocated = [cupy.null], [], list[weakref.ref[Any]]()
        self._C = SimpleNamespace(
            _cuda_getDevice=lambda: self.cuda.current_device(),
            _cuda_getCurrentRawStream=lambda device: self.streams[-1].ptr,
            _dynamo=SimpleNamespace(guards=SimpleNamespace(_empty_strided_cuda=self._empty_strided)),
        )
        self.cuda = SimpleNamespace(
            current_device=lambda: cupy.device,
            device=cupy.cuda.Device,
            current_stream=lambda: SimpleNamespace(
                device_index=0, cuda_stream=self.streams[-1].ptr, stream=self.streams[-1]
            ),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def from_dlpack(self, array: Any) -> Any:
        if not isinstance(array, cupy_machine.Ndarray):
            return torch.from_dlpack(array)
        return torch.from_numpy(array.host).as_subclass(DeviceTensor)

    def tensor(self, array: Any, *, device: torch.device) -> Any:
        return on_device(array) if device.type == "cuda" else torch.tensor(array)

    def _empty_strided(self, shape: Any, strides: Any, dtype: Any) -> Any:
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        self.allocated.append(weakref.ref(tensor))
        if self.streams[-1].is_capturing():
            self.pool.append(tensor)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(255)

    @contextmanager
    def stream(self, stream: cupy_machine.Stream) -> Iterator[None]:
        """Make a stream PyTorch's current one within a block; CuPy's current stream does not change."""
        self.streams.append(stream)
        yield
        self.streams.pop()


class _Streams:
    """A substitute for `cupy.cuda.Stream`: it creates streams, and accepts those of other libraries."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, non_blocking: bool = False) -> cupy_machine.Stream:
        return self._make(non_blocking)

    def from_external(self, stream: Any) -> cupy_machine.Stream:
        return stream.stream


def _as_cupy_array(tensor: DeviceTensor) -> cupy_machine.Ndarray:
    """Return the memory of a tensor on a device as a CuPy array."""
    return cupy_machine.Ndarray(tensor.as_subclass(torch.Tensor).numpy(), tensor.number)


def put_every_tensor_on_the_device(monkeypatch: Any) -> None:
    """Let all tensors report the device, also results of PyTorch's operations and transformations."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)


@contextmanager
def installed(monkeypatch: Any, cache: Path) -> Iterator[tuple[cupy_machine.Cupy, Torch]]:
    """Install the test doubles of CuPy and PyTorch, and empty the caches that may hold earlier ones."""
    with cupy_machine.installed(monkeypatch, cache) as cupy:
        machine = Torch(cupy)
        cupy.cuda.Stream = _Streams(cupy.cuda.Stream)
        cupy.from_dlpack = _as_cupy_array
        monkeypatch.setattr(layouts, "_is_on_stream_of", lambda tensor, cupy: False)
        monkeypatch.setattr(layouts, "_is_plain", lambda value, torch: type(value) is DeviceTensor)
        monkeypatch.setattr(torch_gpu, "torch", machine)
        monkeypatch.setattr(torch_gpu, "MACHINE", torch_gpu.TorchGpu())
        monkeypatch.setattr(_tensors, "torch", machine)
        for module in (_tensors, _passes):
            monkeypatch.setattr(module, "PLAIN", _tensors.PLAIN | {DeviceTensor})
        yield cupy, machine
