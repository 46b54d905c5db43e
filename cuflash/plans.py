"""A plan: everything decided about a call before its data is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heapreplace
from math import prod
from types import MappingProxyType

import numpy as np

from . import sm80_tiles, sm90_tiles
from .device import DeviceSpec
from .dq_turns import DqTurns, dq_turns, last_finishes
from .errors import UnsupportedProblem
from .mask import Band, Mask
from .problem import Problem
from .source import KernelSpec
from .tiles import Tile, blocks_at_once, host_tile, kernel_specs, shared_bytes
from .work_list import IntervalWork, ListedWork, WorkList, work_list

# When blocks share a tile's keys: `Plan._splits_that_pay`.
_FULL, _ALMOST = 0.8, 0.85  # shares of what a GPU holds at once, and of the best that sharing reaches
_FEWEST_STEPS, _MOST_WAVES, _MOST_SPLITS = 4, 4, 128
# When blocks go on from tile to tile: steps' time that a tile takes beside them; `Plan._places_that_balance`.
_STEPS_BESIDE, _UNEVEN, _MOST_ROUNDS, _SHARERS = 2, 1.005, 64, 16
_SAMPLED = 256  # queries
MAX_TILES = 1 << 30  # of a launch: kernels number them in int32, and add the blocks of a launch


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Problem, mask, device, tile and work, all frozen.

    Attributes
    ----------
    problem : Problem
    mask : Mask
        Resolved for the problem's shape.
    device : DeviceSpec
    tile : Tile
    work : WorkList
    specs : dict of KernelSpec by entry
        The kernels that a GPU runs; none on the host.
    num_splits : int
        Blocks that share a tile's keys, forward.
    """

    problem: Problem
    mask: Mask
    device: DeviceSpec
    tile: Tile
    work: WorkList
    specs: dict[str, KernelSpec] = field(default_factory=dict)
    num_splits: int = 1

    @property
    def num_matrices(self) -> int:
        """Batch entries times query heads."""
        return self.problem.mask_shape.num_batch * self.problem.num_heads

    @property
    def is_empty(self) -> bool:
        """Nothing to compute: no queries, no keys, or nothing in the batch."""
        return 0 in (self.num_matrices, self.problem.seqlen_q, self.problem.seqlen_kv)

    @property
    def num_workers(self) -> int:
        """Threads that a call on the host uses: one, and BLAS's own, where the work is too little to share."""
        return 1 if self.is_small else max(1, min(self.device.num_processors, self.num_tiles))

    @property
    def is_small(self) -> bool:
        """Too little work to share among threads on the host, whatever their number."""
        return self.num_matrices * self.problem.seqlen_q * self.problem.seqlen_kv < 1 << 23

    @property
    def batch_area(self) -> int:
        """Scores that the tiles of a batch hold together on the host, unless a single tile is larger.

        Small calls run on BLAS's threads and share nothing, so two tiles at once spare Python's part of the second.
        """
        return (1 + self.is_small) * self.tile.block_q * self.tile.block_kv

    @property
    def scratch_scores(self) -> int:
        """Scores that a batch holds at most."""
        rows = max(self.tile.block_q, self.work.block_q, self.work.block_kv)
        return max(self.batch_area, rows * self.tile.block_kv)

    @property
    def num_tiles(self) -> int:
        """Tiles of queries, over all batch entries and heads."""
        return self.num_matrices * -(-self.problem.seqlen_q // self.work.block_q)

    def step_width(self, height: int) -> int:
        """Rows that a tile of some height visits at once: a flat tile is as wide as its area allows, up to 8 tiles."""
        area = self.tile.block_q * self.tile.block_kv
        return min(max(self.tile.block_kv, area // height), 8 * self.tile.block_kv)

    def grid(self, spec: KernelSpec) -> int:
        """Blocks that a kernel is launched with for all leading axes: a tile each, tiles stay within listed blocks."""
        problem, work = self.problem, self.work
        query_tiles = self._num_tiles(problem.seqlen_q, work.block_q, spec.block_q)
        key_tiles = self._num_tiles(problem.seqlen_kv, work.block_kv, spec.block_kv)
        if spec.entry in ("backward", "backward_wide", "backward_columns", "gradient_keys"):
            tiles = problem.num_kv_heads * key_tiles
        elif spec.is_packed:
            tiles = problem.num_kv_heads
        else:
            tiles = problem.num_heads * query_tiles
        head_tiles, value_tiles = -(-problem.head_dim // spec.head_dim), -(-problem.value_dim // spec.value_dim)
        parts = {  # of a tile's work, a block each
            "forward": self.num_splits,
            "scores": key_tiles,
            "output": value_tiles,
            "gradient_scores": key_tiles,
            "gradient_queries": head_tiles,
            "gradient_keys": head_tiles + value_tiles,
        }
        return problem.mask_shape.num_batch * tiles * parts.get(spec.entry, 1)

    def tiles_of_launch(self, spec: KernelSpec, num_launches: int) -> int:
        """Tiles that a kernel works on in one of as many launches: those of dQ only as gradients leave them to it."""
        tiles = self.grid(spec) // num_launches
        if spec.name != "sm90_convert_dq":
            return tiles
        places = self.num_matrices // num_launches
        finished = self.problem.group_size * self.finished_places(places // self.problem.group_size)
        return tiles // max(1, places) * (places - finished)

    def blocks(self, spec: KernelSpec, num_tiles: int) -> int:
        """Blocks that a kernel is launched with to work on so many tiles: one each, or as many as a GPU holds, which go
        on to further tiles."""
        if self.takes_tiles_on(spec):
            return min(num_tiles, blocks_at_once(spec, self.device))
        return num_tiles

    def takes_tiles_on(self, spec: KernelSpec) -> bool:
        """Whether a kernel's blocks go on to further tiles as they end, which a count in its workspace gives them."""
        return spec.family == "sm90" and spec.takes_maps

    @property
    def _is_uneven_band(self) -> bool:
        return isinstance(self.work, IntervalWork) and self.work.band not in (None, Band())

    @property
    def cuts_tiles(self) -> bool:
        """Whether a list's blocks are no multiples of the smallest tiles of the sm90 family."""
        sides = (self.work.block_q, self.work.block_kv)
        return isinstance(self.work, ListedWork) and any(side % sm90_tiles.ROWS for side in sides)

    def split(self, num_splits: int | None = None) -> Plan:
        """The same, but that blocks of the forward pass share each tile's keys: so many, or as many as pay."""
        work = self.work
        shares_masks = isinstance(work, IntervalWork) and (work.lo is None or work.lo.shape[1] == 1)
        group_size = self.problem.group_size if shares_masks else 1
        specs = sm80_tiles.split(self.specs, self.problem, self.device, group_size)
        made = replace(self, specs=specs, num_splits=1)
        chosen = made._splits_that_pay if num_splits is None else num_splits
        if num_splits is None and chosen == 1 and not made.specs["forward"].is_packed:
            return self
        return replace(made, num_splits=chosen)

    @property
    def _splits_that_pay(self) -> int:
        """Blocks that should share a tile's keys: the fewest that keep the GPU almost as busy as can be.

        FlashAttention's rule: how much of its last wave of blocks fills the GPU. A block takes a step at least, and
        loads no less than writing and reading its part takes.
        """
        problem, spec = self.problem, self.specs["forward"]
        slots, tiles, steps = blocks_at_once(spec, self.device), self.grid(spec), self._most_steps(spec)
        if tiles >= _FULL * slots or steps < _FEWEST_STEPS:
            return 1
        rows = min(spec.block_q, problem.seqlen_q * (problem.group_size if spec.is_packed else 1))
        step_bytes = spec.block_kv * (spec.head_dim + spec.value_dim) * problem.dtype.itemsize
        least_steps = -(-2 * rows * spec.value_dim * problem.accumulator.itemsize // step_bytes)
        most = max(1, min(steps // least_steps, _MOST_WAVES * slots // tiles, _MOST_SPLITS))
        busy = {}
        for splits in range(1, most + 1):
            if splits == 1 or -(-steps // splits) < -(-steps // (splits - 1)):  # else no block has less to do
                busy[splits] = tiles * splits / slots / -(-tiles * splits // slots)
        return min(splits for splits, share in busy.items() if share >= _ALMOST * max(busy.values()))

    def _most_steps(self, spec: KernelSpec) -> int:
        """Steps of the longest tile of queries, or a bound on them that needs not wait for a device."""
        problem, work = self.problem, self.work
        if isinstance(work, ListedWork):
            return work.most_in_row * -(-work.block_kv // spec.block_kv)
        keys = problem.seqlen_kv
        if work.band is not None and work.band.lower is not None and work.band.upper is not None:
            keys = min(keys, work.band.upper - work.band.lower + min(spec.block_q, problem.seqlen_q))
        return -(-keys // spec.block_kv)

    @property
    def places_in_turn(self) -> int:
        """Matrices whose tiles of queries are worked on in turn, the longest tiles of each first.

        Under a band, as many as have no more tiles than blocks work at once, so that few long tiles start late; where
        blocks of the sm90 family go on from tile to tile, as many as let them end together. With a list, on tensor
        cores, as many as have K and V in a third of the level-2 cache; all where multiply-adds are what takes time:
        that K and V come from memory costs a fiftieth, and the fewer take turns the more of the GPU idles at the end
        (experiments/results/simt_sparse.log).
        """
        problem = self.problem
        if isinstance(self.work, ListedWork):
            return self._places_in_cache(problem.seqlen_kv * (problem.head_dim + problem.value_dim))
        forward = self.specs.get("forward")
        if forward is None:
            return 1
        return self._places_that_balance or self._places_of_a_wave(forward, problem.seqlen_q, forward.block_q)

    @property
    def key_places_in_turn(self) -> int:
        """The same of tiles of keys, whose blocks all read Q and dO and add to dQ, in float32."""
        problem = self.problem
        if isinstance(self.work, ListedWork):
            dq = problem.head_dim * problem.accumulator.itemsize // problem.dtype.itemsize
            return self._places_in_cache(problem.seqlen_q * (problem.head_dim + problem.value_dim + dq))
        backward = self.specs.get("backward", self.specs.get("backward_columns"))
        if self.dq_turns is not None:
            return self.dq_turns.places
        return 1 if backward is None else self._places_of_a_wave(backward, problem.seqlen_kv, backward.block_kv)

    def _places_of_a_wave(self, spec: KernelSpec, length: int, height: int) -> int:
        """Matrices that have no more tiles of unlike lengths than blocks of a kernel work at once; one at least."""
        if not self._is_uneven_band:
            return 1
        return max(1, blocks_at_once(spec, self.device) // max(1, -(-length // height)))

    @cached_property
    def dq_turns(self) -> DqTurns | None:
        """The order in which blocks of the sm90 family's gradients finish dQ, where they do."""
        spec = self.specs.get("backward")
        if spec is None or not spec.finishes_dq or not isinstance(self.work, IntervalWork):
            return None
        return dq_turns(self.problem, self.work.band, spec, self.device)

    def finished_places(self, num_places: int) -> int:
        """Of so many batch entries and heads of keys in a launch, the first of which dQ is finished by those blocks."""
        return 0 if self.dq_turns is None else self.dq_turns.finished(num_places)

    def finishing(self) -> Plan:
        """The same, but that blocks of gradients finish dQ where they had better."""
        backward = self.specs.get("backward")
        if backward is None:
            return self
        if isinstance(self.work, ListedWork):
            if not last_finishes(self.problem, self.work, backward):
                return self
            told = {x: replace(self.specs[x], finishes_dq=True) for x in ("backward_statistics", "backward")}
            specs = self.specs | told
            del specs["convert_dq"]
            return replace(self, specs=specs)
        assert isinstance(self.work, IntervalWork)
        turns = dq_turns(self.problem, self.work.band, backward, self.device)
        if turns is None or not turns.finished(self.num_matrices // self.problem.group_size):
            return self
        return replace(self, specs=self.specs | {"backward": replace(backward, finishes_dq=True)})

    @property
    def sums_dq(self) -> bool:
        """Whether dQ is added up in float32 beside what is returned of it."""
        return "convert_dq" in self.specs or ("backward" in self.specs and self.specs["backward"].finishes_dq)

    def _places_in_cache(self, num_elements: int) -> int:
        """Matrices of a list whose elements, of the inputs' dtype, find room in a third of the level-2 cache."""
        if self.family not in ("sm80", "sm90"):
            return self.num_matrices
        return max(1, self.device.cache_bytes // max(1, 3 * num_elements * self.problem.dtype.itemsize))

    @cached_property
    def _places_that_balance(self) -> int | None:
        """How many matrices take turns where the sm90 family's blocks go on from tile to tile of a band: as many as
        have K and V in a third of the level-2 cache; or more, if many blocks read each at a time, until they end
        together.
        """
        problem, work, spec = self.problem, self.work, self.specs.get("forward")
        if spec is None or spec.family != "sm90" or not self._is_uneven_band:
            return None
        assert isinstance(work, IntervalWork) and work.band is not None
        last = np.arange(problem.seqlen_q, 0, -spec.block_q) - 1  # the longest tile first
        first = np.maximum(last + 1 - spec.block_q, 0)
        lo = 0 if work.band.lower is None else np.maximum(first + work.band.lower, 0)
        hi = problem.seqlen_kv if work.band.upper is None else np.minimum(last + work.band.upper + 1, problem.seqlen_kv)
        steps = _STEPS_BESIDE + np.maximum(-(-(hi - lo) // spec.block_kv), 0)
        blocks = blocks_at_once(spec, self.device)
        places = min(self.num_matrices, -(-_MOST_ROUNDS * blocks // len(steps)))
        num_elements = problem.seqlen_kv * (problem.head_dim + problem.value_dim) // problem.group_size
        in_cache = self._places_in_cache(num_elements)
        if in_cache >= places:
            return places
        in_turn, uneven = 1 << in_cache.bit_length() - 1, dict[int, float]()
        while not uneven or in_turn <= min(places, blocks // _SHARERS):
            turns = [np.repeat(steps, min(in_turn, places - start)) for start in range(0, places, in_turn)]
            uneven[in_turn] = _longest_block(np.concatenate(turns).tolist(), blocks)
            if uneven[in_turn] <= _UNEVEN:
                break
            in_turn *= 2
        return min(uneven, key=uneven.__getitem__)

    def workspace_shape(self, name: str) -> tuple[int, ...]:
        """Of an array that one kernel leaves to another: a number a query, a row of scores a query, tiles of dQ, or
        what each block that shares a tile's keys makes of a query."""
        shape = self.problem.lse_shape()
        if name == "next_tile":
            return (2 + 2 * self.num_matrices,)
        if name in ("o_parts", "lse_parts"):
            parts = (*shape[:-1], self.num_splits * shape[-1])
            return parts if name == "lse_parts" else (*parts, self.specs["forward"].value_dim)
        if name == "dq_sum":
            spec = self.specs["backward"]
            tiles = self._num_tiles(self.problem.seqlen_q, self.work.block_q, spec.block_q)
            return (*shape[:-1], tiles, spec.block_q * spec.head_dim)
        backward = self.specs.get("backward")
        if name == "delta" and backward is not None and backward.family == "sm90":
            return (*shape[:-1], self.workspace_shape("dq_sum")[-2] * sm90_tiles.known_words(backward))
        return shape if name == "delta" else (*shape, self.problem.seqlen_kv)

    def _num_tiles(self, length: int, listed: int, height: int) -> int:
        block = listed if isinstance(self.work, ListedWork) else height
        return -(-length // block) * -(-block // height)

    @property
    def family(self) -> str | None:
        """Of the kernels that a GPU runs; None on the host."""
        return next((spec.family for spec in self.specs.values()), None)

    @property
    def whole_matrices_bytes(self) -> int:
        """Scores and their gradients, as the naive kernels' backward pass keeps them; the forward pass takes half."""
        if self.family != "naive":
            return 0
        scores = self.num_matrices * self.problem.seqlen_q * self.problem.seqlen_kv
        return 2 * scores * self.problem.accumulator.itemsize

    @property
    def workspace_bytes(self) -> int:
        """Memory beside inputs and outputs of the pass that needs more of it, the backward pass unless keys are shared.

        On a GPU: O and lse of each part where blocks share a tile's keys; or one number a query, the sums of dq where
        its kernel adds to them in float32, gradients in the accumulator's dtype over axes that were broadcast, with
        their sums where these are rounded, and the lists that kernels read; tiles lie in shared memory. On the host:
        two tiles of scores, three tiles of gathered and widened rows and one accumulator for each worker; one number a
        query; and the work list. The naive kernels keep whole matrices of scores instead.
        """
        problem, itemsize = self.problem, self.problem.accumulator.itemsize
        if self.family == "naive":
            return self.whole_matrices_bytes + _list_bytes(self.work)
        if self.device.compute_capability is not None:
            delta = prod(self.workspace_shape("delta")) * itemsize
            sums = prod(self.workspace_shape("dq_sum")) if self.sums_dq else 0
            asks = any(map(self.takes_tiles_on, self.specs.values()))
            count = itemsize * prod(self.workspace_shape("next_tile")) * asks
            backward = delta + itemsize * sums + count + self._summed_bytes
            return max(self._parts_bytes, backward) + _list_bytes(self.work)
        rows = max(self.tile.block_q, self.work.block_q, self.work.block_kv)
        columns = self.step_width(min(self.work.block_q, self.work.block_kv))
        scores = 2 * self.scratch_scores
        gathered = 2 * (rows + columns) * (problem.head_dim + problem.value_dim)
        delta = self.num_matrices * problem.seqlen_q
        return (self.num_workers * (scores + gathered) + delta) * itemsize + self.work.nbytes

    @property
    def _parts_bytes(self) -> int:
        """What blocks that share a tile's keys leave to be merged."""
        if "combine" not in self.specs:
            return 0
        return sum(prod(self.workspace_shape(name)) for name in ("o_parts", "lse_parts")) * 4

    @property
    def _summed_bytes(self) -> int:
        """Gradients before they are summed over broadcast axes, and the largest of the sums before it is rounded."""
        problem, shapes = self.problem, self.problem.argument_shapes()
        summed = {name: full for name, full in problem.gradient_shapes().items() if full != shapes[name]}
        before = sum(map(prod, summed.values()))
        rounded = max((prod(shapes[name]) for name in summed), default=0) if problem.dtype != problem.accumulator else 0
        return (before + rounded) * problem.accumulator.itemsize

    def explain(self, notes: Mapping[str, str] = MappingProxyType({})) -> str:
        """What was decided and why, a line each; `notes` say more of the kernels of some entries."""
        problem, work = self.problem, self.work
        heads = f"{problem.num_heads} heads"
        if problem.num_heads != problem.num_kv_heads:
            heads += f" in groups of {problem.group_size} on {problem.num_kv_heads} key/value heads"
        dtype = f"{problem.dtype}" + f" at precision {problem.precision}" * (problem.precision != "ieee")
        where = f"{self.device.num_processors} cores"
        if self.device.compute_capability is not None:
            major, minor = self.device.compute_capability
            where = f"sm_{major}{minor}, {self.device.num_processors} multiprocessors"
        listed = work.nbytes if self.device.compute_capability is None else _list_bytes(work)
        lines = [
            f"problem    batch {problem.batch}, {heads}, {problem.seqlen_q} queries, {problem.seqlen_kv} keys, "
            f"dims {problem.head_dim} and {problem.value_dim}, {dtype}, scale {problem.softmax_scale:.6g}",
            f"device     {self.device.name}: {where}, {self.device.tile_memory_bytes >> 10} KiB for a tile",
            f"tile       {self.tile.block_q} queries x {self.tile.block_kv} keys",
            *(self._describe_kernel(spec, notes.get(entry, "not compiled yet")) for entry, spec in self.specs.items()),
            f"work       {_describe_work(work)}",
            f"FLOPs      {self.forward_flops} forward",
            f"workspace  {self.workspace_bytes} bytes, {listed} of them the work list",
        ]
        if "combine" in self.specs:
            packed = ", which holds a group's heads" if self.specs["forward"].is_packed else ""
            lines.insert(3, f"splits     {self.num_splits} blocks share the keys of a tile{packed}")
        if "backward" in self.specs and "backward_rows" not in self.specs:
            lines.insert(-3, "gradients  dq by atomic additions: its bits may differ from call to call, for speed")
        elif self.specs:
            lines.insert(-3, "gradients  every result is bitwise repeatable")
        if self.family == "naive":
            lines[-1] += f", {self.whole_matrices_bytes} the whole scores and, backward, their gradients"
            lines.insert(2, "kernel     naive: every score is made and kept, whatever the mask")
        return "\n".join(lines)

    def _describe_kernel(self, spec: KernelSpec, note: str) -> str:
        tile = f"{spec.block_q} queries x {spec.block_kv} keys" + " on tensor cores" * (spec.mma_rows > 0)
        memory = f"{shared_bytes(spec)} bytes of shared memory"
        return f"kernel     {spec.name}: {tile}, grid {self.grid(spec)}, {memory}, {note}"

    @property
    def forward_flops(self) -> int:
        """Multiplications and additions of both products over the scores that the work visits."""
        return 2 * self.visited_scores * (self.problem.head_dim + self.problem.value_dim)

    @property
    def visited_scores(self) -> int:
        """Scores that the work list visits, over all batch entries and heads."""
        total = 0
        work = self.work.on_host
        step = work.block_q
        shape = self.problem.mask_shape
        for b in range(shape.num_batch):
            for h in range(shape.num_heads):
                for start in range(0, shape.seqlen_q, step):
                    stop = min(start + step, shape.seqlen_q)
                    keys = sum(segment.stop - segment.start for segment in work.row(b, h, start, stop))
                    total += (stop - start) * keys
        return total


def make_plan(
    problem: Problem,
    mask: Mask,
    device: DeviceSpec,
    family: str | None = None,
    deterministic: bool = False,
) -> Plan:
    """Choose the tile, then list the work at it; then, for a family of kernels, those whose tiles the list allows.

    `kernel_specs` says what the options mean.
    """
    chosen = partial(kernel_specs, deterministic=deterministic)
    if family is None:
        tile, specs = host_tile(problem, device), {}
    else:
        specs = chosen(family, problem, device)
        first = next(iter(specs.values()))
        tile = Tile(*sm90_tiles.LIST_BLOCK) if family == "sm90" else Tile(first.block_q, first.block_kv)
    work = work_list(mask, problem.mask_shape, (tile.block_q, tile.block_kv))
    if family is not None and isinstance(work, ListedWork):
        specs = chosen(family, problem, device, (work.block_q, work.block_kv))
    elif family == "sm90":
        specs = chosen(family, problem, device, num_keys=_keys_seen(work, problem))
    made = Plan(problem=problem, mask=mask, device=device, tile=tile, work=work, specs=specs)
    if made.is_empty:
        return made
    for spec in specs.values():
        num_tiles = made.grid(spec)
        if num_tiles > MAX_TILES:
            advice = "call once for each part of the batch or of the heads"
            raise UnsupportedProblem(
                [f"q, k and v must make at most {MAX_TILES} tiles for {spec.name}; got {num_tiles}: {advice}"]
            )
    return made.split() if family == "sm80" else made.finishing() if family == "sm90" else made


def _keys_seen(work: WorkList, problem: Problem) -> float | None:
    """How many keys a query sees on average, by a sample of them; None where no band says it."""
    if not isinstance(work, IntervalWork) or work.band is None or not problem.seqlen_q:
        return None
    query = np.linspace(0, problem.seqlen_q - 1, min(problem.seqlen_q, _SAMPLED))
    lo = 0 if work.band.lower is None else np.maximum(query + work.band.lower, 0)
    hi = problem.seqlen_kv if work.band.upper is None else np.minimum(query + work.band.upper + 1, problem.seqlen_kv)
    return float(np.mean(np.maximum(hi - lo, 0)))


def _longest_block(tiles: list[int], blocks: int) -> float:
    """When the last of blocks is done that take the next tile as they end one, of the mean: 1 and more."""
    ends = [0] * blocks
    for tile in tiles:
        heapreplace(ends, ends[0] + tile)
    return max(ends) * blocks / sum(tiles)


def _list_bytes(work: WorkList) -> int:
    """Memory of the arrays that kernels read: `ListedWork.lists` says of what they are."""
    if isinstance(work, IntervalWork):
        return work.nbytes
    index = work.index
    rows, columns = (index.batch * index.num_heads * blocks for blocks in (index.num_q_blocks, index.num_kv_blocks))
    entries = len(index.indices)
    sides = sum(int(side.nbytes) for side in (index.lo, index.hi) if side is not None)
    return 4 * (2 * (rows + columns + 1) + 5 * entries) + entries + int(index.bits.nbytes) + sides


def _describe_work(work: WorkList) -> str:
    if isinstance(work, ListedWork):
        index = work.index.on_host
        full, partial = int((index.kinds == 1).sum()), int((index.kinds != 1).sum())
        return f"listed: {full} full and {partial} partial blocks of {index.block}, {len(index.bits)} bit tiles"
    assert isinstance(work, IntervalWork)
    if work.band is not None:
        return f"implicit: keys with {work.band.lower} <= j - i <= {work.band.upper}, no list"
    return "implicit: one interval of keys a row, no list"
