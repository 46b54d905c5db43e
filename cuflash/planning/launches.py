"""Describes the kernel launches of a plan: specification, grid, memory, and the arrays that each kernel uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .spec import KernelSpec

BATCH_AXES = 3  # as kBatchAxes; further ones take a launch for each of their entries
MATRICES = np.dtype(
    [
        ("data", np.uint64),
        ("batch_strides", np.int64, (BATCH_AXES,)),
        ("head_stride", np.int64),
        ("row_stride", np.int64),
        ("column_stride", np.int64),
        ("is_accumulator", np.int64),
    ],
    align=True,
)  # an array in the records that kernels take


TENSOR_MAP_PARAM = np.dtype(
    {"names": ("map", "is_valid"), "formats": ((np.uint64, (16,)), np.int64), "offsets": (0, 128), "itemsize": 192}
)  # how the tensor memory accelerator copies boxes of an array; is_valid is 0 if it cannot


def record_of(dtype: np.dtype[np.generic], numbers: Mapping[str, Any]) -> Any:
    """A record with these numbers in its fields, a dict for a record within, and zeros in all others."""
    record = np.zeros((), dtype)
    assert dtype.fields is not None
    for name, number in numbers.items():
        record[name] = record_of(dtype.fields[name][0], number) if isinstance(number, Mapping) else number
    return record


@lru_cache(maxsize=256)
def leaves(dtype: np.dtype[np.generic]) -> Mapping[str, tuple[np.dtype[np.generic], int]]:
    """The fields of a record and of those within it, but for arrays' and maps': type and offset in bytes by path.

    >>> dtype = np.dtype([("x", np.int64), ("inner", [("y", np.uint64)])])
    >>> {path: offset for path, (_, offset) in leaves(dtype).items()}
    {'x': 0, 'inner.y': 8}
    """
    found = {}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        if kind.names is None or kind in (MATRICES, TENSOR_MAP_PARAM):
            found[name] = kind, int(offset)
        else:
            found |= {f"{name}.{path}": (inner, offset + start) for path, (inner, start) in leaves(kind).items()}
    return found


class Workspace(NamedTuple):
    """An array in C order that one kernel of a pass writes and a later one reads.

    >>> Workspace((2, 300), np.dtype(np.float32)).nbytes
    2400

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    is_zeroed : bool
        The array must hold zeros before the first kernel of the pass, and holds zeros again after the last.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    is_zeroed: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Feature:
    """A record that kernels take by value: an argument of some of the kernels of a pass.

    Attributes
    ----------
    name : str
    dtype : numpy.dtype
        The record, a multiple of 8 bytes long. Its fields may be records, whose fields have paths such as "cache.k". A
        field of the type of an array of Params holds an array [*batch, heads, rows, columns]; a field of one of the
        `tables` holds the address of any other array; other fields hold numbers. Arrays are operands, results or
        workspaces of the pass.
    values : dict by field
        The numbers; for a record within, a dict.
    tables : tuple of str
        Arrays whose address is in fields of 8 bytes, and that no launch takes a part of. Where the record has a field
        ``<table>_strides``, it holds the array's strides in elements, 0 along axes of length 1.
    boxes : dict of (array, (rows, columns)) by field
        Fields of the type of a tensor map, with the table that it copies boxes of. Leading axes of the table beyond
        three have no map.
    numbers : tuple of str
        Fields whose numbers each call gives, after the arrays: eight bytes, or the first four of eight.
    names : dict of str by path
        The array of a field whose path is not the array's name.
    starts : dict of int by path
        How many bytes from the start of its array a field's address lies.
    """

    name: str
    dtype: np.dtype[np.generic]
    values: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    boxes: Mapping[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)

    def addresses(self) -> list[tuple[str, np.dtype[np.generic], int]]:
        """The fields that hold addresses: the array's name, the field's type and its offset in bytes."""
        fields = ((self.names.get(path, path), kind, offset) for path, (kind, offset) in leaves(self.dtype).items())
        return [each for each in fields if each[1] == MATRICES or each[0] in self.tables]


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch:
    """One kernel of a pass.

    Attributes
    ----------
    spec : KernelSpec
    tiles : int
        Tiles that the kernel computes for one batch entry.
    reads, writes : tuple of str
        Names of the arrays that the kernel reads and writes: operands, results and workspaces. ``dlse`` is read only
        where the caller gives it.
    max_blocks : int, optional
        Thread blocks of a persistent kernel, which take further tiles as they finish one. Other kernels have one thread
        block for each tile.
    boxes : dict of (rows, columns) by array name
        Boxes that the kernel copies by tensor maps; empty for kernels that take none.
    features : tuple of str
        Names of the features of the pass whose parameters the kernel takes.
    skipped_tiles : callable, optional
        Given a number of batch entries, how many of their tiles an earlier kernel of the pass has finished.
    row_bytes : int
        Dynamic shared memory for rows of arrays, if a thread block has more than the specification says.
    """

    spec: KernelSpec
    tiles: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    max_blocks: int | None = None
    boxes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    skipped_tiles: Callable[[int], int] | None = None
    row_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self.spec.shared_bytes + self.row_bytes

    def grid(self, num_batch: int) -> int:
        """Thread blocks of a launch over so many batch entries."""
        tiles = self.tiles * num_batch
        if self.skipped_tiles is not None:
            tiles -= self.skipped_tiles(num_batch)
        return tiles if self.max_blocks is None else min(tiles, self.max_blocks)


@dataclass(frozen=True, eq=False)
class Pass:
    """The launches of a forward or backward pass in order, and the workspaces between them.

    Attributes
    ----------
    launches : dict of Launch by role
        A role is the entry of the kernel, or of the one that another kernel stands in for: "backward".
    workspaces : dict of Workspace by name
    features : tuple of Feature
        Features whose parameters some of the kernels take.
    zeroed : tuple of str
        Results that kernels add to: they are set to 0 before the first kernel.
    """

    launches: Mapping[str, Launch]
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    features: tuple[Feature, ...] = ()
    zeroed: tuple[str, ...] = ()

    @classmethod
    def of_kernel(
        cls, spec: KernelSpec, grid: int, record: np.dtype[np.generic], numbers: Mapping[str, Any], *,
        reads: tuple[str, ...], writes: tuple[str, ...], row_bytes: int = 0,
        names: Mapping[str, str] = MappingProxyType({}), starts: Mapping[str, int] = MappingProxyType({}),
    ) -> Pass:  # fmt: skip
        """A pass of one launch of so many thread blocks, whose one argument is a record of addresses and numbers."""
        name = spec.entry.name
        launch = Launch(spec=spec, tiles=grid, reads=reads, writes=writes, features=(name,), row_bytes=row_bytes)
        feature = Feature(name, record, numbers, (*reads, *writes), names=names, starts=starts)
        return cls({name: launch}, features=(feature,))

    @property
    def specs(self) -> dict[str, KernelSpec]:
        """The specifications by role, in the order of the launches."""
        return {role: launch.spec for role, launch in self.launches.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(workspace.nbytes for workspace in self.workspaces.values())

    @property
    def boxes(self) -> Mapping[str, tuple[int, int]]:
        """Boxes of the tensor maps that the pass's kernels share."""
        return next((launch.boxes for launch in self.launches.values() if launch.boxes), MappingProxyType({}))


class DqSemaphoreOrder(NamedTuple):
    """The order in which thread blocks take tiles of keys, of the heads whose dQ these blocks finish themselves.

    Pairs of batch entry and key/value head form groups. The tiles of a group are taken in three rounds: first the last
    tile of keys, which stores its part of dQ; then the other tiles backwards, which add to it; then the first tile of
    keys, which adds, scales, rounds and writes dQ.

    Attributes
    ----------
    heads_per_group : int
        Pairs in a group.
    last_tile_lead : int
        Rounds by which the last tiles of keys precede the others; 0 under a causal mask, where they meet other queries.
    first_tile_lag : int
        Rounds by which the first tiles of keys, which wait for all others, follow.
    min_unfused_heads : int
        The least number of pairs after all groups, whose dQ a kernel of its own rounds. They keep the thread blocks
        busy while the first tiles of the last group are computed.
    """

    heads_per_group: int
    last_tile_lead: int
    first_tile_lag: int
    min_unfused_heads: int

    def num_fused_heads(self, num_heads: int) -> int:
        """Return how many pairs of a launch, from the first on, have their dQ finished by the blocks that add to it."""
        groups = max(0, num_heads - self.min_unfused_heads) // self.heads_per_group
        return groups * self.heads_per_group if groups > self.last_tile_lead + self.first_tile_lag else 0


class TileOrder(NamedTuple):
    """The order in which thread blocks take the tiles of different heads.

    Attributes
    ----------
    heads_per_group : int
        Pairs of batch entry and query head whose tiles of queries are taken alternately, longest tiles first.
    kv_heads_per_group : int
        The number of such pairs for kernels that work on tiles of keys.
    dq : DqSemaphoreOrder, optional
        The order in which the blocks of a backward kernel finish dQ, if they do.
    """

    heads_per_group: int = 1
    kv_heads_per_group: int = 1
    dq: DqSemaphoreOrder | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernels:
    """All kernels of a plan.

    Attributes
    ----------
    forward, backward : Pass
    order : TileOrder
    num_splits : int
        Thread blocks that share the keys of one tile of queries in the forward pass (split-KV).
    is_repeatable : bool
        Every result has the same bits in every call; otherwise blocks add to dq by atomic additions.
    """

    forward: Pass
    backward: Pass
    order: TileOrder = TileOrder()
    num_splits: int = 1
    is_repeatable: bool = True

    @property
    def passes(self) -> Mapping[str, Pass]:
        """The passes by name."""
        return {"forward": self.forward, "backward": self.backward}
