"""Block indexes of chosen blocks: those that kernels create equal those that the host creates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import cupy_machine
import numpy as np
from cached_calls import cached
import pytest
from device_lists import assert_same_blocks
from foreign import Foreign
from library_parts import part
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import BlockIndex, masks
from cuflash.blocks import index as indices
from cuflash.executors import gpu, index_maker
from cuflash.executors.index_maker import index_of
from cuflash.masks import fields as mask_fields
from cuflash.masks.shape import MaskShape

CLOSED = [masks.Band(), masks.Causal("bottom_right"), masks.Band(-9, 4)]


@pytest.fixture
def cupy(tmp_path, monkeypatch):
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine


def blocks_of(shape, block, heads, seed):
    sides = [-(-length // side) for length, side in zip(shape[2:], block)]
    return np.random.default_rng(seed).random((*shape.batch, heads, *sides)) < 0.4


def expected_of(cells, mask, shape, block):
    whole = masks.BlockPattern(cells, block)
    return BlockIndex.from_mask(whole if mask == masks.Band() else whole & mask, block=block, **shape._asdict())


def index_by_kernels(xp, cells, mask, shape, block):
    return index_of(xp.asarray(cells), mask.resolve(shape), shape, block)


def assert_same(got, expected):
    """Assert that an index on a device equals one on the host, and that zeros follow its last entry."""
    # a new copy, since a graph may have written to the index after the last one
    assert_same_blocks(replace(got)._on_host, expected)
    for name in ("indices", "kinds", "tiles"):
        assert not getattr(got, name)[expected.num_entries :].get().any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.sampled_from([(4, 8), (5, 3), (16, 16)]),
       st.sampled_from(CLOSED), st.sampled_from([1, 3]))  # fmt: skip
def check_indices(machine, seed, seqlen_q, seqlen_kv, block, mask, heads):
    shape = MaskShape((2,), 3, seqlen_q, seqlen_kv)
    blocks = blocks_of(shape, block, heads, seed)
    assert_same(index_by_kernels(machine, blocks, mask, shape, block), expected_of(blocks, mask, shape, block))


def test_kernels_make_the_index_of_chosen_blocks(cupy):
    check_indices(cupy)


class Named(Foreign):
    """An array that names its namespace and cannot be written to, like JAX's arrays."""

    def __init__(self, host):
        super().__init__(host, (2, 0))
        self.shape, self.dtype, self.ndim = host.shape, host.dtype, host.ndim

    def __array_namespace__(self):
        return SimpleNamespace(__name__="named")


@pytest.mark.parametrize("make", [Foreign, Named])
def test_an_index_is_made_of_arrays_of_other_libraries(cupy, monkeypatch, make):
    for module in (mask_fields, indices):
        monkeypatch.setattr(module, "is_differentiated", lambda value: isinstance(value, Named))
    shape, block = MaskShape((2,), 3, 37, 29), (8, 4)
    blocks = blocks_of(shape, block, 3, 0)
    on_device = Named(blocks) if make is Named else Foreign(blocks, (2, 0))
    assert_same(BlockIndex.from_blocks(on_device, 37, 29, block), expected_of(blocks, masks.Band(), shape, block))


@pytest.mark.parametrize("make", [Foreign, Named])
def test_an_index_is_made_of_masks_that_hold_arrays_of_other_libraries(cupy, monkeypatch, make):
    monkeypatch.setattr(mask_fields, "is_differentiated", lambda value: isinstance(value, Named))
    dense = np.random.default_rng(0).random((37, 29)) < 0.3
    on_device = masks.Dense(Named(dense) if make is Named else Foreign(dense, (2, 0)))
    for got, mask in ((on_device, masks.Dense(dense)), (~on_device, ~masks.Dense(dense))):
        index = BlockIndex.from_mask(got & masks.Causal("top_left"), 37, 29, (8, 4))
        assert_same(index, BlockIndex.from_mask(mask & masks.Causal("top_left"), 37, 29, (8, 4)))


def test_whoever_makes_plans_makes_indices_on_a_device():
    """The module of block indexes does not import the code that creates indexes on a device."""
    code = "import cuflash, cuflash.blocks.index as index; cuflash.plan; assert index.make_on_device is not None"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_later_calls_of_one_layout_launch_four_kernels_and_bind_nothing(cupy, monkeypatch):
    shape, block = MaskShape((2,), 3, 37, 29), (8, 4)
    mask = masks.Causal("bottom_right").resolve(shape)
    index_by_kernels(cupy, blocks_of(shape, block, 3, 0), mask, shape, block)
    monkeypatch.setattr(index_maker, "ListSource", None)
    for seed in (1, 2):
        blocks = blocks_of(shape, block, 3, seed)
        cupy.log.clear()
        index = index_by_kernels(cupy, blocks, mask, shape, block)
        assert [entry for kind, *_, entry in cupy.log if kind == "launch"] == [
            "classify", "ranks", "pointers", "entries"
        ]  # fmt: skip
        assert_same(index, expected_of(blocks, mask, shape, block))


OF_MASKS = {  # function that creates a mask from an array; lengths, block and other arguments of the index
    "dense": (lambda x, of: of.Dense(x), (37, 29, (8, 4)), {}),
    "a bare array": (lambda x, of: x, (37, 29, (8, 4)), {}),
    "causal": (lambda x, of: of.Dense(x) & of.Causal("bottom_right"), (37, 29, 8), {}),
    "blocks": (lambda x, of: of.BlockPattern(x[..., :5, :4], (8, 8)), (37, 29, 8), {}),
    "blocks of others": (
        lambda x, of: of.Causal("top_left") & of.BlockPattern(x[..., :5, :4], (8, 8)), (37, 29, 5), {},
    ),
    "heads": (lambda x, of: of.Dense(x), (37, 29, 8), {"batch": (2,), "num_heads": 3}),
    "lengths": (lambda x, of: of.Lengths(q=30, kv=x[0].sum()), (37, 29, 8), {}),
    "lengths of a batch": (
        lambda x, of: of.Lengths(q=x[:, 0, :, 0].sum(-1), kv=x[:, 0, 0].sum(-1)) & of.Causal("top_left"),
        (37, 29, (8, 4)), {"batch": (2,), "num_heads": 3},
    ),
    "lengths outside a window": (  # no array is in the part that is evaluated
        lambda x, of: ~of.SlidingWindow(9, 4, align="top_left") & of.Lengths(q=30, kv=x[0].sum()), (37, 29, (8, 4)), {},
    ),
    "documents": (lambda x, of: of.Documents(x[:, 0].cumsum(-1), x[0].cumsum(-1)), (37, 29, (5, 3)), {}),
}


def check_masks(machine, library, name):
    """Check that repeated calls list the current contents, even if calls with another block size come between them.

    Each array of the index equals that of an index whose kernels are not bound.
    """
    make, arguments, options = OF_MASKS[name]
    rng, twin = np.random.default_rng(0), library.BlockIndex
    array = rng.random((2, 3, 37, 29)) < 0.4 if options else rng.random((37, 29)) < 0.4
    on_device, narrow = machine.asarray(array), {"seqlen_q": 37, "seqlen_kv": 29, "block": 16} | options
    maker, (*lengths, block) = part(library, "executors.index_maker"), arguments
    shape = library.masks.MaskShape(options.get("batch", ()), options.get("num_heads", 1), *lengths)
    sides, target = (block, block) if isinstance(block, int) else block, part(library, "executors.gpu").current_target()
    for turn in range(3):
        machine.log.clear()
        index = twin.from_mask(make(on_device, library.masks), *arguments, **options)
        launches = ["launch"] * (4 + (name in ("lengths", "lengths of a batch", "documents")))
        assert turn == 0 or [kind for kind, *_ in machine.log] == launches
        whole = library.masks.Mask._mask_of(make(on_device, library.masks))
        unbound = maker.index_of_mask(whole, shape, sides, target)
        for field in ("indptr", "indices", "kinds", "tiles", "bits", "lo", "hi"):
            one, other = getattr(index, field), getattr(unbound, field)
            assert (one is None) == (other is None)
            assert one is None or one.shape == other.shape and one.dtype == other.dtype and (one == other).all()
        assert_same(index, twin.from_mask(make(array, library.masks), *arguments, **options))
        expected = twin.from_mask(make(array, library.masks), **narrow)
        assert_same(twin.from_mask(make(on_device, library.masks), **narrow), expected)
        array = ~array
        on_device[...] = array


@pytest.mark.parametrize("name", OF_MASKS)
def test_an_index_of_a_mask_on_a_device_is_made_by_bound_kernels(cupy, name):
    check_masks(cupy, cuflash, name)


def test_arguments_of_an_earlier_call_are_compared_with_their_types(cupy):
    array = cupy.asarray(np.tri(6, dtype=bool))
    BlockIndex.from_mask(array, 6, 6, 1)
    for arguments in ((6, 6, True), (6, 6.0, 1), (6, 6, np.True_)):
        with pytest.raises(cuflash.UnsupportedProblem):
            BlockIndex.from_mask(array, *arguments)


def test_a_graph_makes_the_index_of_what_a_mask_holds_at_a_replay(cupy):
    mask = masks.Dense(cupy.asarray(np.tri(24, dtype=bool)))
    BlockIndex.from_mask(mask, 24, 24, 8)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        index = BlockIndex.from_mask(mask, 24, 24, 8)
        graph = stream.end_capture()
    assert {maker for (maker,) in cached("index").values()} == gpu._pinned
    for array in (np.tri(24, k=-7, dtype=bool), np.eye(24, dtype=bool)):
        mask.allowed[...] = array
        graph.launch(stream)
        assert_same(index, BlockIndex.from_mask(array, 24, 24, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_MASKS)
def test_a_gpu_makes_the_index_of_a_mask(name):
    import cupy

    make, arguments, options = OF_MASKS[name]
    for seed in range(3):
        array = np.random.default_rng(seed).random((2, 3, 37, 29) if options else (37, 29)) < 0.4
        index = BlockIndex.from_mask(make(cupy.asarray(array), masks), *arguments, **options)
        assert_same(index, BlockIndex.from_mask(make(array, masks), *arguments, **options))


def test_layouts_and_masks_are_not_mixed_up(cupy):
    shape, block = MaskShape((2,), 3, 32, 32), (8, 8)
    blocks = blocks_of(shape, block, 3, 0)
    for mask in (masks.Band(), masks.Causal(), masks.Band(-9, 4), masks.Band()):
        assert_same(index_by_kernels(cupy, blocks, mask, shape, block), expected_of(blocks, mask, shape, block))
    turned = cupy.asarray(blocks).swapaxes(-1, -2)
    index = index_of(turned, masks.Band(), shape, block)
    assert_same(index, expected_of(blocks.swapaxes(-1, -2), masks.Band(), shape, block))


def test_an_index_is_made_inside_a_capture_once_the_kernels_are_compiled(cupy):
    shape, block = MaskShape((), 1, 24, 24), (8, 8)
    blocks = blocks_of(shape, block, 1, 0)
    array, mask = cupy.asarray(blocks), masks.Causal().resolve(shape)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="is not compiled yet, and a stream capture cannot wait for it"):
            index_of(array, mask, shape, block)
        stream.end_capture()
    index_of(array, mask, shape, block)
    with stream:
        stream.begin_capture()
        index = index_of(array, mask, shape, block)
        graph = stream.end_capture()
    assert {maker for (maker,) in cached("index").values()} == gpu._pinned
    for seed in (0, 1):
        array[...] = blocks_of(shape, block, 1, seed)
        graph.launch(stream)
        assert_same(index, expected_of(array.get(), mask, shape, block))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", CLOSED, ids=lambda mask: type(mask).__name__)
def test_a_gpu_makes_the_index_of_chosen_blocks(mask):
    import cupy

    shape, block = MaskShape((2,), 3, 300, 500), (16, 8)
    blocks = blocks_of(shape, block, 3, 0)
    assert_same(index_by_kernels(cupy, blocks, mask, shape, block), expected_of(blocks, mask, shape, block))
