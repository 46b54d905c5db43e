"""Calls on a cache, which are checked and bound once per layout of arrays; a repeated call only writes addresses."""

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
from ..layouts import address, is_foreign, reach, tensors_layout
from ..masks import ChosenBlocks
from ..planning._call_cache import CALLS
from ..planning.chosen_pages import TABLES
from ..planning.launches import Pass
from ..planning.options import Window
from ..planning.score_launches import array_name
from ..plans.conversion import as_arrays
from ..scores import Score

_ALIGNMENT = 256  # alignment in bytes of arrays that share memory
_SCALES = {type(None), float, int}

Extent = tuple[int, int]  # the first address of an array's memory, and the first address after it


class RequestedOptions(NamedTuple):
    """Arguments of `KVCache.attention` except arrays and the score function, as the caller passed them, unchecked."""

    causal: bool
    window: Window | None
    scale: float | None
    kernel: str
    executor: str
    precision: str


class Request(NamedTuple):
    """The arguments of `KVCache.attention` on which kernels and their arrays depend: all except counts."""

    q: Array
    out: Array | None
    sink: Array | None
    options: RequestedOptions
    score: Score | None
    chosen: ChosenBlocks | None

    @property
    def arrays(self) -> list[Array]:
        """The arrays whose addresses the call's kernels take first: q, the sink, captured arrays and lists."""
        arrays = () if self.score is None else self.score.arrays.values()
        lists = () if self.chosen is None else _lists(self.chosen)
        return [self.q, *(() if self.sink is None else (self.sink,)), *arrays, *lists]

    @property
    def names(self) -> list[str]:
        """The names of `arrays` in kernels."""
        captured = () if self.score is None else map(array_name, self.score.arrays)
        lists = () if self.chosen is None else TABLES[: len(_lists(self.chosen))]
        return ["q", *(() if self.sink is None else ("sink",)), *captured, *lists]


class Step:
    """A checked call on arrays of one layout.

    Attributes
    ----------
    is_checked : bool
        True if CUFLASH_CHECK was on, so that calls wait for their kernels; such a step serves only one call.

    Parameters
    ----------
    arrays : dict by name
        The arrays of the call.
    looked_at : sequence of str
        Names of arrays whose addresses decide whether a call needs checks.
    apart : sequence of str
        Names in `looked_at` of arrays that must overlap neither the cache nor the arrays that are not in `apart`.
    """

    def __init__(self, arrays: Mapping[str, Array], looked_at: Sequence[str], apart: Sequence[str]) -> None:
        self.is_checked = checks.is_on()
        self._spans = [(*reach(arrays[name]), arrays[name].dtype.itemsize - 1, name in apart) for name in looked_at]

    def takes(self, addresses: Sequence[int], own: Sequence[Extent]) -> bool:
        """True if arrays at these addresses need no check: they are aligned, and those in `apart` overlap no others.

        The last arrays may be omitted.
        """
        others = own
        for start, (low, high, odd_bits, is_apart) in zip(addresses, self._spans):
            if start & odd_bits:
                return False
            first, stop = start + low, start + high
            if not is_apart:
                others = [*others, (first, stop)]
                continue
            for other, end in others:
                if first < end and other < stop:
                    return False
        return True


class AppendStep(Step):
    """The append kernel, which takes the addresses of k, v and counts.

    Attributes
    ----------
    launch, wait : callable
        `launch` launches the kernels on a stream, with addresses in the order of the arrays; `wait` waits for them.
    """

    def __init__(self, kernels: Pass, arrays: Mapping[str, Array | None], target: LaunchTarget) -> None:
        super().__init__(arrays, ("k", "v"), ("k", "v"))
        bound = BoundPass.of(kernels, arrays, ("k", "v", "counts"), target)
        self.launch, self.wait = bound.launch, bound.wait


class AttendStep(Step):
    """A call of `attention`.

    Attributes
    ----------
    make_o, make_lse : callable
        Allocate the results.

    Parameters
    ----------
    arrays : dict by name
        q, o, lse and sink, the arrays of the score function by their names in kernels, and the result of `lists_of`.
    inputs : sequence of str
        The names of the arrays that the call reads: `Request.names`.
    """

    def __init__(self, arrays: Mapping[str, Array], inputs: Sequence[str]) -> None:
        o, lse = arrays["o"], arrays["lse"]
        xp = namespace(o)
        self.make_o, self.make_lse = partial(xp.empty, o.shape, o.dtype), partial(xp.empty, lse.shape, lse.dtype)
        super().__init__(arrays, (*inputs, "o"), ("o",))


class DecodeStep(AttendStep):
    """The decode kernel, or the kernels for many new tokens.

    It takes the addresses of q, of the sink, of the arrays of the score function and of lists if present, of o, lse and
    counts, and of the workspaces that `places` returns.

    Attributes
    ----------
    launch, wait : callable
        As in `AppendStep`.
    nbytes : int
        Bytes of the kernel's workspaces, and of lse in case the caller does not need it.

    Parameters
    ----------
    arrays : dict by name
        As for `BoundPass.of`, with the workspaces that keep their contents between calls.
    """

    def __init__(
        self, kernels: Pass, arrays: Mapping[str, Array], target: LaunchTarget, inputs: Sequence[str]
    ) -> None:
        super().__init__(arrays, inputs)
        shared = {name: each for name, each in kernels.workspaces.items() if name not in arrays}
        sizes = [*(each.nbytes for each in shared.values()), arrays["lse"].nbytes]
        *self._offsets, self.nbytes = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        bound = BoundPass.of(kernels, arrays, (*inputs, "o", "counts", *shared, "lse"), target)
        self.launch, self.wait = bound.launch, bound.wait

    def places(self, memory: int, lse: int | None) -> list[int]:
        """Return the addresses of workspaces in a block of memory, and of lse, which is also there if `lse` is None."""
        addresses = [memory + offset for offset in self._offsets]
        if lse is not None:
            addresses[-1] = lse
        return addresses


class StepCall(NamedTuple):
    """A step, with the addresses that its kernels take first: of k and v, or of q, the sink and captured arrays."""

    step: Any
    addresses: list[int]


class Steps:
    """The steps of a cache, with the extents of its memory, and a workspace that they use one after another.

    A copy has no steps, since these hold addresses of arrays.

    Parameters
    ----------
    *arrays : arrays
        The cache's pages, their scales and their bounds.
    """

    def __init__(self, *arrays: Array) -> None:
        self.arrays, xp = arrays, namespace(arrays[0])
        self._empty = xp.empty
        if xp is not np:
            self.current_stream = xp.cuda.get_current_stream
        self._spans = [(address(x) + low, address(x) + high) for x, (low, high) in ((x, reach(x)) for x in arrays)]
        self._memory: list[Array] = []  # the last one is in use; a stream may still read the others

    def __reduce__(self) -> tuple[type[Steps], tuple[Array, ...]]:
        return Steps, self.arrays

    def append(self, k: Array, v: Array) -> tuple[StepCall | None, Array, Array]:
        """Return a checked append for rows of this layout, or None, and k and v as arrays.

        If these are tensors, later tensors of the same layout use the same step.
        """
        step_call = self._step_call(append_key(self, k, v), [k, v])
        if step_call is None and (is_foreign(k) or is_foreign(v)):
            tensor_key, (k, v) = append_key(self, k, v), as_arrays({"k": k, "v": v}).values()
            step_call = self._step_call(append_key(self, k, v), [k, v], tensor_key)
        return step_call, k, v

    def decode(self, request: Request) -> tuple[StepCall | None, Request]:
        """Return a checked and bound call for this layout and options, or None, and the request with known arrays."""
        key = decode_key(self, request)
        step_call = self._step_call(key, request.arrays, None, request.out)
        if step_call is None and (is_foreign(request.q) or is_foreign(request.sink)):
            request = request._replace(**as_arrays({"q": request.q, "sink": request.sink}))
            step_call = self._step_call(decode_key(self, request), request.arrays, key, request.out)
        return step_call, request

    def _step_call(
        self, key: Hashable, arrays: list[Array], other: Hashable = None, out: Array | None = None
    ) -> StepCall | None:
        """Return the step of a key if it accepts the arrays without a check; also cache it under the key `other`."""
        step = CALLS.get(key)
        if step is None or type(out) is np.ndarray and not out.flags.writeable:
            return None
        if other is not None:
            CALLS.put(other, step, self)
        addresses = list(map(_address, arrays))
        looked_at = addresses if out is None else [*addresses, _address(out)]
        return StepCall(step, addresses) if step.takes(looked_at, self._spans) else None

    def keep_append(self, k: Array, v: Array, step: Step) -> StepCall:
        """Cache the step for rows that have been checked, unless rows at such addresses need checks at each call."""
        return self._kept(append_key(self, k, v), [k, v], step)

    def keep_decode(self, request: Request, step: AttendStep) -> StepCall:
        """Cache the step for a request that has been checked."""
        return self._kept(decode_key(self, request), request.arrays, step, request.out)

    def _kept(self, key: Hashable, arrays: list[Array], step: Step, out: Array | None = None) -> StepCall:
        addresses = list(map(_address, arrays))
        if key is not None and step.takes(addresses if out is None else [*addresses, _address(out)], self._spans):
            CALLS.put(key, step, self)
        return StepCall(step, addresses)

    def memory(self, nbytes: int) -> Array:
        """Return memory of at least `nbytes` bytes, which consecutive calls share."""
        if not self._memory or self._memory[-1].nbytes < nbytes:
            least = 2 * self._memory[-1].nbytes if self._memory else 0
            self._memory.append(self._empty((max(nbytes, least),), np.uint8))
        return self._memory[-1]


def _address(array: Array) -> int:
    """Return the address of an array or a tensor."""
    of_tensor: Callable[[], int] | None = getattr(array, "data_ptr", None)
    return address(array) if of_tensor is None else of_tensor()


def _layout(*arrays: Array) -> Hashable:
    """Return the key of the layout of CuPy arrays, or of tensors convertible to them; None for anything else."""
    of_arrays = layout_key(*arrays)
    of_tensors = tensors_layout(*arrays) if of_arrays is None else None
    return of_arrays if of_tensors is None else (nvrtc.current_number(), of_tensors)


def append_key(steps: Steps, k: Array, v: Array) -> Hashable:
    """Return the key of the layout of a cache's new rows; None for non-plain arguments, and under CUFLASH_CHECK."""
    layout = None if checks.is_on() else _layout(k, v)
    return None if layout is None else ("append", id(steps), layout)


def _lists(chosen: ChosenBlocks) -> list[Array]:
    return [chosen.blocks] if chosen.counts is None else [chosen.blocks, chosen.counts]


def lists_of(chosen: ChosenBlocks | None) -> dict[str, Array]:
    """Return lists [batch, heads, rows, entries] and their counts [batch, heads, rows] by their names in kernels.

    Axes along which all lists are shared have extent 1.
    """
    arrays = zip(TABLES, [] if chosen is None else _lists(chosen), (4, 3))
    return {name: array[(None,) * (rank - array.ndim)] for name, array, rank in arrays}


def decode_key(steps: Steps, request: Request) -> Hashable:
    """Return the key of a call of `KVCache.attention`, without data and counts; None for non-plain arguments.

    Types of options are checked, since 1 == True.
    """
    q, out, sink, options, score, chosen = request
    causal, window, scale, kernel, executor, precision = options
    if type(causal) is not bool or type(scale) not in _SCALES or checks.is_on():
        return None
    if not type(kernel) is type(executor) is type(precision) is str:
        return None
    if window is not None and (type(window) is not tuple or not set(map(type, window)) <= {int, type(None)}):
        return None
    key: list[Hashable] = ["decode", id(steps), options]
    captured = () if score is None else tuple(score.arrays.values())
    lists = () if chosen is None else _lists(chosen)
    for arrays in ((q,), () if out is None else (out,), () if sink is None else (sink,), captured, lists):
        layout = _layout(*arrays) if arrays else ()
        if layout is None:
            return None
        key.append(layout)
    key += () if score is None else (score.program, score.numbers)
    key += () if chosen is None else (chosen.block,)
    return tuple(key)
