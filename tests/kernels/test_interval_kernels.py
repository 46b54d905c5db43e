"""The kernel that computes packed sequences' row intervals from device offsets, and the calls that launch it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import device_double as device
import numpy as np
import pytest
from cuflash.calls._call import Call
from cuflash import masks
from cuflash.blocks.classify import row_intervals
from cuflash.blocks.sequence_tiles import tile_starts
from cuflash.blocks.work_list import IntervalWork
from cuflash.executors import gpu
from cuflash.executors.list_maker import ListMaker
from cuflash.executors.sim import Simulator
from cuflash.masks import MaskShape
from cuflash.masks.documents import SortedDocuments
from cuflash.masks.sequences import ResolvedSequences
from cuflash.planning.families import sm90
from cuflash.planning.interval_kernels import IntervalsAtCall, IntervalSource
from cuflash.testing import Example, assert_within_bounds
from executors import hostile_schedules, needs_compiler, to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from test_device_masks import changed
from test_list_kernels import passes
from test_sm90 import SIM90

import cuflash

RNG = np.random.default_rng(0)
EXECUTORS = [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]
DTYPES = tuple(np.dtype(kind) for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"))
BLOCK = (16, 8)  # queries and keys of a tile if tiles are ordered
TILE = (6, 10)  # queries and keys of a tile that ends with its sequence
CLOSED = [None, masks.SlidingWindow(7, 3, "top_left"), masks.Causal("bottom_right"), masks.Lengths(q=30, kv=33)]


@st.composite
def cases(draw):
    """Draw a shape, and sequences with offsets of any dtype and layout, perhaps intersected with closed-form masks."""
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 3), (1, 2, 2)]))
    rng, num_sequences = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(0, 7))
    shape = MaskShape(batch, draw(st.integers(1, 2)), draw(st.integers(1, 90)), draw(st.integers(1, 90)))
    is_same = draw(st.booleans())
    shape = shape._replace(seqlen_kv=shape.seqlen_q) if is_same else shape

    def offsets(length):
        leading = [int(rng.choice([1, extent])) for extent in batch][int(rng.integers(0, len(batch) + 1)) :]
        ordered = np.sort(rng.integers(0, length + 1, (*leading, num_sequences + 1)), axis=-1)
        ordered = ordered.astype(draw(st.sampled_from(DTYPES)))
        return np.repeat(ordered, 2, axis=-1)[..., ::2] if draw(st.booleans()) else ordered

    def ids(length):
        document_ids = np.sort(rng.integers(0, 5, (*batch, length)), axis=-1).astype(draw(st.sampled_from(DTYPES)))
        return document_ids - document_ids.dtype.type(2) if document_ids.dtype.kind == "i" else document_ids

    q_offsets = offsets(shape.seqlen_q)
    window = draw(st.sampled_from([None, (5, None), (None, 2), (0, 3), (1 << 70, 1 << 70)]))
    causal = draw(st.sampled_from(["bottom_right", "top_left", *([True, False] if is_same else [])]))
    mask = masks.Sequences(
        q_offsets, None if is_same else offsets(shape.seqlen_kv), causal=causal, window=window, allow_gaps=True
    )
    kind = draw(st.sampled_from(["sequences", "lengths", "documents"]))
    if kind == "lengths":
        dtypes = (draw(st.sampled_from(DTYPES)) for _ in range(2))
        of_q, of_kv = (rng.integers(-9 * (dtype.kind == "i"), 95, batch).astype(dtype) for dtype in dtypes)
        mask = masks.Lengths(q=draw(st.sampled_from([None, 40, of_q])), kv=of_kv)
    elif kind == "documents":
        runs = rng.permutation(90)[np.cumsum(rng.random(shape.seqlen_q) < 0.2)]  # ids of neighboring runs, unsorted
        mask = masks.Documents(runs) if is_same else masks.Documents(ids(shape.seqlen_q), ids(shape.seqlen_kv))
    closed = draw(st.sampled_from(CLOSED))
    return shape, mask if closed is None else mask & closed


def intervals_by_kernel(mask, shape, convert, target, address, stream):
    """Return the source of a mask's intervals and the kernels' results; `convert` copies offsets to the device."""
    resolved = mask.to(convert).resolve(shape)
    source = IntervalSource.of(resolved, shape, BLOCK)
    source = replace(source, tile=TILE) if source.kind == "sequences" else source
    parts = getattr(mask.to(convert), "operands", None) or (mask.to(convert),)
    arrays = next(part._device_form for part in parts if part._device_form is not None).arrays
    return source, source.views(ListMaker(source, target)(map(address, arrays), stream))


def on_simulator(mask, shape, schedule=None):
    machine = Simulator() if schedule is None else Simulator(schedule)
    return intervals_by_kernel(mask, shape, device.DeviceArray, machine, lambda array: array._host.ctypes.data, None)


def on_gpu(mask, shape):
    import cupy

    stream = cupy.cuda.get_current_stream()
    source, intervals = intervals_by_kernel(mask, shape, to_device, gpu.Gpu(), lambda array: array.data.ptr, stream)
    return source, {name: cupy.asnumpy(each) for name, each in intervals.items()}


RUNS = {"sim": on_simulator, "gpu": on_gpu}


def with_numbered_runs(mask):
    """Return documents whose ids are replaced by the numbers of their runs, which never decrease."""
    if not isinstance(mask, masks.Documents) or mask.kv_ids is not None:
        return mask
    return masks.Documents(np.cumsum(np.diff(mask.q_ids, prepend=mask.q_ids[:1]) != 0))


def assert_intervals(mask, shape, source, intervals):
    """Assert that the kernel's intervals and orders equal those that array operations compute."""
    mask = changed(mask, with_numbered_runs)
    sides = row_intervals(mask.resolve(shape), *shape[2:], source.batch, source.num_heads)
    lo, hi = (np.broadcast_to(side, source.extents) for side in sides)
    (seqlen_q, seqlen_kv), (block_q, block_kv) = shape[2:], BLOCK
    work = IntervalWork(
        seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_q=block_q, block_kv=block_kv, lo=lo, hi=hi, is_ordered=True
    )
    tiles = tiles_of_offsets(mask, shape, lo, hi) if source.kind == "sequences" else {}
    for name, wanted in (work.lists | tiles).items():
        assert intervals[name].dtype == wanted.dtype == np.int32
        np.testing.assert_array_equal(intervals[name], wanted, err_msg=name)


def tiles_of_offsets(mask, shape, lo, hi):
    """Return where the tiles of sequences start, and the order of tiles of keys, computed from the mask's offsets."""
    sequences = next(part for part in getattr(mask, "operands", (mask,)) if isinstance(part, masks.Sequences))
    batch, num_heads, _ = lo.shape
    starts = []
    for offsets, length, height in zip((sequences.arrays[0], sequences.arrays[-1]), shape[2:], TILE):
        inner = np.clip(offsets.astype(np.float64), 0, length).astype(np.int64)
        bounds = np.concatenate([np.zeros_like(inner[..., :1]), inner, np.full_like(inner[..., :1], length)], axis=-1)
        bounds = np.broadcast_to(bounds, (*(shape.batch if batch > 1 else bounds.shape[:-1]), bounds.shape[-1]))
        starts.append(np.repeat(tile_starts(bounds.reshape(batch, -1), height), num_heads, axis=0))
    first, end = starts[1][:, :-1, None], starts[1][:, 1:, None]
    lo, hi = (side.reshape(batch * num_heads, 1, -1) for side in (lo, hi))
    seen = (lo < end).sum(-1) - (hi <= first).sum(-1)
    lengths = np.clip(-(-seen // TILE[0]), 0, 255)
    order = np.argsort(lengths, axis=1, kind="stable")[:, ::-1].astype(np.int32)
    return {"q_blocks": starts[0], "kv_blocks": starts[1], "column_entries": order}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_kernel_finds_what_the_array_form_finds(executor):
    @settings(max_examples=min(60, settings.default.max_examples))
    @given(cases())
    def check(case):
        shape, mask = case
        assert_intervals(mask, shape, *RUNS[executor](mask, shape))

    check()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_integers_of_every_dtype_keep_their_sign(executor):
    """Ids and lengths may be negative, and those of queries and of keys may have different dtypes."""
    for of_q, of_kv in itertools.product(DTYPES, repeat=2):
        q, kv = (np.array([-9, -2, -2, 0, 3, 70]).astype(dtype) for dtype in (of_q, of_kv))
        documents, lengths = masks.Documents(np.sort(q), np.sort(kv)[1:]), masks.Lengths(q=q, kv=kv[::-1])
        for shape, mask in ((MaskShape((), 1, 6, 5), documents), (MaskShape((6,), 1, 7, 5), lengths)):
            assert_intervals(mask, shape, *RUNS[executor](mask, shape))


@needs_compiler
def test_any_order_of_threads_finds_the_same_intervals():
    shape, offsets = MaskShape((3,), 1, 300, 300), np.sort(RNG.integers(0, 301, (3, 9)), axis=-1)
    mask = masks.Sequences(offsets, causal=True, allow_gaps=True) & masks.SlidingWindow(100, 0)
    for schedule in hostile_schedules("intervals", 1):
        assert_intervals(mask, shape, *on_simulator(mask, shape, schedule))


@needs_compiler
@pytest.mark.parametrize(
    "offsets", [[0, 50, 20, 40], [-9, 7, 300, 2], [2**62, -(2**62), 5, 2**63 - 1]], ids=["fall", "outside", "far"]
)
def test_offsets_that_break_their_condition_stay_within_the_keys(offsets):
    mask = masks.Sequences(device.DeviceArray(np.array(offsets, np.int64)), causal=True)
    shape = MaskShape((), 1, 40, 40)
    source = replace(IntervalSource.of(ResolvedSequences(mask, shape), shape, None), tile=TILE)
    maker = ListMaker(source, Simulator())([mask.q_offsets._host.ctypes.data], None)
    work = IntervalsAtCall.of(source, (64, 64)).with_results(maker)
    starts = [source.views(maker)[name] for name in ("q_blocks", "kv_blocks")]
    assert all(((side >= 0) & (side <= 40)).all() for side in (work.lo, work.hi, *starts))


def test_masks_that_the_kernel_does_not_serve_are_left_to_the_array_form():
    shape = MaskShape((2,), 1, 40, 40)
    sequences, lengths = masks.Sequences(np.array([0, 9, 40])), masks.Lengths(kv=np.array([1, 2]))
    for mask in (sequences & lengths, sequences & sequences, sequences | masks.Causal(), ~sequences, masks.Causal()):
        assert IntervalSource.of(mask.to(device.to_device).resolve(shape), shape, None) is None
    for other in (MaskShape((1, 1, 1, 2), 1, 40, 40), MaskShape((0,), 1, 40, 40)):
        assert IntervalSource.of(sequences.to(device.to_device).resolve(other), other, None) is None


# Calls, on a test double of CuPy that runs the kernels.

Q, K, V, DO = RNG.standard_normal((4, 2, 3, 40, 16), dtype=np.float32)
OFFSETS = [np.array(offsets) for offsets in ([0, 7, 30, 40], [3, 3, 20, 21], [0, 39, 40, 40])]
SEQUENCES = {
    "causal": lambda take, turn: masks.Sequences(take(OFFSETS[turn]), causal=True, allow_gaps=True),
    "of each entry": lambda take, turn: masks.Sequences(
        take(np.stack([OFFSETS[turn], OFFSETS[turn] // 2])), allow_gaps=True
    ),
    "with a window": lambda take, turn: (
        masks.Sequences(take(OFFSETS[turn]), allow_gaps=True) & masks.SlidingWindow(5, 2)
    ),
    "with offsets of keys": lambda take, turn: masks.Sequences(
        take(OFFSETS[turn]), take(OFFSETS[turn - 1]), causal="bottom_right", window=(9, None), allow_gaps=True
    ),
}
LENGTHS = [np.array(lengths, np.int32) for lengths in ([7, 40], [0, 23], [39, 1])]
IDS = [np.array(np.repeat(ids, (9, 14, 17))) for ids in ([3, 5, 9], [2, 2, 3], [-4, 0, 5])]
MASKS = SEQUENCES | {
    "lengths of keys": lambda take, turn: masks.Lengths(kv=take(LENGTHS[turn])) & masks.Causal(),
    "lengths of queries": lambda take, turn: masks.Lengths(q=take(LENGTHS[turn]), kv=30),
    "lengths of both": lambda take, turn: masks.Lengths(q=take(LENGTHS[turn]), kv=take(LENGTHS[turn - 1])),
    "documents": lambda take, turn: masks.Documents(take(IDS[turn])) & masks.Causal(),
    "documents of each entry": lambda take, turn: masks.Documents(take(np.stack([IDS[turn], IDS[turn - 1]]))),
    "documents of keys": lambda take, turn: masks.Documents(take(IDS[turn]), take(IDS[turn - 1])),
}


def require_bounds(mask, **results):
    """Require that results of a call are within their bounds; the mask holds host arrays."""
    assert_within_bounds(Example(q=Q, k=K, v=V, mask=mask, do=DO), **results)


def asks_nothing_again(monkeypatch):
    resolved = ((ResolvedSequences, "bounds"), (SortedDocuments, "bounds"))
    for place, name in ((Call, "plan"), (gpu, "BoundPass"), (gpu, "ListMaker"), *resolved):
        monkeypatch.setattr(place, name, lambda *args, name=name, **options: pytest.fail(f"{name} again"))


@pytest.mark.parametrize("name", MASKS)
def test_calls_with_new_arrays_share_their_launches(cupy, monkeypatch, name):
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    got = []
    with monkeypatch.context() as patched:
        for turn in range(3):
            cupy.log.clear()
            got.append(passes(MASKS[name](cupy.asarray, turn), arrays, do))
            assert cupy.launched[:2] == ["intervals", "forward"] and cupy.launched.count("intervals") == 1
            if turn == 0:
                asks_nothing_again(patched)
    for turn, results in enumerate(got):
        named = dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True))
        require_bounds(MASKS[name](np.asarray, turn), **named)


def test_gradients_read_the_offsets_of_their_own_call(cupy):
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    offsets, pullbacks = cupy.asarray(OFFSETS[0]), []
    for turn in (0, 1):
        offsets[...] = OFFSETS[turn]
        pullbacks.append(cuflash.attention_vjp(*arrays, mask=masks.Sequences(offsets))[1])
    for turn, vjp in enumerate(pullbacks):
        dq, dk, dv = (x.get() for x in vjp(do))
        require_bounds(masks.Sequences(OFFSETS[turn], allow_gaps=True), dq=dq, dk=dk, dv=dv)


def test_plans_for_new_sequences_share_their_launches(cupy, monkeypatch):
    arrays = [cupy.asarray(each) for each in (Q, K, V)]
    plans = []
    with monkeypatch.context() as patched:
        for turn in range(3):
            plans.append(cuflash.plan(*arrays, mask=masks.Sequences(cupy.asarray(OFFSETS[turn]), causal=True)))
            plans[turn].forward(*arrays)
            if turn == 0:
                asks_nothing_again(patched)
    for turn, plan in enumerate(plans):
        o, lse = plan.forward(*arrays)
        require_bounds(masks.Sequences(OFFSETS[turn], causal=True, allow_gaps=True), o=o.get(), lse=lse.get())
        out = cupy.empty(Q.shape, np.float32)
        assert plan.forward(*arrays, out=out)[0] is out and (out.get() == o.get()).all()
        assert plan._plan.visited_scores == cuflash.plan(
            Q, K, V, mask=masks.Sequences(OFFSETS[turn], causal=True, allow_gaps=True), executor="sim"
        )._plan.visited_scores


def test_offsets_of_a_repeated_call_are_checked_again(cupy):
    arrays = [cupy.asarray(each) for each in (Q, K, V)]
    for _ in range(2):
        cuflash.attention(*arrays, mask=masks.Sequences(cupy.asarray(OFFSETS[0])))
    wrong = {
        "leading axes of q_offsets must broadcast": masks.Sequences(cupy.asarray(np.zeros((3, 4), np.int64))),
        "must be on the same device as q": masks.Sequences(OFFSETS[0]),
    }
    for reason, mask in wrong.items():
        with pytest.raises(cuflash.UnsupportedProblem, match=reason):
            cuflash.attention(*arrays, mask=mask)


def check_layouts(cupy, library=cuflash):
    """Check that masks refuse integers on a device that do not start, or follow each other, at their item size."""
    room, numbers = library.masks, cupy.asarray(np.zeros(99, np.uint8))
    shifted = numbers[1:41].view(np.int32)
    odd = cupy.asarray(np.zeros((10, 5), np.uint8))[:, :4].view(np.int32)[:, 0]
    refused = {
        "q_ids": room.Documents, "q": lambda array: room.Lengths(q=array), "q_offsets": room.Sequences,
        "blocks": lambda array: room.ChosenBlocks(array.reshape(5, 2), 16),
        "counts": lambda array: room.ChosenBlocks(cupy.asarray(np.zeros((10, 2), np.int64)), 16, counts=array),
    }  # fmt: skip
    for name, make in refused.items():
        with pytest.raises(library.UnsupportedProblem, match=f"{name} must start at a multiple of its item size, 4"):
            make(shifted)
    with pytest.raises(library.UnsupportedProblem, match="q_ids's strides must be multiples of its item size, 4"):
        room.Documents(odd)


def test_arrays_that_kernels_cannot_read_are_refused_by_masks(cupy):
    check_layouts(cupy)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_new_arrays_wait_for_nothing_and_can_be_captured(name):
    import cupy

    q, k, v = (cupy.asarray(each) for each in (Q, K, V))
    arrays = []
    mask = MASKS[name](lambda array: arrays.append(cupy.asarray(array)) or arrays[-1], 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention(q, k, v, mask=mask)
        stream.synchronize()
        stream.begin_capture()
        o = cuflash.attention(q, k, v, mask=mask)
        graph = stream.end_capture()
        for turn in (1, 2, 0):
            new = []
            MASKS[name](lambda array: new.append(array) or array, turn)
            for array, contents in zip(arrays, new, strict=True):
                array[...] = cupy.asarray(contents)
            graph.launch(stream)
            stream.synchronize()
            require_bounds(MASKS[name](np.asarray, turn), o=o.get())


@pytest.mark.parametrize("name", SEQUENCES)
def test_backward_tiles_of_new_sequences_end_with_them(cupy, monkeypatch, name):
    """Each call computes the tiles of its current offsets on the device; calls share launches."""
    monkeypatch.setattr(sm90, "LONG_SEQUENCE", 0)
    length, scale = 400, 10  # scale of the offsets
    q, k, v, do = RNG.standard_normal((4, 2, 1, length, 128)).astype(np.float16)
    arrays, sent_do = [cupy.asarray(each) for each in (q, k, v)], cupy.asarray(do)
    for turn in range(3):
        cupy.log.clear()
        mask = SEQUENCES[name](lambda offsets: cupy.asarray(offsets * scale), turn)
        results = passes(mask, arrays, sent_do, kernel="sm90")
        assert cupy.launched == ["intervals", "interval_orders", "forward", "backward_statistics", "backward"]
        example = SIM90.rounded(
            Example(q=q, k=k, v=v, mask=SEQUENCES[name](lambda offsets: offsets * scale, turn), do=do)
        )
        assert_within_bounds(example, **dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True)))
        planned = cuflash.plan(*arrays, mask=mask, kernel="sm90")._plan
        assert planned.specs["backward"].cuts_sequences
