"""Planted faults in the row intervals and orders of packed sequences that kernels compute at each call."""

from __future__ import annotations

from types import ModuleType

import device_double
import numpy as np
from cuflash import masks, sim
from cuflash.masks import MaskShape
from mutations.planting import Edit
from mutations.python_guards import part
from test_interval_kernels import assert_intervals, on_simulator
from test_sequence_tiles import (
    HEIGHT, WIDTH, alone, assert_parts, backward_tiles, check_backward_tiles, check_choice, check_order,
    check_other_kernels, tiles_of,
)  # fmt: skip

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault
_RNG = np.random.default_rng(0)


def _offsets(length: int, *leading: int) -> np.ndarray:
    return np.sort(_RNG.integers(0, length + 1, (*leading, 7)), axis=-1)


_GAPS = {"allow_gaps": True}
_CASES = (
    (MaskShape((), 1, 230, 230), masks.Sequences(
        _offsets(230).astype(np.uint8), causal=True, window=(9, None), **_GAPS
    )),
    (MaskShape((2, 3), 2, 70, 90), masks.Sequences(
        _offsets(70, 3), _offsets(90, 2, 1), causal="bottom_right", **_GAPS
    )),
    (MaskShape((3,), 1, 90, 41), masks.Sequences(
        _offsets(90, 3).astype(np.int32), _offsets(41).astype(np.int16), causal="top_left", window=(3, 3), **_GAPS
    )),
    (MaskShape((), 1, 64, 64), masks.Sequences(np.array([3, 20, 60], np.uint64), **_GAPS) & masks.SlidingWindow(7, 3)),
    (MaskShape((), 1, 300, 5000), masks.Sequences(np.array([0, 100, 300]), np.array([0, 2900, 5000]))),
    (MaskShape((), 2, 83, 60), masks.Sequences(_offsets(60), **_GAPS) & masks.Lengths(q=80, kv=33)),
    (MaskShape((3,), 1, 50, 60), masks.Lengths(q=np.array([9, 0, 70]), kv=np.array([61, 30, 2], np.uint8))),
    (MaskShape((2,), 1, 50, 60), masks.Lengths(q=30, kv=np.array([60, 20], np.uint64)) & masks.Causal("top_left")),
    (MaskShape((), 1, 50, 50), masks.Documents(np.repeat([5, -2, 9], (11, 22, 17)))),
    (MaskShape((2,), 1, 30, 40), masks.Documents(
        np.sort(_RNG.integers(0, 5, (2, 30))).astype(np.uint64) << 61, np.sort(_RNG.integers(0, 3, 40)) << 61
    )),
    (MaskShape((), 1, 5, 4), masks.Documents(np.array([-7, -7, -1, 0, 2], np.int32), np.array([-7, -1, 0, 2]))),
)  # fmt: skip


def intervals_are_those_of_the_array_form() -> None:
    """Check that kernels compute the same intervals as array operations, in any order of threads."""
    for number, (shape, mask) in enumerate(_CASES):
        schedule = sim.Schedule(seed=number, order=("random", "priorities")[number % 2], shuffle_lanes=True)
        assert_intervals(mask, shape, *on_simulator(mask, shape, schedule))


def queries_are_cut_into_tiles() -> None:
    """Check that each query is in one tile, that long sequences share no tile, and that short ones share some."""
    long = [0, 70, 165, 320]
    assert tiles_of(masks.Sequences(np.array(long), causal=True), 320, 320) == alone(long)
    assert (64, 70) in tiles_of(masks.Sequences(np.array([0, 70, 75, 80, 160]), causal=True), 160, 160)
    assert tiles_of(masks.Sequences(np.arange(0, 161, 10), causal=True), 160, 160) == alone([0, 160])
    assert tiles_of(masks.Sequences(np.array([0, 300]), causal=True, window=(50, None)), 300, 300) == alone([0, 300])
    full = [first for first, _ in tiles_of(masks.Sequences(np.array(long)), 320, 320)]
    assert full == sorted({*range(0, 320, HEIGHT), *long[:-1]})
    assert_parts(masks.Sequences(np.array([0, 20, 150]), causal=True) & masks.Lengths(q=149, kv=90), 150)


def sequences_have_kernels_by_their_length(library: ModuleType) -> None:
    check_choice(library)
    check_other_kernels(library)


def backward_tiles_end_with_sequences(library: ModuleType) -> None:
    check_backward_tiles([70, 90, 129, 40], [16, 90, 33, 40], library=library)
    check_backward_tiles([64, 70, 5, 60], [64, 70, 5, 60], "bottom_right", library)
    window = library.masks.Sequences(np.array([0, 150]), causal=True, window=(9, None))
    numbers = [len(starts) for starts in backward_tiles(window, 150, 150, library)]
    assert numbers == [150 // HEIGHT + 2, 150 // WIDTH + 2]
    check_order(library)


def each_call_reads_offsets(library: ModuleType) -> None:
    """Check that the key of a call excludes offsets, and includes everything that decides how kernels read them."""
    contents_of = part(library, "masks.one_array").mask_contents

    def layout(*arrays):
        return tuple((array.shape, array.strides) for array in arrays)

    def of(offsets, *more, **options):
        return contents_of(library.masks.Sequences(offsets, *more, **options), layout)

    offsets, other, longer = (device_double.to_device(np.arange(length)) for length in (4, 4, 5))
    first = of(offsets, causal=True)
    assert first.key == of(other, causal=True).key and first.arrays == (offsets,)
    others = (
        of(longer, causal=True), of(offsets), of(offsets, causal="top_left"), of(offsets, causal=True, window=(1, 0)),
        of(offsets, other, causal="bottom_right"),
    )  # fmt: skip
    assert len({each.key for each in (first, *others)}) == 6 and others[-1].arrays == (offsets, other)
    lengths, documents = library.masks.Lengths, library.masks.Documents
    keys = [contents_of(each, layout).key for each in (
        lengths(kv=offsets), lengths(q=offsets), lengths(q=3, kv=offsets), lengths(q=4, kv=offsets),
    )]  # fmt: skip
    assert len(set(keys)) == 4 and contents_of(lengths(kv=other), layout).key == keys[0]
    assert contents_of(lengths(q=3, kv=4), layout) is None
    assert contents_of(documents(offsets, other), layout).arrays == (offsets, other)
    assert contents_of(documents(offsets, offsets), layout).arrays == (offsets,)


INTEGERS = "attention/integers.cuh"
KERNEL, ORDERS, SOURCE = "lists/intervals.cu", "lists/interval_orders.cu", "planning/interval_kernels.py"
TILES, CHOICE, PARTS = "sm90/sequence_tiles.cuh", "planning/families/sm90.py", "blocks/sequence_tiles.py"
FAULTS = {
    intervals_are_those_of_the_array_form: {
        "a sequence starts after its first query": Edit(
            KERNEL, "keys_of_sequence", "q.at(middle) <= query", "q.at(middle) < query"
        ),
        "queries after all sequences see keys": Edit(KERNEL, "keys_of_sequence", "after > last ? kFar : ", ""),
        "the window is not cut to the sequence": Edit(
            KERNEL, "keys_of_sequence", "clipped(diagonal - params.left, start, stop)", "diagonal - params.left"
        ),
        "the diagonal starts with the sequence": Edit(
            KERNEL, "keys_of_sequence", "params.is_bottom_right ? stop - q.at(end)", "false ? stop - q.at(end)"
        ),
        "keys have the offsets of queries": Edit(
            KERNEL, "Matrix.Matrix", "if (params.kv_integers != nullptr)", "if (false)"
        ),
        "batch entries are one": Edit(
            INTEGERS, "integers_of", "data += batch_entry % batch[axis] * strides[axis];", ""
        ),
        "bytes have a sign": Edit(
            INTEGERS, "Integers.at", "is_signed ? *static_cast<const int8_t*>(", "true ? *static_cast<const int8_t*>("
        ),
        "negative integers of 32 bits become large": Edit(
            INTEGERS, "Integers.at", "if (itemsize == 4 && is_signed) return *static_cast<const int32_t*>(from);", ""
        ),
        "the query behind a length sees keys": Edit(
            KERNEL, "keys_of_lengths", "query < q_length", "query <= q_length"
        ),
        "lengths of keys that the host knows serve all": Edit(
            KERNEL, "keys_of_lengths", "kv.data == nullptr ? params.kv_length : kv.at(0)", "params.kv_length"
        ),
        "lengths of queries are not read": Edit(
            KERNEL, "keys_of_lengths", "q.data == nullptr ? params.q_length : q.at(0)", "params.seqlen_q"
        ),
        "a document starts with its query": Edit(KERNEL, "keys_of_document", "; }, 0, query)", "; }, query, query)"),
        "a document ends with its query": Edit(
            KERNEL, "keys_of_document", "query + 1, params.seqlen_q)", "query + 1, query + 1)"
        ),
        "a document has the keys of those before": Edit(
            KERNEL, "keys_of_document", "return !(kv.exact(j) < id); }, 0,", "return true; }, 0,"
        ),
        "a document ends before its last id": Edit(
            KERNEL, "keys_of_document", "return id < kv.exact(j); }", "return !(kv.exact(j) < id); }"
        ),
        "large ids are negative": Edit(
            INTEGERS, "Integers.exact", "{!is_signed && bits < 0, bits}", "{false, bits}"
        ),
        "closed forms hide nothing": Edit(KERNEL, "Matrix.keys_of", "if (params.rows_lo == nullptr)", "if (true)"),
        "a short last block reaches past the end": Edit(
            KERNEL, "row_length", "(end < params.seqlen_q ? end : params.seqlen_q) - 1", "params.seqlen_q - 1"
        ),
        "columns end with their first key": Edit(
            KERNEL, "column_length", "num_queries_of(first, last)", "num_queries_of(first, first)"
        ),
        "blocks that are begun do not count": Edit(
            KERNEL, "num_blocks_of", "(length - 1) / block + 1", "length / block"
        ),
        "long blocks are distinguished": Edit(KERNEL, "num_blocks_of", "0, kMaxLength", "0, 1 << 20"),
        "the shortest come first": Edit(ORDERS, "put_in_order", "other_length > length", "other_length < length"),
        "of equally long ones the first comes first": Edit(
            ORDERS, "put_in_order", "&& other > number", "&& other < number"
        ),
        "matrices have one order": Edit(ORDERS, "put_in_order", "number / num_blocks * num_blocks", "0"),
        "a sequence has no tile more than multiples": Edit(KERNEL, "tile_start", "/ height + sequence;", "/ height;"),
        "a sequence starts a tile early": Edit(
            KERNEL, "tile_start", "first_number(middle) <= number", "first_number(middle) <= number + 1"
        ),
        "tiles continue in the next sequence": Edit(KERNEL, "tile_start", "bound(sequence + 1)", "length"),
        "rows behind the last sequence have no tiles": Edit(
            KERNEL, "tile_start", "end = num_offsets + 1", "end = num_offsets"
        ),
        "tiles of keys start where queries do": Edit(
            KERNEL, "start_of_kv_tile", "tile_start(matrix.kv,", "tile_start(matrix.q,"
        ),
        "queries that see a tile are counted by keys": Edit(KERNEL, "tile_length", "params.tile_q", "params.tile_kv"),
        "a tile has the queries of its first key": Edit(
            KERNEL, "tile_length", "num_queries_of(first, end - 1)", "num_queries_of(first, first)"
        ),
        "lanes look at one query too early": Edit(
            KERNEL, "Matrix.num_queries_of", "% kLanes + 1) * step - 1;", "% kLanes + 1) * step - 2;"
        ),
        "a search ends a query early": Edit(
            KERNEL, "Matrix.num_queries_of", "end = counted + step - 1;", "end = counted + step - 2;"
        ),
        "queries that have not ended are taken away": Edit(
            KERNEL, "Matrix.num_queries_of", "(counts_ends ? keys.hi : keys.lo)", "keys.lo"
        ),
    },
    queries_are_cut_into_tiles: {
        "a sequence starts a query late": Edit(TILES, "next_sequence", "+ __ffs(chunk)", "+ __ffs(chunk) + 1"),
        "the last of several sequences is next": Edit(
            TILES, "next_sequence", "!= 0) found = first + 32 * i + __ffs", "!= 0) found = first + 32 * i + 32 - __clz"
        ),
        "each query of a window starts a sequence": Edit(
            TILES, "next_sequence", "rows.lo[before] + 1", "rows.lo[before]"
        ),
        "tiles start behind the next sequence's start": Edit(
            TILES, "start_of_tiles", "keys_before % Height) % Height, next)", "keys_before % Height) % Height, length)"
        ),
        "tiles start at multiples": Edit(
            TILES, "start_of_tiles", "if (!has_diagonal ||", "if (true ||"
        ),
        "a window has a diagonal": Edit(
            TILES, "start_of_tiles", "has_diagonal = first_lo == last_lo &&", "has_diagonal ="
        ),
        "full sequences have a diagonal": Edit(
            TILES, "start_of_tiles", "&& last_hi - first_hi == last - position", ""
        ),
        "short sequences move tiles": Edit(
            TILES, "start_of_tiles", "|| (next < position + Height && keys_before < Height)", ""
        ),
        "the tiles of a block end where it ends": Edit(TILES, "queries_of_block", "block.last = last;", ""),
        "a tile has all queries": Edit(TILES, "take_tile", "min(tile.first + Height, tile.last)", "tile.last"),
        "sequences share tiles": Edit(TILES, "take_tile", "> 2 * Width) tile.last = next;", "> 2 * Width) {}"),
        "short sequences share no tile": Edit(TILES, "take_tile", "> 2 * Width", "> 0"),
        "queries after a sequence's end are left out": Edit(
            TILES, "take_tile", "queries.first = tile.last", "queries.first += Height"
        ),
    },
    sequences_have_kernels_by_their_length: {
        "none is": Edit(CHOICE, "_forward_of_sequences", "keys >= LONG_SEQUENCE", "False"),
        "no work has backward tiles": Edit(
            CHOICE, "Sm90.with_sequence_tiles", "else work.with_sequence_tiles(_SEQUENCE_TILE)", "else work"
        ),
        "all kernels cut sequences": Edit(
            CHOICE, "_with_cut_sequences", "!= (backward.block_q, backward.block_kv)", "is None"
        ),
        "kernels that add in order cut sequences": Edit(
            CHOICE, "_with_cut_sequences", "and not backward.adds_dq_in_order", ""
        ),
        "a sink's gradient reads statistics elsewhere": Edit(
            CHOICE, "_with_cut_sequences", 'or "sink" in problem.wrt', ""
        ),
        "statistics are not cut": Edit(
            CHOICE, "_with_cut_sequences", "replace(spec, cuts_sequences=True)",
            "replace(spec, cuts_sequences=spec != specs['backward_statistics'])",
        ),
        "there are places for tiles at multiples": Edit(
            "planning/families/_passes.py", "backward_pass", "rows, columns = work.num_sequence_tiles", ""
        ),
        "calls have tiles of the host": Edit(
            SOURCE, "IntervalSource.num_tiles", "sequences = self.num_offsets + 1", "sequences = self.num_offsets - 1"
        ),
    },
    backward_tiles_end_with_sequences: {
        "tiles continue in the next sequence": Edit(
            PARTS, "tile_starts", "np.minimum(starts, of_matrix[sequence + 1])", "np.minimum(starts, of_matrix[-1])"
        ),
        "tiles start a sequence early": Edit(PARTS, "tile_starts", 'side="right") - 1', 'side="left") - 1'),
        "each query of a window starts a sequence": Edit(
            PARTS, "sequence_bounds", "np.diff(of_matrix) > 1", "np.diff(of_matrix) > 0"
        ),
        "queries are counted in tiles of keys": Edit(
            "blocks/work_list.py", "IntervalWork.sequence_tiles", "self.sequence_tile[0]", "self.sequence_tile[1]"
        ),
        "a tile has the queries of all keys before": Edit(
            "blocks/work_list.py", "_num_rows", '- xp.searchsorted(hi, first, side="right")', "",
        ),
    },
    each_call_reads_offsets: {
        "windows do not count": Edit(
            "masks/sequences.py", "Sequences._device_form", "(self.causal, self.window)", "(self.causal,)"
        ),
        "keys have no offsets": Edit(
            "masks/sequences.py", "Sequences._device_form", "DeviceForm(self.arrays,", "DeviceForm(self.arrays[:1],"
        ),
        "lengths that the host knows do not count": Edit(
            "masks/lengths.py", "Lengths._device_form", "DeviceForm(arrays, facts)", "DeviceForm(arrays)"
        ),
        "lengths of queries and of keys are alike": Edit(
            "masks/lengths.py", "Lengths._device_form", '"array" if is_array(length)', "None if is_array(length)"
        ),
        "ids of keys are not handed over": Edit(
            "masks/documents.py", "Documents._device_form", "if shares_ids else", "if True else"
        ),
        "ids that queries and keys share are handed over twice": Edit(
            "masks/documents.py", "Documents._device_form", "or self.kv_ids is self.q_ids", ""
        ),
    },
}  # fmt: skip
