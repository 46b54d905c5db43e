"""Guards for faults of block masses, selectors and rooflines: numbers equal their definitions in NumPy."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import device_double
import device_lists
import numpy as np
import workspace_memory
from executors import CPU, SIM, Run
from mutations.python_guards import in_base_2, part
from test_block_mass import HALVES, check_halves, summed
from test_masked_selectors import (
    KINDS, NAMES, REFERENCES, estimates_are_right, hidden_rows_choose_nothing, last_queries_choose, problem_of,
    queries_choose_alone,
)  # fmt: skip
from test_recall import EXACT, tolerance, weights
from test_selection_kernels import (
    check_choice, check_draws, check_key_scores, check_local_blocks_past_the_last_key, check_means,
    check_page_bounds, check_pair, check_runs, check_slashes, check_spread,
)  # fmt: skip
from test_selectors import by_sorting, means, of_antidiagonal, of_nsa, of_pooled

import cuflash
from cuflash.compiler import source
from cuflash.sim import SimulationError

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions with which a guard reports a fault
CAUSAL = np.tri(8, dtype=bool)
EVERY_BUDGET = [
    cuflash.selectors.Budget(**rule)
    for rule in (
        {"top_k": 1}, {"top_k": 5}, {"mass": 0.5}, {"mass": 0.75, "min_blocks": 3}, {"mass": 1.0}, {"threshold": 0.5},
        {"threshold": 9.0, "min_blocks": 4}, {"top_k": 9}, {"threshold": -0.5, "max_blocks": 5},
        {"mass": 0.9, "max_blocks": 3},
    )
]  # fmt: skip


@in_base_2
def the_host_sums_masses(library: ModuleType) -> None:
    """Check tiles that share a block, and keys that take several steps."""
    check_masses(library, CPU)
    q, k = (np.random.default_rng(1).standard_normal((1, length, 4)) * 3 for length in (600, 1500))
    mass = library.study.block_mass(q, k, block=(300, 64))
    expected = summed(weights(q, k, np.ones((600, 1500), bool)), (300, 64))
    np.testing.assert_allclose(mass, expected, rtol=tolerance(q, k, EXACT, (300, 64)))


def masses_are_of_chosen_blocks(library: ModuleType) -> None:
    """Check 16-bit keys in the simulator."""
    part(library, "compiler.source").KERNELS = source.KERNELS
    check_halves(SIM, **HALVES["blocks that each query chooses"], library=library)


def the_kernel_sums_masses() -> None:
    """Check thread blocks with one or several rows of blocks: lists, intervals, chunks of head_dim, and an lse."""
    check_masses(cuflash, SIM)


def check_masses(library: Any, run: Run) -> None:
    rng = np.random.default_rng(0)
    for dim, block in ((40, (20, 48)), (140, (70, 7))):
        q, k = rng.standard_normal((2, 4, 100, dim)), rng.standard_normal((1, 2, 90, dim))
        blocks = rng.random((2, 4, 7, 6)) < 0.6
        blocks[:, :, 5:] = False
        for mask, allowed in (
            (library.masks.Causal("bottom_right"), np.tri(100, 90, -10, dtype=bool)),
            (library.masks.BlockPattern(blocks, 16), blocks.repeat(16, axis=2).repeat(16, axis=3)[:, :, :100, :90]),
        ):
            p = weights(q, k.repeat(2, axis=0), allowed)
            options = {"block": block, "mask": mask, "executor": run.executor}
            mass, relative = library.study.block_mass(q, k, **options), tolerance(q, k, EXACT, block)
            np.testing.assert_allclose(mass, summed(p, block), rtol=relative)
            v = np.broadcast_to(k[..., :1], (2, 2, 90, 1))
            _, lse = cuflash.attention(q, k, v, mask=allowed, return_lse=True)
            np.testing.assert_allclose(library.study.block_mass(q, k, lse=lse, **options), mass, rtol=2 * relative)


def the_kernel_chooses() -> None:
    """Check ties, zeros of both signs and NaN; forced and forbidden blocks; diagonals that start before key 0."""
    rng = np.random.default_rng(0)
    for turn, budget in enumerate(EVERY_BUDGET):
        lengths, block = (90 + turn % 3 // 2, 64 + 30 * (turn % 2)), (8, 5)
        scores = (rng.integers(-3, 4, (2, 12, -(-lengths[1] // 5))) / 4).astype(np.float32)
        scores.reshape(-1)[rng.integers(0, scores.size, 40)] = np.resize([np.nan, -np.nan, -0.0, np.inf, -np.inf], 40)
        allowed, forced = (rng.random(scores.shape) < odds for odds in (0.7, 0.1))
        shares = (rng.integers(0, 5, scores.shape) / 64).astype(np.float32)
        must = cuflash.selectors.Forced(sink=turn % 2, local=turn % 3, diagonal=turn % 2 == 0)
        case = scores, shares, allowed, forced, budget, must, lengths, block, lengths[1] - lengths[0], turn % 3 == 0
        check_choice("sim", case)
        check_choice("sim", (scores, None, None, None, *case[4:]))


def thread_blocks_choose_from_wide_rows() -> None:
    """Check runs of 1024 blocks with equal scores; the last chosen block ends a run or lies inside one."""
    rng, must = np.random.default_rng(0), cuflash.selectors.Forced(diagonal=False)
    for most, rule in (
        (0, {"top_k": 2048}), (1, {"top_k": 1700}), (1, {"top_k": 700}), (1, {"mass": 0.8125}), (1, {"mass": 1.0}),
        (1, {"threshold": 0.5, "min_blocks": 2000}),
    ):  # fmt: skip
        scores = (rng.integers(0, most + 1, (1, 2, 3001)) / 2).astype(np.float32)
        shares = (rng.integers(1, 5, scores.shape) / 64).astype(np.float32)
        budget = cuflash.selectors.Budget(**rule)
        check_choice("sim", (scores, shares, None, None, budget, must, (16, 3001), (8, 1), 0, False))
    check_pair()


def the_kernel_draws() -> None:
    check_draws()


def the_kernel_makes_means() -> None:
    check_means()


def the_kernels_of_pages_and_slashes_are_right() -> None:
    check_spread()
    check_slashes((30, 41), 11)
    check_slashes((41, 30), 0)
    check_slashes((160, 2200), 2040)
    check_key_scores(np.dtype(np.float16))
    check_page_bounds()


def selections_tell_kernels_where(library: ModuleType) -> None:
    planning = part(library, "planning.selection_kernels")
    check_spread(planning=planning)
    check_slashes((41, 38), -3, planning=planning)
    check_key_scores(np.dtype(np.float16), planning=planning)
    check_page_bounds(planning=planning)
    check_runs(planning)
    check_local_blocks_past_the_last_key(planning=planning)


def fixed_blocks_stay(library: ModuleType) -> None:
    """Check that a stream waits for the copy of the blocks, and that a captured selection stays alive."""
    selecting, streams = part(library, "executors.selecting"), []
    lists = SimpleNamespace(use=streams.append)

    def guarded(owner: Any, arrays: dict[str, Any]) -> Any:
        lists.arrays = arrays
        return lists

    stream = SimpleNamespace(is_capturing=lambda: False)
    target = SimpleNamespace(guarded=guarded, sent=np.copy, mask_address=id, stream=lambda: stream)
    selection = selecting.FixedSelection(np.eye(2, dtype=bool), lambda blocks: lambda *arguments: arguments, target)
    assert selection.makes_index and selection("q", "k") == ((id(lists.arrays["kept"]),), stream)
    assert streams == [stream] and selection not in selecting.gpu._pinned
    stream.is_capturing = lambda: True
    selection("q", "k")
    assert streams == [stream, stream] and selection in selecting.gpu._pinned


def selections_share_memory(library: ModuleType) -> None:
    """Check that a selection's kernels write disjoint arrays, and that a captured selection keeps its memory."""
    bound, launches, planning = (
        part(library, name) for name in ("selectors.bound", "planning.launches", "planning.selection_kernels")
    )
    target, stream, launched = _target_of(part(library, "executors.workspaces").Workspaces)
    row, lists = np.dtype([(name, np.uint64) for name in ("mask", "lists")]), np.empty(9, np.uint8)
    launch = launches.Launch(spec=SimpleNamespace(shared_bytes=0), tiles=1, reads=(), writes=(), features=("lists",))
    listing = launches.Pass({"lists": launch}, features=(launches.Feature("lists", row, tables=row.names),))
    record = part(library, "executors.launch").pass_record(listing, {}, row.names, target)
    lists_of = SimpleNamespace(launches=SimpleNamespace(record=record, works=()), allocate=lambda: lists)
    make_index = SimpleNamespace(lists=lists_of, index_of=lambda lists: lists)
    rule = planning.ChoiceRule(
        lengths=(2, 4), block=(1, 1), offset=0, is_causal=False, count=1, mass=0.0, threshold=None, num_sinks=0,
        num_local=0, has_diagonal=False,
    )  # fmt: skip
    grid = SimpleNamespace(heads=(1,), size=(2, 4), block=(2, 2), rule=lambda budget, forced: rule)
    drawing, (q, k) = planning.drawing((2, 4), 0), np.empty((2, 5))
    steps = [(drawing, {"numbers": "means"}), (drawing, {"numbers": "scores"})]
    needs = {
        "scores": launches.Workspace((2, 4), np.dtype(np.float32)),
        "means": launches.Workspace((300,), np.dtype(np.uint8)),
    }  # fmt: skip
    replaced = {
        "compile_kernels": lambda specs, target: None, "current_target": lambda: target,
        "current_device": lambda: SimpleNamespace(tile_memory_bytes=1 << 16), "_pinned": set(),
    }  # fmt: skip
    with patch.multiple(bound.gpu, **replaced), patch.object(bound, "_maker", lambda grid: make_index):
        for has_shares, density in ((True, None), (True, 0.5), (False, None)):
            budget = SimpleNamespace(density=density)
            selection = bound._by_scores(grid, steps, needs, budget, None, has_shares=has_shares)
            launched.clear()
            assert selection(q, k) is lists and not selection._captured
            means, scores = (int(np.frombuffer(each, planning.DRAW)["numbers"][0]) for each in launched[:2])
            choice, listed = (np.frombuffer(each, kind)[0] for each, kind in zip(launched[2:], (planning.CHOICE, row)))
            shares = scores if has_shares and density is None else 0
            assert [choice[name] for name in ("scores", "shares", "allowed")] == [scores, shares, 0]
            assert listed["mask"] == choice["kept"] and listed["lists"] == lists.ctypes.data
            starts = sorted([means, scores, int(choice["kept"])])
            assert all(later - earlier >= 256 for earlier, later in zip(starts, starts[1:]))
            assert choice["kept"] - means >= 300
            stream.is_capturing = lambda: True
            selection(q, k)
            assert len(selection._captured) == 3 and selection in bound.gpu._pinned
            stream.is_capturing = lambda: False


def _target_of(workspaces: Any) -> tuple[Any, Any, list[Any]]:
    """Return a target that records the first argument of each launch, its stream, and the records."""
    stream, launched = SimpleNamespace(ptr=3, is_capturing=lambda: False), list[Any]()

    def launcher(*launch: Any) -> Any:
        return lambda arguments, stream: launched.append(arguments.records[0][0].tobytes())

    memory = workspace_memory.memory()
    target = SimpleNamespace(
        workspaces=lambda needs: workspaces(needs, memory), stream=lambda: stream, address=memory.address,
        tensor_map=None, lists=None, launcher=launcher,
    )  # fmt: skip
    return target, stream, launched


def an_index_hands_its_lists_over(library: ModuleType) -> None:
    """Check that calls read the lists of an index on a device, or lists built from them in larger blocks."""
    kernels, room, looking_up = (part(library, name) for name in ("planning.list_kernels", "masks", "planning.lookup"))
    options, carried = part(library, "planning.options").Options, part(library, "blocks.carried").CarriedLists
    at_each_call = part(library, "masks.one_array").at_each_call
    device_lists.install(part(library, "blocks.index"), part(library, "executors.index_maker"))
    for side in (16, 8):
        blocks = device_double.to_device(np.eye(64 // side, dtype=bool))
        index = library.BlockIndex.from_blocks(blocks, 64, 64, side)
        shape = room.MaskShape((), 1, 64, 64)
        source, _ = kernels.ListSource.of(room.BlockPattern(blocks, side).resolve(shape), shape, (side, side))
        vars(index)["_carried"] = carried(blocks, source)
        entry = looking_up.lookup(options(mask=index), lambda array: None)
        assert entry.options.mask is None and entry.contents.key == source and entry.contents.arrays[0] is blocks
        work = kernels.work_of_kernels(at_each_call(index).resolve(shape), shape, (64, 64))
        assert work.carried is source and (work.source is source) == (side == 16)
        assert work.source.block == (16, 16) and work.source.element == (side, side)
        causal, window = room.Causal("top_left"), room.SlidingWindow(9, 40, "top_left")
        within = kernels.ListSource.of((room.BlockPattern(blocks, side) & causal).resolve(shape), shape, (side, side))[
            0
        ]
        vars(index)["_carried"] = carried(blocks, within)
        work = kernels.work_of_kernels((at_each_call(index) & window).resolve(shape), shape, (64, 64))
        lo, hi = (causal & window).resolve(shape).intervals(0, 0, np.arange(64))
        assert work.source is not within and (work.source.rows.lo == np.maximum(lo, 0)).all()
        assert (work.source.rows.hi == np.minimum(hi, 64)).all()
    shape = room.MaskShape((2, 3), 4, 40, 70)
    blocks = device_double.to_device(np.zeros((2, 3, 4, 2, 4), dtype=bool))
    source, _ = kernels.ListSource.of(room.BlockPattern(blocks, (32, 20)).resolve(shape), shape, (32, 20))
    for block in ((16, 20), (16, 16)):
        listed = source.in_blocks(block)
        assert listed.strides == np.empty((2, 3, 4, 2, 4), np.uint8).strides and listed.is_whole == (block == (16, 20))


def budgets_are_exact(library: ModuleType) -> None:
    budget, choose = library.selectors.Budget, library.selectors.budget.choose
    scores = np.array([0.5, -np.nan, -1.0, 0.5, 2.0, -0.0, 0.0, -np.inf, 0.25], np.float32)
    shares = np.array([2, 1, 0, 2, 3, 1, 1, 4, 0], np.float32) / 8
    eligible = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1], bool)
    forced = np.array([0, 0, 1, 0, 1, 0, 0, 1, 0], bool)
    for rule in (
        {"top_k": 1}, {"top_k": 3}, {"top_k": 6}, {"top_k": 20}, {"mass": 0.5}, {"mass": 0.75}, {"mass": 1.0},
        {"threshold": 0.5}, {"threshold": 9.0, "min_blocks": 4},
    ):  # fmt: skip
        chosen = np.flatnonzero(choose(scores, shares, eligible, forced, budget(**rule))).tolist()
        assert chosen == by_sorting(scores, shares, eligible, forced, budget(**rule))


def selections_are_right(library: ModuleType) -> None:
    """Check selections against each paper's scores in float64, causality within blocks, and Quest's bounds."""
    of = library.selectors
    q, k = np.random.default_rng(1).standard_normal((2, 4, 64, 16))
    k = k[:2]
    options = {"budget": of.Budget(top_k=4), "forced": of.Forced(sink=1, local=2), "causal": True}
    of_diagonal = cuflash.selectors.budget.Diagonal.of(np, (64, 64), (8, 8), 0)
    must = of_diagonal.forced(cuflash.selectors.Forced(sink=1, local=2))
    wide = k.repeat(2, axis=0)
    scored = {
        of.pooled: (of_pooled(q, k), {}),
        of.antidiagonal: (of_antidiagonal(q, wide), {"stride": 4}),
        of.nsa: (of_nsa(q, k), {"compression": (8, 4)}),
        of.oracle: (summed(weights(q, k, np.tri(64, dtype=bool)), (8, 8)), {}),
    }
    for select, (scores, more) in scored.items():
        index = select(q, k, block=8, **options, **more)
        expected = [
            [by_sorting(row, row, CAUSAL[i], must[i], options["budget"]) for i, row in enumerate(head)]
            for head in scores
        ]
        assert [[np.flatnonzero(row).tolist() for row in head] for head in index.states()[0]] == expected
        assert not (index.toarray() & ~np.tri(64, dtype=bool)).any()
    grouped = of.pooled(q, k, block=8, pool_queries=False, **options).states()[0] > 0
    assert (grouped & must).sum() == (np.broadcast_to(must & CAUSAL, grouped.shape)).sum()
    cut = of.pooled(q[:, :58], k[:, :58] * 9, block=8, budget=of.Budget(top_k=4), forced=of.Forced(diagonal=False))
    every, none, few = np.ones(8, bool), np.zeros(8, bool), options["budget"]
    scores = weights(means(q[:, :58], 8), means(k[:, :58], 8) * 9, np.ones((8, 8), bool))
    expected = [[by_sorting(row, row, every, none, few) for row in head] for head in scores]
    assert [[np.flatnonzero(row).tolist() for row in head] for head in cut.states()[0]] == expected
    pages = [wide[:, None, start : start + 12] for start in range(0, 64, 12)]
    bounds = [np.maximum(q * page.min(-2), q * page.max(-2)).sum(-1) for page in pages]
    # A sum of two sums of products over head_dim, in any order; each is off by one roundoff of the absolute products
    # per term.
    sizes = [np.maximum(np.abs(q * page.min(-2)), np.abs(q * page.max(-2))).sum(-1) for page in pages]
    bound = q.shape[-1] * EXACT * np.stack(sizes, axis=-1)
    assert (np.abs(of.page_bounds(q, k, page_size=12) - np.stack(bounds, axis=-1)) <= bound).all()


def masked_selections_are_right(library: ModuleType) -> None:
    """Check that estimates under masks of all kinds read only attended elements."""
    for number, kind in enumerate(KINDS):
        problem = problem_of(kind, 14, 19, number, library)
        for budget in ({"top_k": 2}, {"threshold": 0.3}):
            for name in REFERENCES:
                estimates_are_right(name, problem, budget, library)
            queries_choose_alone(problem, budget, library)
        if kind in ("lengths of entries", "elements of heads", "documents", "causal"):
            for name in NAMES:
                hidden_rows_choose_nothing(name, problem, 1, "NaN", library)
    last_queries_choose(library)


def selectors_take_caches(library: ModuleType) -> None:
    """Check that a selector's pages are those of the cache, for the queries that the cache accepts."""
    of, rows = library.selectors, np.ones((1, 1, 40, 8), np.float32)
    sizes = {"batch": 1, "num_kv_heads": 1, "head_dim": 8, "capacity": 64}
    for pages, side in (({"page_size": 64, "num_pages": 1}, 64), ({}, 16), ({"page_size": 32, "num_pages": 2}, 32)):
        cache = library.KVCache(**sizes, **pages, dtype="float8_e4m3fn")
        cache.append(rows, rows)
        chosen = of.quest(np.ones((1, 2, 1, 8), np.float16), cache, budget=of.Budget(top_k=1))
        assert chosen.block == side


def densities_are_counted(library: ModuleType) -> None:
    of = library.selectors
    q = np.random.default_rng(0).standard_normal((100, 4)) * 3
    for density, count in ((0.55, 55), (0.551, 56)):
        few = {"block": (2, 1), "budget": of.Budget(density=density), "forced": of.Forced(diagonal=False)}
        assert of.random(q[:2], q, **few).num_entries == of.pooled(q[:2], q, **few).num_entries == count
