"""Addresses, devices and extents of arrays; overlap of two; arrays of other libraries taken without a copy."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .arrays import DTYPES, Array, accumulator_dtype, is_array, is_shape, namespace
from .errors import UnsupportedProblem, refuse

_ON_DEVICE = {2: "CUDA", 13: "CUDA managed"}  # kDLCUDA, kDLCUDAManaged
COPIES = {"numpy": "its get()", "cupy": "cupy.asarray"}  # what copies an array of the other namespace to each
_OF_Q, _OF_LSE = ("q", "k", "v", "o", "do"), ("lse", "dlse")  # arrays of q's dtype, and of that of its sums
_EXTENDED = {dtype.name: dtype for dtype in DTYPES if dtype.kind == "V"}  # dtypes of ml_dtypes
_ON_HOST = {1: "CPU", 3: "CUDA pinned"}  # kDLCPU, kDLCUDAHost


def address(array: Array) -> int:
    """Return the address of an array's first element, on the host or on a device."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def device_number(array: Array) -> int | None:
    """Return the number of the CUDA device that holds an array, and None for the host."""
    return None if isinstance(array, np.ndarray) else int(array.data.device_id)


def dense_strides(shape: Sequence[int], axes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides in elements of a dense array whose axes lie in C order, or as given from outermost inwards."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape)) if axes is None else axes):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def layout_reasons(name: str, array: Array) -> list[str]:
    """Why a kernel, which counts in elements, cannot walk an array."""
    itemsize = array.dtype.itemsize
    if array.size == 0:
        return []
    reasons = []
    if any(step % itemsize and extent > 1 for step, extent in zip(array.strides, array.shape)):
        reasons.append(
            f"{name}'s strides must be multiples of its item size, {itemsize} bytes; got {array.strides}: copy it"
        )
    if address(array) % itemsize:
        reasons.append(
            f"{name} must start at a multiple of its item size, {itemsize} bytes; got a misaligned view: copy it"
        )
    return reasons


def is_broadcast(array: Array) -> bool:
    """Return whether two places of an array are the same memory by a stride of 0."""
    return bool(array.size) and any(step == 0 and extent > 1 for step, extent in zip(array.strides, array.shape))


def reach(array: Array) -> tuple[int, int]:
    """Return where an array's memory starts and ends, in bytes from its first element."""
    if not array.size:
        return 0, 0
    steps = [step * (extent - 1) for step, extent in zip(array.strides, array.shape)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + array.dtype.itemsize


def overlap(first: Array, second: Array) -> bool:
    """Return whether two arrays share any element; true where that would be hard to decide."""
    try:
        return bool(np.shares_memory(_span(first), _span(second), max_work=1 << 16))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Span:
    """An array that lies where another does, on any device: NumPy counts its addresses and never reads there."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address(array), False), "typestr": f"|V{array.dtype.itemsize}",
            "shape": tuple(array.shape), "strides": tuple(array.strides),
        }  # fmt: skip


def _span(array: Array) -> Any:
    return array if isinstance(array, np.ndarray) else np.asarray(_Span(array))


def is_foreign(value: object) -> bool:
    """Return whether a value is another library's array that can be taken without a copy."""
    if isinstance(value, (np.ndarray, type)) or not hasattr(value, "__dlpack_device__"):
        return False
    return not (is_array(value) and namespace(value).__name__ == "cupy")


def is_on_cuda(name: str, value: Any) -> bool:
    """Return the device of another library's array.

    Raises
    ------
    UnsupportedProblem
        It lies on a device that is neither a CUDA device nor the host, or does not say where, or it is a tensor of
        PyTorch whose elements cannot be read in place.
    """
    reasons = tensor_reasons(name, value)
    if not reasons and is_tensor(value) and value.requires_grad:
        why, fix = "which calls for NumPy do not record", "detach() it, or call cuflash.torch.attention"
        if name == "mask":
            why, fix = "since a mask has none", "detach() it"
        reasons = [f"{name} must not require gradients, {why}; got a torch.Tensor with requires_grad=True: {fix}"]
    refuse(reasons)
    if is_tensor(value) and value.is_cuda:
        return True
    try:
        kind = int(value.__dlpack_device__()[0])
    except Exception as error:  # code of another library
        raise UnsupportedProblem(
            [f"{name} must say on which device it lies; got {kind_of(value)} ({_said(error)}): copy it to the CPU"]
        ) from error
    if kind not in _ON_DEVICE and kind not in _ON_HOST:
        raise UnsupportedProblem(
            [
                f"{name} must lie on a CUDA device or the CPU; got DLPack device type {kind} of {kind_of(value)}: copy "
                f"it to either"
            ]
        )
    return kind in _ON_DEVICE


def taken(name: str, value: Any, xp: Any) -> Array:
    """Another library's array as one of the namespace `xp`, which lies where it does: no copy.

    Raises
    ------
    UnsupportedProblem
        The library does not give it away, or `xp` does not know its dtype.
    """
    try:
        if is_tensor(value) and value.is_cuda and xp is not np and _is_on_stream_of(value, xp):
            return _of_tensor(value, xp)
        extended = _extended_dtype(value)
        return xp.from_dlpack(value) if extended is None else _of_extended(value, extended, xp)
    except MemoryError:
        raise
    except Exception as error:  # code of another library
        raise UnsupportedProblem(
            [
                f"{name} must be an array that {xp.__name__}.from_dlpack takes; got {kind_of(value)} ({_said(error)}): "
                f"copy it with {xp.__name__}.asarray"
            ]
        ) from error


def _is_on_stream_of(tensor: Any, cupy: Any) -> bool:
    """Return whether PyTorch's current stream on a tensor's device is CuPy's, so that neither waits for the other."""
    stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(tensor.get_device())
    return stream == int(cupy.cuda.get_current_stream().ptr)


def tensors_layout(*tensors: Any) -> tuple[Hashable, ...] | None:
    """Key of the layout of PyTorch's tensors that kernels on CuPy's current stream may read in place; else None.

    Tensors of one layout are `taken` as arrays of one layout, but for odd addresses.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is None or cupy is None or has_dual_level():
        return None
    found = []
    try:
        for each in tensors:
            if not _is_plain(each, torch) or each.requires_grad or each.is_neg() or not each.data_ptr():
                return None
            found.append((each.shape, each.stride(), each.dtype, each.device))
    except RuntimeError:  # nested tensors have no shape, and tracers no memory: `tensor_reasons` says so
        return None
    return tuple(found) if _is_on_stream_of(tensors[0], cupy) else None


def _is_plain(value: Any, torch: Any) -> bool:
    """Return whether a value is a dense tensor on a CUDA device, and of no subclass."""
    return type(value) is torch.Tensor and value.is_cuda and value.layout is torch.strided


def _of_tensor(tensor: Any, cupy: Any) -> Array:
    """A tensor on a CUDA device as CuPy's array at its address, which holds it; DLPack takes five times as long."""
    itemsize = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(step * itemsize for step in tensor.stride())
    nbytes = itemsize + sum(step * (extent - 1) for step, extent in zip(strides, shape)) if tensor.numel() else 0
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, tensor.get_device())
    return cupy.ndarray(shape, _numpy_dtype(tensor.dtype), cupy.cuda.MemoryPointer(memory, 0), strides)


@lru_cache(maxsize=64)
def _numpy_dtype(dtype: Any) -> np.dtype[np.generic]:
    """The dtype of NumPy for one of PyTorch.

    Raises
    ------
    TypeError
        NumPy has none.
    """
    return np.dtype(str(dtype).removeprefix("torch."))


def taken_on_cuda(name: str, value: Any) -> Array:
    """Another library's array on a CUDA device as CuPy's, without a copy.

    Raises
    ------
    UnsupportedProblem
        As `taken`, or CuPy is missing.
    """
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedProblem(
            [f"{name} lies on a CUDA device, as {kind_of(value)}, which needs CuPy ({error}): install CuPy, or copy it"]
        ) from error
    return taken(name, value, cupy)


def _extended_dtype(value: Any) -> np.dtype[np.generic] | None:
    """The dtype of a value if NumPy's DLPack lacks it."""
    dtype = getattr(value, "dtype", "")
    if isinstance(dtype, np.dtype):  # whose name takes long to make
        return dtype if dtype in _EXTENDED.values() else None
    return _EXTENDED.get(str(dtype).removeprefix("torch."))


def _of_extended(value: Any, dtype: np.dtype[np.generic], xp: Any) -> Array:
    """Return an array of a dtype that NumPy's DLPack lacks: tensors pass as integers, others by the host's buffer."""
    if is_tensor(value):
        integers = getattr(sys.modules["torch"], f"int{8 * dtype.itemsize}")
        return xp.from_dlpack(value.view(integers)).view(dtype)
    if xp is not np:
        return xp.from_dlpack(value)
    array = np.asarray(value)
    if array.dtype != dtype:
        raise TypeError(f"its elements come as {array.dtype}")
    return array


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of PyTorch, which is not imported for that."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def tensor_reasons(name: str, value: Any) -> list[str]:
    """Why the elements of a tensor of PyTorch cannot be read in place, or are not all of it; none for other values."""
    if not is_tensor(value):
        return []
    torch = sys.modules["torch"]
    if value.device.type == "meta":
        return [f"{name} must hold data; got a tensor on the device 'meta': make it on 'cpu' or 'cuda'"]
    if value.is_nested:
        fix = "torch.nested.to_padded_tensor makes one, and cuflash.masks.Lengths masks the padding"
        return [f"{name} must be one dense tensor; got a nested one: {fix}"]
    if value.is_quantized:
        return [f"{name} must not be quantised; got a tensor of {value.dtype}: its dequantize() makes one of floats"]
    if value.layout != torch.strided:
        return [f"{name} must be a dense tensor; got the layout {value.layout}: its to_dense() makes one"]
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) or _has_no_operations(value)
    try:  # the address of a tensor with operations of its own, as FakeTensor's, may be that of no memory
        has_memory = not _is_fake(value) if not is_plain else value.data_ptr() != 0 or value.numel() == 0
    except Exception:  # tracers of PyTorch raise, or warn where warnings are errors
        has_memory = False
    if not has_memory:
        return [f"{name} must hold data; got a tracer, a {kind_of(value)} without memory: {_fix_of_tracer(value)}"]
    if not is_plain:
        fix = _FIX_OF_SUBCLASS.get(type(value).__name__, "its as_subclass(torch.Tensor) is one")
        return [f"{name} must be a plain torch.Tensor; got a {type(value).__name__}: {fix}"]
    if value.is_neg():
        return [f"{name} must hold its values; got a lazily negated view: its resolve_neg() makes one that does"]
    if has_dual_level() and torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        return [
            f"{name} must not carry a tangent, since attention has no forward-mode derivative; got a dual tensor: pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal, or differentiate with torch.autograd.grad"
        ]
    return []


_FIX_OF_SUBCLASS = {
    "DTensor": "its full_tensor() makes one, and its to_local() is this process's part",
    "MaskedTensor": "its to_tensor(0) makes one, and mask= takes what it hides",
}


def has_dual_level() -> bool:
    """Return whether PyTorch is within `torch.autograd.forward_ad.dual_level`, outside of which there is no tangent."""
    return bool(getattr(sys.modules["torch"].autograd.forward_ad, "_current_level", 0) >= 0)


def _is_fake(tensor: Any) -> bool:
    """Return whether a tensor is one of those that `torch.compile` and `torch.export` compute shapes with."""
    return isinstance(tensor, getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ()))


def _fix_of_tracer(tensor: Any) -> str:
    """How to call attention without the transformation of PyTorch that made a tracer."""
    if is_batched(tensor):
        return "call this outside of torch.vmap: leading axes are batch axes, so call it once on the whole batch"
    if sys.modules["torch"]._C._functorch.is_gradtrackingtensor(tensor):
        return "call this outside of torch.func, and differentiate cuflash.torch.attention with torch.autograd.grad"
    return "call this outside of torch.compile, torch.export, torch.vmap and torch.func"


def is_batched(tensor: Any) -> bool:
    """Return whether a tensor is one of `torch.vmap`, or of a backward pass for several cotangents at once."""
    functorch = sys.modules["torch"]._C._functorch
    kinds = "is_batchedtensor", "is_legacy_batchedtensor"  # the latter of is_grads_batched=True
    return any(getattr(functorch, kind)(tensor) for kind in kinds if hasattr(functorch, kind))


def _has_no_operations(tensor: Any) -> bool:
    """Return whether a tensor's class has no operations of its own, which its elements alone would not have."""
    torch, kind = sys.modules["torch"], type(tensor)
    plain = getattr(torch.Tensor.__torch_function__, "__func__", None), torch._C._disabled_torch_function_impl
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return function in plain and bool(kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__)


def dtype_of(array: Any) -> np.dtype[np.generic]:
    """The dtype of an array or tensor as NumPy's; void for one of PyTorch's that NumPy does not have."""
    if not is_tensor(array):
        dtype: np.dtype[np.generic] = np.dtype(array.dtype)
        return dtype
    try:
        return _numpy_dtype(array.dtype)
    except TypeError:
        return np.dtype(np.void)


def dtypes_of_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """The dtypes of lists in a call by name: those of the arrays that they stand beside.

    A list of ints in the place of q, k or v is left out, as it is no array of rows but may be a shape.
    """
    found = [dtype_of(given[name]) for name in _OF_Q if hasattr(given.get(name), "dtype")]
    like = next((dtype for dtype in found if dtype in DTYPES), np.dtype(np.float64))
    dtypes = {name: like for name in _OF_Q if not is_shape(given.get(name))}
    dtypes |= dict.fromkeys(_OF_LSE, accumulator_dtype(like)) | dict.fromkeys(("sink", "bias"), np.dtype(np.float64))
    return {**dtypes, "mask": np.dtype(np.bool_)}


def is_differentiated(value: object) -> bool:
    """Tell whether a value is an array of PyTorch or JAX, neither of which is imported here."""
    jax_array = getattr(sys.modules.get("jax"), "Array", None)
    return is_tensor(value) or jax_array is not None and isinstance(value, jax_array)


def is_tracer(value: object) -> bool:
    """Return whether a value is one that JAX traces, in place of an array."""
    core = getattr(sys.modules.get("jax"), "core", None)
    return core is not None and isinstance(value, core.Tracer)


def _said(error: Exception) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def kind_of(value: object) -> str:
    """Package and name of a value's type."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
