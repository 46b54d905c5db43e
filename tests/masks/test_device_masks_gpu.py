"""Block lists and work lists on a GPU equal those created on the host, also in a stream capture, which forbids
waits.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_device_masks import LARGE, assert_same_blocks, assert_same_lists

from cuflash import BlockIndex, masks, patterns
from cuflash.arrays import namespace
from cuflash.masks import MaskShape
from cuflash.blocks.work_list import IntervalWork, ListedWork, requested_mask, work_list

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
SHAPE = MaskShape((2, 3), 2, 190, 250)
CASES = [
    *LARGE,
    (SHAPE, masks.Lengths(q=RNG.integers(0, 191, (2, 1)), kv=RNG.integers(0, 251, (2, 3)))),
    (SHAPE, masks.Documents(np.sort(RNG.integers(0, 9, (3, 190))), np.sort(RNG.integers(0, 9, 250)))),
    (SHAPE, ~masks.PrefixLM(RNG.integers(0, 251, (2, 3)), "bottom_right") | masks.Dilated(3, align="top_left")),
    (SHAPE, masks.Dense(RNG.random((2, 1, 1, 190, 1)) < 0.5) & masks.FromFunction(lambda b, h, i, j: (i + j) % 3 == h)),
    (SHAPE, masks.BlockPattern(RNG.random((3, 1, 12, 16)) < 0.3, 16) & masks.Lengths(kv=200)),
    (SHAPE, masks.BlockPattern(RNG.random((2, 48, 63)) < 0.3, 4)),
    (MaskShape((), 1, 4096, 4096), masks.Causal() & masks.Documents(np.arange(4096) // 700)),
]
IDS = [f"{number}_{type(mask).__name__}" for number, (_, mask) in enumerate(CASES)]


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def captured(cupy, build):
    """Run `build` inside a stream capture, which any wait for the stream would break."""
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        build()  # compiles the kernels and fills the memory pool
        stream.synchronize()
        stream.begin_capture()
        try:
            results = build()
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    return results


def test_a_wait_inside_a_capture_is_seen(cupy):
    ids = cupy.arange(8)
    with pytest.raises(RuntimeError, match="captur"):  # CuPy's own error, or its CUDA error, which is a subclass
        captured(cupy, lambda: int(ids.sum()))


@pytest.mark.parametrize(("shape", "mask"), CASES, ids=IDS)
@pytest.mark.parametrize("block", [(32, 20), (16, 16)], ids=str)
def test_an_index_and_its_lists_are_made_without_waiting(cupy, shape, mask, block):
    on_device = mask.to(cupy.asarray)

    def build():
        index = BlockIndex.from_mask(on_device, block=block, **shape._asdict())
        return index, ListedWork(index=index).lists, index.transpose()

    index, lists, turned = captured(cupy, build)
    expected = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    assert_same_blocks(index._on_host, expected)
    assert_same_blocks(turned._on_host, expected.transpose())
    on_host = {name: cupy.asnumpy(array) for name, array in lists.items()}
    assert_same_lists(on_host, ListedWork(index=expected).lists, expected.num_entries)


@pytest.mark.parametrize(("shape", "mask"), CASES, ids=IDS)
def test_work_is_made_without_waiting(cupy, shape, mask):
    on_device = mask.to(cupy.asarray)
    where = namespace(cupy.zeros(0))
    work = captured(cupy, lambda: work_list(requested_mask(on_device, False, None, shape, where), shape, (64, 32)))
    on_host = work.on_host
    if isinstance(on_host, ListedWork):
        got = on_host.index.toarray()
    else:
        keys = np.arange(shape.seqlen_kv)
        got = (on_host.lo[..., None] <= keys) & (keys < on_host.hi[..., None])
    expected = mask.toarray(**shape._asdict()).reshape(shape.num_batch, *shape[1:])
    assert (np.broadcast_to(got, expected.shape) == expected).all()


@pytest.mark.parametrize("block", [8, 24])
def test_an_index_on_a_gpu_combines_without_waiting(cupy, block):
    shape, other = MaskShape((), 2, 130, 130), masks.Causal()
    pattern = patterns.random(130, block=8, density=0.3, num_heads=2)
    on_device = pattern.to(cupy.asarray)

    def build():
        index = BlockIndex.from_mask(on_device, block=8, **shape._asdict())
        return BlockIndex.from_mask(index.as_mask() & other, block=block, **shape._asdict())

    index = captured(cupy, build)
    assert_same_blocks(index._on_host, BlockIndex.from_mask(pattern & other, block=block, **shape._asdict()))


def test_contents_out_of_order_read_no_other_memory(cupy):
    ids = cupy.asarray(RNG.integers(-(2**40), 2**40, (2, 190)))
    shape = MaskShape((2,), 1, 190, 190)
    work = captured(cupy, lambda: work_list(masks.Documents(ids, ids[::-1]).resolve(shape), shape, (64, 64)))
    assert isinstance(work, IntervalWork)
    for side in (work.on_host.lo, work.on_host.hi):
        assert ((0 <= side) & (side <= 190)).all()
