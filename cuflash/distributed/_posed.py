"""A call on several ranks without its arrays: its shape, mask, layout, method and steps, equal on all ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..arrays import DTYPES, Array, Namespace, ShapeDtype, accumulator_dtype, describe, is_int, namespace
from ..blocks.work_list import requested_mask
from ..calls._call import Call, planned
from ..errors import UnsupportedProblem, refuse
from ..executors import gpu
from ..masks.base import Mask
from ..masks.places import Places
from ..masks.shape import MaskShape, count_reasons
from ..planning.options import Options
from ..planning.plan_cache import plan_for
from ..plans.plan import Plan
from ..scores import Score
from ._lanes import Move, joint_runs
from ._layout import Costs, Rows, block_reasons, dealt
from ._model import METHODS, TILE, TYPICAL, CallSize, Machine, estimate, idle_share
from ._schedule import (
    ADD, ATTEND, COPY, NUM_BUFFERS, TAKE, Program, Step, exchanging_heads, finished, gathering, head_groups, program,
)  # fmt: skip


Runs = tuple[tuple[int, int, int], ...]  # of rows: first row, its place elsewhere, and number of rows


class Part(NamedTuple):
    """A group of heads of one rank's call.

    Attributes
    ----------
    kv_heads, heads : slice
        The key/value heads and the query heads of the group.
    plans : tuple of (slice, Plan)
        Rows of the rank's queries, and the plan of their attention to all keys, for these heads.
    operands : dict of arrays by name
        Arrays that the plan takes in addition to q, k and v, except those of a score function.
    """

    kv_heads: slice
    heads: slice
    plans: tuple[tuple[slice, Plan], ...]
    operands: dict[str, Array]


@dataclass(frozen=True, eq=False)
class Posed:
    """A call on several ranks.

    Attributes
    ----------
    size : int
        Number of ranks.
    shape : MaskShape
        The shape of the whole call.
    num_kv_heads, block : int
    method : str
        "gather" or "heads".
    options : Options
    costs : Costs
    queries, keys : Rows
        The layouts of queries and of keys.
    groups : tuple of (int, int)
        The groups of key/value heads that the method "gather" moves and computes, as pairs (first, stop).
    """

    size: int
    shape: MaskShape
    num_kv_heads: int
    block: int
    method: str
    options: Options
    costs: Costs
    queries: Rows
    keys: Rows
    groups: tuple[tuple[int, int], ...]
    _moved: dict[tuple[int, int], Array] = field(default_factory=dict)  # also of calls with other groups
    _runs: dict[tuple[str, int, int], Runs] = field(default_factory=dict)
    _moves: dict[tuple[str, int], tuple[Move, ...]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, arguments: Mapping[str, Any], options: Options, size: int) -> Posed:
        """Return a call with its layouts and its method.

        Raises
        ------
        UnsupportedProblem
            The mask does not fit the shape, or the layout is invalid.
        """
        block, kv_heads, method = arguments["block"], int(arguments["num_kv_heads"]), arguments["method"]
        seqlen, seqlen_kv = arguments["seqlen"], arguments["seqlen_kv"]
        num_keys = seqlen if seqlen_kv is None else seqlen_kv
        shape = MaskShape(arguments["batch"], arguments["num_heads"], seqlen, num_keys)
        mask = requested_mask(options.mask, options.causal, options.window, shape)
        costs = Costs.of(mask, shape, block)
        queries = keys = dealt(arguments["layout"], costs.work, shape.seqlen_q, block, size)
        if seqlen_kv is not None:
            keys = dealt("contiguous", costs.needs.any(axis=0), shape.seqlen_kv, block, size)
        heads = cls(size, shape, kv_heads, block, "heads", options, costs, queries, keys, ((0, kv_heads),))
        gather = replace(heads, method="gather")._in_fast_groups() if method != "heads" else heads
        if method != "auto" or kv_heads % size:
            return heads if method == "heads" else gather
        return min(gather, heads, key=Posed.model_seconds)

    def require_options(self, xp: Any) -> None:
        """Refuse options that are invalid for every dtype of q, k and v, before there are arrays.

        Raises
        ------
        TypeError, UnsupportedProblem
            As those of `cuflash.attention`.
        """
        executors = ("auto", "cpu", "sim") if xp is np else ("auto", "gpu")
        if self.options.executor in ("cpu", "gpu", "sim") and self.options.executor not in executors:
            rule = "'auto', 'cpu' or 'sim' for ranks with NumPy" if xp is np else "'auto' or 'gpu' for ranks with CuPy"
            refuse([f"executor must be {rule} arrays; got {self.options.executor!r}"])
        refusals = list[UnsupportedProblem]()
        whole, options = self.shape, on_device(self.options, xp)
        for dtype in sorted(DTYPES, key=np.dtype(np.float32).__ne__):  # reports the reasons of float32
            q = ShapeDtype((*whole.batch, whole.num_heads, whole.seqlen_q, TILE // 2), dtype)
            k = ShapeDtype((*whole.batch, self.num_kv_heads, whole.seqlen_kv, TILE // 2), dtype)
            try:
                Call.of(q, k, k, options)
                return
            except UnsupportedProblem as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _in_fast_groups(self) -> Posed:
        """Return this call with the groups of heads that the cost model expects to be fastest.

        Among those within 0.5% of the fastest, this takes the groups that need the least memory.
        """
        if self.size == 1:
            return self
        ways = [replace(self, groups=groups) for groups in head_groups(self.num_kv_heads)]
        seconds = [way.model_seconds() for way in ways]
        return next(way for way, each in zip(ways, seconds) if each <= 1.005 * min(seconds))

    def kv_groups(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the groups of key/value heads that a rank computes, as pairs (first, stop)."""
        return self.groups if self.method == "gather" else (self.own_heads(rank)[1],)

    def own_heads(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return a rank's query heads and key/value heads with the method "heads", as pairs (first, stop)."""
        own, own_kv = self.shape.num_heads // self.size, self.num_kv_heads // self.size
        return (rank * own, rank * own + own), (rank * own_kv, rank * own_kv + own_kv)

    def moved(self, rank: int, source: int) -> Array:
        """Return the positions of the keys that a rank gathers from a source."""
        rows = self._moved.get((rank, source))
        if rows is None:
            needed, held = self.costs.needed(self.queries, self.keys, rank), self.keys.of_rank[source]
            rows = self._moved[rank, source] = held[needed[held]]
        return rows

    def moves(self, name: str, number: int) -> tuple[Move, ...]:
        """Return the rows that a step of a pass moves."""
        moves = self._moves.get((name, number))
        if moves is None:
            of_method = self._gathered if self.method == "gather" else self._exchanged
            moves = self._moves[name, number] = tuple(of_method(name, self.steps[name][number]))
        return moves

    def _gathered(self, name: str, step: Step) -> Iterator[Move]:
        first, stop = self.kv_groups(0)[step.group]
        heads = slice(0, stop - first)
        names, own, runs = ("dk", "dv"), heads, self.runs("returned", step.source, step.rank)
        if step.kind == COPY:
            names, own, runs = ("k", "v"), slice(first, stop), self.runs("copied", step.rank, step.source)
        for each in names:
            yield Move(each, own, heads, runs)

    def runs(self, kind: str, rank: int, source: int) -> Runs:
        """Return the runs of the keys that a rank gathers from a source: first row of each run, its place, its length.

        `kind` is "copied" for the place among all keys, or "returned" for the runs of all keys and their place among
        the rows that are returned to the source.
        """
        key = kind, rank, source
        if key not in self._runs:
            rows = self.moved(rank, source)
            pair = rows, self.first_returned(source, rank) + np.arange(len(rows))
            self._runs[key] = joint_runs(*((self.keys.local(source, rows), rows) if kind == "copied" else pair))
        return self._runs[key]

    def first_returned(self, rank: int, source: int) -> int:
        """Return the place of a source's gradients of a rank's keys among all that are returned to the rank."""
        return sum(len(self.moved(other, rank)) for other in range(source) if other != rank)

    def own_keys(self, rank: int) -> Array:
        """Return a table of `RowSums` that puts a rank's keys in place, and zeros where no rank's keys are moved."""
        moved = [self.moved(rank, source) for source in range(self.size)]
        absent = np.setdiff1d(np.arange(self.shape.seqlen_kv), np.concatenate(moved))  # these keys must be finite
        rows, places = moved[rank], np.r_[self.keys.local(rank, moved[rank]), np.full(len(absent), -1)]
        return np.stack([np.r_[rows, absent], places], axis=1).astype(np.int32)

    def returned_gradients(self, rank: int) -> Array:
        """Return a table of `RowSums` that adds the gradients of a rank's keys in the order of ranks."""
        num_rows, num_keys = len(self.keys.of_rank[rank]), self.shape.seqlen_kv
        table = np.full((num_rows, 1 + self.size), -1, np.int32)
        table[:, 0] = np.arange(num_rows)
        for source in range(self.size):
            rows = self.moved(source, rank)
            received = num_keys + self.first_returned(rank, source) + np.arange(len(rows))
            table[self.keys.local(rank, rows), 1 + source] = rows if source == rank else received
        return table

    def _exchanged(self, name: str, step: Step) -> Iterator[Move]:
        is_copy, is_forward = step.kind == COPY, name == "forward"
        names = (("q", "k", "v") if is_forward else ("do", "dlse")) if is_copy else (
            ("o", "lse") if is_forward else ("dq", "dk", "dv"))  # fmt: skip
        of_heads, of_rows = (step.rank, step.source) if is_copy else (step.source, step.rank)
        for each in names:
            is_key = each in ("k", "v", "dk", "dv")
            rows = (self.keys if is_key else self.queries).of_rank[of_rows]
            first, stop = self.own_heads(of_heads)[is_key]
            ends = (slice(first, stop), np.arange(len(rows))), (slice(0, stop - first), rows)
            (heads, source), (to_heads, target) = ends if is_copy else ends[::-1]
            yield Move(each, heads, to_heads, joint_runs(source, target))

    @cached_property
    def steps(self) -> dict[str, tuple[Step, ...]]:
        """The steps of the passes "forward" and "backward" on all ranks."""
        if self.method == "heads":
            counts = [len(self.queries.of_rank[n]) + len(self.keys.of_rank[n]) for n in range(self.size)]
            steps = exchanging_heads(self.size, lambda rank: counts[rank] > 0)
            return {"forward": steps, "backward": steps}
        needs = [[len(self.moved(rank, source)) > 0 for source in range(self.size)] for rank in range(self.size)]
        groups = len(self.kv_groups(0))
        return {
            name: gathering(self.size, groups, lambda rank, source: needs[rank][source], returns=name == "backward")
            for name in ("forward", "backward")
        }

    @cached_property
    def programs(self) -> dict[str, Program]:
        """The steps of the passes with the events that they wait for."""
        return {name: program(steps, self.size) for name, steps in self.steps.items()}

    def part(self, rank: int, kv_heads: tuple[int, int], q: Array, k: Array, v: Array) -> Part:
        """Return a group of heads of a rank's call on arrays like these."""
        first, stop = kv_heads
        ratio, whole = self.shape.num_heads // self.num_kv_heads, self.shape
        heads = slice(first * ratio, stop * ratio)
        xp = namespace(q)
        options = on_device(self.options, xp)
        operands = dict[str, Array]()
        if options.sink is not None:
            sink: Array = options.sink
            operands["sink"] = sink[..., heads] if sink.shape[-1:] == (whole.num_heads,) else sink
            options = options._replace(sink=operands["sink"])
        counts = heads.stop - heads.start, stop - first, stop - first
        plans, begin = list[tuple[slice, Plan]](), 0
        for runs in self._calls_of(rank, options):
            rows = sum(end - start for start, end in runs)
            shapes = [
                ShapeDtype((*whole.batch, count, length, x.shape[-1]), x.dtype)
                for x, count, length in zip((q, k, v), counts, (rows, whole.seqlen_kv, whole.seqlen_kv))
            ]
            start = runs[0][0] if runs else 0
            places = Places(start, 0, 0, heads.start, runs if len(runs) > 1 else (), whole)
            plans.append((slice(begin, begin + rows), self._plan(shapes, options, places)))
            begin += rows
        return Part(slice(first, stop), heads, tuple(plans), operands)

    def _calls_of(self, rank: int, options: Options) -> Sequence[tuple[tuple[int, int], ...]]:
        """Return the runs of queries of each call for one group of heads.

        Score functions and dropout on kernels see the positions of adjacent queries only, so that each run is a call.
        """
        if self.method == "heads":
            return [((0, self.shape.seqlen_q),)]
        runs = self.queries.runs(rank)
        readers: list[Any] = [options.score, options.softcap, options.bias, options.dropout]
        has_positions = any(each is not None for each in readers)
        is_split = has_positions and options.executor in ("gpu", "sim") and len(runs) > 1
        return [(run,) for run in runs] if is_split else [runs]

    def _plan(self, shapes: Sequence[ShapeDtype], options: Options, places: Places) -> Plan:
        """Return the plan of a call at some places, whose gradients of keys are not rounded if ranks add them."""
        q, k, v = shapes
        if self.size > 1:
            options = options._replace(places=places)
        elif options.executor == "gpu" and isinstance(options.mask, Mask):  # its arrays are on the host
            options = options._replace(mask=options.mask.to(gpu.namespace().asarray))
        ready = planned(q, k, v, options)
        if self.method == "heads":
            return ready
        plan, kernel = ready._plan, None if ready.executor == "cpu" else options.kernel
        problem = replace(plan.problem, wide_gradients=True)
        wide = plan_for(problem, plan.mask, plan.device, kernel, bool(options.deterministic))
        return replace(ready, _plan=wide)

    # Bytes that ranks exchange

    def step_bytes(self, name: str, step: Step, dims: tuple[int, int], dtype: np.dtype[np.generic]) -> int:
        """Return the bytes that a step of a pass receives; `dims` are head_dim and value_dim."""
        if step.kind in (ATTEND, ADD) or step.rank == step.source:
            return 0
        is_copy, wide, (head_dim, value_dim) = step.kind == COPY, accumulator_dtype(dtype).itemsize, dims
        reader, holder = (step.rank, step.source) if is_copy else (step.source, step.rank)
        if self.method == "gather":
            first, stop = self.kv_groups(0)[step.group]
            rows = len(self.moved(reader, holder)) * (stop - first) * self.shape.num_batch
            return rows * (head_dim + value_dim) * (dtype.itemsize if is_copy else wide)
        (first, stop), (first_kv, stop_kv) = self.own_heads(reader)
        queries = len(self.queries.of_rank[holder]) * (stop - first) * self.shape.num_batch
        keys = len(self.keys.of_rank[holder]) * (stop_kv - first_kv) * self.shape.num_batch
        if is_copy == (name == "forward"):  # q, k and v, or their gradients
            return (queries * head_dim + keys * (head_dim + value_dim)) * dtype.itemsize
        return queries * (value_dim * dtype.itemsize + wide * (not is_copy))  # o and lse, or the gradient of o

    def traffic(self, dims: tuple[int, int], dtype: np.dtype[np.generic]) -> dict[str, Array]:
        """Return the bytes that each rank (rows) receives from each other rank (columns), by pass."""
        matrices = {name: np.zeros((self.size, self.size), np.int64) for name in self.steps}
        for name, steps in self.steps.items():
            for step in steps:
                matrices[name][step.rank, step.source] += self.step_bytes(name, step, dims, dtype)
        return matrices

    def seconds(self, name: str, head_dim: int, dtype: np.dtype[np.generic], machine: Machine) -> float:
        """Return the modeled seconds of a pass if copies and products overlap as far as the steps allow."""
        shape, loads = self.model_shape(head_dim, dtype.itemsize), self.costs.loads(self.queries)
        whole = estimate(shape._replace(imbalance=1.0), self.method, machine, backward=name == "backward").compute
        shares = loads / loads.mean() if loads.any() and self.method == "gather" else np.ones(self.size)

        tiles = self.shape.num_batch * self.shape.num_heads * self.shape.seqlen_q / TILE / self.size
        costs = dict[Hashable, tuple[float, int]]()  # of steps that differ in the group alone

        def cost(number: int, step: Step) -> tuple[float, int]:
            first, stop = self.kv_groups(step.rank)[step.group]
            is_last = step.group == len(self.kv_groups(step.rank)) - 1
            key = step.kind, step.rank, step.source, stop - first, is_last
            if key not in costs:
                part = (stop - first) / self.num_kv_heads if self.method == "gather" else 1.0
                seconds = self.step_bytes(name, step, (head_dim, head_dim), dtype) / machine.link
                if step.kind == ATTEND:
                    # The next group uses idle multiprocessors, but in a backward pass small kernels run between groups.
                    idle = idle_share(machine, tiles) if is_last or name == "backward" else 0.0
                    seconds = whole * (part * float(shares[step.rank]) + idle)
                costs[key] = seconds, self._num_issued(name, number)
            return costs[key]

        steps = self.steps[name]
        every = [cost(number, step) for number, step in enumerate(steps)]
        return finished(steps, [each for each, _ in every], [machine.launch * count for _, count in every])

    def _num_issued(self, name: str, number: int) -> int:
        """Return the number of copies and kernels that the host queues for a step."""
        kind = self.steps[name][number].kind
        if kind == TAKE and self.method == "gather":  # all heads of dk and dv are a single copy
            return len(self.moves(name, number)[0].runs)
        if kind in (COPY, TAKE):
            return self.shape.num_batch * sum(len(move.runs) for move in self.moves(name, number))
        return 1 if kind == ADD else 3 if name == "forward" else 5

    def workspace_bytes(self, head_dim: int, dtype: np.dtype[np.generic]) -> int:
        """Return the bytes of memory that a rank needs in addition to its rows and results."""
        shape, wide = self.shape, accumulator_dtype(dtype).itemsize
        heads = max((stop - first for first, stop in self.kv_groups(0)), default=0)
        keys = shape.num_batch * heads * shape.seqlen_kv * 2 * head_dim
        if self.method == "gather":
            ranks = range(self.size)
            returned = max(self.first_returned(rank, self.size) for rank in ranks)
            num_exchanged = shape.num_batch * heads * returned * 2 * head_dim
            return min(NUM_BUFFERS, len(self.groups)) * (keys * (dtype.itemsize + wide) + num_exchanged * wide)
        queries = shape.num_batch * (shape.num_heads // self.size) * shape.seqlen_q * head_dim
        return (2 * keys + 4 * queries) * dtype.itemsize

    def model_shape(self, head_dim: int = 128, itemsize: int = 2) -> CallSize:
        """Return the numbers that the cost model reads."""
        shape, loads = self.shape, self.costs.loads(self.queries)
        imbalance = float(loads.max() / loads.mean()) if loads.any() else 1.0
        scores = min(float(loads.sum()) * self.block**2, float(np.prod([shape.num_batch, *shape[1:]])))
        return CallSize(
            size=self.size, rows=shape.num_batch * shape.seqlen_kv, num_heads=shape.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=head_dim, itemsize=itemsize, scores=scores, imbalance=imbalance,
        )  # fmt: skip

    def model_seconds(self) -> float:
        """Return the modeled seconds of both passes on a typical machine, for typical arrays."""
        return sum(self.seconds(name, 128, np.dtype(np.float16), TYPICAL) for name in self.steps)

    def explain(self, head_dim: int, dtype: np.dtype[np.generic], machine: Machine) -> str:
        """Return a text about the layout, the traffic, and the cost model's estimates for both methods."""
        shape = self.model_shape(head_dim, dtype.itemsize)
        traffic = self.traffic((head_dim, head_dim), dtype)
        forward, backward = (int(each.sum(axis=1).max(initial=0)) for each in traffic.values())
        groups = ", ".join(str(stop - first) for first, stop in self.kv_groups(0))
        heads = f"key/value heads in groups of {groups}"
        if self.method == "heads":
            (_, own), (_, own_kv) = self.own_heads(0)
            heads = f"{own} query heads and {own_kv} key/value heads on each"
        counts = [len(rows) for rows in self.queries.of_rank]
        runs = [len(self.queries.runs(rank)) for rank in range(self.size)]
        lines = [
            f"ranks      {self.size}, method {self.method}: {heads}",
            f"rows       {min(counts)} to {max(counts)} queries in {min(runs)} to {max(runs)} runs, block {self.block}",
            f"work       {shape.imbalance:.3f} of the mean on the rank with the most",
            f"bytes      {forward} forward and {backward} backward, received by the rank that receives the most",
            f"workspace  {self.workspace_bytes(head_dim, dtype)} bytes",
        ]
        for method in METHODS:
            for name in ("forward", "backward"):
                each = estimate(shape, method, machine, backward=name == "backward")
                lines.append(
                    f"model      {method} {name}: products {each.compute * 1e3:.3g} ms, exchange "
                    f"{each.exchange * 1e3:.3g} ms, {each.efficiency:.3f} of linear speed if nothing is hidden"
                )
        for name in self.steps:
            linear = estimate(shape._replace(imbalance=1.0), self.method, machine, backward=name == "backward").compute
            seconds = self.seconds(name, head_dim, dtype, machine)
            share = linear / seconds if seconds else 1.0
            spent = f"{seconds * 1e3:.3g} ms, {share:.3f} of linear speed"
            lines.append(f"model      {self.method} {name} with overlap: {spent}")
        return "\n".join(lines)


def on_device(options: Options, xp: Namespace) -> Options:
    """Copy the bias, sink and score arrays of options to the device of a rank, and select its executor."""
    if xp is np:
        return options
    sink, bias, score = options.sink, options.bias, options.score
    if isinstance(score, Score) and score.arrays:
        score = score._with_arrays({name: xp.asarray(each) for name, each in score.arrays.items()})
    return options._replace(
        sink=None if sink is None else xp.asarray(sink), bias=None if bias is None else xp.asarray(bias), score=score,
        executor="gpu" if options.executor == "auto" else options.executor,
    )  # fmt: skip


def argument_reasons(arguments: Mapping[str, Any], size: int) -> list[str]:
    """Return why the arguments of a call on several ranks break their rules."""
    counts = {name: arguments[name] for name in ("seqlen", "num_heads", "num_kv_heads", "seqlen_kv")}
    if counts["num_kv_heads"] is counts["num_heads"]:  # the default
        del counts["num_kv_heads"]
    reasons = count_reasons(**{name: each for name, each in counts.items() if each is not None or name != "seqlen_kv"})
    reasons += block_reasons(arguments["block"])
    heads, kv_heads, method = (arguments[name] for name in ("num_heads", "num_kv_heads", "method"))
    is_name = isinstance(method, str)
    if not (is_name and method in ("auto", *METHODS)):
        reasons.append(f"method must be 'auto', 'gather' or 'heads'; got {describe(method)}")
    if reasons:
        return reasons
    if not (is_int(heads) and is_int(kv_heads) and kv_heads > 0 and heads % kv_heads == 0):
        return [f"num_kv_heads must be at least 1 and divide num_heads; got {describe(kv_heads)} and {describe(heads)}"]
    if method == "heads" and kv_heads % size:
        rule = f"method='heads' needs num_kv_heads ({kv_heads}) to be a multiple of the {size} ranks"
        return [f"{rule}: use method='gather'"]
    return []
