"""Score programs on tiles of the cpu executor, in blocks that stay in a processor's cache.

An instruction that depends on the score, or on both query and key, has a value for each score of a tile. It is computed
block by block, in the memory of values that are no longer needed. All other instructions are computed once a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..scores._primitives import PRIMITIVES
from ..scores.program import BlockKind, Instruction, Program, depends
from ..scores.values import Operands, result

_BLOCK = 1 << 17  # number of scores of a block; with fewer, NumPy's calls themselves take as long as the cache saves


class Block(NamedTuple):
    """A part of tiles of scores [tiles, keys, queries], with the values of a program there.

    Attributes
    ----------
    tiles, keys : slice
        The part of both axes; it has all queries.
    values : mapping of int to array or number
        The values of instructions that were asked for, which broadcast against the block. They last until the next
        block is made.
    """

    tiles: slice
    keys: slice
    values: Mapping[int, Any]

    def of(self, x: Any) -> Any:
        """The part of an array that broadcasts against the tiles; a number is its own part."""
        if np.ndim(x) != 3:
            return x
        return x[self.tiles if len(x) > 1 else slice(None), self.keys if x.shape[1] > 1 else slice(None)]


class _Step(NamedTuple):
    """An instruction that has a value for each score, and the number of the memory that the value is written to."""

    n: int
    instruction: Instruction
    memory: int


class _Schedule(NamedTuple):
    """The instructions computed once a tile, those computed block by block, and the kinds of a block's memories."""

    of_tile: tuple[int, ...]
    of_block: tuple[_Step, ...]
    memories: tuple[BlockKind, ...]


@lru_cache(maxsize=128)
def _schedule(program: Program, kept: frozenset[int]) -> _Schedule:
    """Order a program's instructions; values of `kept` are not overwritten within a block."""
    dependencies = depends(program)
    varies = ["s" in found or {"i", "j"} <= found for found in dependencies]
    last_use = {a: n for n, instruction in enumerate(program.instructions) for a in instruction.args if varies[n]}
    memories: list[BlockKind] = []
    free: dict[BlockKind, list[int]] = {"real": [], "int": [], "bool": []}
    memory_of: dict[int, int] = {}
    steps = []
    for n, instruction in enumerate(program.instructions):
        if not varies[n]:
            continue
        ended = [a for a in {*instruction.args} if last_use[a] == n and a in memory_of and a not in kept]
        before, after = ([], ended) if instruction.op == "where" else (ended, [])  # `where` writes before it has read
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
    program: Program, operands: Operands, s: Array, at: tuple[Array, ...], kept: frozenset[int],
    s_dot: Array | None = None,
) -> Iterator[Block]:
    """Evaluate a program on tiles of scores, block by block.

    Parameters
    ----------
    program : Program
    operands : Operands
    s : array [tiles, keys, queries]
        Scores; a block of them may be overwritten once it has come.
    at : tuple of int arrays
        b, h, i and j as `tile_scores.coordinates` has them.
    kept : frozenset of int
        The instructions whose values are asked for.
    s_dot : array [tiles, keys, queries], optional
        Tangents of the scores, for a program that reads them; they may be overwritten as the scores may.
    """
    schedule, real = _schedule(program, kept), s.dtype.type
    b = at[0]
    given = dict(zip("bhij", at))
    of_tile: dict[int, Any] = {}
    for n in schedule.of_tile:
        instruction = program.instructions[n]
        args = [of_tile[a] for a in instruction.args]
        own = given.get(instruction.op)
        of_tile[n] = result(program, operands, instruction, args, b, real) if own is None else own
    read = {a for step in schedule.of_block for a in step.instruction.args}.union(kept).intersection(of_tile)
    dtypes: dict[BlockKind, Any] = {"real": s.dtype, "int": np.int64, "bool": np.bool}
    memories: list[Array] = []
    for tiles, keys in _parts(s.shape):
        block = Block(tiles, keys, {})
        part = s[tiles, keys]
        if not memories or memories[0].shape != part.shape:
            memories = [np.empty(part.shape, dtypes[kind]) for kind in schedule.memories]
        found = {n: block.of(of_tile[n]) for n in read}
        for n, instruction, memory in schedule.of_block:
            args = [found[a] for a in instruction.args]
            if instruction.op == "s":
                found[n] = part
            elif instruction.op == "s_dot":
                assert s_dot is not None
                found[n] = s_dot[tiles, keys]
            elif instruction.op == "load":
                found[n] = result(program, operands, instruction, args, block.of(b), real)
            else:
                found[n] = memories[memory]
                _write(instruction.op, args, memories[memory])
        yield block._replace(values=found)


def _write(op: str, args: list[Any], out: Array) -> None:
    """Write an operation's result to memory, which may be that of an argument unless it is a choice."""
    if op == "real":
        out[...] = args[0]
    elif op == "where":
        np.copyto(out, args[2])
        np.copyto(out, args[1], where=args[0])
    else:
        PRIMITIVES[op].value(*args, out=out)


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Parts of whole tiles, or of one tile's keys, of about `_BLOCK` scores each."""
    num_tiles, num_keys, num_queries = shape
    tiles = max(1, _BLOCK // max(1, num_keys * num_queries))
    keys = num_keys if tiles > 1 else max(1, _BLOCK // max(1, num_queries))
    for tile in range(0, num_tiles, tiles):
        for key in range(0, num_keys, keys):
            yield slice(tile, tile + tiles), slice(key, key + keys)
