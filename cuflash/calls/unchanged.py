"""Protection of arrays that a vjp reads again: results become read-only, and checksums detect other changes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..arrays import Array, to_host

_SHORT_BYTES = 1 << 15  # smaller arrays are copied for their checksum
_ODD = np.uint64(0x9E3779B97F4A7C15)  # its multiples spread over all 64 bits


class Held:
    """A lock that keeps one NumPy array read-only; deleting it restores the array's own flag."""

    __slots__ = ("__weakref__", "array", "was_writeable")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.was_writeable = array, array.flags.writeable
        array.flags.writeable = False

    def __del__(self) -> None:
        if self.was_writeable:
            _make_writeable(self.array)


_NOTHING = nullcontext()
_held: WeakValueDictionary[int, Held] = WeakValueDictionary()  # by the id of the array, which Held keeps alive


def held(*arrays: Array) -> tuple[Held, ...]:
    """Make NumPy arrays read-only as long as the returned objects exist.

    An array that is already held gets the same object, which restores the array's flag when it is deleted. An array
    that NumPy could never make writable again, such as memory of another library, stays unchanged.
    """
    locks = []
    for array in arrays:
        if isinstance(array, np.ndarray):
            each = _held.get(id(array))
            if each is None and (not array.flags.writeable or _make_writeable(array.view(np.ndarray)[...])):
                each = _held[id(array)] = Held(array)
            if each is not None:
                locks.append(each)
    return tuple(locks)


def writeable(arrays: Any) -> AbstractContextManager[None]:
    """Let a call write to arrays that earlier vjps hold; afterwards they are read-only again."""
    if arrays is None:
        return _NOTHING
    listed = arrays if isinstance(arrays, (tuple, list)) else (arrays,)
    return _lent([each for each in (_held.get(id(array)) for array in listed) if each and each.was_writeable])


@contextmanager
def _lent(lent: list[Held]) -> Iterator[None]:
    try:
        for each in lent:
            _make_writeable(each.array)
        yield
    finally:
        for each in lent:
            each.array.flags.writeable = False


def _make_writeable(array: np.ndarray[Any, Any]) -> bool:
    """Make an array writable, and return True if NumPy allows it; this also works for views of held arrays."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    was_writeable = owner.flags.writeable
    try:
        owner.flags.writeable = True
        array.flags.writeable = True
    except ValueError:  # memory of another library
        return False
    if owner is not array:
        owner.flags.writeable = was_writeable
    return True


def checksum(array: Array) -> int:
    """Return a number that changes if any value in the array changes, independent of the array's strides.

    Elements are compared as the integers of their bits, so different NaNs differ. Each 8-byte word along the last axis
    is multiplied by its own odd factor, modulo 2^64, so no change of a single word leaves the sum of its row
    unchanged.
    """
    host = array if isinstance(array, np.ndarray) else to_host(array)
    if host.nbytes <= _SHORT_BYTES:
        return zlib.crc32(host.tobytes())
    size, length = host.itemsize, host.shape[-1]
    per_word = 8 // size
    words, factors = host.view(f"u{size}"), np.arange(1, -(-length // per_word) + 1, dtype=np.uint64) * _ODD | 1
    if length % per_word == 0 and host.strides[-1] == size:
        words = words.view(np.uint64)
    else:  # the same sums, computed element by element
        shifts = np.arange(0, 64, 8 * size, dtype=np.uint64)
        factors = (factors[:, None] << shifts).ravel()[:length]
    return zlib.crc32(np.einsum("...i,i->...", words, factors).tobytes())


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    return {name: checksum(array) for name, array in arrays.items()}


def require_unchanged(arrays: Mapping[str, Array], before: Mapping[str, int]) -> None:
    """Refuse arrays whose checksums have changed.

    Raises
    ------
    RuntimeError
        An array has changed; the message names all that have.
    """
    changed = [name for name, array in arrays.items() if checksum(array) != before[name]]
    if changed:
        raise RuntimeError(
            f"{' and '.join(changed)} must stay unchanged until vjp is called; got different values from "
            f"those of attention_vjp: change a copy, {changed[0]}.copy(), or call attention_vjp again"
        )
