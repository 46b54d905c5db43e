"""Planted faults in the KV cache: its pages, what it writes and reads, and what it refuses."""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from cache_machine import KINDS, walk
from cupy_machine import a_machine_for
from cuflash.testing import Example, assert_within_bounds
from foreign import Foreign
from mutations.calls import refuses, takes
from mutations.planting import Edit
from mutations.python_guards import part
from test_device_cache import check_calls_by_sequence, check_captures, check_interrupted_launch
from test_kv_cache import check_interrupted_changes, check_overlaps

SIGNS = (AssertionError, ValueError, IndexError, RuntimeError)  # exceptions with which a guard reports a fault
K = np.ones((2, 1, 3, 4), np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def operations_are_right(library: ModuleType) -> None:
    """Check random operations against arrays.

    A window of a long sequence reads the last pages only, and rows past a count attend nothing.
    """
    pages = {"page_size": 16, "num_pages": 4}
    cache = library.KVCache(batch=1, num_kv_heads=1, head_dim=4, capacity=64, dtype=np.float32, **pages)
    rows = np.random.default_rng(0).standard_normal((1, 1, 50, 4)).astype(np.float32)
    cache.append(rows, rows)
    last = rows[:, :, -4:]
    o = cache.attention(rows[:, :, -1:], window=(3, 0))
    assert_within_bounds(Example(q=rows[:, :, -1:], k=last, v=last), o=o)
    cache.truncate([1])
    beside_inf = cache.attention(last, counts=[0], sink=np.full(1, np.inf, np.float32), return_lse=True)
    assert all(np.isnan(x).all() for x in beside_inf)
    for kind in KINDS:
        walk(library, kind, seed=1, steps=40)
        walk(library, kind, seed=2, steps=40)


def a_cache(library: ModuleType, dtype: Any = np.float32, **pages: int) -> Any:
    return library.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=40, dtype=dtype, **pages)


def filled(library: ModuleType, **pages: int) -> Any:
    cache = a_cache(library, **pages)
    cache.append(K, K)
    return cache


def pages_are_used_sparingly(library: ModuleType) -> None:
    """Check that forks share pages, that the last owner writes in place, and that released pages are free."""
    cache = a_cache(library, page_size=16, num_pages=3)
    cache.append(np.repeat(K, 7, axis=2)[:, :, :20], np.repeat(K, 7, axis=2)[:, :, :20], counts=[20, 0])
    cache.fork(0, 1)
    assert cache.num_free_pages == 1 and cache.block_table.tolist() == [[0, 1, -1]] * 2
    cache.append(K, K)
    assert cache.num_free_pages == 0 and cache.lengths.tolist() == [23, 23]
    cache.truncate([16, 23])
    assert cache.num_free_pages == 1
    before, rows = cache.block_table[1].tolist(), np.repeat(K, 4, axis=2)
    cache.append(rows, rows, counts=[0, 12])
    assert cache.block_table[1].tolist()[:2] == before[:2] and cache.num_free_pages == 0
    cache.reset()
    assert cache.num_free_pages == 3


class Device:
    """A substitute for a cache's device arrays, which stores the page tables that it receives."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.tables = np.array(lengths, np.int32), list[list[list[int]]]()

    def put(self, lengths: list[int] | None, pages: Any) -> None:
        assert lengths is None
        self.tables.append([list(table) for table in pages.tables])

    def truncate(self, lengths: list[int]) -> None:
        self.lengths = np.minimum(self.lengths, lengths)

    def faults(self) -> list[str]:
        return []


def numbers_of_rows_are_planned_once(library: ModuleType) -> None:
    """Check that sequences of equal length share a plan, also in later calls, and that others do not."""
    cache, planned = filled(library), []
    plan = part(library, "planning.plan").KernelPlan
    original = plan.with_band

    def counted(self: Any, band: Any, *rows: int) -> Any:
        planned.append(rows)
        return original(self, band, *rows)

    with patch.object(plan, "with_band", counted):
        for lengths, sizes in (([3, 3], [(2, 3)]), ([3, 3], []), ([3, 2], [(2, 2)]), ([2, 3], [])):
            planned.clear()
            cache.reset()
            cache.append(K, K, counts=lengths)
            cache.attention(K[:, :, :2])
            assert planned == sizes


class Subclassed(np.ndarray):
    """An array type whose layout the call cache does not know."""


def layouts_that_are_unknown_share_no_plan(library: ModuleType) -> None:
    """Check that page arrays of a subclass are bound separately for sequences of unequal lengths."""
    pages = np.random.default_rng(0).standard_normal((2, 2, 1, 16, 4)).astype(np.float32)
    k, v = (x.view(Subclassed) for x in pages)
    cache, bound = library.KVCache.over(k, v, np.array([[0], [1]]), [5, 9]), []
    step = part(library, "cache.one_by_one").OwnRowsStep

    def counted(self: Any, band: Any, seqlen_q: int, seqlen_kv: int, arrays: Any) -> Any:
        bound.append(seqlen_kv)
        o, lse = np.zeros((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
        return SimpleNamespace(run=lambda arrays: (o, lse))

    with patch.object(step, "_bound", counted):
        cache.attention(np.ones((2, 1, 1, 4), np.float32), executor="sim")
    assert bound == [5, 9]


def calls_by_sequence_read_lengths_of_the_host(library: ModuleType) -> None:
    """Check that calls that read the host's lengths are refused if the device counts, also if bound before."""
    with a_machine_for(library) as machine:
        check_calls_by_sequence(library, machine)


def captures_change_nothing(library: ModuleType) -> None:
    """Check that a capture changes nothing of a cache whose rows the host counts."""
    with a_machine_for(library) as machine:
        check_captures(library, machine)


def an_interrupted_launch_counts_no_rows(library: ModuleType) -> None:
    """Check that rows of an append that was interrupted after its launch are not attended."""
    with a_machine_for(library) as machine:
        check_interrupted_launch(library, machine)


def interrupted_changes_lose_no_rows(library: ModuleType) -> None:
    """Check that an interrupted change leaves each sequence with its rows or with none."""
    check_interrupted_changes(library)


def results_overlap_nothing(library: ModuleType) -> None:
    """Check that rows and results overlap no array of a cache or a call."""
    check_overlaps(library)


def a_device_has_lengths_and_pages(library: ModuleType) -> None:
    """Check that the cache returns the lengths that the device counts, and sends it the pages whenever they change."""
    cache, module = filled(library, page_size=16, num_pages=4), part(library, "cache.on_device")
    cache._state.device = device = Device([5, 2])
    cache._state.is_counted_on_device = True
    assert [cache.rows(sequence)[0].shape[1] for sequence in (0, 1)] == [5, 2]
    cache.check()
    cache.truncate([5, 1])
    assert device.lengths.tolist() == [5, 1] and cache.num_free_pages == 2
    device.lengths[1] = 17
    for call in (cache.check, lambda: cache.rows(1)):
        try:
            call()
        except RuntimeError as error:
            assert "sequence 1 has 17 positions and 1 pages of 16" in str(error)
        else:
            raise AssertionError("rows without a page are not told of")
    with patch.object(module, "is_capturing", lambda: False):
        cache.reset([1])
        assert device.tables[-1] == [[0], []] and device.lengths.tolist() == [5, 0]
        cache.reserve([20, 16])
        assert device.tables[-1] == [[0, 1], [2]]
    with patch.object(module, "is_capturing", lambda: True):
        for change in (lambda: cache.reset([0]), lambda: cache.reserve([40, 16])):
            try:
                change()
            except library.UnsupportedProblem:
                assert cache.num_free_pages == 1
            else:
                raise AssertionError("pages change hands inside a capture")


def over(library: ModuleType, table: Any, lengths: list[int]) -> Any:
    return library.KVCache.over(*np.ones((2, 3, 1, 16, 4), np.float32), np.array(table), lengths)


def cut_on_a_shared_page(library: ModuleType) -> None:
    cache, rows = a_cache(library, page_size=16, num_pages=4), np.ones((2, 1, 20, 4), np.float32)
    cache.append(rows, rows, counts=[20, 0])
    cache.fork(0, 1)
    cache._state.device, cache._state.is_counted_on_device = Device([20, 20]), True
    cache.truncate([32, 15])


def forked_without_room(library: ModuleType) -> None:
    cache = a_cache(library, page_size=16, num_pages=1)
    cache.append(K, K, counts=[3, 0])
    cache.fork(0, 1)
    cache.append(K, K, counts=[0, 1])


CHANGES, PAGES, ROWS = "cache/_changes.py", "cache/pages.py", "cache/paged_rows.py"
GIVEN, ONE, ARGUMENTS = "cache/_changes.py", "cache/one_by_one.py", "cache/arguments.py"
DOORS, STATE, DEVICE = "cache/_doors.py", "cache/_state.py", "cache/on_device.py"
ODD_SINK = np.zeros((3, 1), np.float32)
FAULTS = {
    operations_are_right: {
        "scales of keys are those of values": Edit(
            ROWS, "PagedRows.write", "(self.v, self.v_scale, v)", "(self.v, self.k_scale, v)"
        ),
        "rows are read without their scales": Edit(
            ROWS, "PagedRows.gather", "dequantized_rows(v, v_scale, gathered_dtype)",
            "dequantized_rows(v, v_scale * 0 + 1, gathered_dtype)",
        ),
        "a window reads the first pages": Edit(
            ROWS, "PagedRows._gathered", "[first : -(-stop // size)]", "[0 : -(-stop // size) - first]"
        ),
        "the first query has no result": Edit(ONE, "OneByOneStep._parts", "slice(0, new)", "slice(1, new)"),
        "rows that are not counted keep what they had": Edit(
            ONE, "OneByOneStep.attend", "o[sequence], lse[sequence] = results_without_keys(own_sink, lse)", "pass"
        ),
        "a sink of inf without keys is a number": Edit(ONE, "results_without_keys", "xp.isposinf(logit)", "False"),
        "all sequences have the first one's sink": Edit(
            ONE, "sink_of", "sink[sequence if sink.shape[0] > 1 else 0]", "sink[0]"
        ),
        "sequences of other lengths have the first one's tiles": Edit(
            ONE, "OwnRowsStep._run", "= (seqlen_q, seqlen_kv)", "= (seqlen_q,)"
        ),
        "fewer queries have the tiles of more": Edit(
            ONE, "OwnRowsStep._run", "= (seqlen_q, seqlen_kv)", "= (seqlen_kv,)"
        ),
        "queries see later keys": Edit(
            ONE, "OneByOneStep._parts", "offset + right", "offset + right + 1"
        ),
        "rows on the next page are taken for rows on this one": Edit(
            PAGES, "PagePool._has_page", "(stop - 1) // self.page_size", "length // self.page_size"
        ),
        "a fork keeps its old pages": Edit(PAGES, "PagePool.fork", "self.shrink(target, 0)", "pass"),
        "a fork of a contiguous cache copies nothing": Edit(
            PAGES, "OwnPages.fork", "[Copy(source, target, length)]", "[]"
        ),
        "a page too many is given back": Edit(
            PAGES, "PagePool.shrink", "while len(table) > self._pages(length):", "while len(table) > length // 17:"
        ),
        "each sequence counts all free pages as its own": Edit(PAGES, "PagePool.shortages", "free -= wanted", "pass"),
        "a cache over pages takes those of others": Edit(
            CHANGES, "state_over", "tables, owns_rest=False", "tables"
        ),
    },
    refuses(
        lambda library: a_cache(library, part_keys=64).attention(K, counts=[0, 0], kernel="other"),
        "kernel must be 'auto'",
    ): {
        "options are not looked at where there are no queries": Edit(
            ONE, "OwnRowsStep.__init__", "kernel=options.kernel,", ""
        ),
    },
    refuses(lambda library: filled(library).attention(K, sink=ODD_SINK), "(*batch, num_heads) = (2, 1)"): {
        "sinks are taken as they are": Edit(
            DOORS, "checked_queries", "sink_reasons(sink, q, k)", "[]"
        ),
    },
    numbers_of_rows_are_planned_once: {
        "each sequence is planned alone": Edit(ONE, "OwnRowsStep._run", "CALLS.put(key, own, self)", "pass"),
    },
    layouts_that_are_unknown_share_no_plan: {
        "layouts that are unknown are one": Edit(ONE, "OwnRowsStep._run", "or sizes is None else", "else"),
    },
    pages_are_used_sparingly: {
        "resetting keeps pages": Edit(CHANGES, "reset", "state.pages.shrink(row, 0)", "pass"),
        "a page that one sequence writes to alone is counted as shared": Edit(
            PAGES, "PagePool.shortages", "dropped.get(page, 0) + 1", "0"
        ),
        "a fork takes pages": Edit(PAGES, "PagePool.grow", "> 1:", "> 0:"),
    },
    calls_by_sequence_read_lengths_of_the_host: {
        "steps that were bound before the device counted are run": Edit(
            "cache/kv_cache.py", "KVCache.attention", "and state.counts_on_device(counts):", "and False:",
        ),
        "counts of the call itself are not looked at": Edit(
            STATE, "CacheState.counts_on_device", 'or is_on_device(as_arrays({"counts": counts})["counts"])', ""
        ),
        "no call is refused after the first counts": Edit(
            STATE, "CacheState.counts_on_device", "self.is_counted_on_device or", ""
        ),
    },
    captures_change_nothing: {
        "pages are taken within a capture": Edit(STATE, "CacheState._grow", "self.require_no_capture()", "pass"),
        "copies of a fork are captured": Edit(CHANGES, "fork", "state.require_no_capture()", "pass"),
        "replays attend rows that the host has counted": Edit(
            ONE, "OneByOneStep.attend", "require_no_capture()", "pass"
        ),
        "appends that the host counts are captured": Edit(
            DEVICE, "OnDevice._stream", "if self._known_lengths is not None and stream.is_capturing():", "if False:"
        ),
    },
    an_interrupted_launch_counts_no_rows: {
        "a device keeps the lengths of an interrupted call": Edit(
            DEVICE, "OnDevice.append", "self._known_lengths = None if new_lengths is None else []", "pass"
        ),
    },
    interrupted_changes_lose_no_rows: {
        "tables change before pages are copied": Edit(
            STATE, "CacheState._grow",
            "for copy in self.pages.copies(growth):",
            "copies = self.pages.copies(growth)\nself.pages.grow(growth)\nfor copy in copies:",
        ),
        "pages are freed before sequences are shorter": Edit(
            CHANGES, "truncate", "state.lengths = new_lengths", "state.lengths = list(state.lengths)"
        ),
        "a reset frees pages of rows": Edit(CHANGES, "reset", "state.lengths[row] = 0", "pass"),
        "an interrupted fork keeps its length": Edit(CHANGES, "fork", "state.lengths[target] = 0", "pass"),
        "an interrupted change loses pages": Edit(PAGES, "PagePool._counting", "self._count()", "pass"),
    },
    results_overlap_nothing: {
        "cached calls write to scales": Edit(STATE, "CacheState.__init__", "*rows.held", "rows.k, rows.v"),
        "results may be written to scales": Edit(
            DOORS, "_own_arrays", "(rows.k, rows.v, rows.k_scale, rows.v_scale, rows.key_bounds)", "(rows.k, rows.v)"
        ),
        "results may be written to page bounds": Edit(
            DOORS, "_own_arrays", "rows.v_scale, rows.key_bounds", "rows.v_scale"
        ),
        "results may be written to the sink": Edit(DOORS, "checked_queries", '"sink": sink,', ""),
        "results may be written to a bias": Edit(
            DOORS, "checked_queries", "**({} if score is None else score.arrays),", ""
        ),
    },
    a_device_has_lengths_and_pages: {
        "rows are those that the host has counted": Edit(
            STATE, "CacheState.lengths_now", "if self.is_counted_on_device", "if False"
        ),
        "a device keeps lengths that are truncated": Edit(
            CHANGES, "truncate", "state.on_device().truncate(new_lengths)", "pass"
        ),
        "a device has pages that a reset has freed": Edit(CHANGES, "reset", "state.on_device()", "pass"),
        "a reset is captured": Edit(
            CHANGES, "reset", 'capture_reasons("reset", state.pages)', "[]"
        ),
    },
    refuses(cut_on_a_shared_page, "got 15 for sequence 1, which shares its first 32 positions"): {
        "a device may write to shared pages": Edit(
            CHANGES, "truncate", "sharing_reasons(new_lengths, state.pages) if isinstance(new_lengths, list) else []",
            "[]",
        ),
        "a page of two sequences is not shared": Edit(
            PAGES, "PagePool.num_shared", "self._references[page] > 1", "self._references[page] > 2"
        ),
        "the last page that is shared is the first": Edit(PAGES, "PagePool.num_shared", "place + 1", "place"),
    },
    refuses(forked_without_room, "got 1 rows for sequence 1, which need 1 more page, but of 1 pages 0 are free"): {
        "shared pages are not counted as wanted": Edit(PAGES, "PagePool.shortages", "+ len(shared)", ""),
    },
    refuses(lambda library: (lambda x: x.append(x.k[:, :, :2], x.v[:, :, :2]))(filled(library)), "must not overlap"): {
        "a cache appends its own rows": Edit("cache/arguments.py", "overlap_reasons", "and overlap(array, value)",
                                             "and False"),
    },
    refuses(lambda library: filled(library).append(K, K, counts=[4, 0]), "number of rows, 3; got 4"): {
        "counts go beyond the rows": Edit(ARGUMENTS, "excess_reasons", "if new > num_rows", "if False"),
    },
    takes(lambda library: filled(library).reset(Foreign(np.array([0]))) is None): {
        "rows of another library are refused": Edit(
            CHANGES, "reset", 'as_arrays({"rows": rows})["rows"]', "rows"
        ),
    },
    refuses(lambda library: filled(library).truncate([4, 0]), "which has 3"): {
        "truncating makes a sequence longer": Edit(ARGUMENTS, "growth_reasons", "if new > length", "if False"),
    },
    refuses(lambda library: over(library, [[0, -1, 2]], [17]), "which has 1 pages of 16"): {
        "pages after a missing one count": Edit(
            GIVEN, "_until_negative", "if page < 0), len(row))", "if page < -1), len(row))"
        ),
        "a table may be shorter than its sequence": Edit(
            GIVEN, "_table_reasons", "if length > len(table) * page_size:", "if False:"
        ),
    },
    refuses(lambda library: a_cache(library, page_size=40, num_pages=3), "page_size must be a multiple of 16"): {
        "pages are of any size": Edit(
            "cache/kv_cache.py", "KVCache.__init__", "reasons += page_reasons(page_size, num_pages)", "pass"
        ),
    },
    refuses(lambda library: (lambda q: filled(library).attention(q, out=q))(K.copy()), "out must not overlap q"): {
        "results are written over queries": Edit(
            "cache/arguments.py", "out_reasons", "+ overlap_reasons(\"out\", out, inputs)", ""
        ),
    },
    takes(lambda library: copy.copy(cache := filled(library)).k is not cache.k): {
        "a copy writes over the rows of its original": Edit(
            "cache/kv_cache.py", "KVCache.__copy__", "return deepcopy(self)", "return self"
        ),
    },
    refuses(lambda library: a_cache(library).attention(K), "q has 3 rows and sequence 0 has 0 tokens"): {
        "an empty cache is attended": Edit(
            ARGUMENTS, "require_appended", "if new > length]", "if new > length > 0]"
        ),
    },
    refuses(lambda library: filled(library).fork(1, 1), "target must differ from source"): {
        "a sequence is forked to itself": Edit(
            CHANGES, "fork", "if not reasons and source == target:", "if False:"
        ),
    },
    refuses(lambda library: a_cache(library).fork(0, 1), "source must hold rows"): {
        "an empty sequence is forked": Edit(
            CHANGES, "fork", "if not reasons and not state.lengths[source]:", "if False:"
        ),
    },
    refuses(lambda library: filled(library).append(K, K[:, :, :2]), "v must have k's 3 rows"): {
        "keys and values need not be as many": Edit(
            DOORS, "checked_rows", "if k.shape[2] == v.shape[2]", "if True"
        ),
    },
    refuses(lambda library: over(library, [[0, 3]], [0]), "block_table must name pages below 3"): {
        "tables name pages that are not there": Edit(GIVEN, "_table_reasons", "if page >= num_pages]", "if False]"),
    },
    refuses(
        lambda library: filled(library).attention(np.ones((2, 1, 5, 4), np.float32), counts=[2, 4], causal=False),
        "counts has 4 rows for sequence 1 and sequence 1 has 3 tokens",
    ): {
        "queries without keys are counted": Edit(
            STATE, "CacheState.queried", "if num_rows > min(lengths):", "if counts is None:"
        ),
    },
    refuses(lambda library: filled(library).attention(K, out=K[:1].copy()), "out must have shape (2, 1, 3, 4)"): {
        "results go to any shape": Edit(
            "cache/arguments.py", "out_reasons", "if tuple(out.shape) != shape or", "if False or"
        ),
    },
}  # fmt: skip
