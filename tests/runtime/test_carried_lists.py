"""An index created on a device carries the lists that kernels walk, and calls with it create no others."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import cupy_machine
import numpy as np
from cached_calls import cached
import pytest
from cuflash.calls._call import Call
from cuflash import BlockIndex, masks
from cuflash.executors.index_maker import index_of
from cuflash.masks.shape import MaskShape

import cuflash

LENGTHS, BLOCK = (70, 52), (16, 32)
OTHER_BLOCKS = [(1, 16), (16, 1), (3, 5), (600, 5), (1024, 1024)]  # block sizes that no attention kernel walks
RNG = np.random.default_rng(0)
Q, DO = RNG.standard_normal((2, 4, LENGTHS[0], 16), dtype=np.float32)
K, V = RNG.standard_normal((2, 2, LENGTHS[1], 16), dtype=np.float32)
CAUSAL = masks.Causal("bottom_right")


@pytest.fixture
def cupy(tmp_path: Any, monkeypatch: Any) -> Any:
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine


def blocks(seed: int, block: tuple[int, int] = BLOCK) -> Any:
    sides = [-(-length // side) for length, side in zip(LENGTHS, block)]
    return np.random.default_rng(seed).random((4, *sides)) < 0.6


def index_on(machine: Any, cells: Any, is_causal: bool, block: tuple[int, int] = BLOCK) -> BlockIndex:
    if not is_causal:
        return BlockIndex.from_blocks(machine.asarray(cells), *LENGTHS, block)
    shape = MaskShape((), 4, *LENGTHS)
    return index_of(machine.asarray(cells), CAUSAL.resolve(shape), shape, block)


def on_host(cells: Any, is_causal: bool, block: tuple[int, int] = BLOCK) -> Any:
    pattern = masks.BlockPattern(cells, block)
    return pattern & CAUSAL if is_causal else pattern


def launched(machine: Any) -> list[str]:
    return [entry for kind, *_, entry in machine.log if kind == "launch"]


def results(library: Any, arrays: Any, mask: Any, **options: Any) -> list[Any]:
    *operands, do = arrays
    o, vjp = library.attention_vjp(*operands, mask=mask, **options)
    return [o, *vjp(do)]


def assert_right(actual: Any, mask: Any, q: Any = Q, **options: Any) -> None:
    """Assert that o, or o and gradients, equal the host's up to both error bounds."""
    bound = cuflash.error_bound(q, K, V, DO, mask=mask, **options)
    expected = results(cuflash, (q, K, V, DO), mask, **options)
    for name, array, wanted in zip(("o", "dq", "dk", "dv"), actual, expected):
        assert (np.abs(array.get() - wanted) <= 2 * getattr(bound, name)).all(), name


def check(library: Any, machine: Any, is_causal: bool) -> None:
    arrays = [machine.asarray(array) for array in (Q, K, V, DO)]
    for seed in range(3):
        cells = blocks(seed)
        index = index_on(machine, cells, is_causal)
        machine.log.clear()
        assert_right(results(library, arrays, index), on_host(cells, is_causal))
        assert not {"classify", "ranks", "pointers", "entries"} & set(launched(machine))


@pytest.mark.parametrize("is_causal", [False, True], ids=["whole blocks", "causal"])
def test_calls_walk_the_lists_that_an_index_carries(cupy: Any, is_causal: bool) -> None:
    check(cuflash, cupy, is_causal)


def test_calls_with_new_indices_of_one_layout_are_one_cached_call(cupy: Any, monkeypatch: Any) -> None:
    arrays = [cupy.asarray(array) for array in (Q, K, V)]
    first = cuflash.attention(*arrays, mask=index_on(cupy, blocks(0), True))
    (key,) = cached("attention")
    monkeypatch.setattr(Call, "plan", None)
    for seed in (0, 1):
        o = cuflash.attention(*arrays, mask=index_on(cupy, blocks(seed), True))
        assert (o.get() == first.get()).all() == (seed == 0)
    assert list(cached("attention")) == [key]


def indices_and_masks(machine: Any, is_causal: bool, block: tuple[int, int]) -> list[tuple[BlockIndex, Any]]:
    """Return three indexes with equal layouts, each with its mask on the host."""
    drawn = [blocks(seed, block) for seed in range(3)]
    return [(index_on(machine, cells, is_causal, block), on_host(cells, is_causal, block)) for cells in drawn]


WITHIN = [{"causal": "top_left"}, {"window": (9, 3), "causal": "bottom_right"}]
CASES = [((1, 16), {}), ((3, 5), {}), ((1024, 1024), {}), (BLOCK, WITHIN[0]), ((1, 16), WITHIN[1])]


@pytest.mark.parametrize("is_causal", [False, True], ids=["whole blocks", "causal"])
@pytest.mark.parametrize(("block", "options"), CASES, ids=str)
def test_indices_in_other_blocks_or_intersected_are_listed_by_kernels_and_planned_once(
    cupy: Any, monkeypatch: Any, block: tuple[int, int], options: dict[str, Any], is_causal: bool
) -> None:
    arrays = [cupy.asarray(array) for array in (Q, K, V, DO)]
    indices, plans, planned = indices_and_masks(cupy, is_causal, block), [], Call.plan
    monkeypatch.setattr(Call, "plan", lambda *arguments: plans.append(planned(*arguments)) or plans[-1])
    results_of_each = []
    for index, _ in indices:
        cupy.log.clear()
        results_of_each.append(results(cuflash, arrays, index, **options))
        assert launched(cupy)[:4] == ["classify", "ranks", "pointers", "entries"]
    assert len(plans) == 1
    for each, (_, mask) in zip(results_of_each, indices):
        assert_right(each, mask, **options)


def test_a_captured_call_reads_the_lists_of_an_index_that_is_gone(cupy: Any) -> None:
    arrays, stream = [cupy.asarray(array) for array in (Q, K, V)], cupy.cuda.Stream()
    index = index_on(cupy, blocks(0, (1, 16)), True, (1, 16))
    with stream:
        cuflash.attention(*arrays, mask=index)
        stream.begin_capture()
        o = cuflash.attention(*arrays, mask=index)
        graph = stream.end_capture()
    lists = weakref.ref(index._carried.lists)
    del index
    arrays[0][...] = 2 * Q
    graph.launch()
    assert lists() is not None
    assert_right([o], on_host(blocks(0, (1, 16)), True, (1, 16)), 2 * Q)


@pytest.mark.gpu
@pytest.mark.parametrize("options", WITHIN, ids=str)
@pytest.mark.parametrize("block", [BLOCK, (1, 16)], ids=str)
def test_a_gpu_reads_indices_that_are_intersected(block: tuple[int, int], options: dict[str, Any]) -> None:
    import cupy

    arrays = [cupy.asarray(array) for array in (Q, K, V, DO)]
    for index, mask in indices_and_masks(cupy, True, block):
        assert_right(results(cuflash, arrays, index, **options), mask, **options)


@pytest.mark.parametrize("options", [{}, *WITHIN], ids=str)
def test_a_plan_has_lists_of_its_own_in_blocks_that_kernels_walk(cupy: Any, options: dict[str, Any]) -> None:
    arrays, do = [cupy.asarray(array) for array in (Q, K, V)], cupy.asarray(DO)
    for index, mask in indices_and_masks(cupy, True, (1, 16)):
        ready = cuflash.plan(*arrays, mask=index, **options)
        cupy.log.clear()
        o, lse = ready.forward(*arrays)
        results = o, *ready.backward(do, *arrays, o, lse)
        assert not {"classify", "ranks", "pointers", "entries"} & set(launched(cupy))
        assert_right(results, mask, **options)
        assert "blocks of (16, 16)" in ready.explain()


def test_copies_of_an_index_carry_lists_of_their_own(cupy: Any) -> None:
    """Kernels list a copy on a device once, unless it has row intervals or room for partial blocks."""
    index = index_on(cupy, blocks(0), False)
    assert index._carried is not None
    assert index._on_host._carried is None and pickle.loads(pickle.dumps(index._on_host))._carried is None
    copied = index.to(lambda array: array)
    assert copied._carried is copied._carried is not None and copied._carried.lists is not index._carried.lists
    for name, array in index._carried.arrays.items():
        number = index.num_entries if name in ("kv_blocks", "q_blocks", "kinds", "column_entries") else None
        assert (array.get()[:number] == copied._carried.arrays[name].get()[:number]).all(), name
    assert index_on(cupy, blocks(0), True).to(lambda array: array)._carried is None
    dense = cupy.asarray(np.tri(*LENGTHS, dtype=bool))
    of_elements = BlockIndex.from_mask(masks.Dense(dense), *LENGTHS, BLOCK)
    assert of_elements._carried is not None and of_elements.to(lambda array: array)._carried is None


@pytest.mark.parametrize("block, options", [(BLOCK, {}), (BLOCK, WITHIN[0]), ((1, 16), {}), ((1, 16), WITHIN[1])])
def test_partial_blocks_of_an_index_are_attended(cupy: Any, block: tuple[int, int], options: dict[str, Any]) -> None:
    """Also if the call has other blocks or hides keys, for which kernels cannot read bit tiles of an index."""
    arrays, elements = [cupy.asarray(array) for array in (Q, K, V, DO)], RNG.random(LENGTHS) < 0.5
    index = BlockIndex.from_mask(cupy.asarray(elements), *LENGTHS, block)
    assert index._carried is not None
    assert_right(results(cuflash, arrays, index, **options), elements, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["whole blocks", "causal"])
@pytest.mark.parametrize("block", [BLOCK, *OTHER_BLOCKS], ids=str)
def test_a_gpu_walks_the_lists_that_an_index_carries(block: tuple[int, int], is_causal: bool) -> None:
    import cupy

    arrays = [cupy.asarray(array) for array in (Q, K, V, DO)]
    for index, mask in indices_and_masks(cupy, is_causal, block):
        assert_right(results(cuflash, arrays, index), mask)
