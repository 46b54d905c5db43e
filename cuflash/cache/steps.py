"""Launches on a cache's arrays that are bound once for each layout of what calls give: later ones write addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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


class Step:
    """Kernels bound for arrays of one layout, which calls give.

    Attributes
    ----------
    is_checked : bool
        CUFLASH_CHECK was on, so that the kernels are waited for; such a step serves one call alone.
    launch, wait : callable
        Launches the kernels on arrays at addresses in the order of the names, on a stream; waits for them.

    Parameters
    ----------
    kernels : Pass
    arrays : dict by name
        As `BoundPass.of` takes them.
    names : sequence of str
        The arrays whose addresses each call gives.
    target : LaunchTarget
    looked_at : sequence of str
        Arrays whose addresses decide whether a call needs checks.
    apart : sequence of str
        Those of them that must lie apart from the cache, and from the others that need not.
    """

    def __init__(
        self, kernels: Pass, arrays: Mapping[str, Any], names: Sequence[str], target: LaunchTarget,
        looked_at: Sequence[str], apart: Sequence[str],
    ) -> None:  # fmt: skip
        bound = BoundPass.of(kernels, arrays, names, target)
        self.is_checked, self.launch, self.wait = checks.is_on(), bound.launch, bound.wait
        self._spans = [(*reach(arrays[name]), arrays[name].dtype.itemsize - 1, name in apart) for name in looked_at]

    def takes(self, addresses: Sequence[int], own: Sequence[Extent]) -> bool:
        """True if arrays at these addresses need no check: they are aligned, and lie apart from where they must.

        The last arrays may be left out.
        """
        others = own
        for address, (low, high, odd_bits, is_apart) in zip(addresses, self._spans):
            if address & odd_bits:
                return False
            start, stop = address + low, address + high
            if not is_apart:
                others = [*others, (start, stop)]
                continue
            for first, end in others:
                if start < end and first < stop:
                    return False
        return True


class AppendStep(Step):
    """The append kernel, for the addresses of k, v and counts."""

    def __init__(self, kernels: Pass, arrays: Mapping[str, Array | None], target: LaunchTarget) -> None:
        super().__init__(kernels, arrays, ("k", "v", "counts"), target, ("k", "v"), ("k", "v"))


class DecodeStep(Step):
    """The decode kernel, or those of many new tokens.

    It takes the addresses of q, the sink and the score function's arrays, as far as there are some, and of o, lse,
    counts, and the places in a memory that `places` gives.

    Attributes
    ----------
    nbytes : int
        Memory of the kernel's workspaces, and of lse where the caller does not want it.
    make_o, make_lse : callable
        Allocate results.

    Parameters
    ----------
    arrays : dict by name
        As `BoundPass.of` takes them, with the workspaces that hold something between calls.
    captured : sequence of str
        The names of the score function's arrays.
    """

    def __init__(
        self, kernels: Pass, arrays: Mapping[str, Any], target: LaunchTarget, captured: Sequence[str] = ()
    ) -> None:
        o, lse = arrays["o"], arrays["lse"]
        shared = {name: each for name, each in kernels.workspaces.items() if name not in arrays}
        sizes = [*(each.nbytes for each in shared.values()), lse.nbytes]
        *self._offsets, self.nbytes = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        xp = namespace(o)
        self.make_o, self.make_lse = partial(xp.empty, o.shape, o.dtype), partial(xp.empty, lse.shape, lse.dtype)
        given = ("q", *(() if arrays["sink"] is None else ("sink",)), *captured)
        super().__init__(kernels, arrays, (*given, "o", "counts", *shared, "lse"), target, (*given, "o"), ("o",))

    def places(self, memory: int, lse: int | None) -> list[int]:
        """The addresses of workspaces in memory, and of lse, which lies there too if it has none."""
        addresses = [memory + offset for offset in self._offsets]
        if lse is not None:
            addresses[-1] = lse
        return addresses


class StepCall(NamedTuple):
    """A step with the addresses that its kernels take first: of k and v, or of q, the sink and captured arrays."""

    step: Any
    addresses: list[int]


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
        self._own = [(_address(x) + low, _address(x) + high) for x, (low, high) in ((x, reach(x)) for x in (k, v))]
        self._memory: list[Array] = []  # the last one is in use; a stream may still read the others

    def append(self, k: Any, v: Any, given: tuple[Any, Any] | None = None) -> StepCall | None:
        """The append of rows like which some have been checked and bound; None where they have to be checked.

        Where k and v are views of tensors that are `given`, later tensors of their layout are rows like these.
        """
        return self._found(append_key(self, k, v), [k, v], None if given is None else append_key(self, *given))

    def decode(
        self, q: Any, out: Any, sink: Any, options: tuple[Any, ...], score: Score | None = None,
        given: tuple[Any, Any] | None = None,
    ) -> StepCall | None:  # fmt: skip
        """The call like which one has been checked and bound; None where it has to be checked.

        Where q and the sink are views of tensors that are `given`, later tensors of their layout are like these.
        """
        other = None if given is None else decode_key(self, given[0], out, given[1], options, score)
        return self._found(decode_key(self, q, out, sink, options, score), _inputs(q, sink, score), other, out)

    def _found(self, key: Hashable, arrays: list[Any], other: Hashable, out: Any = None) -> StepCall | None:
        """The step of a key, which is that of another key too, if it takes the arrays without a check."""
        step = CALLS.get(key)
        if step is None:
            return None
        if other is not None:
            CALLS.put(other, step, self)
        addresses = list(map(_address, arrays))
        looked_at = addresses if out is None else [*addresses, _address(out)]
        return StepCall(step, addresses) if step.takes(looked_at, self._own) else None

    def bound_append(self, kernels: Pass, arrays: Mapping[str, Any], target: LaunchTarget) -> StepCall:
        """The step for rows that have been checked."""
        k, v = arrays["k"], arrays["v"]
        return self._bound(append_key(self, k, v), [k, v], lambda: AppendStep(kernels, arrays, target))

    def bound_decode(
        self, kernels: Pass, arrays: Mapping[str, Any], out: Any, options: tuple[Any, ...], target: LaunchTarget,
        score: Score | None = None,
    ) -> StepCall:  # fmt: skip
        """The step for a call that has been checked; `out` is None where each call has an array made."""
        q, sink = arrays["q"], arrays["sink"]
        names = [] if score is None else list(map(array_name, score.arrays))
        key = decode_key(self, q, out, sink, options, score)
        return self._bound(key, _inputs(q, sink, score), lambda: DecodeStep(kernels, arrays, target, names))

    def _bound(self, key: Hashable, arrays: list[Any], make: Callable[[], Step]) -> StepCall:
        step = CALLS.get(key) or make()
        if key is not None:  # the layout of the call is known
            CALLS.put(key, step, self)
        return StepCall(step, list(map(_address, arrays)))

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


def append_key(steps: Steps, k: Any, v: Any) -> Hashable:
    """Key of the layout of rows of a cache; None for arguments that may not be plain, and under CUFLASH_CHECK."""
    layout = None if checks.is_on() else _layout(k, v)
    return None if layout is None else ("append", id(steps), layout)


def _inputs(q: Any, sink: Any, score: Score | None) -> list[Any]:
    """The arrays of a call that its kernels take first."""
    return [q, *(() if sink is None else (sink,)), *(() if score is None else score.arrays.values())]


def decode_key(
    steps: Steps, q: Any, out: Any, sink: Any, options: tuple[Any, ...], score: Score | None = None
) -> Hashable:
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
    return "decode", id(steps), layout, of_out, of_sink, of_arrays, of_score, options
