"""Launches on a cache's arrays that are bound once for each layout of what calls give: later ones write addresses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, namespace
from ..compiler import nvrtc
from ..executors._layout_key import layout_key
from ..executors import checks
from ..executors.launch import BoundPass, LaunchTarget
from ..layouts import reach, tensors_layout
from ..planning._call_cache import CALLS
from ..planning.launches import Pass
from ..planning.score_launches import array_name
from ..scores import Score

_ALIGNMENT = 256  # bytes, of arrays that share memory
_SCALES = {type(None), float, int}
_NOT_GIVEN: Hashable = ()  # in place of a layout

Extent = tuple[int, int]  # the first address of an array's memory, and the one after its last


class AppendStep:
    """The append kernel for rows of one layout.

    Attributes
    ----------
    is_checked : bool
        CUFLASH_CHECK was on, so that the launch is waited for; such a step serves one call alone.
    wait : callable
        Waits for the kernel.

    Parameters
    ----------
    kernels : Pass
    arrays : dict by name
        As `BoundPass.of` takes them.
    target : LaunchTarget
    """

    def __init__(self, kernels: Pass, arrays: Mapping[str, Array | None], target: LaunchTarget) -> None:
        bound = BoundPass.of(kernels, arrays, ("k", "v", "counts"), target)
        self.is_checked, self.wait, self._launch = checks.is_on(), bound.wait, bound.launch
        self._rows = [_Place(arrays[name]) for name in ("k", "v")]

    def takes(self, k: int, v: int, own: Iterable[Extent]) -> bool:
        """Tell whether rows at these addresses need no check: they lie apart from the cache's own memory."""
        of_k, of_v = self._rows
        return of_k.is_apart(k, own) and of_v.is_apart(v, own)

    def run(self, k: int, v: int, counts: int, stream: Any) -> None:
        """Launch the kernel on rows at these addresses, and counts at theirs or at 0 for all rows."""
        self._launch((k, v, counts), stream)


class DecodeStep:
    """The decode kernel, or those of many new tokens, for queries and options of one kind.

    Attributes
    ----------
    is_checked, wait
        As of `AppendStep`.
    nbytes : int
        Memory of the kernel's workspaces, and of lse where the caller does not want it.
    make_o, make_lse : callable
        Allocate results.

    Parameters
    ----------
    kernels : Pass
    arrays : dict by name
        As `BoundPass.of` takes them, with the workspaces that hold something between calls.
    target : LaunchTarget
    captured : sequence of str
        The names of the score function's arrays.
    """

    def __init__(
        self, kernels: Pass, arrays: Mapping[str, Any], target: LaunchTarget, captured: Sequence[str] = ()
    ) -> None:
        q, o, lse, sink = (arrays[name] for name in ("q", "o", "lse", "sink"))
        shared = {name: each for name, each in kernels.workspaces.items() if name not in arrays}
        sizes = [lse.nbytes, *(each.nbytes for each in shared.values())]
        *self._offsets, self.nbytes = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        xp = namespace(q)
        self.make_o, self.make_lse = partial(xp.empty, o.shape, o.dtype), partial(xp.empty, lse.shape, lse.dtype)
        self._q, self._o, self._sink = _Place(q), _Place(o), None if sink is None else _Place(sink)
        self._captured = [_Place(arrays[name]) for name in captured]
        names = ("lse", *shared, "q", "o", "counts", *(() if sink is None else ("sink",)), *captured)
        bound = BoundPass.of(kernels, arrays, names, target)
        self.is_checked, self.wait, self._launch = checks.is_on(), bound.wait, bound.launch

    def takes(
        self, q: int, out: int | None, sink: int | None, own: Iterable[Extent], captured: Sequence[int] = ()
    ) -> bool:
        """Tell whether arrays at these addresses need no check: they are aligned, and out overlaps no other."""
        if not self._q.is_aligned(q) or self._sink is not None and not self._sink.is_aligned(sink or 0):
            return False
        if not all(place.is_aligned(start) for place, start in zip(self._captured, captured)):
            return False
        return out is None or self._o.is_aligned(out) and self._o.is_apart(out, [*own, self._q.extent(q)])

    def run(
        self, q: int, o: int, lse: int | None, counts: int, sink: int | None, memory: int, stream: Any,
        captured: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Launch the kernel on arrays at these addresses.

        `memory` is that of the workspaces, and of lse where the caller does not want it; `captured` are the arrays of
        the score function.
        """
        addresses = [memory + offset for offset in self._offsets]
        if lse is not None:
            addresses[0] = lse
        addresses += (q, o, counts) if sink is None else (q, o, counts, sink)
        self._launch((*addresses, *captured), stream)


class _Place:
    """The memory that arrays of one layout span around their first element, and the alignment that they need."""

    def __init__(self, array: Any) -> None:
        self._low, self._high = reach(array)
        self._odd_bits = array.dtype.itemsize - 1

    def is_aligned(self, start: int) -> bool:
        return not start & self._odd_bits

    def extent(self, start: int) -> Extent:
        return start + self._low, start + self._high

    def is_apart(self, start: int, others: Iterable[Extent]) -> bool:
        """Tell whether memory is surely disjoint from others': none lies between an array's first and last element."""
        first, end = start + self._low, start + self._high
        for other_first, other_end in others:
            if first < other_end and other_first < end:
                return False
        return True


class Append(NamedTuple):
    """A step with the addresses of new rows: what an append launches."""

    step: AppendStep
    k: int
    v: int


class Decode(NamedTuple):
    """A step with the addresses of a call's arrays; None for those that are not given."""

    step: DecodeStep
    q: int
    out: int | None
    sink: int | None
    captured: tuple[int, ...] = ()


class Steps:
    """The steps of a cache, and what they share: extents of its memory, and memory that they use one after another.

    Parameters
    ----------
    k, v : arrays
        The cache's pages.
    """

    def __init__(self, k: Array, v: Array) -> None:
        xp = namespace(k)
        self.current_stream, self._empty = xp.cuda.get_current_stream, xp.empty
        self._own = [_Place(array).extent(_address(array)) for array in (k, v)]
        self._memory: list[Array] = []  # the last one is in use; a stream may still read the others

    def append(self, k: Any, v: Any, given: tuple[Any, Any] | None = None) -> Append | None:
        """The append of rows like which some have been checked and bound; None where they have to be checked.

        Where k and v are views of tensors that are `given`, later tensors of their layout are rows like these.
        """
        step = CALLS.get(self._key("append", _append_key(k, v)))
        if step is None:
            return None
        if given is not None:
            self._put("append", _append_key(*given), step)
        of_k, of_v = _address(k), _address(v)
        return Append(step, of_k, of_v) if step.takes(of_k, of_v, self._own) else None

    def decode(
        self, q: Any, out: Any, sink: Any, options: tuple[Any, ...], score: Score | None = None,
        given: tuple[Any, Any] | None = None,
    ) -> Decode | None:  # fmt: skip
        """The call like which one has been checked and bound; None where it has to be checked.

        Where q and the sink are views of tensors that are `given`, later tensors of their layout are like these.
        """
        step = CALLS.get(self._key("decode", _decode_key(q, out, sink, options, score)))
        if step is None:
            return None
        if given is not None:
            self._put("decode", _decode_key(given[0], out, given[1], options, score), step)
        of_q = _address(q)
        of_out, of_sink = None if out is None else _address(out), None if sink is None else _address(sink)
        captured = _captured(score)
        takes = step.takes(of_q, of_out, of_sink, self._own, captured)
        return Decode(step, of_q, of_out, of_sink, captured) if takes else None

    def bind_append(self, kernels: Pass, arrays: Mapping[str, Array | None], target: LaunchTarget) -> Append:
        """The step for rows that have been checked."""
        key = _append_key(arrays["k"], arrays["v"])
        step = CALLS.get(self._key("append", key)) or AppendStep(kernels, arrays, target)
        self._put("append", key, step)
        return Append(step, _address(arrays["k"]), _address(arrays["v"]))

    def bind_decode(
        self, kernels: Pass, arrays: Mapping[str, Array | None], out: Any, options: tuple[Any, ...],
        target: LaunchTarget, score: Score | None = None,
    ) -> Decode:  # fmt: skip
        """The step for a call that has been checked; `out` is None where each call has an array made."""
        q, sink = arrays["q"], arrays["sink"]
        key = _decode_key(q, out, sink, options, score)
        names = [] if score is None else list(map(array_name, score.arrays))
        step = CALLS.get(self._key("decode", key)) or DecodeStep(kernels, arrays, target, names)
        self._put("decode", key, step)
        return Decode(step, _address(q), None, None if sink is None else _address(sink), _captured(score))

    def _key(self, kind: str, layout: Hashable) -> Hashable:
        return None if layout is None else (kind, id(self), layout)

    def _put(self, kind: str, layout: Hashable, step: AppendStep | DecodeStep) -> None:
        """Cache a step of these steps' cache, if the layout of the call is known."""
        if layout is not None:
            CALLS.put(self._key(kind, layout), step, self)

    def memory(self, nbytes: int) -> Array:
        """Return memory of at least `nbytes` bytes, which calls that follow each other share."""
        if not self._memory or self._memory[-1].nbytes < nbytes:
            least = 2 * self._memory[-1].nbytes if self._memory else 0
            self._memory.append(self._empty((max(nbytes, least),), np.uint8))
        return self._memory[-1]


def _address(array: Any) -> int:
    """The address of an array of CuPy's or of a tensor."""
    of_tensor = getattr(array, "data_ptr", None)
    address: int = array.data.ptr if of_tensor is None else of_tensor()
    return address


def _layout(*arrays: Any) -> Hashable:
    """Key of the layout of arrays of CuPy's, or of tensors that stand for some; None for anything else."""
    of_arrays = layout_key(*arrays)
    of_tensors = tensors_layout(*arrays) if of_arrays is None else None
    return of_arrays if of_tensors is None else (nvrtc.current_number(), of_tensors)


def _append_key(k: Any, v: Any) -> Hashable:
    """Key of the layout of rows; None for arguments that may not be plain, and under CUFLASH_CHECK."""
    return None if checks.is_on() else _layout(k, v)


def _captured(score: Score | None) -> tuple[int, ...]:
    """The addresses of a score's arrays."""
    return () if score is None else tuple(map(_address, score.arrays.values()))


def _decode_key(q: Any, out: Any, sink: Any, options: tuple[Any, ...], score: Score | None = None) -> Hashable:
    """Key of a call of `KVCache.attention`, without its data and counts; None for arguments that may not be plain.

    `options` are causal, window, scale, kernel, executor and precision. Equal ones have one type here: 1 is not True.
    """
    causal, window, scale, kernel, executor, precision = options
    if type(causal) is not bool or type(scale) not in _SCALES or checks.is_on():
        return None
    if not type(kernel) is type(executor) is type(precision) is str:
        return None
    if window is not None and (type(window) is not tuple or not set(map(type, window)) <= {int, type(None)}):
        return None
    of_out = _NOT_GIVEN if out is None else _layout(out)
    of_sink = _NOT_GIVEN if sink is None else _layout(sink)
    arrays = () if score is None else score.arrays.values()
    of_arrays = _layout(*arrays) if arrays else _NOT_GIVEN
    of_score = None if score is None else (score.program, score.numbers)
    layout = _layout(q)
    if layout is None or of_out is None or of_sink is None or of_arrays is None:
        return None
    return layout, of_out, of_sink, of_arrays, of_score, options
