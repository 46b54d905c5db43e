"""Traced score functions (programs) on tiles of the cpu executor, evaluated in blocks that fit in the cache.

An instruction that depends on the score, or on both query and key, has a value for each score of a tile. Its values are
computed block by block, and replace values in memory that are no longer needed. All other instructions are computed
once per tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array
from ..scores._primitives import PRIMITIVES
from ..scores.program import BlockKind, Instruction, Program, depends
from ..scores.values import Operands, result

_BLOCK = 1 << 17  # scores per block; for smaller blocks the overhead of NumPy calls exceeds the gain from the cache


class Block(NamedTuple):
    """A part of tiles of scores [tiles, keys, queries], with the values of a program on it.

    Attributes
    ----------
    tiles, keys : slice
        The ranges of the block along both axes; a block contains all queries.
    values : mapping of int to array or number
        The values of the requested instructions, which broadcast against the block. They are valid until the next
        block is computed.
    """

    tiles: slice
    keys: slice
    values: Mapping[int, Array]

    def of(self, x: Array) -> Array:
        """Return the part of an array that broadcasts against the tiles; numbers are returned unchanged."""
        if np.ndim(x) != 3:
            return x
        return x[self.tiles if len(x) > 1 else slice(None), self.keys if x.shape[1] > 1 else slice(None)]


class _Step(NamedTuple):
    """An instruction with a value for each score, and the index of the memory for that value."""

    n: int
    instruction: Instruction
    memory: int


class _Schedule(NamedTuple):
    """The instructions computed once per tile, those computed per block, and the kind of each memory of a block."""

    of_tile: tuple[int, ...]
    of_block: tuple[_Step, ...]
    memories: tuple[BlockKind, ...]


@lru_cache(maxsize=128)
def _schedule(program: Program, requested: frozenset[int]) -> _Schedule:
    """Order a program's instructions, so that values of `requested` are not overwritten within a block."""
    dependencies = depends(program)
    varies = ["s" in inputs or {"i", "j"} <= inputs for inputs in dependencies]
    last_use = {a: n for n, instruction in enumerate(program.instructions) for a in instruction.args if varies[n]}
    memories: list[BlockKind] = []
    free: dict[BlockKind, list[int]] = {"real": [], "int": [], "bool": []}
    memory_of: dict[int, int] = {}
    steps = []
    for n, instruction in enumerate(program.instructions):
        if not varies[n]:
            continue
        ended = [a for a in {*instruction.args} if last_use[a] == n and a in memory_of and a not in requested]
        # `where` writes its result before it has read all arguments
        before, after = ([], ended) if instruction.op == "where" else (ended, [])
        for a in before:
            free[memories[memory_of[a]]].append(memory_of[a])
        if instruction.op not in ("s", "s_dot", "load"):
            own = free[instruction.kind]
            if not own:
                own.append(len(memories))
                memories.append(instruction.kind)
            memory_of[n] = own.pop()
        for a in after:
            free[memories[memory_of[a]]].append(memory_of[a])
        steps.append(_Step(n, instruction, memory_of.get(n, -1)))
    of_tile = tuple(n for n, has_one_each in enumerate(varies) if not has_one_each)
    return _Schedule(of_tile, tuple(steps), tuple(memories))


def blocks(
    program: Program, operands: Operands, s: Array, at: tuple[Array, ...], requested: frozenset[int],
    s_dot: Array | None = None,
) -> Iterator[Block]:
    """Evaluate a program on tiles of scores, block by block.

    Parameters
    ----------
    program : Program
    operands : Operands
    s : array [tiles, keys, queries]
        Scores; a block of them may be overwritten after it is yielded.
    at : tuple of int arrays
        b, h, i and j in the format of `tile_scores.coordinates`.
    requested : frozenset of int
        The instructions whose values each block must have.
    s_dot : array [tiles, keys, queries], optional
        Tangents of the scores, for a program that reads them; they may be overwritten like the scores.
    """
    schedule, real = _schedule(program, requested), s.dtype.type
    b = at[0]
    by_op = dict(zip("bhij", at))
    of_tile: dict[int, Array] = {}
    for n in schedule.of_tile:
        instruction = program.instructions[n]
        args = [of_tile[a] for a in instruction.args]
        own = by_op.get(instruction.op)
        of_tile[n] = result(program, operands, instruction, args, b, real) if own is None else own
    read = {a for step in schedule.of_block for a in step.instruction.args}.union(requested).intersection(of_tile)
    dtypes: dict[BlockKind, DTypeLike] = {"real": s.dtype, "int": np.int64, "bool": np.bool}
    memories: list[Array] = []
    for tiles, keys in _parts(s.shape):
        block = Block(tiles, keys, {})
        part = s[tiles, keys]
        if not memories or memories[0].shape != part.shape:
            memories = [np.empty(part.shape, dtypes[kind]) for kind in schedule.memories]
        values = {n: block.of(of_tile[n]) for n in read}
        for n, instruction, memory in schedule.of_block:
            args = [values[a] for a in instruction.args]
            if instruction.op == "s":
                values[n] = part
            elif instruction.op == "s_dot":
                assert s_dot is not None
                values[n] = s_dot[tiles, keys]
            elif instruction.op == "load":
                values[n] = result(program, operands, instruction, args, block.of(b), real)
            else:
                values[n] = memories[memory]
                _write(instruction.op, args, memories[memory])
        yield block._replace(values=values)


def _write(op: str, args: list[Array], out: Array) -> None:
    """Write an operation's result to `out`, which may be the memory of an argument unless `op` is "where"."""
    if op == "real":
        out[...] = args[0]
    elif op == "where":
        np.copyto(out, args[2])
        np.copyto(out, args[1], where=args[0])
    else:
        PRIMITIVES[op].value(*args, out=out)


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield parts of about `_BLOCK` scores: whole tiles, or some keys of one tile."""
    num_tiles, num_keys, num_queries = shape
    tiles = max(1, _BLOCK // max(1, num_keys * num_queries))
    keys = num_keys if tiles > 1 else max(1, _BLOCK // max(1, num_queries))
    for tile in range(0, num_tiles, tiles):
        for key in range(0, num_keys, keys):
            yield slice(tile, tile + tiles), slice(key, key + keys)
