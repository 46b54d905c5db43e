"""The kernel launches of a plan: specifications, grids, memory, and the arrays that each kernel reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from .spec import KernelSpec

BATCH_AXES = 3  # equals kBatchAxes of the kernels; each entry along further batch axes takes its own launch
POINTER = np.uint64  # the type of addresses in records
BATCH, BATCH_STRIDES = (np.dtype((kind, (BATCH_AXES,))) for kind in (np.int32, np.int64))


def structure(*members: tuple[DTypeLike, *tuple[str, ...]]) -> np.dtype[np.generic]:
    """Return the layout of a structure in CUDA; each argument is a type, followed by the names of members of this type.

    >>> structure((np.float64, "x"), (np.int32, "row", "column")).itemsize
    16
    """
    return np.dtype([(name, np.dtype(kind)) for kind, *names in members for name in names], align=True)


def over_batch(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Return values of batch axes as those of `BATCH_AXES` axes; missing axes come first, with the value `fill`."""
    return (fill,) * (BATCH_AXES - len(values)) + tuple(values)


MATRICES = structure(
    (POINTER, "data"), (BATCH_STRIDES, "batch_strides"),
    (np.int64, "head_stride", "row_stride", "column_stride", "is_accumulator"),
)  # an array in the records that kernels take by value  # fmt: skip


TENSOR_MAP_PARAM = np.dtype(
    {"names": ("map", "is_valid"), "formats": ((np.uint64, (16,)), np.int64), "offsets": (0, 128), "itemsize": 192}
)  # a tensor map of TMA; is_valid is 0 if TMA cannot copy the array


# The value of a field of a record: a number, an array of numbers, or the values of a nested record.
Value: TypeAlias = "float | np.generic | Sequence[float] | Mapping[str, Value]"


def record_of(dtype: np.dtype[np.generic], numbers: Mapping[str, Value]) -> Any:
    """Return a record with these numbers in its fields, and zeros in all others; a nested record takes a dict."""
    record = np.zeros((), dtype)
    assert dtype.fields is not None
    for name, number in numbers.items():
        record[name] = record_of(dtype.fields[name][0], number) if isinstance(number, Mapping) else number
    return record


@lru_cache(maxsize=256)
def leaves(dtype: np.dtype[np.generic]) -> Mapping[str, tuple[np.dtype[np.generic], int]]:
    """Return the type and the offset in bytes of each field of a record, by path; fields of nested records included.

    Records of arrays and of tensor maps count as single fields.

    >>> dtype = np.dtype([("x", np.int64), ("inner", [("y", np.uint64)])])
    >>> {path: offset for path, (_, offset) in leaves(dtype).items()}
    {'x': 0, 'inner.y': 8}
    """
    by_path = {}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        if kind.names is None or kind in (MATRICES, TENSOR_MAP_PARAM):
            by_path[name] = kind, int(offset)
        else:
            by_path |= {f"{name}.{path}": (inner, offset + start) for path, (inner, start) in leaves(kind).items()}
    return by_path


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
        The record's dtype; its size is a multiple of 8 bytes. Fields may be records, whose fields have paths such as
        "cache.k". A field of dtype `MATRICES` describes an array [*batch, heads, rows, columns]. A field named in
        `tables` holds the address of any other array. All other fields hold numbers. Arrays are operands, results or
        workspaces of the pass.
    values : dict by field
        The numbers; a dict for a nested record.
    tables : tuple of str
        Arrays whose addresses are stored in 8-byte fields, and which every launch of the pass takes as a whole. If the
        record has a field ``<table>_strides``, it holds the array's strides in elements, 0 along axes of length 1.
    boxes : dict of (array, (rows, columns)) by field
        Fields of dtype `TENSOR_MAP_PARAM`, with the table and the box that they copy. A table with more than three
        leading axes has no valid map.
    numbers : tuple of str
        Fields whose numbers each call passes, after the arrays. A number takes 8 bytes, or the first 4 of 8.
    names : dict of str by path
        The array of each field whose path is not the array's name.
    starts : dict of int by path
        Offset in bytes of a field's address from the start of its array.
    """

    name: str
    dtype: np.dtype[np.generic]
    values: Mapping[str, Value] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    boxes: Mapping[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)

    def addresses(self) -> list[tuple[str, np.dtype[np.generic], int]]:
        """Return the array's name, the type and the offset in bytes of each field that holds an address."""
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
        if the caller passes it.
    max_blocks : int, optional
        Maximum number of thread blocks of a persistent kernel, each of which processes several tiles. Other kernels
        have one thread block per tile.
    boxes : dict of (rows, columns) or (queries, heads, columns) by array name
        Boxes that the kernel copies by tensor maps; empty for kernels without tensor maps. A box of neighboring
        queries has several heads of each.
    features : tuple of str
        Names of those features of the pass that the kernel takes as parameters.
    skipped_tiles : callable, optional
        Returns, for a number of batch entries, how many of their tiles an earlier kernel of the pass has finished.
    row_bytes : int
        Bytes of dynamic shared memory for rows of arrays, in addition to those of the specification.
    """

    spec: KernelSpec
    tiles: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    max_blocks: int | None = None
    boxes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    skipped_tiles: Callable[[int], int] | None = None
    row_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per thread block."""
        return self.spec.shared_bytes + self.row_bytes

    def taking(
        self, *features: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), **fields: Any
    ) -> Launch:
        """Return the launch with further features and arrays, and with changed fields of the specification."""
        return replace(
            self, spec=replace(self.spec, **fields), reads=(*self.reads, *reads), writes=(*self.writes, *writes),
            features=(*self.features, *features),
        )  # fmt: skip

    def grid(self, num_batch: int) -> int:
        """Return the number of thread blocks of a launch over `num_batch` batch entries."""
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
        A role is the name of the kernel's entry, or of the entry that the kernel replaces, such as "backward".
    workspaces : dict of Workspace by name
    features : tuple of Feature
        Records that some of the kernels take as parameters.
    zeroed : tuple of str
        Results that kernels add to. They are set to 0 before the first kernel.
    """

    launches: Mapping[str, Launch]
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    features: tuple[Feature, ...] = ()
    zeroed: tuple[str, ...] = ()

    @classmethod
    def of_kernel(
        cls, spec: KernelSpec, grid: int, record: np.dtype[np.generic], numbers: Mapping[str, Value], *,
        reads: tuple[str, ...], writes: tuple[str, ...], row_bytes: int = 0,
        names: Mapping[str, str] = MappingProxyType({}), starts: Mapping[str, int] = MappingProxyType({}),
    ) -> Pass:  # fmt: skip
        """Return a pass of one launch of `grid` thread blocks whose only argument is a record."""
        name = spec.entry.name
        launch = Launch(spec=spec, tiles=grid, reads=reads, writes=writes, features=(name,), row_bytes=row_bytes)
        feature = Feature(name, record, numbers, (*reads, *writes), names=names, starts=starts)
        return cls({name: launch}, features=(feature,))

    def changed(self, change: Callable[[str, Launch], Launch], *features: Feature) -> Pass:
        """Return the pass with the launches that `change` returns for each role and launch, and further features."""
        launches = {role: change(role, launch) for role, launch in self.launches.items()}
        return replace(self, launches=launches, features=(*self.features, *features))

    @property
    def specs(self) -> dict[str, KernelSpec]:
        """The specifications by role, in the order of the launches."""
        return {role: launch.spec for role, launch in self.launches.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(workspace.nbytes for workspace in self.workspaces.values())

    @property
    def boxes(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """The boxes of the kernels' tensor maps; kernels with equal boxes share their maps."""
        every = [launch.boxes for launch in self.launches.values() if launch.boxes]
        return tuple(boxes for number, boxes in enumerate(every) if boxes not in every[:number])


class DqSemaphoreOrder(NamedTuple):
    """The order in which thread blocks take key tiles, for heads whose dQ they also finish.

    Pairs of batch entry and key/value head form groups. The tiles of a group are taken in three rounds. First, the last
    tile of keys stores its part of dQ. Then the other tiles, in descending order, add to dQ. Finally, the first tile of
    keys adds its part, and scales, rounds and writes dQ.

    Attributes
    ----------
    heads_per_group : int
        Pairs in a group.
    last_tile_lead : int
        Rounds by which the last tiles of keys precede the others; 0 under a causal mask, where only the last queries
        attend to these tiles.
    first_tile_lag : int
        Rounds by which the first tiles of keys, which wait for all others, come later.
    min_unfused_heads : int
        Minimum number of pairs after all groups. A separate kernel rounds dQ of these pairs, whose tiles keep thread
        blocks busy while the first tiles of the last group are computed.
    """

    heads_per_group: int
    last_tile_lead: int
    first_tile_lag: int
    min_unfused_heads: int

    def num_fused_heads(self, num_heads: int) -> int:
        """Return the number of a launch's pairs in groups, whose dQ is finished by the blocks that add to it."""
        groups = max(0, num_heads - self.min_unfused_heads) // self.heads_per_group
        return groups * self.heads_per_group if groups > self.last_tile_lead + self.first_tile_lag else 0


class TileOrder(NamedTuple):
    """The order in which thread blocks take the tiles of different heads.

    Attributes
    ----------
    heads_per_group : int
        Pairs of batch entry and query head whose tiles of queries are taken alternately, longest tiles first.
    kv_heads_per_group : int
        The same for kernels that work on tiles of keys: pairs of batch entry and key/value head.
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
        Number of thread blocks that divide the keys of one query tile among themselves in the forward pass (split-KV).
    is_repeatable : bool
        All results are bitwise reproducible; otherwise blocks add to dq by atomic additions.
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
