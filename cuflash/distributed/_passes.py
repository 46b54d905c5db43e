"""The passes of one call on a rank: they gather rows, attend to them, and return gradients to their owners."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Array, ShapeDtype, accumulator_dtype, describe, namespace
from ..executors import gpu
from ..keywords import explains_keywords
from ..plans.fit import require_fit
from ..plans.plan import Gradients, named_gradients
from ._group import Group
from ._lanes import Addresses, Arranged, Move, Region, Route, RowSums, Task
from ._posed import Part, Posed
from ._schedule import ADD, COPY, NUM_BUFFERS, TAKE, Program, Step, program

_ALIGNMENT = 128  # elements; parts of memory that several arrays share start at multiples of it


class Pass:
    """The steps of a pass on this rank; each is prepared once for arrays of one layout.

    Attributes
    ----------
    group : Group
    steps, program
        Those of all ranks.
    arrays : dict of arrays by name
        This rank's arrays, which other ranks read.
    """

    def __init__(
        self, group: Group, steps: Sequence[Step], issued: Program, arrays: dict[str, Array],
        tasks: dict[int, list[Task]],
    ) -> None:  # fmt: skip
        self.group, self.steps, self.program, self.arrays, self._tasks = group, steps, issued, arrays, tasks
        self.addresses = Addresses(arrays)

    def routes(self, number: int) -> Sequence[Route]:
        """Return the rows that a step moves, on any rank."""
        raise NotImplementedError

    def do(self, number: int, source: Arranged) -> None:
        """Run a step of this rank that reads the arrays of a pass of another, or of this one."""
        tasks = self._tasks.get(number)
        if tasks is None:
            tasks = self._tasks[number] = self._prepared(number, source)
        for task in tasks:
            task(self, source)

    def _prepared(self, number: int, source: Arranged) -> list[Task]:
        """Return functions that run a step."""
        return [self.group._lanes.copier(self.routes(number), self.arrays, source.arrays)]


class Gather(Pass):
    """Copies that collect the rows of all ranks on every rank, for arrays [heads, rows, dim].

    Each array has the rows of all ranks in "all " with its name.
    """

    def __init__(self, group: Group, arrays: Mapping[str, Array], places: Sequence[tuple[tuple[int, int, int], ...]]):
        steps = tuple(Step(COPY, rank, source, 0) for rank in range(group.size) for source in range(group.size))
        rows, self._places, self._names = sum(count for runs in places for _, _, count in runs), places, [*arrays]
        every = {f"all {name}": namespace(x).empty((len(x), rows, x.shape[2]), x.dtype) for name, x in arrays.items()}
        super().__init__(group, steps, program(steps, group.size), {**arrays, **every}, {})

    def routes(self, number: int) -> list[Route]:
        runs, every = self._places[self.steps[number].source], slice(0, None)
        return [(Move(name, every, every, runs), Region(f"all {name}"), Region(name)) for name in self._names]


@dataclass(eq=False)
class Prepared:
    """Plans, memory and prepared steps of a rank's calls on arrays of one layout.

    Attributes
    ----------
    group : Group
    posed : Posed
    parts : list of Part
        The groups of heads with their plans.
    texts : dict of str by name
        The arguments that must be equal on all ranks.
    dims : (int, int)
        head_dim and value_dim.
    dtype : dtype
    tasks : dict of functions by pass and number of the step
    constants : dict of arrays by name
        Arrays that plans read in addition to q, k and v.
    memory : dict of dict of ShapeDtype by name, by pass
        Memory that each call needs in addition to its results.
    regions : dict of Region by (name of the memory, "k" or "v", group)
        With the method "gather": "keys" of all ranks, "sums" of their gradients, and gradients that are "received".
    """

    group: Group
    posed: Posed
    parts: list[Part]
    texts: dict[str, str]
    dims: tuple[int, int]
    dtype: np.dtype[np.generic]
    tasks: dict[Hashable, dict[int, list[Task]]] = field(default_factory=dict, init=False)
    constants: dict[str, Array] = field(default_factory=dict, init=False)
    memory: dict[str, dict[str, ShapeDtype]] = field(default_factory=dict, init=False)
    regions: dict[tuple[str, str, int], Region] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        posed, wide = self.posed, accumulator_dtype(self.dtype)
        if posed.method == "gather":
            num_keys = posed.shape.seqlen_kv
            keys = {"keys": ShapeDtype((self._share("keys", num_keys),), self.dtype)}
            rows = {"sums": num_keys, "received": posed.first_returned(self.group.rank, posed.size)}
            sums = {name: ShapeDtype((self._share(name, count),), wide) for name, count in rows.items()}
            self.memory |= {"forward": keys, "backward": keys | sums}
            return
        num_heads, num_kv_heads = (each.stop - each.start for each in (self.parts[0].heads, self.parts[0].kv_heads))
        of_queries, of_keys = (num_heads, posed.shape.seqlen_q), (num_kv_heads, posed.shape.seqlen_kv)
        for name, count in zip(("q", "k", "v", "o", "lse"), (*self.dims[:1] * 2, *self.dims[1:] * 2, 1)):
            shape = *posed.shape.batch, *(of_keys if name in ("k", "v") else of_queries), count
            like = ShapeDtype(shape, wide if name == "lse" else self.dtype)
            for of_pass, prefix in (("forward", "all "), ("backward", "all d")):
                self.memory.setdefault(of_pass, {})[prefix + name] = like

    def _share(self, name: str, rows: int) -> int:
        """Assign regions of memory to keys and values of all groups, in turn, and return the number of elements."""
        size, starts = 0, dict[tuple[str, int], tuple[int, tuple[int, ...]]]()
        for group, (first, stop) in enumerate(self.posed.groups):
            end = 0
            for each, columns in zip("kv", self.dims):
                shape = *self.posed.shape.batch, stop - first, rows, columns
                starts[each, group] = end, shape
                end += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
            size = max(size, end)
        for (each, group), (start, shape) in starts.items():
            self.regions[name, each, group] = Region(name, (...,), group % NUM_BUFFERS * size + start, shape)
        return min(NUM_BUFFERS, len(self.posed.groups)) * size

    @cached_property
    def tables(self) -> tuple[Array, Array]:
        """The tables of `RowSums` of own keys, and of gradients that are received."""
        posed, rank, sent = self.posed, self.group.rank, self.group._lanes.sent
        return sent(posed.own_keys(rank)), sent(posed.returned_gradients(rank))


class _Attention(Pass):
    """A pass of attention on this rank."""

    name: str

    def __init__(self, prepared: Prepared, key: Hashable, arrays: Mapping[str, Array]) -> None:
        self.prepared, self.posed, self.parts = prepared, prepared.posed, prepared.parts
        self._gathers, empty = self.posed.method == "gather", prepared.group._lanes.namespace.empty
        memory = {name: empty(like.shape, like.dtype) for name, like in prepared.memory[self.name].items()}
        steps, issued, every = self.posed.steps, self.posed.programs, {**prepared.constants, **arrays, **memory}
        tasks = prepared.tasks.setdefault(key, {})
        super().__init__(prepared.group, steps[self.name], issued[self.name], every, tasks)

    def routes(self, number: int) -> list[Route]:
        step = self.steps[number]
        moves = (move for move in self.posed.moves(self.name, number) if move.name != "dlse" or "dlse" in self.arrays)
        return [(move, *self._ends(step, move.name)) for move in moves]

    def _ends(self, step: Step, name: str) -> tuple[Region, Region]:
        """Return where rows of an array go, and where they come from."""
        if not self._gathers:
            ends = Region(f"all {name}"), Region(name)
            return ends if step.kind == COPY else (ends[1], ends[0])
        regions, group = self.prepared.regions, step.group
        if step.kind == COPY:
            return regions["keys", name, group], Region(name)
        return regions["received", name[1:], group], regions["sums", name[1:], group]

    def _prepared(self, number: int, source: Arranged) -> list[Task]:
        step = self.steps[number]
        if step.kind in (COPY, TAKE):
            return super()._prepared(number, source)
        regions, tasks = self.prepared.regions, list[Task]()
        if self._gathers:
            is_sum, group, pairs = step.kind == ADD, step.group, list[tuple[Region, Region, Region]]()
            for each in "kv":
                own = Region("d" * is_sum + each, (..., self.parts[group].kv_heads, slice(None), slice(None)))
                if is_sum:
                    pairs.append((own, regions["sums", each, group], regions["received", each, group]))
                else:
                    pairs.append((regions["keys", each, group], own, own))
            sums = RowSums(tuple(pairs), self.prepared.tables[is_sum])
            tasks.append(self.group._lanes.adder(sums, self.arrays))
        if step.kind != ADD:
            tasks += (self._attending(step.group, n) for n in range(len(self.parts[step.group].plans)))
        return tasks

    def _attending(self, group: int, n: int) -> Task:
        """Return a function that runs plan `n` of a group of heads."""
        part, lanes = self.parts[group], self.group._lanes
        rows, plan = part.plans[n]
        heads, prefix = (part.heads, "") if self._gathers else (slice(None), "all ")

        def queries(*names: str) -> dict[str, Region]:
            return {
                name: Region(prefix + name, (..., heads, rows, 0 if "lse" in name else slice(None)))
                for name in names if name in self.arrays
            }  # fmt: skip

        def keys(memory: str, *names: str) -> dict[str, Region]:
            of = self.prepared.regions
            return {name: of[memory, name[-1], group] if self._gathers else Region(prefix + name) for name in names}

        if self.name == "forward":
            inputs, outs = queries("q"), queries("o", "lse")
        else:
            inputs, outs = queries("do", "q", "o", "lse", "dlse"), queries("dq")
            outs |= {} if n else keys("sums", "dk", "dv")
        inputs |= keys("keys", "k", "v")
        for name, array in plan._with_operands(self.name, {}, part.operands).items():
            inputs[name] = Region(f"{name} of {group}.{n}")
            self.arrays[inputs[name].name] = self.prepared.constants[inputs[name].name] = array
        read, written = ({name: each.of(self.arrays) for name, each in some.items()} for some in (inputs, outs))
        require_fit(plan._plan, plan.executor, self.name, read, {})
        launch = lanes.launcher(plan, self.name, inputs, outs, self.arrays)
        if launch is not None:
            return launch
        bound = plan._bind(self.name, read, written)

        def run(own: Any, other: Any) -> None:
            if plan._lists is not None:
                plan._lists.guard.use(gpu.current_target().stream())
            read, written = ({name: each.of(own.arrays) for name, each in some.items()} for some in (inputs, outs))
            results = bound.run(read, written, plan._numbers)
            for out, result in zip(written.values(), results):
                if out is not result:  # which was scaled or summed after the kernels
                    out[...] = result
            if own.name == "backward":
                own.keep(part, group, n, named_gradients(plan._plan.problem, results))

        return run


class RankCall(_Attention):
    """The forward pass of one call on this rank.

    Attributes
    ----------
    o, lse : array
        Results of this rank's rows.
    """

    name = "forward"

    def __init__(self, prepared: Prepared, arrays: Mapping[str, Array]) -> None:
        xp = prepared.group._lanes.namespace
        q, _, v = own = [x if x.flags.c_contiguous else xp.ascontiguousarray(x) for x in arrays.values()]
        self.o = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
        self.lse = xp.empty(q.shape[:-1], accumulator_dtype(q.dtype))
        results = {"o": self.o, "lse": self.lse[..., None]}
        super().__init__(prepared, self.name, dict(zip(arrays, own)) | results)


class _Backward(_Attention):
    """The backward pass of one call on this rank.

    Attributes
    ----------
    others : dict of arrays by name and lane
        This rank's part of the gradients of other arrays, in the dtype of accumulators; each lane adds to its own.
    """

    name = "backward"

    def __init__(self, prepared: Prepared, arrays: Mapping[str, Array], cotangents: Mapping[str, Array]) -> None:
        xp, self.others = prepared.group._lanes.namespace, dict[tuple[str, int], Array]()
        gradients = {f"d{name}": xp.empty_like(arrays[name]) for name in "qkv"}
        super().__init__(prepared, (self.name, "dlse" in cotangents), {**arrays, **cotangents, **gradients})

    def keep(self, part: Part, group: int, n: int, gradients: Gradients) -> None:
        """Add the gradients of plan `n` of a group of heads to those of the plans before it."""
        for name, each in {"k": gradients.dk, "v": gradients.dv}.items() if n else ():
            total = self.prepared.regions["sums", name, group].of(self.arrays)
            total += each
        for name, each in gradients.others.items():
            whole = self._of_all_heads(part, each) if name == "sink" else each
            key = name, group % NUM_BUFFERS
            self.others[key] = self.others.get(key, 0) + whole.astype(accumulator_dtype(whole.dtype))

    def _of_all_heads(self, part: Part, dsink: Array) -> Array:
        sink: Array = self.posed.options.sink
        shape: tuple[int, ...] = np.shape(sink)
        if dsink.shape == shape:
            return dsink
        whole = self.group._lanes.namespace.zeros(shape, dsink.dtype)
        whole[..., part.heads] = dsink
        return whole

    def other_gradients(self) -> dict[str, Array]:
        """Return the gradients of other arrays, summed over the ranks in order, on every rank."""
        operands = self.parts[0].plans[0][1]._plan.problem if self.parts else None
        if operands is None or not operands.wrt:
            return {}
        group, dtypes = self.group, {each.name: each.dtype for each in operands.operands}
        own: dict[str, Any] = {}
        for (name, _), each in sorted(self.others.items(), key=lambda item: item[0]):
            own[name] = own.get(name, 0) + each
        arrays = {name: namespace(each).ascontiguousarray(each).reshape(1, 1, -1) for name, each in own.items()}
        gather = Gather(group, arrays, [((0, source, 1),) for source in range(group.size)])
        group._perform("the gradients of other arrays", {}, [], gather)
        sums = dict[str, Array]()
        for name, mine in own.items():
            parts = gather.arrays[f"all {name}"][0]
            total = parts[0].copy()
            for source in range(1, group.size):
                total += parts[source]
            sums[name] = total.reshape(mine.shape).astype(dtypes[name])
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
        self._prepared, self._o, self._lse = call.prepared, call.o, call.lse
        self._arrays = {name: x for name, x in call.arrays.items() if name != "keys"}  # which move again

    def __call__(self, do: Array, dlse: Array | None = None) -> Gradients:
        """Return this rank's rows of the gradients of sum(do * o) + sum(dlse * lse) over the rows of all ranks.

        Raises
        ------
        UnsupportedProblem
            An argument does not match o or lse, or the arguments of other ranks; every rank raises it.
        PeerLost
            Another rank is lost.
        """
        group, cotangents = self._prepared.group, dict[str, Array]()
        reasons = _reasons("do", do, self._o) + ([] if dlse is None else _reasons("dlse", dlse, self._lse))
        if not reasons:
            cotangents["do"] = group._lanes.namespace.ascontiguousarray(do)
            if dlse is not None:
                cotangents["dlse"] = group._lanes.namespace.ascontiguousarray(dlse)[..., None]
        backward = None if reasons else _Backward(self._prepared, self._arrays, cotangents)
        group._perform("vjp", {"dlse": "None" if dlse is None else "an array"}, reasons, backward)
        assert backward is not None
        dq, dk, dv = (backward.arrays[f"d{name}"] for name in "qkv")
        return Gradients(dq, dk, dv, backward.other_gradients())


def _reasons(name: str, array: Array, like: Array) -> list[str]:
    if type(array) is type(like) and array.shape == like.shape and array.dtype == like.dtype:
        return []
    kind = "NumPy" if isinstance(like, np.ndarray) else "CuPy"
    return [f"{name} must be a {kind} array of shape {like.shape} and dtype {like.dtype}; got {describe(array)}"]
