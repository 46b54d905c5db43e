"""Passes under `jax.vmap`: one call with one more batch axis, or a call per entry if results depend on its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import batching

from ..blocks.index import BlockIndex
from ..masks._chosen import ChosenBlocks
from ..masks.arrays import reads_numbers
from ..masks.base import Mask
from ..masks.content import held_masks
from ..planning.options import DOT
from ..scores import Score
from ._call import MASK
from ._own_axes import FROM_HEADS, OWN_AXES
from ._primitives import PRIMITIVES, THIRD, bind_pass
from ._runs import Pass

_OF_RESULTS = ("o", "lse", "do", "dlse")


def _batched(
    arrays: Sequence[jax.Array], axes: Sequence[int | None], **parameters: Any
) -> tuple[list[jax.Array], list[int]]:
    one = Pass(**parameters)
    mapped = {name for name, axis in zip(one.names, axes) if axis is not None}
    moved = [
        array if axis is None else jax.numpy.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes)
    ]
    if not _takes_an_axis(one, mapped):
        results = _in_turn(one, moved, mapped)
    else:
        results = _at_once(one, moved, mapped)
    return results, [0] * len(results)


def _in_turn(one: Pass, arrays: Sequence[jax.Array], mapped: set[str]) -> list[jax.Array]:
    """Run a pass for each entry of the mapped axis."""

    def of_entry(entry: dict[str, jax.Array]) -> list[jax.Array]:
        return bind_pass(one, *({**dict(zip(one.names, arrays)), **entry}[name] for name in one.names))

    entries = {name: array for name, array in zip(one.names, arrays) if name in mapped}
    results: list[jax.Array] = jax.lax.map(of_entry, entries)
    return results


def _takes_an_axis(one: Pass, mapped: set[str]) -> bool:
    """True if a pass may get one more batch axis, because nothing depends on the number of a batch entry."""
    options, of = one.call.options, one.of
    if options.dropout is not None:
        return False
    if isinstance(options.score, Score):
        if any(each.op == "b" for each in options.score.program.instructions):
            return False
        with_axis = mapped | _spread(one, mapped)
        captured = {name for name in with_axis if name.removesuffix(DOT) in options.score.arrays}
        if captured and (len(of["q"]) == 2 or "bias" in of and len(of["bias"]) < 3):
            return False
        if any(len(_num_indices(one, name.removesuffix(DOT))) > 1 for name in captured):
            return False
    mask = options.mask
    if mask is None:
        return True
    if isinstance(mask, BlockIndex):
        return mask.batch == 1
    if not isinstance(mask, Mask):  # an array of elements
        return hasattr(mask, "ndim") and mask.ndim <= 3
    if reads_numbers(mask):
        return False
    if not any(name.startswith(MASK) for name in mapped):
        return True
    # The two arrays of ChosenBlocks have unequal numbers of axes.
    kinds = {type(each) for each in held_masks(mask)}
    return ChosenBlocks not in kinds and len(kinds & OWN_AXES.keys()) == 1


def _at_once(one: Pass, arrays: Sequence[jax.Array], mapped: set[str]) -> list[jax.Array]:
    """Run a pass on arrays with one more batch axis."""
    if one.name == "curvature":  # of second tangents, which no pass computes for several entries
        raise NotImplementedError(THIRD)
    of, has_heads = one.of, len(one.of["q"]) > 2
    (size,) = {array.shape[0] for name, array in zip(one.names, arrays) if name in mapped}
    spread = _spread(one, mapped)
    ranks = [len(of[name]) - 3 for name in ("q", "k", "v")]
    num_batch = max(*ranks, 0)
    added, shapes = [], []
    for name, array in zip(one.names, arrays):
        own, own_shape = array.shape[name in mapped :], of[name]
        if not has_heads and FROM_HEADS.get(name.removesuffix(DOT), 1) > 1:
            own, own_shape = (1, *own), (1, *own_shape)
        is_mapped = name in mapped
        has_axis = is_mapped or name in spread
        missing = (1,) * (num_batch + _own_axes(one, name) - len(own_shape)) if has_axis else ()
        leading = (array.shape[0], *missing, *(1,) * (len(own_shape) - len(own))) if is_mapped else ()
        added.append(array.reshape(*leading, *own))
        shapes.append((size, *missing, *own_shape) if has_axis else own_shape)
    results = bind_pass(one._replace(shapes=tuple(shapes)), *added)
    return [result.reshape(size, *each.shape) for result, each in zip(results, one.results)]


def _spread(one: Pass, mapped: set[str]) -> set[str]:
    """Return the names of arrays that are not mapped but must have the mapped axis, along which they repeat."""
    own = [name for name in one.names if not name.endswith(DOT)]
    spread = {name for name in own if name in _OF_RESULTS}
    if one.name.startswith("backward"):  # each entry has its own gradients
        spread |= {"q", "k", "v", *one.wrt}
    spread |= {name for name in own if {name, f"{name}{DOT}"} & mapped and f"{name}{DOT}" in one.names}
    if not {"q", "k", "v"} & (mapped | spread):
        spread.add("q")
    return {name for name in one.names if name.removesuffix(DOT) in spread} - mapped


def _own_axes(one: Pass, name: str) -> int:
    """Return the number of an array's axes after those that broadcast over the batch."""
    name = name.removesuffix(DOT)
    if name in FROM_HEADS:
        return FROM_HEADS[name]
    if name.startswith(MASK):
        mask: Any = one.call.options.mask
        return next(OWN_AXES[type(each)] for each in held_masks(mask) if type(each) in OWN_AXES)
    if name == "bias":
        return 3
    return min(_num_indices(one, name), default=0)


def _num_indices(one: Pass, name: str) -> set[int]:
    """Return the numbers of indices with which a score function reads an array, after axes that it broadcasts."""
    score: Any = one.call.options.score
    loads = (each for each in score.program.instructions if each.op == "load")
    return {len(each.args) for each in loads if score.program.arrays[each.value].name == name}


def batch_passes() -> None:
    """Register the batching rule of all passes with JAX."""
    for primitive in PRIMITIVES.values():  # the documentation is built with a stand-in for JAX that has no items
        batching.primitive_batchers.__setitem__(primitive, _batched)
