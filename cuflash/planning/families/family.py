"""The interface of kernel families, and functions that all families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
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

# Kernels are compiled for the problem's dimensions, rounded up to one of these.
DIMS = (32, 64, 96, 128, 192, 256)
SIMT_DTYPES = (*UP_TO_FLOAT32, np.dtype(np.float64))  # dtypes that the simt family serves
WIDEST_CHUNK = 128  # maximum columns of q and k that the block mass kernels load at a time

# Arrays that kernels read, by kind of kernel.
FORWARD_INPUTS = ("q", "k", "v")
STATISTICS_INPUTS = ("o", "lse", "do", "dlse")
BACKWARD_INPUTS = ("q", "k", "v", "lse", "do")


def _place_reasons(problem: Problem) -> list[str]:
    """Return why no kernel serves a call at its places in a larger call."""
    if problem.places is None:
        return []
    fix = "use executor='cpu'"
    reasons = []
    _, _, query, key = problem.places.starts
    if problem.dropout is not None and (query % 16 or key % 16):
        rule = "q_start and kv_start must be multiples of 16 for dropout on kernels"
        reasons.append(f"{rule}; got {query} and {key}: choose such parts, or {fix}")
    if (problem.score is not None or problem.dropout is not None) and problem.places.q_runs:
        reasons.append(f"score functions and dropout of queries that are not adjacent do not run on kernels: {fix}")
    return reasons


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """The call for which a family chooses kernels.

    Attributes
    ----------
    problem : Problem
        A problem that the family serves.
    device : DeviceSpec
    largest : (block_q, block_kv), optional
        The block sizes of a list, which tiles must not exceed.
    deterministic : bool
        True if all results must be bitwise reproducible.
    """

    problem: Problem
    device: DeviceSpec
    largest: tuple[int, int] | None = None
    deterministic: bool = False

    @staticmethod
    def over(problem: Problem, device: DeviceSpec, work: WorkList, deterministic: bool = False) -> Request:
        """Return the request for kernels that walk a work list."""
        largest = (work.block_q, work.block_kv) if isinstance(work, ListedWork) else None
        return Request(problem, device, largest, deterministic)

    @property
    def dims(self) -> tuple[int, int]:
        """The head_dim and value_dim that kernels are compiled for."""
        of_problem = self.problem.head_dim, self.problem.value_dim
        head_dim, value_dim = (next(padded for padded in DIMS if padded >= dim) for dim in of_problem)
        return head_dim, value_dim


class Family(ABC):
    """The kernels for one generation of hardware, in ``kernels_cu/<name>/``.

    Attributes
    ----------
    name : str
        The value of ``kernel=`` that selects the family.
    dtypes : tuple of numpy.dtype
        The dtypes of q, k and v that it supports at precision "ieee".
    oldest : (int, int)
        The lowest compute capability that runs its kernels.
    operands : tuple of str
        Names of the arrays, other than q, k and v, that its kernels support.
    rounds_weights : bool
        Its kernels round P and dS to the dtype of 16-bit inputs before they are multiplied with v, do, k and q.
    waits_at_barriers : bool
        Its kernels wait at barriers in shared memory for copies, and would hang if a copy never completed.
    takes_orders : bool
        Its kernels can process tiles of row intervals in a specified order, longest first.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[np.dtype[np.generic], ...]]
    oldest: ClassVar[tuple[int, int]] = (7, 5)
    operands: ClassVar[tuple[str, ...]] = ()
    rounds_weights: ClassVar[bool] = False
    waits_at_barriers: ClassVar[bool] = False
    takes_orders: ClassVar[bool] = False

    def with_sequence_tiles(self, work: WorkList) -> WorkList:
        """Return the work with sequence-aligned tiles if kernels of the family use them; otherwise unchanged."""
        return work

    def __eq__(self, other: object) -> bool:
        """Compare types: families have no state, so that an unpickled family equals the one in FAMILIES."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def reasons(self, problem: Problem, device: DeviceSpec | None) -> list[str]:
        """Return why the family does not serve a problem: on `device`, or on every device if that is None."""
        reasons = self._dtype_reasons(problem)
        reasons += [
            f"kernel={self.name!r} does not support {operand.name}; got one: use kernel='auto'"
            for operand in problem.operands
            if not operand.is_captured and operand.name not in self.operands
        ]
        reasons += _place_reasons(problem)
        return reasons if device is None or reasons else self._device_reasons(problem, device)

    def tangent_reasons(self, problem: Problem) -> list[str]:
        """Return why the family has no kernels for tangents of a problem."""
        return [f"kernel={self.name!r} does not support tangents; got some: use kernel='auto'"]

    def _dtype_reasons(self, problem: Problem) -> list[str]:
        if problem.precision != "ieee":
            return [f"kernel={self.name!r} needs precision='ieee'; got {problem.precision!r}: use kernel='auto'"]
        if problem.dtype in self.dtypes:
            return []
        served = " or ".join(dtype.name for dtype in self.dtypes)
        return [f"kernel={self.name!r} takes {served}; got {problem.dtype}: {self._instead(problem)}"]

    def _instead(self, problem: Problem) -> str:
        """Return the fix for a dtype that the family does not serve, as the end of an error message."""
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
        """Return NVRTC's name of the architecture for a compute capability.

        Raises
        ------
        UnsupportedProblem
            The family's kernels do not run on this compute capability.
        """
        reasons = self._capability_reasons(capability)
        refuse(reasons)
        return f"sm_{capability[0]}{capability[1]}"

    @abstractmethod
    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        """Return (block_q, block_kv) of block lists for the family's kernels, usually the forward tile.

        Raises
        ------
        UnsupportedProblem
            No tile fits in the device's shared memory.
        """

    @abstractmethod
    def specs(self, request: Request) -> dict[str, KernelSpec]:
        """Return the kernels of both passes by entry, in the order of their launches.

        Raises
        ------
        UnsupportedProblem
            No tile fits in the device's shared memory.
        """

    @abstractmethod
    def launches(self, request: Request, work: WorkList) -> Kernels:
        """Return the launches of both passes over a work list.

        Raises
        ------
        UnsupportedProblem
            As in `specs`.
        """

    def jvp_spec(self, request: Request) -> KernelSpec:
        """Return the kernel that computes the tangents of o and lse along the tangents that the problem names.

        Its tile is the same for all tangents, so that omitting a tangent and passing zeros lead to the same bits. The
        kernel may belong to a family other than the forward kernel's, but walks the same work list.

        Raises
        ------
        UnsupportedProblem
            The family has no such kernel, or no tile fits in the device's shared memory.
        """
        raise UnsupportedProblem(self.tangent_reasons(request.problem))

    def backward_jvp_specs(self, request: Request) -> tuple[KernelSpec, KernelSpec]:
        """Return the kernels that compute tangents of gradients, for tiles of queries and for tiles of keys.

        Raises
        ------
        UnsupportedProblem
            As in `jvp_spec`.
        """
        raise UnsupportedProblem(self.tangent_reasons(request.problem))

    def union_specs(self, request: Request, block: int, heads: int) -> dict[str, KernelSpec]:
        """Return the kernels for block lists per query, by role; {} if there are none.

        Parameters
        ----------
        block : int
            Keys per block.
        heads : int
            Query heads per tile.

        Raises
        ------
        UnsupportedProblem
            As in `specs`.
        """
        return {}

    def mass_spec(self, request: Request, block_kv: int) -> KernelSpec | None:
        """Return the kernel that sums softmax weights over blocks of `block_kv` keys, or None if there is none."""
        return None


def resident_blocks(spec: KernelSpec, device: DeviceSpec) -> int:
    """Return how many thread blocks of a kernel a GPU holds at once, limited by registers and shared memory.

    CUDA reserves 1 KiB of shared memory per block, and a multiprocessor has 1 KiB more than a block can use.
    """
    fitting = (device.tile_memory_bytes + 1024) // (spec.shared_bytes + 1024)
    return device.num_processors * max(1, min(spec.min_blocks, fitting))


def order_of_waves(request: Request, work: WorkList, forward: KernelSpec, backward: KernelSpec) -> TileOrder:
    """Return between how many heads each kernel's tiles alternate under a band: the heads of one wave of blocks."""
    problem, device = request.problem, request.device
    return TileOrder(
        heads_per_wave(work, resident_blocks(forward, device), -(-problem.seqlen_q // forward.block_q)),
        heads_per_wave(work, resident_blocks(backward, device), -(-problem.seqlen_kv // backward.block_kv)),
    )


def first_fitting(specs: Iterable[KernelSpec], device: DeviceSpec, blocks: int = 1) -> KernelSpec | None:
    """Return the first specification for which a multiprocessor's shared memory holds `blocks` thread blocks."""
    return next((spec for spec in specs if spec.shared_bytes <= device.tile_memory_bytes // blocks), None)


def no_tile_fits(nbytes: int, what: str, device: DeviceSpec, fix: str) -> UnsupportedProblem:
    """Return the error for a kernel whose smallest tile needs `nbytes` of shared memory."""
    rule = f"{device.name} must have {nbytes} bytes of shared memory per thread block{what}"
    return UnsupportedProblem([f"{rule}; it has {device.tile_memory_bytes}: {fix}"])


def launch_of(
    spec: KernelSpec, device: DeviceSpec, tiles: int, reads: tuple[str, ...], writes: tuple[str, ...],
    features: tuple[str, ...] = (),
) -> Launch:  # fmt: skip
    """Return the launch of a kernel over `tiles` tiles; a persistent kernel has no more blocks than the GPU holds."""
    return Launch(
        spec=spec, tiles=tiles, reads=reads, writes=writes, boxes=spec.boxes, features=features,
        max_blocks=resident_blocks(spec, device) if spec.entry.is_persistent else None,
    )  # fmt: skip


def launch_over(
    spec: KernelSpec, request: Request, work: WorkList, reads: tuple[str, ...], writes: tuple[str, ...],
    features: tuple[str, ...] = (),
) -> Launch:  # fmt: skip
    """Return the launch of a kernel over all its tiles of a work list."""
    return launch_of(spec, request.device, num_tiles(spec, request.problem, work), reads, writes, features)


def query_tiles(problem: Problem, work: WorkList, block_q: int) -> int:
    """Return the number of query tiles per head; a tile does not cross the blocks of a list."""
    return _num_tiles(problem.seqlen_q, work.block_q if isinstance(work, ListedWork) else block_q, block_q)


def key_tiles(problem: Problem, work: WorkList, block_kv: int) -> int:
    """Return the number of key tiles per head; a tile does not cross the blocks of a list."""
    return _num_tiles(problem.seqlen_kv, work.block_kv if isinstance(work, ListedWork) else block_kv, block_kv)


def num_tiles(spec: KernelSpec, problem: Problem, work: WorkList) -> int:
    """Return the number of a kernel's work tiles per batch entry."""
    if spec.entry.holds_keys:
        return problem.num_kv_heads * key_tiles(problem, work, spec.block_kv)
    return problem.num_heads * query_tiles(problem, work, spec.block_q)


def _num_tiles(length: int, block: int, tile: int) -> int:
    return -(-length // block) * -(-block // tile)
