"""The passes of a call on tensors: how a call is looked up, planned and run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from ..arrays import Array, ShapeDtype
from ..calls._call import planned
from ..calls._forward import run
from ..dropout import Dropout
from ..errors import UnsupportedProblem, refuse
from ..executors import checks, gpu, torch_gpu
from ..executors._bound_plan import BoundPlan
from ..executors._layout_key import layout_key
from ..executors.torch_gpu import Layout
from ..layouts import dtype_of, is_tensor, taken
from ..masks.one_array import at_each_call
from ..planning._call_cache import CALLS
from ..planning.dropout_launches import SEED, numbers_of
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.lookup import Lookup, lookup
from ..planning.options import Options
from ..planning.problem import Problem
from ..plans.fit import require_fit, require_ready
from ..plans.plan import Plan
from ..scores import Score
from ._tensors import NEW, PLAIN, Outs, Tensor, argument_reasons, as_tensor, executor_reasons, returned


class _ByArrays:
    """A call on NumPy or CuPy arrays that share the tensors' memory, for calls that are not cached on a GPU.

    Attributes
    ----------
    names : tuple of str
        The names of the call's tensors: q, k, v and operands.
    """

    def __init__(self, names: Iterable[str], options: Options, is_on_gpu: bool) -> None:
        self.names, self._options, self._is_on_gpu = tuple(names), options, is_on_gpu
        self._ready: Plan | None = None

    @property
    def wrt(self) -> tuple[str, ...]:
        """The names of operands whose gradients `run` returns."""
        assert self._ready is not None
        return self._ready._plan.problem.wrt

    def _array(self, tensor: Tensor) -> Array:
        return taken("q", tensor.detach(), gpu.namespace() if self._is_on_gpu else np)

    def _within(self) -> AbstractContextManager[object]:
        return torch_gpu.stream() if self._is_on_gpu else nullcontext()

    def forward(self, outs: Outs, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._within():
            out = None if outs is NEW else tuple(None if each is None else self._array(each) for each in outs)
            arrays = dict(zip(self.names, map(self._array, tensors)))
            q, k, v = (arrays[name] for name in self.names[:3])
            self._ready, _, *results = run(q, k, v, _over(arrays, self._options), out, return_lse=True)
        return returned(outs, (as_tensor(array) for array, each in zip(results, outs) if each is None))

    def run(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a pass other than "forward" on tensors by name: those of the call, and others that the pass reads."""
        with self._within():
            arrays = {each: self._array(tensor) for each, tensor in tensors.items()}
            if self._ready is None:
                options = _over({each: arrays[each] for each in self.names}, self._options)
                self._ready = planned(arrays["q"], arrays["k"], arrays["v"], options)
            arrays = _read_by(name, arrays, self._ready._plan.problem)
            return tuple(map(as_tensor, self._ready._run(name, arrays, {})))


class OnGpu:
    """A call on GPU tensors of one layout: a plan whose passes are bound once, and then run repeatedly.

    Attributes
    ----------
    names : tuple of str
        The names of the call's tensors: q, k, v and operands.
    wrt : tuple of str
        The names of operands whose gradients `run` returns.
    lists_of : callable, optional
        Builds the lists of the mask from its arrays, if every call has to build them.

    `later` are the passes that will probably run next, as in `Plan._bind`.
    """

    def __init__(
        self, ready: Plan, layouts: dict[str, Layout], outs: dict[str, Layout],
        lists_of: Callable[..., Tensor] | None, wants_lse: bool, later: Sequence[str],
    ) -> None:  # fmt: skip
        work, problem = ready._plan.work, ready._plan.problem
        self._ready, self._outs, self.lists_of = ready, tuple(outs), lists_of
        self.names, self.wrt = tuple(layouts), problem.wrt
        self._lists = {AT_CALL: Layout.of_lists(work.source.nbytes)} if isinstance(work, WorkAtCall) else {}
        self._of_forward = [name for name in layouts if problem.is_of_forward(name)]
        q_axes = torch_gpu.axes_in_memory(layouts["q"])
        axes = {"o": q_axes} if q_axes is not None and len(q_axes) == len(problem.o_shape()) else {}
        self._forward = ready._bind(
            "forward", layouts | self._lists, outs, wants_lse=wants_lse, pins=True, axes=axes,
            machine=torch_gpu.MACHINE, later=later,
        )  # fmt: skip
        self._launch = None if outs else self._forward.plain_call

    def forward(
        self, outs: Outs, *tensors: Tensor, lists: Sequence[Tensor] = (), numbers: Sequence[int] = ()
    ) -> Sequence[Tensor]:
        """Return o and lse; lse is None if it was not requested."""
        if self._launch is not None:
            results = self._launch(*tensors, *lists, numbers=numbers)
        else:
            arrays = dict(zip((*self.names, *self._lists), (*tensors, *lists)))
            written = dict(zip(self._outs, (each for each in outs if each is not None)))
            results = self._forward.run(arrays, written, numbers)
        return results if len(results) == 2 else (results[0], None)

    def run(
        self, name: str, tensors: Mapping[str, Tensor], lists: Sequence[Tensor] = (), numbers: Sequence[int] = ()
    ) -> Sequence[Tensor]:
        """Run a pass other than "forward" on tensors by name: those of the call, and others that the pass reads."""
        if self._of_forward:
            tensors = _read_by(name, tensors, self._ready._plan.problem)
        key = "torch", name, id(self), tuple(tensors), torch_gpu.layout_key(*tensors.values())
        bound: BoundPlan | None = CALLS.get(key)
        if bound is None:
            bound = self._bound(name, {each: Layout.of(tensor) for each, tensor in tensors.items()})
            CALLS.put(key, bound, self)
        return bound.run({**tensors, **dict(zip(self._lists, lists))} if lists else tensors, numbers=numbers)

    def _bound(self, name: str, layouts: dict[str, Layout]) -> BoundPlan:
        plan, arrays = self._ready._plan, ("o", "lse") if name == "jvp" else ("q", "k", "v")
        wanted, results = plan.results(name), plan.kernel_results(name)
        with torch_gpu.stream():
            require_ready(plan, self._ready.executor, torch_gpu.MACHINE)
            in_memory = dict(zip(wanted, (torch_gpu.axes_in_memory(layouts[each]) for each in arrays)))
            axes = {each: order for each, order in in_memory.items() if order and wanted[each] == results[each]}
            return self._ready._bind(name, layouts | self._lists, pins=True, axes=axes, machine=torch_gpu.MACHINE)


def _read_by(name: str, arrays: Mapping[str, Array], problem: Problem) -> dict[str, Array]:
    """Return the arrays that a pass reads: all except operands that only the forward pass and its tangent read."""
    if name == "jvp":
        return dict(arrays)
    return {each: array for each, array in arrays.items() if not problem.is_of_forward(each)}


class _WithContents(NamedTuple):
    """A GPU call with the other inputs of all passes: the lists of its mask, and dropout's seed and offset."""

    call: OnGpu
    lists: tuple[Tensor, ...]
    numbers: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.call.names

    @property
    def wrt(self) -> tuple[str, ...]:
        return self.call.wrt

    def forward(self, outs: Outs, *tensors: Tensor) -> Sequence[Tensor]:
        return self.call.forward(outs, *tensors, lists=self.lists, numbers=self.numbers)

    def run(self, name: str, tensors: Mapping[str, Tensor]) -> Sequence[Tensor]:
        return self.call.run(name, tensors, lists=self.lists, numbers=self.numbers)


Call: TypeAlias = OnGpu | _ByArrays | _WithContents


def looked_up_call(
    tensors: dict[str, Tensor], outs: Outs, options: Options, wants_lse: bool, later: Sequence[str] = ()
) -> Call:
    """Return the object that runs a call; only the first of identical calls checks the arguments."""
    looked_up = lookup(options, _mask_layout)
    contents, key = looked_up.contents, _key(tensors, outs, looked_up, wants_lse)
    call: Call | None = looked_up.find(key)
    if call is None:
        lists_at_call = key is not None and contents is not None
        call = _first(looked_up, key, tensors, outs, options, lists_at_call, wants_lse, later)
    if isinstance(call, OnGpu) and (contents is not None or options.dropout is not None):
        lists_of = call.lists_of
        lists = () if contents is None or lists_of is None else (lists_of(*contents.arrays),)
        call = _WithContents(call, lists, numbers_of(options.dropout))
    return call


def ran(
    tensors: dict[str, Tensor], outs: Outs, options: Options, wants_lse: bool,
    record: Callable[..., Sequence[Tensor]] | None = None,
) -> tuple[Call, Tensor, Tensor]:  # fmt: skip
    """Run a call, and return it with o and lse; `record` runs the call if PyTorch differentiates it."""
    if torch_gpu.is_elsewhere(tensors["q"]):
        with torch_gpu.within(tensors["q"]):
            return ran(tensors, outs, options, wants_lse, record)
    try:
        call = looked_up_call(tensors, outs, options, wants_lse, () if record is None else ("backward",))
        forward = call.forward if record is None else partial(record, call)
        o, lse = forward(outs, *tensors.values())
        return call, o, lse
    except RuntimeError as error:
        reasons = argument_reasons(tensors, outs)
        if reasons:
            raise UnsupportedProblem(reasons) from error
        raise


def _mask_layout(*arrays: Array | Tensor) -> Hashable:
    """Return the key of the layouts of a mask's arrays: one tensor on a GPU, or CuPy arrays; None for others."""
    if type(arrays[0]) in PLAIN:
        return torch_gpu.layout_key(*arrays) if arrays[0].is_cuda else None
    return layout_key(*arrays)


def _over(arrays: Mapping[str, Array | ShapeDtype], options: Options) -> Options:
    """Return the options of a call with other arrays instead of its tensors, by name."""
    score, bias, dropout = options.score, options.bias, options.dropout
    if SEED in arrays and isinstance(dropout, Dropout):
        options = options._replace(dropout=Dropout(dropout.p, arrays[SEED], dropout.offset))
    if isinstance(score, Score) and score.arrays.keys() <= arrays.keys():
        score = score._with_arrays(arrays)
    if bias is not None and is_tensor(bias):  # a bias remains here only if it or the score is invalid
        bias = ShapeDtype(tuple(bias.shape), dtype_of(bias))
    return options._replace(score=score, bias=bias, sink=arrays.get("sink"))


def _key(arrays: dict[str, Tensor], outs: Outs, looked_up: Lookup, wants_lse: bool) -> Hashable:
    """Return the key of a call on a GPU, which contains everything except its data; None for other calls.

    Calls with tensors of other classes, lazily negated ones, or outputs that require gradients have keys of their own,
    and are refused each time.
    """
    o, lse = outs
    try:
        if checks.is_on() or not arrays["q"].is_cuda:
            return None
        tensors = arrays.values() if o is lse is None else [*arrays.values(), *(x for x in outs if x is not None)]
        layouts = [(type(x), x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg()) for x in tensors]
    except (AttributeError, TypeError, RuntimeError):  # something other than dense tensors
        return None
    are_new = o is None or o.requires_grad, lse is None or lse.requires_grad
    return looked_up.key("torch", (*layouts, *are_new, wants_lse), *arrays)


def _first(
    looked_up: Lookup, key: Hashable, tensors: dict[str, Tensor], outs: Outs, options: Options, lists_at_call: bool,
    wants_lse: bool, later: Sequence[str],
) -> OnGpu | _ByArrays:  # fmt: skip
    """Check the arguments of a call with a new layout or new options, and return the object that runs it."""
    bias = {} if options.bias is None else {"bias": options.bias}  # remains only if it or the score is invalid
    refuse(argument_reasons(tensors | bias, outs) or executor_reasons(tensors["q"].device, options.executor))
    snapshot = looked_up.snapshot()
    is_on_gpu = tensors["q"].is_cuda
    if not is_on_gpu or checks.is_on():
        return _ByArrays(tensors, options, is_on_gpu)
    with torch_gpu.stream():
        layouts = {name: Layout.of(tensor) for name, tensor in tensors.items()}
        ready = _planned(layouts, options, lists_at_call)
        written = {name: Layout.of(each) for name, each in zip(("o", "lse"), outs) if each is not None}
        require_fit(ready._plan, ready.executor, "forward", layouts, written, torch_gpu.MACHINE)
        if not ready._plan.is_kernels_alone:
            return _ByArrays(tensors, options, is_on_gpu)
        work, lists_of = ready._plan.work, None
        if isinstance(work, WorkAtCall):
            lists_of = gpu.lists_of_calls(ready._plan, work, torch_gpu.MACHINE)
        call = OnGpu(ready._without_arrays(), layouts, written, lists_of, wants_lse, later)
    if key is not None and (lists_of is not None or not lists_at_call):
        looked_up.keep(key, call, snapshot)
    return call


def _planned(layouts: dict[str, Layout], options: Options, lists_at_call: bool) -> Plan:
    """Return the plan of a call; calls build the lists of its mask if kernels support this and `lists_at_call`."""
    shapes = {name: ShapeDtype(layout.shape, layout.dtype) for name, layout in layouts.items()}
    q, k, v, options = layouts["q"], layouts["k"], layouts["v"], _over(shapes, options)
    if lists_at_call:
        ready = planned(q, k, v, options._replace(mask=at_each_call(options.mask)))
        if ready._plan.is_kernels_alone:
            return ready
    return planned(q, k, v, options)
