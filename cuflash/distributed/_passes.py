"""The passes of one call on a rank: they gather rows, attend to them, and return gradients to their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array, accumulator_dtype, describe, namespace
from ..executors import gpu
from ..executors._bound_plan import BoundPlan
from ..keywords import explains_keywords
from ..plans import Gradients, Plan, named_gradients
from ._group import Group
from ._lanes import Lanes, Launcher, Move
from ._posed import Part, Posed
from ._schedule import ADD, COPY, NUM_BUFFERS, Step, program


Region = tuple[Array, tuple[Any, ...]]  # an array, and the index of a part of it


@dataclass(eq=False)
class Prepared:
    """The plans and bound launches of a rank's calls on arrays of one layout, filled by the first call.

    Attributes
    ----------
    parts : list of Part
        The groups of heads with their plans.
    texts : dict of str by name
        The arguments that must be equal on all ranks.
    """

    parts: list[Part]
    texts: dict[str, str]
    _bound: dict[Any, BoundPlan] = field(default_factory=dict)
    _launches: dict[Any, Launcher] = field(default_factory=dict)
    _copies: dict[Any, dict[int, Any]] = field(default_factory=dict)

    def copies(self, key: Any) -> dict[int, Any]:
        """Return what is known of the moves of a pass, by the number of the step."""
        return self._copies.setdefault(key, {})

    def run(
        self, lanes: Lanes, name: str, key: Any, plan: Plan, arrays: Mapping[str, Region], outs: Mapping[str, Region]
    ) -> Sequence[Array]:  # fmt: skip
        """Run a pass of a plan, which is bound once for each key.

        Return all results in the plan's order; none if kernels alone have written them.
        """
        launch = self._launches.get(key)
        if launch is not None:
            launch([whole for whole, _ in arrays.values()] + [whole for whole, _ in outs.values()])
            return ()
        read, written = ({each: whole[index] for each, (whole, index) in some.items()} for some in (arrays, outs))
        bound = self._bound.get(key)
        if bound is None:
            plan._require(name, read, {})
            bound = self._bound[key] = plan._bind(name, read, written)
            wholes = [whole for whole, _ in (*arrays.values(), *outs.values())]
            if (launch := lanes.launcher(plan, name, read, written, wholes)) is not None:
                self._launches[key] = launch
        if plan._lists is not None:
            plan._lists.guard.use(gpu.current_target().stream())
        results = bound.run(read, written, plan._numbers)
        for out, result in zip(written.values(), results):
            if out is not result:  # which was scaled or summed after the kernels
                out[...] = result
        return results


class Gather:
    """Copies that collect the rows of all ranks on every rank, for arrays [heads, rows, dim].

    Attributes
    ----------
    whole : dict of arrays by name
        The arrays with the rows of all ranks.
    """

    def __init__(self, group: Group, arrays: Mapping[str, Array], places: Sequence[tuple[tuple[int, int, int], ...]]):
        self._places, self._own, self.bound = places, arrays, dict[int, Any]()
        self.steps = tuple(Step(COPY, rank, source, 0) for rank in range(group.size) for source in range(group.size))
        self.program = program(self.steps, group.size)
        rows = sum(count for runs in places for _, _, count in runs)
        self.whole = {
            name: namespace(x).empty((x.shape[0], rows, x.shape[2]), x.dtype) for name, x in arrays.items()
        }  # fmt: skip

    def moves(self, number: int) -> list[Move]:
        source = self.steps[number].source
        return [Move(name, slice(0, None), slice(0, None), self._places[source]) for name in self.whole]

    def source(self, step: Step, move: Move) -> Array:
        return self._own[move.name]

    def target(self, step: Step, move: Move) -> Array:
        return self.whole[move.name]

    def act(self, step: Step) -> None:
        raise AssertionError(step)


class RankCall:
    """One call on this rank: its arrays, its buffers, and its forward pass.

    Attributes
    ----------
    inputs : dict of arrays by name
        This rank's rows of q, k, v, do and dlse, which other ranks read.
    o, lse : array
        Results of this rank's rows.
    buffers : dict of arrays by name and turn
        Rows that this rank gathers.
    results : dict of arrays by name
        With the method "heads": o and lse of this rank's own heads, whose rows other ranks read.
    """

    name = "forward"

    def __init__(self, group: Group, posed: Posed, prepared: Prepared, arrays: Mapping[str, Array]) -> None:
        self.group, self.posed, self.prepared, self.parts = group, posed, prepared, prepared.parts
        self.steps, self.program = posed.steps[self.name], posed.programs[self.name]
        self.bound = prepared.copies(self.name)
        xp = self.xp = group._lanes.namespace
        self.inputs = {name: xp.ascontiguousarray(x) for name, x in arrays.items()}
        q, k, v = self.inputs.values()
        self.o = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
        self.lse = xp.empty(q.shape[:-1], accumulator_dtype(q.dtype))
        self.buffers, self.results = dict[tuple[str, int], Array](), dict[str, Array]()
        if posed.method == "gather":
            make = xp.empty if posed.gathers_all(group.rank) else xp.zeros  # keys that nothing writes must be finite
            for turn in range(posed.num_buffers):
                for name, x in (("k", k), ("v", v)):
                    self.buffers[name, turn] = make(posed.keys_shape(x), x.dtype)
        else:
            for name, x in (("q", q), ("k", k), ("v", v)):
                self.buffers[name, 0] = self.rows_of_heads(name in ("k", "v"), x)
            for name, x in (("o", self.o), ("lse", self.lse[..., None])):
                self.results[name] = self.rows_of_heads(False, x)

    def rows_of_heads(self, is_key: bool, like: Array) -> Array:
        """Return new memory for all rows of this rank's own heads."""
        part, whole = self.parts[0], self.posed.shape
        heads, rows = (part.kv_heads, whole.seqlen_kv) if is_key else (part.heads, whole.seqlen_q)
        return self.xp.empty((*like.shape[:-3], heads.stop - heads.start, rows, like.shape[-1]), like.dtype)

    def moves(self, number: int) -> Sequence[Move]:
        return self.posed.moves(self.name, number)

    def source(self, step: Step, move: Move) -> Array:
        return (self.inputs if step.kind == COPY else self.results)[move.name]

    def target(self, step: Step, move: Move) -> Array:
        if step.kind == COPY:
            return self.buffers[move.name, step.group % NUM_BUFFERS]
        return self.o if move.name == "o" else self.lse[..., None]

    def keys(self, name: str, group: int) -> Region:
        """Return the gathered keys, or values, of a group of heads."""
        return self.buffers[name, group % NUM_BUFFERS], (..., _first_heads(self.parts[group]), slice(None), slice(None))

    def queries(self, name: str) -> Array:
        """Return the rows of queries that this rank computes, such as q, o [..., rows, dim] or lse [..., rows, 1]."""
        if self.posed.method == "heads":
            return self.results[name] if name in ("o", "lse") else self.buffers[name, 0]
        return {"o": self.o, "lse": self.lse[..., None]}.get(name, self.inputs.get(name))

    def index(self, group: int, rows: slice) -> tuple[Any, ...]:
        """Return the index of a group of heads and of some rows in arrays of queries."""
        return ..., self.parts[group].heads if self.posed.method == "gather" else slice(None), rows, slice(None)

    def act(self, step: Step) -> None:
        """Compute attention for a group of heads."""
        group, part = step.group, self.parts[step.group]
        k, v, q, o, lse = self.keys("k", group), self.keys("v", group), *map(self.queries, ("q", "o", "lse"))
        for n, (rows, plan) in enumerate(part.plans):
            index = self.index(group, rows)
            arrays = {"q": (q, index), "k": k, "v": v, **_wholes(plan._captured), **_wholes(part.operands)}
            outs = {"o": (o, index), "lse": (lse, (*index[:-1], 0))}
            self.prepared.run(self.group._lanes, self.name, (self.name, group, n), plan, arrays, outs)


def _first_heads(part: Part) -> slice:
    """Return the place of a group of heads in memory for the largest group."""
    return slice(0, part.kv_heads.stop - part.kv_heads.start)


def _wholes(arrays: Mapping[str, Array]) -> dict[str, Region]:
    return {name: (array, (...,)) for name, array in arrays.items()}


class _Backward:
    """The backward pass of one call on this rank.

    Attributes
    ----------
    dq, dk, dv : array
        Gradients of this rank's rows.
    others : dict of arrays by name
        This rank's part of the gradients of other arrays, in the dtype of accumulators.
    """

    name = "backward"

    def __init__(self, call: RankCall) -> None:
        self.call, posed, inputs, xp = call, call.posed, call.inputs, call.xp
        self.steps, self.program = posed.steps[self.name], posed.programs[self.name]
        self.key = self.name, "dlse" in inputs
        self.bound = call.prepared.copies(self.key)
        self.dq, self.dk, self.dv = (xp.empty_like(inputs[name]) for name in ("q", "k", "v"))
        self.others = dict[str, Array]()
        self.results, self._taken = dict[tuple[str, int], Array](), dict[tuple[str, int, int], Array]()
        if posed.method == "heads":
            for name in ("do", "dlse"):
                if name in inputs:
                    call.buffers[name, 0] = call.rows_of_heads(False, inputs[name])
            for name, x in (("dq", self.dq), ("dk", self.dk), ("dv", self.dv)):
                self.results[name, 0] = call.rows_of_heads(name != "dq", x)
            return
        wide = accumulator_dtype(self.dk.dtype)
        for turn in range(posed.num_buffers):
            for name, x in (("dk", self.dk), ("dv", self.dv)):
                shape = posed.keys_shape(x)
                self.results[name, turn] = xp.empty(shape, wide)
                for source in posed.others(call.group.rank):
                    rows = len(posed.moved(source, call.group.rank))
                    self._taken[name, source, turn] = xp.empty((*shape[:-2], rows, shape[-1]), wide)

    def moves(self, number: int) -> Sequence[Move]:
        moves = self.call.posed.moves(self.name, number)
        return moves if self.key[1] else [each for each in moves if each.name != "dlse"]

    def source(self, step: Step, move: Move) -> Array:
        if step.kind == COPY:
            return self.call.inputs[move.name]
        return self.results[move.name, step.group % NUM_BUFFERS]

    def target(self, step: Step, move: Move) -> Array:
        if step.kind == COPY:
            return self.call.buffers[move.name, step.group % NUM_BUFFERS]
        if self.call.posed.method == "gather":
            return self._taken[move.name, step.source, step.group % NUM_BUFFERS]
        gradient: Array = getattr(self, move.name)
        return gradient

    def act(self, step: Step) -> None:
        """Compute the gradients of a group of heads, or sum the gradients of this rank's keys."""
        if step.kind == ADD:
            self._add(step.group)
        else:
            self._attend(step.group)

    def _attend(self, group: int) -> None:
        call, part = self.call, self.call.parts[group]
        dk, dv = (self.results[name, group % NUM_BUFFERS] for name in ("dk", "dv"))
        dq = self.dq if call.posed.method == "gather" else self.results["dq", 0]
        of_keys = ..., _first_heads(part), slice(None), slice(None)
        for n, (rows, plan) in enumerate(part.plans):
            index = call.index(group, rows)
            of_lse = *index[:-1], 0
            arrays = {name: (call.queries(name), index) for name in ("do", "q")}
            arrays |= {name: call.keys(name, group) for name in ("k", "v")}
            arrays |= {"o": (call.queries("o"), index), "lse": (call.queries("lse"), of_lse)}
            if "dlse" in call.inputs:
                arrays["dlse"] = call.queries("dlse"), of_lse
            arrays |= _wholes(plan._read_by(self.name, part.operands))
            outs = {"dq": (dq, index)} | ({} if n else {"dk": (dk, of_keys), "dv": (dv, of_keys)})
            results = call.prepared.run(call.group._lanes, self.name, (*self.key, group, n), plan, arrays, outs)
            if not results:
                continue
            gradients = named_gradients(plan._plan.problem, results)
            if n:
                dk[of_keys] += gradients.dk
                dv[of_keys] += gradients.dv
            self._keep_others(part, gradients)

    def _keep_others(self, part: Part, gradients: Gradients) -> None:
        """Add the gradients of other arrays to this rank's."""
        for name, each in gradients.others.items():
            whole = self._of_all_heads(part, each) if name == "sink" else each
            total = self.others.get(name, 0)
            self.others[name] = total + whole.astype(accumulator_dtype(whole.dtype))

    def _add(self, group: int) -> None:
        """Add the gradients of this rank's keys that all ranks computed, in the order of ranks, and round the sums."""
        call, posed, rank = self.call, self.call.posed, self.call.group.rank
        part, turn = call.parts[group], group % NUM_BUFFERS
        heads = _first_heads(part)
        for name, gradient in (("dk", self.dk), ("dv", self.dv)):
            own, terms = gradient[..., part.kv_heads, :, :], dict[int, Array]()
            for source in range(posed.size):
                term = self.results[name, turn] if source == rank else self._taken[name, source, turn]
                terms[source] = term[..., heads, :, :]
            if not posed.returns_all(rank):
                self._add_runs(own, terms)
                continue
            for to, start, rows in posed.runs("copied", rank, rank):
                first, *others = (
                    term[..., start : start + rows, :] if source == rank else term[..., to : to + rows, :]
                    for source, term in terms.items()
                )
                for term in others[:-1]:
                    first += term
                call.xp.add(first, others[-1] if others else 0, out=own[..., to : to + rows, :])

    def _add_runs(self, own: Array, terms: Mapping[int, Array]) -> None:
        """Add terms of which ranks return only the rows that they attend to."""
        posed, rank = self.call.posed, self.call.group.rank
        total = self.call.xp.zeros(own.shape, terms[rank].dtype)
        for source, term in terms.items():
            runs = posed.runs("copied", rank, rank) if source == rank else posed.runs("added", source, rank)
            for one, other, rows in runs:
                start, to = (other, one) if source == rank else (one, other)
                total[..., to : to + rows, :] += term[..., start : start + rows, :]
        own[...] = total

    def _of_all_heads(self, part: Part, dsink: Array) -> Array:
        sink: Any = self.call.posed.options.sink
        shape: tuple[int, ...] = np.shape(sink)
        if dsink.shape == shape:
            return dsink
        whole = self.call.xp.zeros(shape, dsink.dtype)
        whole[..., part.heads] = dsink
        return whole

    def other_gradients(self) -> dict[str, Array]:
        """Return the gradients of other arrays, summed over the ranks in order, on every rank."""
        call = self.call
        operands = call.parts[0].plans[0][1]._plan.problem if call.parts else None
        if operands is None or not operands.wrt:
            return {}
        group, dtypes = call.group, {each.name: each.dtype for each in operands.operands}
        arrays = {name: call.xp.ascontiguousarray(each).reshape(1, 1, -1) for name, each in self.others.items()}
        gather = Gather(group, arrays, [((0, source, 1),) for source in range(group.size)])
        group._perform("the gradients of other arrays", {}, [], gather)
        sums = dict[str, Array]()
        for name, own in self.others.items():
            parts = gather.whole[name][0]
            total = parts[0].copy()
            for source in range(1, group.size):
                total += parts[source]
            sums[name] = total.reshape(own.shape).astype(dtypes[name])
        return sums


@explains_keywords
class Pullback:
    """Function that pulls gradients back through one call on all ranks; `ContextParallel.attention_vjp` returns it.

    All ranks call it together.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> x = np.ones((1, 8, 4), np.float32)
    >>> def rank(group):
    ...     cp = distributed.ContextParallel(group, seqlen=8, num_heads=1, block=2)
    ...     o, vjp = cp.attention_vjp(cp.shard(x), cp.shard(x), cp.shard(x))
    ...     return round(float(vjp(o).dv.sum()), 3)
    >>> distributed.run(rank, size=2)
    [16.0, 16.0]
    """

    def __init__(self, call: RankCall) -> None:
        self._call = call

    def __call__(self, do: Array, dlse: Array | None = None) -> Gradients:
        """Return this rank's rows of the gradients of sum(do * o) + sum(dlse * lse) over the rows of all ranks.

        Raises
        ------
        UnsupportedProblem
            An argument does not match o or lse, or the arguments of other ranks; every rank raises it.
        PeerLost
            Another rank is lost.
        """
        call, inputs = self._call, self._call.inputs
        reasons = _reasons("do", do, call.o) + ([] if dlse is None else _reasons("dlse", dlse, call.lse))
        inputs.pop("dlse", None)
        if not reasons:
            inputs["do"] = call.xp.ascontiguousarray(do)
            if dlse is not None:
                inputs["dlse"] = call.xp.ascontiguousarray(dlse)[..., None]
        backward = None if reasons else _Backward(call)
        call.group._perform("vjp", {"dlse": "None" if dlse is None else "an array"}, reasons, backward)
        assert backward is not None
        return Gradients(backward.dq, backward.dk, backward.dv, backward.other_gradients())


def _reasons(name: str, array: Any, like: Array) -> list[str]:
    if type(array) is type(like) and array.shape == like.shape and array.dtype == like.dtype:
        return []
    kind = "NumPy" if isinstance(like, np.ndarray) else "CuPy"
    return [f"{name} must be a {kind} array of shape {like.shape} and dtype {like.dtype}; got {describe(array)}"]
