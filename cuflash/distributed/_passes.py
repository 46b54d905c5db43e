"""The passes of one call on a rank: they gather rows, attend to them, and return gradients to their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array, accumulator_dtype, describe, namespace
from ..errors import refuse
from ..keywords import explains_keywords
from ..plans.plan import Gradients
from ._agreement import disagreement
from ._group import Group
from ._lanes import Move
from ._posed import Part, Posed
from ._schedule import ADD, COPY, NUM_BUFFERS, Step


@dataclass(eq=False)
class Shared:
    """The arrays of a rank that other ranks read.

    Attributes
    ----------
    inputs : dict of arrays by name
        This rank's rows of q, k, v, do and dlse.
    results : dict of arrays by name and turn
        Results of this rank for groups of heads, which the ranks that own the rows read.
    """

    inputs: dict[str, Array]
    results: dict[tuple[str, int], Array] = field(default_factory=dict)


def agreed(
    group: Group, what: str, texts: Mapping[str, str], reasons: list[str], own: Shared | None = None
) -> tuple[int, list[Shared]]:
    """Return the number of the exchange and the arrays of all ranks, if no rank has reasons to refuse the call.

    A rank whose arrays this rank cannot read has an empty `Shared`.

    Raises
    ------
    UnsupportedProblem
        The reasons of all ranks, or the first difference of their texts; every rank raises it.
    PeerLost
        Another rank is lost.
    """
    shared = own if group._shares_memory else None
    number, answers = group._exchanged(what, (tuple(reasons), dict(texts), shared))
    of_ranks = [each for each, _, _ in answers]
    if any(of_ranks):
        is_common = all(each == of_ranks[0] for each in of_ranks)
        refuse(of_ranks[0] if is_common else [f"rank {n}: {each}" for n, some in enumerate(of_ranks) for each in some])
    refuse(disagreement([each for _, each, _ in answers]))
    ranks = [each or Shared({}) for _, _, each in answers]
    if own is not None:
        ranks[group.rank] = own
    return number, ranks


class Gather:
    """Copies that collect the rows of all ranks on every rank, for arrays [heads, rows, dim].

    Attributes
    ----------
    whole : dict of arrays by name
        The arrays with the rows of all ranks.
    """

    def __init__(self, group: Group, arrays: Mapping[str, Array], places: Sequence[tuple[tuple[int, int, int], ...]]):
        self._rank, self._places, self.own = group.rank, places, Shared(dict(arrays))
        self.steps = tuple(Step(COPY, rank, source, 0) for rank in range(group.size) for source in range(group.size))
        rows = sum(count for runs in places for _, _, count in runs)
        self.whole = {
            name: namespace(x).empty((x.shape[0], rows, x.shape[2]), x.dtype) for name, x in arrays.items()
        }  # fmt: skip
        self._ranks: list[Shared] = []

    def run(self, group: Group, what: str, texts: Mapping[str, str], reasons: list[str]) -> dict[str, Array]:
        """Return the rows of all ranks, in order."""
        number, self._ranks = agreed(group, what, texts, reasons, self.own)
        group._perform(what, number, self)
        return self.whole

    def moves(self, step: Step) -> list[Move]:
        return [Move(name, slice(0, None), slice(0, None), self._places[step.source]) for name in self.whole]

    def source(self, step: Step, move: Move) -> Array:
        return self._ranks[step.source].inputs[move.name]

    def target(self, step: Step, move: Move) -> Array:
        return self.whole[move.name]

    def act(self, step: Step) -> None:
        raise AssertionError(step)


class RankCall:
    """One call on this rank: its arrays, its buffers, and its forward pass.

    Attributes
    ----------
    o, lse : array
        Results of this rank's rows.
    """

    name = "forward"

    def __init__(self, group: Group, posed: Posed, parts: list[Part], arrays: Mapping[str, Array]) -> None:
        self.group, self.posed, self.parts = group, posed, parts
        self.own = Shared({name: namespace(x).ascontiguousarray(x) for name, x in arrays.items()})
        self.ranks: list[Shared] = []
        q, k, v = self.own.inputs.values()
        xp = self.xp = namespace(q)
        self.o = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
        self.lse = xp.empty(q.shape[:-1], accumulator_dtype(q.dtype))
        self.buffers = dict[tuple[str, int], Array]()
        if posed.method == "gather":
            heads = max((part.kv_heads.stop - part.kv_heads.start for part in parts), default=0)
            is_whole = all(
                len(posed.moved(group.rank, source)) == len(rows) for source, rows in enumerate(posed.keys.of_rank)
            )  # fmt: skip
            make = xp.empty if is_whole else xp.zeros  # keys without queries on this rank must be finite
            for turn in range(NUM_BUFFERS):
                for name, x in (("k", k), ("v", v)):
                    shape = *x.shape[:-3], heads, posed.shape.seqlen_kv, x.shape[-1]
                    self.buffers[name, turn] = make(shape, x.dtype)
        else:
            for name, x in (("q", q), ("k", k), ("v", v)):
                self.buffers[name, 0] = self.rows_of_heads(name in ("k", "v"), x)

    def rows_of_heads(self, is_key: bool, like: Array) -> Array:
        """Return new memory for all rows of this rank's own heads."""
        part, whole = self.parts[0], self.posed.shape
        heads, rows = (part.kv_heads, whole.seqlen_kv) if is_key else (part.heads, whole.seqlen_q)
        return self.xp.empty((*like.shape[:-3], heads.stop - heads.start, rows, like.shape[-1]), like.dtype)

    def forward(self, what: str, texts: Mapping[str, str]) -> None:
        """Compute o and lse, if all ranks make the same call."""
        number, self.ranks = agreed(self.group, what, texts, [], self.own)
        self.group._perform("the forward pass", number, self)

    @property
    def steps(self) -> Sequence[Step]:
        return self.posed.steps[self.name]

    def moves(self, step: Step) -> Sequence[Move]:
        return self.posed.moves(self.name, step)

    def source(self, step: Step, move: Move) -> Array:
        shared = self.ranks[step.source]
        return shared.inputs[move.name] if step.kind == COPY else shared.results[move.name, 0]

    def target(self, step: Step, move: Move) -> Array:
        if step.kind == COPY:
            return self.buffers[move.name, self.turn(step)]
        return self.o if move.name == "o" else self.lse[..., None]

    def turn(self, step: Step) -> int:
        """Return the number of the buffer that a step uses."""
        return step.group % NUM_BUFFERS if self.posed.method == "gather" else 0

    def keys(self, name: str, group: int) -> Array:
        """Return the gathered keys, or values, of a group of heads."""
        heads = self.parts[group].kv_heads
        return self.buffers[name, group % NUM_BUFFERS][..., : heads.stop - heads.start, :, :]

    def act(self, step: Step) -> None:
        """Compute attention for a group of heads."""
        if self.posed.method == "heads":
            part = self.parts[0]
            ((_, plan),) = part.plans
            o, lse = plan.forward(*(self.buffers[name, 0] for name in ("q", "k", "v")), **part.operands)
            self.own.results |= {("o", 0): o, ("lse", 0): lse[..., None]}
            return
        part = self.parts[step.group]
        q, k, v = self.own.inputs["q"][..., part.heads, :, :], self.keys("k", step.group), self.keys("v", step.group)
        for rows, plan in part.plans:
            out = self.o[..., part.heads, rows, :], self.lse[..., part.heads, rows]
            plan.forward(q[..., rows, :], k, v, out=out, **part.operands)


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
        self.call, inputs, xp = call, call.own.inputs, call.xp
        self.dq, self.dk, self.dv = (xp.empty_like(inputs[name]) for name in ("q", "k", "v"))
        self.others = dict[str, Array]()
        self._taken = dict[tuple[str, int, int], Array]()
        if call.posed.method == "heads":
            for name in ("do", "dlse"):
                if name in inputs:
                    call.buffers[name, 0] = call.rows_of_heads(False, inputs[name])
            return
        for source in range(call.posed.size):
            rows = len(call.posed.moved(source, call.group.rank))
            for turn in range(NUM_BUFFERS):
                for name, key in (("dk", "k"), ("dv", "v")):
                    memory = call.buffers[key, turn]
                    shape = *memory.shape[:-2], rows, memory.shape[-1]
                    self._taken[name, source, turn] = xp.empty(shape, accumulator_dtype(memory.dtype))

    @property
    def steps(self) -> Sequence[Step]:
        return self.call.posed.steps[self.name]

    def moves(self, step: Step) -> Sequence[Move]:
        moves = self.call.posed.moves(self.name, step)
        return moves if "dlse" in self.call.own.inputs else [each for each in moves if each.name != "dlse"]

    def source(self, step: Step, move: Move) -> Array:
        shared = self.call.ranks[step.source]
        return shared.inputs[move.name] if step.kind == COPY else shared.results[move.name, self.call.turn(step)]

    def target(self, step: Step, move: Move) -> Array:
        if step.kind == COPY:
            return self.call.buffers[move.name, self.call.turn(step)]
        if self.call.posed.method == "gather":
            return self._taken[move.name, step.source, self.call.turn(step)]
        gradient: Array = getattr(self, move.name)
        return gradient

    def act(self, step: Step) -> None:
        """Compute the gradients of a group of heads, or sum the gradients of this rank's keys."""
        if step.kind == ADD:
            self._add(step.group)
        elif self.call.posed.method == "gather":
            self._attend(step.group)
        else:
            self._attend_with_own_heads()

    def _attend(self, group: int) -> None:
        call, part = self.call, self.call.parts[group]
        do, q, o = (x[..., part.heads, :, :] for x in (call.own.inputs["do"], call.own.inputs["q"], call.o))
        arrays = do, q, call.keys("k", group), call.keys("v", group), o, call.lse[..., part.heads, :]
        dlse = call.own.inputs.get("dlse")
        results = self._gradients(part, arrays, None if dlse is None else dlse[..., part.heads, :, 0])
        self.dq[..., part.heads, :, :] = results[0]
        for name, each in zip(("dk", "dv"), results[1:]):
            call.own.results[name, group % NUM_BUFFERS] = call.xp.ascontiguousarray(each)

    def _add(self, group: int) -> None:
        """Add the gradients of this rank's keys that all ranks computed, in the order of ranks, and round the sums."""
        posed, rank, heads = self.call.posed, self.call.group.rank, self.call.parts[group].kv_heads
        for name, gradient in (("dk", self.dk), ("dv", self.dv)):
            own = gradient[..., heads, :, :]
            total = self.call.xp.zeros(own.shape, accumulator_dtype(own.dtype))
            for source in range(posed.size):
                terms = self._taken[name, source, group % NUM_BUFFERS]
                for first, to, rows in posed.added(source, rank):
                    total[..., to : to + rows, :] += terms[..., : own.shape[-3], first : first + rows, :]
            own[...] = total

    def _attend_with_own_heads(self) -> None:
        call, part = self.call, self.call.parts[0]
        results, buffers = call.own.results, call.buffers
        arrays = *(buffers[name, 0] for name in ("do", "q", "k", "v")), results["o", 0], results["lse", 0][..., 0]
        dlse = buffers["dlse", 0][..., 0] if "dlse" in call.own.inputs else None
        for name, each in zip(("dq", "dk", "dv"), self._gradients(part, arrays, dlse)):
            results[name, 0] = call.xp.ascontiguousarray(each)

    def _gradients(self, part: Part, arrays: tuple[Array, ...], dlse: Array | None) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv of a group of heads, and add the gradients of other arrays to this rank's."""
        do, q, k, v, o, lse = arrays
        dqs, dk, dv = list[Array](), None, None
        for rows, plan in part.plans:
            of_rows = do[..., rows, :], q[..., rows, :], k, v, o[..., rows, :], lse[..., rows]
            gradients = plan.backward(*of_rows, None if dlse is None else dlse[..., rows], **part.operands)
            dqs.append(gradients.dq)
            dk, dv = (gradients.dk, gradients.dv) if dk is None else (dk + gradients.dk, dv + gradients.dv)
            for name, each in gradients.others.items():
                whole = self._of_all_heads(part, each) if name == "sink" else each
                total = self.others.get(name, 0)
                self.others[name] = total + whole.astype(accumulator_dtype(whole.dtype))
        return dqs[0] if len(dqs) == 1 else self.call.xp.concatenate(dqs, axis=-2), dk, dv

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
        places = [((0, source, 1),) for source in range(group.size)]
        parts = Gather(group, arrays, places).run(group, "the gradients of other arrays", {}, [])
        sums = dict[str, Array]()
        for name, own in self.others.items():
            total = parts[name][0, 0].copy()
            for source in range(1, group.size):
                total += parts[name][0, source]
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
        call, inputs = self._call, self._call.own.inputs
        reasons = _reasons("do", do, call.o) + ([] if dlse is None else _reasons("dlse", dlse, call.lse))
        inputs.pop("dlse", None)
        if not reasons:
            inputs["do"] = call.xp.ascontiguousarray(do)
            if dlse is not None:
                inputs["dlse"] = call.xp.ascontiguousarray(dlse)[..., None]
        backward = None if reasons else _Backward(call)
        number, _ = agreed(call.group, "vjp", {"dlse": "None" if dlse is None else "an array"}, reasons)
        assert backward is not None
        call.group._perform("the backward pass", number, backward)
        return Gradients(backward.dq, backward.dk, backward.dv, backward.other_gradients())


def _reasons(name: str, array: Any, like: Array) -> list[str]:
    if type(array) is type(like) and array.shape == like.shape and array.dtype == like.dtype:
        return []
    kind = "NumPy" if isinstance(like, np.ndarray) else "CuPy"
    return [f"{name} must be a {kind} array of shape {like.shape} and dtype {like.dtype}; got {describe(array)}"]
