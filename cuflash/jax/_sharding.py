"""Passes on arrays that are sharded over devices, under `jax.jit`: each device computes its batch entries and heads.

XLA's partitioner asks which axes of the arrays correspond, and then for the pass on one shard. Axes that a shard must
have as a whole are gathered: rows, keys and columns; and batch entries or heads, if results depend on their numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import Array, is_array
from ..blocks.index import BlockIndex
from ..masks.arrays import Dense, reads_numbers
from ..masks.base import Mask
from ..masks.block_pattern import BlockPattern
from ..masks.content import Described, held_arrays, held_masks
from ..planning.options import DOT, MaskLike, ScoreLike
from ..scores import Score
from ._call import MASK, Slot
from ._own_axes import FROM_HEADS, OWN_AXES
from ._runs import Pass

HEADS = "h"  # the name of the axis of heads; those of batch axes are "b0", the last one, "b1", ...
_GROUP = "g"  # query heads per key head

GATHERED_BYTES = 64 << 20  # of a smaller array nothing is said
BindLocal: TypeAlias = Callable[..., list["jax.Array"]]
Labels = tuple[str | None, ...]  # the name of each axis of an array that may be sharded


class _Captured(NamedTuple):
    """The axes of an array of a score function or a mask.

    Attributes
    ----------
    num_own : int
        The number of axes after those that broadcast over the batch.
    heads : int, optional
        The axis of heads, counted from the end.
    """

    num_own: int
    heads: int | None = None


class Axes:
    """The axes of the arrays of a pass along which each device may compute a part.

    Attributes
    ----------
    extents : dict of int by name
        The extents of batch axes and of heads, which the number of parts must divide.

    Parameters
    ----------
    one : Pass
    """

    def __init__(self, one: Pass) -> None:
        self._one, of = one, one.of
        self.extents: dict[str, int] = {}
        if len(of["q"]) < 3:
            return
        self._heads, self._kv_heads = of["q"][-3], max(of["k"][-3], of["v"][-3])
        captured, batch, heads = _of_score(one.call.options.score)
        of_mask, mask_batch, mask_heads = _of_mask(one.call.options.mask)
        self._captured = captured | {name: of_mask for name in of if name.startswith(MASK)}
        has_dropout = one.call.options.dropout is not None
        if batch and mask_batch and not has_dropout:
            shape = np.broadcast_shapes(*(of[name][:-3] for name in ("q", "k", "v")))
            self.extents |= {f"b{n}": extent for n, extent in enumerate(reversed(shape)) if extent > 1}
        if heads and mask_heads and not has_dropout and self._heads > 1:
            self.extents[HEADS] = self._kv_heads if self._kv_heads > 1 else self._heads

    @property
    def group(self) -> int:
        """Query heads per key head, if key heads are several."""
        return self._heads // self._kv_heads if self._kv_heads > 1 else 1

    def labels(self, name: str, shape: Sequence[int]) -> Labels:
        """Return the names of the axes of an array with a shape."""
        name, rank = name.removesuffix(DOT), len(shape)
        if not self.extents:
            return (None,) * rank
        own, of_heads = FROM_HEADS.get(name), self._heads if self.is_of_queries(name) else self._kv_heads
        place = self._captured.get(name) if own is None else _Captured(own, own)
        if place is None:
            return (None,) * rank
        num_own, heads = place
        labels: list[str | None] = [None] * rank
        for axis in range(rank - num_own):
            label = f"b{rank - num_own - 1 - axis}"
            labels[axis] = label if shape[axis] == self.extents.get(label) else None
        if heads is not None and HEADS in self.extents and heads <= rank and shape[-heads] == of_heads > 1:
            labels[-heads] = HEADS
        return tuple(labels)

    def is_of_queries(self, name: str) -> bool:
        """True if an array's heads are those of queries."""
        return name.removesuffix(DOT) not in ("k", "v")


def _of_score(score: ScoreLike | None) -> tuple[dict[str, _Captured], bool, bool]:
    """Return where arrays of a score have their axes, and whether batch entries and heads may be split."""
    if not isinstance(score, Score):
        return {}, True, True
    instructions, arrays = score.program.instructions, score.program.arrays
    captured, heads = dict[str, _Captured](), True
    of_heads = {number for number, each in enumerate(instructions) if each.op == "h"}
    for each in instructions:
        indexed = [len(each.args) - n for n, number in enumerate(each.args) if number in of_heads]
        if each.op != "load":
            heads = heads and not indexed
            continue
        place = _Captured(len(each.args), indexed[0] if indexed else None)
        heads = heads and len(indexed) < 2 and captured.setdefault(arrays[each.value].name, place) == place
    return captured, all(each.op != "b" for each in instructions), heads and not of_heads & {*score.program.results}


def _of_mask(mask: MaskLike | None) -> tuple[_Captured, bool, bool]:
    """Return where arrays of a mask have their axes, and whether batch entries and heads may be split."""
    nothing = _Captured(0)
    if mask is None:
        return nothing, True, True
    if isinstance(mask, BlockIndex):
        return nothing, mask.batch == 1, mask.num_heads == 1
    if not isinstance(mask, Mask):
        return nothing, *_are_alike(mask, _Captured(3, 3))
    if reads_numbers(mask):
        return nothing, False, False
    arrays, with_arrays = [*held_arrays(mask)], {type(each) for each in held_masks(mask)} & OWN_AXES.keys()
    if not arrays:
        return nothing, True, True
    if len(with_arrays) != 1 or any([*held_arrays(each)] and type(each) not in OWN_AXES for each in _leaves(mask)):
        return nothing, False, False
    (kind,) = with_arrays
    place = _Captured(OWN_AXES[kind], 3 if kind in (Dense, BlockPattern) else None)
    others = [_are_alike(array, place) for array in arrays if not isinstance(array, Slot)]
    return place, all(batch for batch, _ in others), all(heads for _, heads in others)


def _leaves(mask: Mask) -> Iterator[Described]:
    """Yield the masks that consist of no other masks."""
    for each in held_masks(mask):
        if len([*held_masks(each)]) == 1:
            yield each


def _are_alike(array: Array, place: _Captured) -> tuple[bool, bool]:
    """Return whether an array of NumPy says the same of all batch entries and of all heads."""
    if not is_array(array):
        return False, False
    shape = (*(1,) * place.num_own, *array.shape)
    return all(extent == 1 for extent in array.shape[: max(0, array.ndim - place.num_own)]), (
        place.heads is None or shape[-place.heads] == 1
    )


def rule_of(one: Pass, shapes: Sequence[tuple[int, ...]]) -> SdyShardingRule:
    """Return which axes of the arrays and results correspond; `shapes` are those of the arrays in memory."""
    axes, whole = Axes(one), list[str]()

    def factor(name: str, label: str | None) -> str | CompoundFactor:
        if label is None:
            whole.append(f"x{len(whole)}")
            return whole[-1]
        if label != HEADS or not axes.is_of_queries(name) or axes.group == 1:
            return label
        if _GROUP not in whole:
            whole.append(_GROUP)
        return CompoundFactor(HEADS, _GROUP)

    mappings = [
        ArrayMapping(*(factor(name, label) for label in axes.labels(name, shape)))
        for name, shape in (*zip(one.names, shapes), *_results(one))
    ]
    number, sizes = len(one.names), {_GROUP: axes.group} if _GROUP in whole else {}
    return SdyShardingRule(
        tuple(mappings[:number]), tuple(mappings[number:]), need_replication_factors=tuple(whole), **sizes
    )


def _results(one: Pass) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the results."""
    return [(name, each.shape) for name, each in zip(one.result_names, one.results, strict=True)]


def parts(
    one: Pass, mesh: Mesh, arrays: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]
) -> dict[str, tuple[str, ...]]:
    """Return the axes of a mesh along which each axis of a pass is split, by the shardings of arrays and results."""
    axes, chosen, taken = Axes(one), dict[str, tuple[str, ...]](), set[str]()
    named = [*zip(one.names, arrays), *((name, each) for (name, _), each in zip(_results(one), results))]
    for name, array in named:
        for label, names in zip(axes.labels(name, array.shape), _split(array, mesh)):
            if label is None or label in chosen or not names or taken & {*names}:
                continue
            if axes.extents[label] % _count(mesh, names) == 0:
                chosen[label] = names
                taken |= {*names}
    return chosen


def _split(array: jax.ShapeDtypeStruct, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the axes of a mesh along which each axis of an array is split; none for a split that they do not name."""
    if array.sharding is None or mesh.empty:
        return [()] * len(array.shape)
    places = array.sharding.devices_indices_map(tuple(array.shape))
    starts = {device: [part.start or 0 for part in place] for device, place in places.items()}
    devices = mesh.devices
    first, split = starts[devices.flat[0]], []
    for axis in range(len(array.shape)):
        steps = dict[str, int]()
        for number, (name, size) in enumerate(mesh.shape.items()):
            neighbor = tuple(int(size > 1 and n == number) for n in range(devices.ndim))
            if starts[devices[neighbor]][axis] != first[axis]:
                steps[name] = abs(starts[devices[neighbor]][axis] - first[axis])
        names = tuple(sorted(steps, key=lambda name: -steps[name]))
        num_parts = len({start[axis] for start in starts.values()})
        split.append(names if _count(mesh, names) == num_parts else ())
    return split


def _warn_of_gathered(one: Pass, mesh: Mesh, arrays: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Warn of a large array that each device needs as a whole along an axis that is split."""
    axes = Axes(one)
    for name, array in zip(one.names, arrays):
        nbytes = math.prod(array.shape) * array.dtype.itemsize
        for axis, (label, names) in enumerate(zip(axes.labels(name, array.shape), _split(array, mesh))):
            if names and label is None and nbytes > GATHERED_BYTES:
                over, fix = " and ".join(map(repr, names)), "shard batch entries or heads"
                warnings.warn(
                    f"{name} is sharded over {over} along axis {axis}, which each device needs as a whole: XLA gathers "
                    f"its {nbytes >> 20} MiB at each call; {fix}, or call within jax.shard_map with q_start",
                    stacklevel=2,
                )  # fmt: skip


def _count(mesh: Mesh, names: Sequence[str]) -> int:
    """Return the number of parts of an axis that is split along axes of a mesh."""
    return math.prod(mesh.shape[each] for each in names)


def _spec(labels: Labels, chosen: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(None if label is None else chosen.get(label) for label in labels))


def partitioned(bind_local: BindLocal, one: Pass, *arrays: jax.Array) -> list[jax.Array]:
    """Run a pass on arrays that XLA may shard; `bind_local` runs a pass on the arrays of one device."""
    axes = Axes(one)

    def shardings(mesh: Mesh, shapes: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]) -> Any:
        chosen = parts(one, mesh, shapes, results)
        if mesh.empty:  # arrays of several meshes; each device computes everything
            devices = next(each.sharding.device_set for each in shapes if each.sharding is not None)
            mesh = Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("all",))
        of_arrays = [axes.labels(name, each.shape) for name, each in zip(one.names, shapes)]
        of_results = [axes.labels(*each) for each in _results(one)]
        placed = [[NamedSharding(mesh, _spec(each, chosen)) for each in labels] for labels in (of_arrays, of_results)]
        return mesh, chosen, *placed

    def partition(mesh: Mesh, shapes: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]) -> Any:
        _warn_of_gathered(one, mesh, shapes)
        mesh, chosen, of_arrays, of_results = shardings(mesh, shapes, results)
        counts = {label: _count(mesh, names) for label, names in chosen.items()}
        own = tuple(
            tuple(extent // counts.get(label or "", 1) for extent, label in zip(shape, axes.labels(name, shape)))
            for name, shape in zip(one.names, one.shapes)
        )
        sums = [
            tuple(name for label, names in chosen.items() if label not in axes.labels(*each) for name in names)
            for each in _results(one)
        ]
        return mesh, partial(_on_shard, bind_local, one._replace(shapes=own), sums), of_results, tuple(of_arrays)

    def inferred(mesh: Mesh, shapes: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]) -> Any:
        *_, of_results = shardings(mesh, shapes, ())
        return of_results

    pass_on = custom_partitioning(lambda *arrays: bind_local(one, *arrays))
    rule = rule_of(one, [array.shape for array in arrays])
    pass_on.def_partition(
        partition, infer_sharding_from_operands=inferred, sharding_rule=rule, decode_shardings=False
    )
    results: list[jax.Array] = pass_on(*arrays)
    return results


def _on_shard(
    bind_local: BindLocal, one: Pass, sums: Sequence[tuple[str, ...]], *arrays: jax.Array
) -> list[jax.Array]:
    """Run a pass on the arrays of one device, and add up gradients over the devices that share an array."""
    results = bind_local(one, *arrays)
    return [_added(result, names) if names else result for result, names in zip(results, sums)]


def _added(gradient: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return the sum of gradients over axes of a mesh, rounded once."""
    wide = jax.numpy.promote_types(gradient.dtype, np.float32)
    return jax.lax.psum(gradient.astype(wide), names).astype(gradient.dtype)
