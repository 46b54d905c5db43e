"""The interface of a family of kernels, and what all families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from ...arrays import BFLOAT16, UP_TO_FLOAT32
from ...blocks.work_list import ListedWork, WorkList
from ...errors import UnsupportedProblem, refuse
from ..device import DeviceSpec
from ..launches import Kernels, Launch, TileOrder
from ..problem import Problem
from ..spec import KernelSpec
from ..tile_order import heads_per_wave

# A kernel is compiled for the smallest of these dimensions that holds the problem's.
DIMS = (32, 64, 96, 128, 192, 256)
SIMT_DTYPES = (*UP_TO_FLOAT32, np.dtype(np.float64))  # that the simt family serves
WIDEST_CHUNK = 128  # columns of q and k that the kernels of block masses hold at a time

# Arrays that kernels read, by what they compute.
FORWARD_INPUTS = ("q", "k", "v")
STATISTICS_INPUTS = ("o", "lse", "do", "dlse")
BACKWARD_INPUTS = ("q", "k", "v", "lse", "do")


class Family(ABC):
    """Kernels of one kind, for one generation of hardware: ``kernels_cu/<name>/``.

    Attributes
    ----------
    name : str
        What ``kernel=`` calls the family.
    dtypes : tuple of numpy.dtype
        The dtypes of q, k and v that it serves at precision "ieee".
    oldest : (int, int)
        The oldest compute capability that runs it.
    operands : tuple of str
        Names of the arrays beside q, k and v that its kernels take.
    rounds_weights : bool
        Its kernels round P and dS to the dtype of 16-bit inputs before they multiply v, do, k and q.
    waits_at_barriers : bool
        Its kernels wait at barriers in shared memory for copies, so that a fault could make one hang.
    takes_orders : bool
        Its kernels can take tiles of row intervals in an order, the longest first.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[np.dtype[np.generic], ...]]
    oldest: ClassVar[tuple[int, int]] = (7, 5)
    operands: ClassVar[tuple[str, ...]] = ()
    rounds_weights: ClassVar[bool] = False
    waits_at_barriers: ClassVar[bool] = False
    takes_orders: ClassVar[bool] = False

    def with_sequence_tiles(self, work: WorkList) -> WorkList:
        """The work, with tiles that end with their sequences where a kernel of the family takes them."""
        return work

    def __eq__(self, other: object) -> bool:
        """A family holds nothing of its own, so that one of a pickled plan is the one of FAMILIES."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def reasons(self, problem: Problem, device: DeviceSpec | None) -> list[str]:
        """Why the family does not serve a problem, on any device or, where one is given, on that device."""
        reasons = self._dtype_reasons(problem)
        reasons += [
            f"kernel={self.name!r} must be given no {operand.name}; got one: use kernel='auto'"
            for operand in problem.operands
            if not operand.is_captured and operand.name not in self.operands
        ]
        return reasons if device is None or reasons else self._device_reasons(problem, device)

    def _dtype_reasons(self, problem: Problem) -> list[str]:
        if problem.precision != "ieee":
            return [f"kernel={self.name!r} has precision='ieee'; got {problem.precision!r}: use kernel='auto'"]
        if problem.dtype in self.dtypes:
            return []
        served = " or ".join(dtype.name for dtype in self.dtypes)
        return [f"kernel={self.name!r} takes {served}; got {problem.dtype}: {self._instead(problem)}"]

    def _instead(self, problem: Problem) -> str:
        """Return what to do about a dtype that the family does not serve."""
        return "convert q, k and v" + (", or use kernel='simt'" if problem.dtype in SIMT_DTYPES else "")

    def _device_reasons(self, problem: Problem, device: DeviceSpec) -> list[str]:
        capability = device.compute_capability
        if capability is None:
            return []
        if problem.dtype == BFLOAT16 and capability < (8, 0):
            return [f"bfloat16 needs compute capability 8.0; {device.name} is older: use float16 or float32"]
        return self._capability_reasons(capability)

    def _capability_reasons(self, capability: tuple[int, int]) -> list[str]:
        if capability >= self.oldest:
            return []
        major, minor = self.oldest
        is_served = capability >= Family.oldest
        fix = "use kernel='auto'" if is_served else "no kernel runs on an older GPU, so compute on the host"
        return [
            f"kernel={self.name!r} needs compute capability {major}.{minor} or newer; got {capability[0]}."
            f"{capability[1]}: {fix}"
        ]

    def architecture(self, capability: tuple[int, int]) -> str:
        """NVRTC's name of the machine code for a compute capability.

        Raises
        ------
        UnsupportedProblem
            The family's kernels need another chip.
        """
        reasons = self._capability_reasons(capability)
        refuse(reasons)
        return f"sm_{capability[0]}{capability[1]}"

    @abstractmethod
    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        """block_q and block_kv of a block list that is made for the family's kernels: those of the forward tile.

        Raises
        ------
        UnsupportedProblem
            No tile fits the device's shared memory.
        """

    @abstractmethod
    def specs(
        self,
        problem: Problem,
        device: DeviceSpec,
        largest: tuple[int, int] | None = None,
        *,
        deterministic: bool = False,
    ) -> dict[str, KernelSpec]:
        """The kernels of both passes, by entry in the order of their launches.

        Parameters
        ----------
        problem : Problem
            One that the family serves: `reasons` has none.
        device : DeviceSpec
        largest : (block_q, block_kv), optional
            Blocks of a list, which tiles may not exceed.
        deterministic : bool
            Whether every result must be bitwise repeatable.

        Raises
        ------
        UnsupportedProblem
            No tile fits the device's shared memory.
        """

    @abstractmethod
    def launches(
        self,
        problem: Problem,
        device: DeviceSpec,
        work: WorkList,
        *,
        deterministic: bool = False,
    ) -> Kernels:
        """The launches of both passes over a work list.

        Raises
        ------
        UnsupportedProblem
            As `specs`.
        """

    def mass_spec(
        self, problem: Problem, device: DeviceSpec, block_kv: int, *, is_listed: bool
    ) -> KernelSpec | None:
        """The kernel that sums softmax weights over blocks of so many keys; None if the family has none for it."""
        return None


def resident_blocks(spec: KernelSpec, device: DeviceSpec) -> int:
    """Thread blocks of a kernel that a GPU holds at once, limited by registers and by shared memory.

    The system takes a KiB of shared memory for each block, and a multiprocessor has one more than a block may use.
    """
    fitting = (device.tile_memory_bytes + 1024) // (spec.shared_bytes + 1024)
    return device.num_processors * max(1, min(spec.min_blocks, fitting))


def order_of_waves(
    problem: Problem, device: DeviceSpec, work: WorkList, forward: KernelSpec, backward: KernelSpec
) -> TileOrder:
    """Heads that alternate under a band: those of one wave of the thread blocks of either kernel."""
    return TileOrder(
        heads_per_wave(work, resident_blocks(forward, device), -(-problem.seqlen_q // forward.block_q)),
        heads_per_wave(work, resident_blocks(backward, device), -(-problem.seqlen_kv // backward.block_kv)),
    )


def first_fitting(specs: Iterable[KernelSpec], device: DeviceSpec, blocks: int = 1) -> KernelSpec | None:
    """The first of some kernels of which a multiprocessor's shared memory holds so many blocks."""
    return next((spec for spec in specs if spec.shared_bytes <= device.tile_memory_bytes // blocks), None)


def no_tile_fits(nbytes: int, what: str, device: DeviceSpec, fix: str) -> UnsupportedProblem:
    """The refusal of a kernel whose smallest tile needs so many bytes."""
    rule = f"{device.name} must have {nbytes} bytes of shared memory a block{what}"
    return UnsupportedProblem([f"{rule}; it has {device.tile_memory_bytes}: {fix}"])


def launch_of(
    spec: KernelSpec, device: DeviceSpec, tiles: int, reads: tuple[str, ...], writes: tuple[str, ...],
    features: tuple[str, ...] = (),
) -> Launch:  # fmt: skip
    """The launch of a kernel over so many tiles, with as many thread blocks as a GPU holds if they are persistent."""
    return Launch(
        spec=spec, tiles=tiles, reads=reads, writes=writes, boxes=spec.boxes, features=features,
        max_blocks=resident_blocks(spec, device) if spec.entry.is_persistent else None,
    )  # fmt: skip


def rounded_dims(problem: Problem) -> tuple[int, int]:
    """head_dim and value_dim that a kernel for the problem is compiled for."""
    head_dim, value_dim = (
        next(padded for padded in DIMS if padded >= dim) for dim in (problem.head_dim, problem.value_dim)
    )
    return head_dim, value_dim


def list_block_of(work: WorkList) -> tuple[int, int] | None:
    """Blocks of the list that kernels walk; None for work that is no list."""
    return (work.block_q, work.block_kv) if isinstance(work, ListedWork) else None


def query_tiles(problem: Problem, work: WorkList, block_q: int) -> int:
    """Tiles of queries in one head; a tile lies within one block of a list."""
    return _num_tiles(problem.seqlen_q, work.block_q if isinstance(work, ListedWork) else block_q, block_q)


def key_tiles(problem: Problem, work: WorkList, block_kv: int) -> int:
    """Tiles of keys in one head; a tile lies within one block of a list."""
    return _num_tiles(problem.seqlen_kv, work.block_kv if isinstance(work, ListedWork) else block_kv, block_kv)


def num_tiles(spec: KernelSpec, problem: Problem, work: WorkList) -> int:
    """Tiles of a kernel in one batch entry."""
    if spec.entry.holds_keys:
        return problem.num_kv_heads * key_tiles(problem, work, spec.block_kv)
    return problem.num_heads * query_tiles(problem, work, spec.block_q)


def _num_tiles(length: int, block: int, tile: int) -> int:
    return -(-length // block) * -(-block // tile)
