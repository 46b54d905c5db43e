"""The passes of one call on a rank: copies of other ranks' rows, attention to them, and gradients that return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Array, accumulator_dtype, describe
from ..errors import refuse
from ..keywords import explains_keywords
from ..plans import Gradients
from ._agreement import disagreement
from ._group import Group
from ._posed import Part, Posed
from ._schedule import ADD, ATTEND, COPY, NUM_BUFFERS, Step


@dataclass(eq=False)
class Shared:
    """The arrays of a rank's call that other ranks read.

    Attributes
    ----------
    inputs : dict of arrays by name
        This rank's rows of q, k, v, do and dlse.
    results : dict of arrays by name and group
        What this rank computed for groups of heads, for ranks that hold the rows.
    """

    inputs: dict[str, Array]
    results: dict[tuple[str, int], Array] = field(default_factory=dict)


def agreed(
    group: Group, what: str, texts: Mapping[str, str], reasons: list[str], value: Shared | Array | None = None
) -> list[Shared]:
    """Return what all ranks pass as `value`, if none has reasons to refuse the call and their texts are equal.

    Raises
    ------
    UnsupportedProblem
        The reasons of all ranks, or the first difference of their texts; every rank raises it.
    PeerLost
        Another rank is lost.
    """
    answers = group.exchange(what, (tuple(reasons), texts, value))
    of_ranks = [own for own, _, _ in answers]
    if any(of_ranks):
        is_common = all(own == of_ranks[0] for own in of_ranks)
        refuse(of_ranks[0] if is_common else [f"rank {n}: {each}" for n, own in enumerate(of_ranks) for each in own])
    refuse(disagreement([each for _, each, _ in answers]))
    return [each for _, _, each in answers]


class RankCall:
    """One call on this rank: its forward pass, and what the backward pass reads again.

    Attributes
    ----------
    o, lse : array
        Results of this rank's rows.
    """

    def __init__(self, group: Group, posed: Posed, parts: list[Part], ranks: list[Shared]) -> None:
        self.group, self.posed, self.parts, self.ranks, self.own = group, posed, parts, ranks, ranks[group.rank]
        q, v = self.own.inputs["q"], self.own.inputs["v"]
        self.o = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        self.lse = np.zeros(q.shape[:-1], accumulator_dtype(q.dtype))
        self._buffers = dict[tuple[str, int], Array]()

    def perform(self, name: str, act: Callable[[Step], None]) -> None:
        """Run this rank's steps of a pass, which all ranks start together."""
        self.group._perform(f"the {name} pass", self.posed.steps[name], act)

    def forward(self) -> None:
        """Compute o and lse."""
        self.perform("forward", self._gather_forward if self.posed.method == "gather" else self._heads_forward)

    def buffer(self, name: str, turn: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return memory that calls with one name and turn share; it is 0 until it is written."""
        memory = self._buffers.get((name, turn))
        if memory is None or memory.shape[-3] < shape[-3]:
            memory = self._buffers[name, turn] = np.zeros(shape, dtype)
        return memory[..., : shape[-3], :, :]

    # Gathering keys and values.

    def keys(self, name: str, group: int) -> Array:
        """Return the buffer for all keys, or values, of a group; those that no query attends stay as they are."""
        local, part = self.own.inputs[name], self.parts[group]
        heads = part.kv_heads.stop - part.kv_heads.start
        shape = (*local.shape[:-3], heads, self.posed.shape.seqlen_kv, local.shape[-1])
        return self.buffer(name, group % NUM_BUFFERS, shape, local.dtype)

    def gather(self, step: Step) -> None:
        """Copy the keys and values of a group that this rank needs from their rank."""
        rows, heads = self.posed.moved(step.rank, step.source), self.parts[step.group].kv_heads
        local = self.posed.keys.local(step.source, rows)
        for name in ("k", "v"):
            theirs = self.ranks[step.source].inputs[name]
            self.keys(name, step.group)[..., rows, :] = theirs[..., heads, :, :][..., local, :]

    def _gather_forward(self, step: Step) -> None:
        if step.kind == COPY:
            self.gather(step)
            return
        part, q = self.parts[step.group], self.own.inputs["q"]
        arrays = q[..., part.heads, :, :], self.keys("k", step.group), self.keys("v", step.group)
        self.o[..., part.heads, :, :], self.lse[..., part.heads, :] = part.plan.forward(*arrays, **part.operands)

    # Exchanging heads.

    def all_rows(self, name: str) -> Array:
        """Return the buffer for all rows of this rank's own heads of an input."""
        part, whole, local = self.parts[0], self.posed.shape, self.own.inputs[name]
        heads, rows = (part.kv_heads, whole.seqlen_kv) if name in ("k", "v") else (part.heads, whole.seqlen_q)
        return self.buffer(name, 0, (*local.shape[:-3], heads.stop - heads.start, rows, local.shape[-1]), local.dtype)

    def copy_rows(self, name: str, source: int) -> None:
        """Copy the rows of a rank of this rank's own heads."""
        part, posed = self.parts[0], self.posed
        layout, heads = (posed.keys, part.kv_heads) if name in ("k", "v") else (posed.queries, part.heads)
        self.all_rows(name)[..., layout.of_rank[source], :] = self.ranks[source].inputs[name][..., heads, :, :]

    def _heads_forward(self, step: Step) -> None:
        part, results = self.parts[0], self.ranks[step.source].results
        if step.kind == COPY:
            for name in ("q", "k", "v"):
                self.copy_rows(name, step.source)
        elif step.kind == ATTEND:
            self.own.results["o", 0], self.own.results["lse", 0] = part.plan.forward(
                *map(self.all_rows, ("q", "k", "v")), **part.operands
            )
        else:
            heads, rows = slice(*self.posed.own_heads(step.source)[0]), self.posed.queries.of_rank[step.rank]
            self.o[..., heads, :, :] = results["o", 0][..., rows, :]
            self.lse[..., heads, :] = results["lse", 0][..., rows]


class _Backward:
    """The backward pass of one call on this rank.

    Attributes
    ----------
    dq, dk, dv : array
        Gradients of this rank's rows.
    others : dict of arrays by name
        This rank's part of the gradients of other arrays, in the dtype of accumulators.
    """

    def __init__(self, call: RankCall) -> None:
        self.call, inputs = call, call.own.inputs
        self.dq, self.dk, self.dv = (np.zeros_like(inputs[name]) for name in ("q", "k", "v"))
        self.others = dict[str, Array]()
        self._taken = dict[tuple[str, int, int], Array]()

    def gather(self, step: Step) -> None:
        """Run a step of the pass that gathers keys again, and adds their gradients where the keys are."""
        call, group = self.call, step.group
        if step.kind == COPY:
            call.gather(step)
        elif step.kind == ATTEND:
            part = call.parts[group]
            do, q, o = (x[..., part.heads, :, :] for x in (call.own.inputs["do"], call.own.inputs["q"], call.o))
            arrays = do, q, call.keys("k", group), call.keys("v", group), o, call.lse[..., part.heads, :]
            dlse = call.own.inputs.get("dlse")
            gradients = self._gradients(part, arrays, None if dlse is None else dlse[..., part.heads, :, 0])
            self.dq[..., part.heads, :, :] = gradients.dq
            for name, each in (("dk", gradients.dk), ("dv", gradients.dv)):
                memory = call.own.results[name, group] = call.buffer(name, group % NUM_BUFFERS, each.shape, each.dtype)
                memory[...] = each
        elif step.kind == ADD:
            self._add(group)
        else:
            rows, results = call.posed.moved(step.source, step.rank), call.ranks[step.source].results
            for name in ("dk", "dv"):
                self._taken[name, step.source, group] = results[name, group][..., rows, :]

    def _add(self, group: int) -> None:
        """Add the gradients of this rank's keys that all ranks computed, in the order of ranks, and round the sums."""
        posed, rank, heads = self.call.posed, self.call.group.rank, self.call.parts[group].kv_heads
        for name, gradient in (("dk", self.dk), ("dv", self.dv)):
            own = gradient[..., heads, :, :]
            total = np.zeros(own.shape, accumulator_dtype(own.dtype))
            for source in range(posed.size):
                terms = self._taken.pop((name, source, group), None)
                if terms is not None:
                    total[..., posed.keys.local(rank, posed.moved(source, rank)), :] += terms
            own[...] = total

    def heads(self, step: Step) -> None:
        """Run a step of the pass in which this rank has all rows of its heads."""
        call, part, posed = self.call, self.call.parts[0], self.call.posed
        has_dlse, results = "dlse" in call.own.inputs, call.own.results
        if step.kind == COPY:
            for name in ("do", "dlse")[: 1 + has_dlse]:
                call.copy_rows(name, step.source)
        elif step.kind == ATTEND:
            arrays = *map(call.all_rows, ("do", "q", "k", "v")), results["o", 0], results["lse", 0]
            gradients = self._gradients(part, arrays, call.all_rows("dlse")[..., 0] if has_dlse else None)
            results |= {("dq", 0): gradients.dq, ("dk", 0): gradients.dk, ("dv", 0): gradients.dv}
        else:
            theirs = call.ranks[step.source].results
            heads, kv_heads = (slice(*each) for each in posed.own_heads(step.source))
            self.dq[..., heads, :, :] = theirs["dq", 0][..., posed.queries.of_rank[step.rank], :]
            self.dk[..., kv_heads, :, :] = theirs["dk", 0][..., posed.keys.of_rank[step.rank], :]
            self.dv[..., kv_heads, :, :] = theirs["dv", 0][..., posed.keys.of_rank[step.rank], :]

    def _gradients(self, part: Part, arrays: tuple[Array, ...], dlse: Array | None) -> Gradients:
        """Return the gradients of a group of heads, and add those of other arrays to this rank's."""
        do, q, k, v, o, lse = arrays
        gradients = part.plan.backward(do, q, k, v, o, lse, dlse, **part.operands)
        for name, each in gradients.others.items():
            whole = self._of_all_heads(part, each) if name == "sink" else each
            total = self.others.get(name, 0)
            self.others[name] = total + whole.astype(accumulator_dtype(whole.dtype))
        return gradients

    def _of_all_heads(self, part: Part, dsink: Array) -> Array:
        sink = np.asarray(self.call.posed.options.sink)
        if dsink.shape == sink.shape:
            return dsink
        whole = np.zeros(sink.shape, dsink.dtype)
        whole[..., part.heads] = dsink
        return whole


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
            An argument does not match o or lse, or what other ranks pass; every rank raises it.
        PeerLost
            Another rank is lost.
        """
        call = self._call
        reasons = _reasons("do", do, call.o) + ([] if dlse is None else _reasons("dlse", dlse, call.lse))
        agreed(call.group, "vjp", {"dlse": "None" if dlse is None else "an array"}, reasons)
        call.own.inputs["do"] = do
        call.own.inputs.pop("dlse", None)
        if dlse is not None:
            call.own.inputs["dlse"] = dlse[..., None]
        backward = _Backward(call)
        call.perform("backward", backward.gather if call.posed.method == "gather" else backward.heads)
        parts = call.group.exchange("the gradients of other arrays", backward.others)
        dtypes = {each.name: each.dtype for each in call.parts[0].plan._plan.problem.operands} if call.parts else {}
        others = {name: _in_order([each[name] for each in parts]).astype(dtypes[name]) for name in backward.others}
        return Gradients(backward.dq, backward.dk, backward.dv, others)


def _reasons(name: str, array: Array, like: Array) -> list[str]:
    if type(array) is np.ndarray and array.shape == like.shape and array.dtype == like.dtype:
        return []
    return [f"{name} must be a NumPy array of shape {like.shape} and dtype {like.dtype}; got {describe(array)}"]


def _in_order(parts: list[Array]) -> Array:
    """Return the sum of the parts of all ranks, added in the order of ranks."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
