"""Tensor maps: descriptions of arrays, in 128 bytes, by which the tensor memory accelerator (TMA) copies boxes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..arrays import KNOWN_DTYPES

BYTES = 128
_MAGIC = 0x70616D726F736E65
_MAX_STRIDE_BYTES = 1 << 40
_MAX_BOX = 256  # maximum elements of a box along an axis
# The driver's names of dtypes, in the order of sim/runtime/bulk.cpp, which does not support reductions of integers.
_TYPES = {np.dtype(np.uint8): "UINT8"} | {each.numpy: each.tensor_map for each in KNOWN_DTYPES if each.tensor_map}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
# This record mirrors the struct `Map` in sim/runtime/bulk.cpp.
_SIMULATED = np.dtype(
    [
        ("magic", np.uint64),
        ("base", np.uint64),
        ("rank", np.uint32),
        ("element_bytes", np.uint32),
        ("swizzle_bytes", np.uint32),
        ("type", np.uint32),
        ("strides", np.uint64, (5,)),
        ("sizes", np.uint32, (5,)),
        ("box", np.uint32, (5,)),
        ("unused", np.uint64, (2,)),
    ]
)


class BoxedArray(NamedTuple):
    """An array at any address, divided into boxes, each of which one instruction copies.

    >>> boxed = BoxedArray(np.dtype(np.float16), (2, 100, 64), (12800, 128, 2), box=(1, 32, 64), swizzle_bytes=128)
    >>> boxed.reasons(address=4096)
    []

    Attributes
    ----------
    dtype : numpy.dtype
        float16, bfloat16, float32 or uint8.
    shape, strides : tuple of 2 to 5 ints
        Strides in bytes. The last axis is dense; the stride of an axis of one element does not matter.
    box : tuple of ints
        Elements along each axis that one copy moves, at most 256; elements outside the array are read as zeros.
    swizzle_bytes : 0, 32, 64 or 128
        Bytes per row in shared memory, whose 16-byte chunks are permuted; rows of a box must not be wider.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128

    @property
    def outer_strides(self) -> tuple[int, ...]:
        """Strides in bytes of all axes except the last."""
        return tuple(stride if size != 1 else 16 for size, stride in zip(self.shape[:-1], self.strides[:-1]))

    def reasons(self, address: int) -> list[str]:
        """Return why hardware cannot copy boxes of an array that starts at this address."""
        reasons = []
        width = self.box[-1] * self.dtype.itemsize
        if not 2 <= len(self.shape) <= 5 or not len(self.shape) == len(self.strides) == len(self.box):
            reasons.append(f"an array must have 2 to 5 axes and a box the same number; got {self.shape} and {self.box}")
        if self.dtype not in _TYPES:
            reasons.append(f"dtype must be float16, bfloat16, float32 or uint8; got {self.dtype}")
        if not all(1 <= size < 2**32 for size in self.shape):
            reasons.append(f"no axis may be empty; got shape {self.shape}")
        if address % 16:
            reasons.append(f"the first element must be at a multiple of 16 bytes; got {address:#x}")
        if self.strides[-1] != self.dtype.itemsize and self.shape[-1] != 1:
            reasons.append(f"the last axis must be dense; got a stride of {self.strides[-1]} bytes")
        if any(not 0 <= stride < _MAX_STRIDE_BYTES or stride % 16 for stride in self.outer_strides):
            reasons.append(f"strides must be multiples of 16 bytes below 2**40; got {self.strides}")
        if not all(1 <= size <= _MAX_BOX for size in self.box):
            reasons.append(f"a box has 1 to {_MAX_BOX} elements along each axis; got {self.box}")
        if self.swizzle_bytes not in _SWIZZLES or width % 16 or self.swizzle_bytes and width > self.swizzle_bytes:
            reasons.append(f"rows of a box must be multiples of 16 bytes, at most {self.swizzle_bytes}; got {width}")
        return reasons


def simulated(boxed: BoxedArray, address: int) -> Any:
    """Return the tensor map of an array for a simulated kernel, as a NumPy scalar of 128 bytes.

    Raises
    ------
    ValueError
        The hardware cannot copy the boxes; the message lists the reasons.
    """
    _check(boxed, address)
    rank = len(boxed.shape)
    encoded_map = np.zeros(1, _SIMULATED)
    encoded_map["magic"], encoded_map["base"], encoded_map["rank"] = _MAGIC, address, rank
    encoded_map["element_bytes"], encoded_map["swizzle_bytes"] = boxed.dtype.itemsize, boxed.swizzle_bytes
    encoded_map["type"] = [*_TYPES].index(boxed.dtype)
    encoded_map["strides"][0, :rank] = (boxed.dtype.itemsize, *boxed.outer_strides[::-1])
    encoded_map["sizes"][0, :rank] = boxed.shape[::-1]
    encoded_map["box"][0, :rank] = boxed.box[::-1]
    return encoded_map.view(f"V{BYTES}")[0]


def encoded(boxed: BoxedArray, address: int) -> Any:
    """Return the tensor map of an array on a GPU, encoded by the CUDA driver.

    Raises
    ------
    ValueError
        The hardware cannot copy the boxes; the message lists the reasons.
    RuntimeError
        cuda-bindings is missing, or the driver returns an error.
    """
    _check(boxed, address)
    try:
        from cuda.bindings import driver
    except ImportError as error:
        fix = "pip install '.[cuda13]' in a clone of cuflash"
        raise RuntimeError(f"cuda-bindings is missing ({error}): {fix}") from error
    rank, words = len(boxed.shape), driver.cuuint32_t
    code, encoded_map = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[boxed.dtype]}"),
        rank,
        address,
        [driver.cuuint64_t(size) for size in boxed.shape[::-1]],
        [driver.cuuint64_t(stride) for stride in boxed.outer_strides[::-1]],
        [words(size) for size in boxed.box[::-1]],
        [words(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[boxed.swizzle_bytes]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if code:
        raise RuntimeError(f"the driver cannot encode a tensor map of {boxed} at {address:#x}: {code!r}")
    return np.frombuffer(ctypes.string_at(encoded_map.getPtr(), BYTES), f"V{BYTES}")[0]


class Template(NamedTuple):
    """A tensor map without its address: 16 words of 8 bytes, and the offset of the address word."""

    words: tuple[int, ...]
    offset: int


_ADDRESSES = 0x5A5A_5A5A_5A50, 0x25A5_A5A5_A5A0  # addresses that no array has, and that differ in most bits


@lru_cache(maxsize=4096)
def template(make: Callable[[BoxedArray, int], Any], boxed: BoxedArray) -> Template:
    """Return the words that tensor maps of arrays of one layout share; `make` is `simulated` or `encoded`.

    Raises
    ------
    RuntimeError
        Maps of two addresses do not differ in exactly one word that holds the address, so a template is impossible.
    """
    encoded_maps = [np.frombuffer(make(boxed, address).tobytes(), np.uint64).tolist() for address in _ADDRESSES]
    offsets = [offset for offset, (one, other) in enumerate(zip(*encoded_maps)) if one != other]
    if len(offsets) != 1 or tuple(words[offsets[0]] for words in encoded_maps) != _ADDRESSES:
        raise RuntimeError("this driver stores addresses of tensor maps in an unknown format: use kernel='sm80'")
    return Template(tuple(encoded_maps[0]), offsets[0])


def _check(boxed: BoxedArray, address: int) -> None:
    reasons = boxed.reasons(address)
    if reasons:
        raise ValueError(f"cannot make a tensor map of {boxed}: {'; '.join(reasons)}")
