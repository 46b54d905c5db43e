"""Addresses, devices and memory extents of arrays, and zero-copy conversion of arrays of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .arrays import DTYPES, Array, Namespace, accumulator_dtype, is_array, is_shape, namespace
from .errors import UnsupportedProblem, refuse

_ON_DEVICE = {2: "CUDA", 13: "CUDA managed"}  # DLPack device types kDLCUDA and kDLCUDAManaged
COPIES = {"numpy": ".get()", "cupy": "cupy.asarray"}  # how to copy an array of the other library to this one
_OF_Q, _OF_LSE = ("q", "k", "v", "o", "do"), ("lse", "dlse")  # arrays with q's dtype, and with its accumulator dtype
_EXTENDED = {dtype.name: dtype for dtype in DTYPES if dtype.kind == "V"}  # dtypes that come from ml_dtypes
_ON_HOST = {1: "CPU", 3: "CUDA pinned"}  # DLPack device types kDLCPU and kDLCUDAHost


def address(array: Array) -> int:
    """Return the address of an array's first element, on the host or on a device."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def device_number(array: Array) -> int | None:
    """Return the number of the CUDA device that holds an array, or None if it is on the host."""
    return None if isinstance(array, np.ndarray) else int(array.data.device_id)


def other_device_reasons(array: Array) -> list[str]:
    """Return why kernels on the current device cannot read an array of a mask: it is on another device."""
    cuda = getattr(namespace(array), "cuda", None)
    if cuda is None or cuda.runtime.getDevice() == device_number(array):
        return []
    rule = f"mask's arrays must be on the current device, {cuda.runtime.getDevice()}"
    return [f"{rule}; got device {device_number(array)}"]


def dense_strides(shape: Sequence[int], axes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array in C order or in the order `axes`, outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape)) if axes is None else axes):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def layout_reasons(name: str, array: Array) -> list[str]:
    """Return why kernels, whose strides count elements, cannot read or write an array."""
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


def overlaps_itself(array: Array) -> bool:
    """True if elements of an array share memory, as in a broadcast view.

    Strides that no slices and transpositions of a dense array have may count as shared memory, too.
    """
    stop = array.dtype.itemsize if array.size else 0
    for step, extent in sorted((abs(step), extent) for step, extent in zip(array.strides, array.shape) if extent > 1):
        if step < stop:
            return True
        stop += step * (extent - 1)
    return False


def reach(array: Array) -> tuple[int, int]:
    """Return the start and end of an array's memory, in bytes relative to its first element."""
    if not array.size:
        return 0, 0
    steps = [step * (extent - 1) for step, extent in zip(array.strides, array.shape)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + array.dtype.itemsize


def overlap(first: Array, second: Array) -> bool:
    """True if two arrays share memory, and also if the exact answer would take too long to compute."""
    try:
        return bool(np.shares_memory(_span(first), _span(second), max_work=1 << 16))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Span:
    """A stand-in with the address and layout of an array on any device, whose memory NumPy never reads."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address(array), False), "typestr": f"|V{array.dtype.itemsize}",
            "shape": tuple(array.shape), "strides": tuple(array.strides),
        }  # fmt: skip


def _span(array: Array) -> Any:
    return array if isinstance(array, np.ndarray) else np.asarray(_Span(array))


def is_foreign(value: object) -> bool:
    """True if a value is an array of another library that supports DLPack."""
    if isinstance(value, (np.ndarray, type)) or not hasattr(value, "__dlpack_device__"):
        return False
    return not (is_array(value) and namespace(value).__name__ == "cupy")


def is_on_cuda(name: str, value: Any) -> bool:
    """True if an array of another library is on a CUDA device, False if it is on the host.

    Raises
    ------
    UnsupportedProblem
        The array is on any other device, does not report its device, or is a PyTorch tensor whose elements cannot be
        read in place.
    """
    value = _without_tracking(value)
    reasons = tensor_reasons(name, value)
    if not reasons and is_tensor(value) and value.requires_grad:
        why, fix = "which NumPy calls do not record", f"pass {name}.detach(), or call cuflash.torch.attention"
        if name == "mask":
            why, fix = "because a mask has none", "pass mask.detach()"
        reasons = [f"{name} must not require gradients, {why}; got a torch.Tensor with requires_grad=True: {fix}"]
    refuse(reasons)
    if is_tensor(value) and value.is_cuda:
        return True
    try:
        kind = int(value.__dlpack_device__()[0])
    except Exception as error:  # the code of the other library may raise any error
        raise UnsupportedProblem(
            f"{name} must report its device; got {kind_of(value)} ({_message(error)}): copy it to the CPU"
        ) from error
    if kind not in _ON_DEVICE and kind not in _ON_HOST:
        raise UnsupportedProblem(
            f"{name} must be on a CUDA device or the CPU; got DLPack device type {kind} of {kind_of(value)}: copy "
            f"it to either"
        )
    return kind in _ON_DEVICE


def taken(name: str, value: Any, xp: Namespace) -> Array:
    """Convert an array of another library to one of the namespace `xp` at the same address, without a copy.

    Raises
    ------
    UnsupportedProblem
        The library does not export the array, or `xp` does not support its dtype.
    """
    value = _without_tracking(value)
    try:
        if is_tensor(value) and value.is_cuda and xp is not np and _is_on_stream_of(value, xp):
            return _of_tensor(value, xp)
        extended = _extended_dtype(value)
        return xp.from_dlpack(value) if extended is None else _of_extended(value, extended, xp)
    except MemoryError:
        raise
    except Exception as error:  # the code of the other library may raise any error
        raise UnsupportedProblem(
            f"{name} must be an array that {xp.__name__}.from_dlpack accepts; got {kind_of(value)} "
            f"({_message(error)}): copy it with {xp.__name__}.asarray"
        ) from error


def _is_on_stream_of(tensor: Array, cupy: Namespace) -> bool:
    """True if PyTorch's current stream on a tensor's device is also CuPy's, so that neither must wait for the other."""
    stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(tensor.get_device())
    return stream == int(cupy.cuda.get_current_stream().ptr)


def tensors_layout(*tensors: Array) -> tuple[Hashable, ...] | None:
    """Return the layout key of PyTorch tensors that kernels on CuPy's current stream can read in place, or None.

    Tensors with equal keys are converted to arrays with equal layouts, except for the alignment of their addresses.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is None or cupy is None or has_dual_level():
        return None
    layouts = []
    try:
        for tensor in tensors:
            if not _is_plain(tensor, torch) or tensor.requires_grad or tensor.is_neg() or not tensor.data_ptr():
                return None
            layouts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    except RuntimeError:  # nested tensors have no shape, and tracers no memory: `tensor_reasons` reports these
        return None
    return tuple(layouts) if _is_on_stream_of(tensors[0], cupy) else None


def _is_plain(value: Any, torch: Namespace) -> bool:
    """True if a value is a dense tensor on a CUDA device, and not an instance of a subclass of torch.Tensor."""
    return type(value) is torch.Tensor and value.is_cuda and value.layout is torch.strided


def _of_tensor(tensor: Array, cupy: Namespace) -> Array:
    """Return a CuPy array that shares a CUDA tensor's memory and keeps it alive; DLPack takes five times as long."""
    itemsize = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(step * itemsize for step in tensor.stride())
    nbytes = itemsize + sum(step * (extent - 1) for step, extent in zip(strides, shape)) if tensor.numel() else 0
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, tensor.get_device())
    return cupy.ndarray(shape, _numpy_dtype(tensor.dtype), cupy.cuda.MemoryPointer(memory, 0), strides)


@lru_cache(maxsize=64)
def _numpy_dtype(dtype: DTypeLike) -> np.dtype[np.generic]:
    """Return the NumPy dtype for a PyTorch dtype.

    Raises
    ------
    TypeError
        NumPy has no such dtype.
    """
    return np.dtype(str(dtype).removeprefix("torch."))


def taken_on_cuda(name: str, value: Any) -> Array:
    """Convert an array of another library on a CUDA device to a CuPy array, without a copy.

    Raises
    ------
    UnsupportedProblem
        For the same reasons as in `taken`, or because CuPy is missing.
    """
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedProblem(
            f"{name}, a {kind_of(value)}, is on a CUDA device, which needs CuPy ({error}): install CuPy, or copy "
            f"it to the CPU"
        ) from error
    return taken(name, value, cupy)


def _extended_dtype(value: Any) -> np.dtype[np.generic] | None:
    """Return the dtype of a value if NumPy's DLPack import does not support it, otherwise None."""
    dtype = getattr(value, "dtype", "")
    if isinstance(dtype, np.dtype):  # avoids str(dtype), which is slow
        return dtype if dtype in _EXTENDED.values() else None
    return _EXTENDED.get(str(dtype).removeprefix("torch."))


def _of_extended(value: Any, dtype: np.dtype[np.generic], xp: Namespace) -> Array:
    """Convert an array whose dtype NumPy's DLPack lacks: a tensor as integers, others by the buffer protocol."""
    if is_tensor(value):
        integers = getattr(sys.modules["torch"], f"int{8 * dtype.itemsize}")
        return xp.from_dlpack(value.view(integers)).view(dtype)
    if xp is not np:
        return xp.from_dlpack(value)
    array = np.asarray(value)
    if array.dtype != dtype:
        raise TypeError(f"NumPy converts its elements to {array.dtype}")
    return array


def is_tensor(value: object) -> bool:
    """True if a value is a PyTorch tensor; this does not import PyTorch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def tensor_reasons(name: str, value: Any) -> list[str]:
    """Return why the elements of a PyTorch tensor cannot be read in place or are not its full value; [] otherwise."""
    if not is_tensor(value):
        return []
    torch = sys.modules["torch"]
    if value.device.type == "meta":
        return [f"{name} must hold data; got a tensor on the device 'meta': make it on 'cpu' or 'cuda'"]
    if value.is_nested:
        fix = "use torch.nested.to_padded_tensor, and cuflash.masks.Lengths to mask the padding"
        return [f"{name} must be one dense tensor; got a nested tensor: {fix}"]
    if value.is_quantized:
        return [f"{name} must not be quantized; got a tensor of {value.dtype}: pass {name}.dequantize()"]
    if value.layout != torch.strided:
        return [f"{name} must be a dense tensor; got the layout {value.layout}: pass {name}.to_dense()"]
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) or _has_no_operations(value)
    try:  # a subclass with its own operations, such as FakeTensor, may have an address without memory
        has_memory = not _is_fake(value) if not is_plain else value.data_ptr() != 0 or value.numel() == 0
    except Exception:  # tracers of PyTorch raise errors, or warnings that are turned into errors
        has_memory = False
    if not has_memory:
        return [f"{name} must hold data; got a tracer, a {kind_of(value)} without memory: {_fix_of_tracer(value)}"]
    if not is_plain:
        fix = _FIX_OF_SUBCLASS.get(type(value).__name__, "pass {name}.as_subclass(torch.Tensor)").format(name=name)
        return [f"{name} must be a plain torch.Tensor; got a {type(value).__name__}: {fix}"]
    if value.is_neg():
        return [f"{name} must hold its values; got a lazily negated view: pass {name}.resolve_neg()"]
    if has_dual_level() and torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        return [
            f"{name} must not carry a tangent, which NumPy calls and outputs do not use; got a dual tensor: pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal, or call cuflash.torch.attention"
        ]
    return []


_FIX_OF_SUBCLASS = {
    "DTensor": "pass {name}.full_tensor(), or {name}.to_local() for the part of this process",
    "MaskedTensor": "pass {name}.to_tensor(0), and mask= for the hidden elements",
}


def has_dual_level() -> bool:
    """True if tensors may have tangents: PyTorch is inside `torch.autograd.forward_ad.dual_level`, and uses them."""
    torch = sys.modules["torch"]
    is_inside = getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0
    return bool(is_inside and torch._C._is_fwd_grad_enabled())


def _without_tracking(value: Array) -> Array:
    """Return the tensor within wrappers of `torch.func` for gradients, if it has none: integers or booleans."""
    if is_tensor(value) and not value.is_floating_point():
        functorch = sys.modules["torch"]._C._functorch
        while functorch.is_gradtrackingtensor(value):
            value = functorch.get_unwrapped(value)
    return value


def _is_fake(tensor: Array) -> bool:
    """True if a tensor is a FakeTensor, with which `torch.compile` and `torch.export` compute shapes."""
    return isinstance(tensor, getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ()))


def _fix_of_tracer(tensor: Array) -> str:
    """Return advice on how to call attention outside of the PyTorch transformation that created a tracer."""
    if is_batched(tensor):
        return "call this outside of torch.vmap: leading axes are batch axes, so call it once on the whole batch"
    if sys.modules["torch"]._C._functorch.is_gradtrackingtensor(tensor):
        return "call this outside of torch.func, or call cuflash.torch.attention"
    return "call this outside of torch.compile, torch.export, torch.vmap and torch.func"


def is_batched(tensor: Array) -> bool:
    """True if a tensor was created by `torch.vmap`, or by a backward pass with is_grads_batched=True."""
    functorch = sys.modules["torch"]._C._functorch
    kinds = "is_batchedtensor", "is_legacy_batchedtensor"  # is_grads_batched=True creates the latter
    return any(getattr(functorch, kind)(tensor) for kind in kinds if hasattr(functorch, kind))


def _has_no_operations(tensor: Array) -> bool:
    """True if a tensor's class does not override operations, so that its elements alone represent it."""
    torch, kind = sys.modules["torch"], type(tensor)
    plain = getattr(torch.Tensor.__torch_function__, "__func__", None), torch._C._disabled_torch_function_impl
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return function in plain and bool(kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__)


def dtype_of(array: Array) -> np.dtype[np.generic]:
    """Return the NumPy dtype of an array or tensor; void for a PyTorch dtype that NumPy lacks."""
    if not is_tensor(array):
        dtype: np.dtype[np.generic] = np.dtype(array.dtype)
        return dtype
    try:
        return _numpy_dtype(array.dtype)
    except TypeError:
        return np.dtype(np.void)


def dtypes_of_lists(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes, by name, to which a call converts lists: those of its arrays.

    A list of ints as q, k or v is left out, because it may be meant as a shape instead of as an array.
    """
    known = [dtype_of(arguments[name]) for name in _OF_Q if hasattr(arguments.get(name), "dtype")]
    like = next((dtype for dtype in known if dtype in DTYPES), np.dtype(np.float64))
    dtypes = {name: like for name in _OF_Q if not is_shape(arguments.get(name))}
    dtypes |= dict.fromkeys(_OF_LSE, accumulator_dtype(like)) | dict.fromkeys(("sink", "bias"), np.dtype(np.float64))
    return {**dtypes, "mask": np.dtype(np.bool_)}


def is_differentiated(value: object) -> bool:
    """True if a value is an array of PyTorch or JAX; this imports neither."""
    return is_tensor(value) or is_jax_array(value)


def is_jax_array(value: object) -> bool:
    """True if a value is an array of JAX, or a tracer of one; this does not import JAX."""
    jax_array = getattr(sys.modules.get("jax"), "Array", None)
    # The first test lets torch.compile trace this for tensors: it cannot trace the second one.
    return jax_array is not None and not is_tensor(value) and isinstance(value, jax_array)


def is_tracer(value: object) -> bool:
    """True if a value is a JAX tracer instead of an array."""
    core = getattr(sys.modules.get("jax"), "core", None)
    return core is not None and isinstance(value, core.Tracer)


def _message(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def kind_of(value: object) -> str:
    """Return the package and the name of a value's type."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
