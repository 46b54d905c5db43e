"""The `gpu` executor on PyTorch tensors, with PyTorch's allocator and current stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike
import torch

from ..arrays import DTYPES, Array, Namespace
from ..layouts import dense_strides, dtype_of
from ..planning.plan import KernelPlan
from . import gpu
from .workspaces import Piece

_Result = TypeVar("_Result")

TORCH_DTYPES = {dtype: getattr(torch, dtype.name) for dtype in DTYPES}
NUMPY_DTYPES = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}


def axes_in_memory(tensor: Layout) -> tuple[int, ...] | None:
    """Return the axes of a dense tensor in memory, outermost first; None for C order, or if rows are not dense."""
    strides = [step // tensor.dtype.itemsize for step in tensor.strides]
    last = tensor.ndim - 1
    axes = (*sorted(range(last), key=lambda axis: (-strides[axis], axis)), last)
    lies_so = zip(tensor.shape, strides, dense_strides(tensor.shape, axes))
    is_dense = all(extent == 1 or step == dense for extent, step, dense in lies_so)
    return axes if is_dense and axes != tuple(range(tensor.ndim)) else None


class Pointer(NamedTuple):
    """An address and its device number, with the attribute names of CuPy."""

    ptr: int
    device_id: int


class Layout(NamedTuple):
    """The layout of a tensor on a CUDA device, with the attribute names of CuPy arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    strides: tuple[int, ...]  # in bytes
    data: Pointer
    size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        is_float, itemsize = tensor.dtype in NUMPY_DTYPES, tensor.element_size()
        dtype = NUMPY_DTYPES[tensor.dtype] if is_float else dtype_of(tensor)
        strides = tuple(step * itemsize for step in tensor.stride())
        return cls(tuple(tensor.shape), dtype, strides, Pointer(tensor.data_ptr(), tensor.get_device()), tensor.numel())

    @classmethod
    def of_lists(cls, nbytes: int) -> Layout:
        """Return the layout of the lists that a call builds, as bytes."""
        return cls((nbytes,), np.dtype(np.uint8), (1,), Pointer(0, torch.cuda.current_device()), nbytes)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array_namespace__(self) -> Namespace:
        return gpu.namespace()


def layout_key(*tensors: torch.Tensor) -> Hashable:
    """Return shapes, strides, dtypes and devices of tensors, and the current device."""
    return torch._C._cuda_getDevice(), *[(each.shape, each.stride(), each.dtype, each.get_device()) for each in tensors]


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """True if a tensor is on a CUDA device that is not the current one."""
    return getattr(tensor, "is_cuda", False) and tensor.get_device() != torch._C._cuda_getDevice()


def within(tensor: torch.Tensor) -> torch.cuda.device:
    """Return a context in which the CUDA device of a tensor is the current one."""
    return torch.cuda.device(tensor.get_device())


class TorchGpu(gpu.Gpu):
    """The current CUDA device, which runs kernels on PyTorch's tensors and current stream."""

    address = staticmethod(torch.Tensor.data_ptr)
    waits_for_copies = True  # a PyTorch capture must not query an event

    @staticmethod
    def mask_address(array: Array) -> int:
        """Return the address of a mask's array: a tensor, or the CuPy array that a mask made from a tensor."""
        return int(array.data_ptr() if isinstance(array, torch.Tensor) else array.data.ptr)

    def set_zero(self, array: Array) -> None:
        """Set a tensor to zeros on PyTorch's current stream."""
        array.zero_()

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[tuple[int, int], Any] = {}

    @property
    def stream(self) -> Callable[[], Any]:
        """A function that returns PyTorch's current stream as a CuPy stream."""
        return self._current_stream

    def _current_stream(self) -> Any:
        device = torch._C._cuda_getDevice()
        key = device, torch._C._cuda_getCurrentRawStream(device)  # fast; code from torch.compile calls it, too
        stream = self._streams.get(key)
        if stream is None:
            stream = gpu.namespace().cuda.Stream.from_external(torch.cuda.current_stream())
            stream = self._streams.setdefault(key, stream)
        return stream

    def maker(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Sequence[int] | None = None) -> Callable[[], Array]:
        """Return a function that allocates a tensor on the current device, or its bytes if PyTorch lacks the dtype."""
        shape, kind = _as_tensor_of(shape, dtype)
        # Compiled code allocates in this way. torch.empty_strided takes longer, because it goes through the dispatcher.
        return partial(torch._C._dynamo.guards._empty_strided_cuda, shape, dense_strides(shape, axes), kind)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new tensor of zeros on the current device."""
        return self.maker(shape, dtype)().zero_()

    def lasting(self, nbytes: int) -> Piece:
        """Return a new piece of zeros; see `_outside_of_pools`."""
        return self._outside_of_pools(partial(super().lasting, nbytes))

    def sent(self, array: Array) -> Array:
        """Return the bytes of an array of a work list, copied to the current device."""
        if isinstance(array, np.ndarray):
            array = self._outside_of_pools(partial(super().sent, np.ascontiguousarray(array)))
        return torch.from_dlpack(array.reshape(-1).view(np.uint8))

    def _outside_of_pools(self, make: Callable[[], _Result]) -> _Result:
        """Allocate CuPy's memory on PyTorch's current stream, for arrays that outlive a call.

        PyTorch directs the allocations of its own tensors to a graph's pool, not only while it captures: also in the
        call before. That pool reuses the memory of tensors that the graph does not return.
        """
        cupy = gpu.namespace()
        with self.stream():
            try:
                return make()
            except cupy.cuda.memory.OutOfMemoryError:
                torch.cuda.empty_cache()  # PyTorch's cache of free memory may be all that is left
                return make()

    def layout(self, array: Array) -> Array:
        return Layout.of(array)

    def sum_to(self, gradient: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return the sum of a gradient over broadcast axes, rounded once."""
        return gradient.sum_to_size(shape).to(TORCH_DTYPES[dtype])

    def refuse_copies(self, reason: str) -> None:
        """Allow the call: a PyTorch graph owns the memory that its capture allocates."""

    def keep_captured(self, plan: KernelPlan, arrays: Iterable[Array], pins: bool) -> None:
        """Keep the plan, and thereby its work list; a PyTorch graph owns the memory that its capture allocated."""
        if pins and plan.work.nbytes:
            gpu.hold(plan)


def _as_tensor_of(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[tuple[int, ...], torch.dtype]:
    dtype = np.dtype(dtype)
    if dtype in TORCH_DTYPES:
        return shape, TORCH_DTYPES[dtype]
    return (int(np.prod(shape, dtype=np.int64)) * dtype.itemsize,), torch.uint8


MACHINE = TorchGpu()


def stream() -> Any:
    """Return PyTorch's current stream as a CuPy stream; a `with` block makes it CuPy's current one."""
    return MACHINE.stream()
