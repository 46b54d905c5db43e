"""Planted faults in how block lists are kept between calls and created on a device."""

from __future__ import annotations

import copy
import gc
import weakref
from types import ModuleType

import device_double
import numpy as np
import pytest
import scipy.sparse
from cuflash import sim
from cuflash.executors.list_maker import ListMaker
from cuflash.executors.sim import Simulator
from cuflash.planning.list_kernels import ListSource
from cuflash.testing import Example, assert_within_bounds
from cupy_machine import a_machine_for
from device_lists import assert_lists_of
from mutations.planting import Edit
from mutations.python_guards import part
from test_index_maker import OF_MASKS, check_masks
from test_interval_kernels import check_layouts
from test_list_kernels import check_large_grids

import cuflash

SIGNS = (AssertionError, ValueError, pytest.fail.Exception)  # exceptions with which a guard reports a fault
Q = np.random.default_rng(0).standard_normal((2, 20, 8))


def index_of(library: ModuleType, step: int):
    return library.BlockIndex.from_mask(library.masks.Dilated(step), 20, 20, 4)


def a_kept_index_goes_by_itself(library: ModuleType) -> None:
    """Check that an index used in calls is freed by its reference count, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        index = index_of(library, 3)
        for _ in range(2):
            library.attention(Q, Q, Q, mask=index)
        library.plan(Q, Q, Q, mask=index).forward(Q, Q, Q)
        held = [weakref.ref(index), weakref.ref(index._kept.mask)]
        del index
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def an_index_is_read_once_and_never_changes(library: ModuleType) -> None:
    """Check that each index has its own calls and lists, built once, and read-only arrays."""
    one, other = index_of(library, 3), index_of(library, 5)
    for _ in range(2):
        for index in (one, other):
            example = Example(q=Q, k=Q, v=Q, mask=index.toarray()[0, 0])
            assert_within_bounds(example, o=library.attention(Q, Q, Q, mask=index))
    plans = [library.plan(Q[:count], Q[:count], Q[:count], mask=one) for count in (1, 2)]
    assert plans[0]._plan.work is plans[1]._plan.work
    for index in (one, copy.deepcopy(one)):
        assert not any(getattr(index, name).flags.writeable for name in ("indptr", "kinds", "bits"))


BLOCK = (16, 20)
CASES = (
    (lambda array: cuflash.masks.Dense(array), (2, 2, 50, 75), 0.3, False),
    (lambda array: cuflash.masks.Dense(array), (1, 1, 50, 75), 1.0, False),
    (lambda array: cuflash.masks.Dense(array), (2, 1, 50, 80), 0.02, True),
    (lambda array: cuflash.masks.BlockPattern(array, (32, 20)), (2, 1, 2, 4), 0.6, True),
    (lambda array: cuflash.masks.BlockPattern(array, (32, 20)), (1, 2, 2, 4), 0.6, False),
    (lambda array: cuflash.masks.BlockPattern(array, (4, 6)), (1, 2, 13, 13), 0.4, True),
)  # fmt: skip


def lists_are_those_of_the_host() -> None:
    """Check that four kernels list what the host lists: elements in vectors and one by one, and blocks of any size.

    In blocks that are taller than the band is wide, only queries in the middle attend some of the keys.
    """
    for make, shape, density, is_within_a_band in CASES:
        mask = make(np.random.default_rng(sum(shape)).random(shape) < density)
        mask = mask & cuflash.masks.Band(-30, 9) if is_within_a_band else mask
        frame = cuflash.masks.MaskShape((2,), 2, 50, shape[-1] if shape[-1] > 13 else 75)
        check_lists(mask, frame, BLOCK)
    tall = cuflash.masks.BlockPattern(np.ones((2, 10), bool), (48, 4))
    check_lists(tall & cuflash.masks.Band(-2, 1), cuflash.masks.MaskShape((2,), 2, 50, 40), (48, 4))


def check_lists(mask: cuflash.masks.Mask, frame: cuflash.masks.MaskShape, block: tuple[int, int]) -> None:
    source, array = ListSource.of(mask.to(device_double.DeviceArray).resolve(frame), frame, block)
    for seed, order in enumerate(("random", "priorities")):
        schedule = sim.Schedule(seed=seed, order=order, shuffle_lanes=bool(seed))
        lists = ListMaker(source, Simulator(schedule))((array._host.ctypes.data,), None)
        assert_lists_of(source, source.views(lists), mask)


def indices_are_those_of_their_blocks(library: ModuleType) -> None:
    """Check that kernels create the same index as the host, for the layout and the mask of the call."""
    index_maker = part(library, "executors.index_maker")
    source_of = part(library, "planning.list_kernels").ListSource.of
    frame, block = library.masks.MaskShape((2,), 3, 50, 75), (16, 20)
    blocks = np.random.default_rng(0).random((2, 3, 4, 4)) < 0.5
    for mask in (library.masks.Band(-30, 9), library.masks.Band()):
        pattern = library.masks.BlockPattern(device_double.to_device(blocks), block) & mask
        on_host = library.masks.BlockPattern(blocks, block) & mask
        expected = library.BlockIndex.from_mask(on_host, block=block, **frame._asdict())
        source, array = source_of(pattern.resolve(frame), frame, block)
        index = index_maker.IndexMaker(source, Simulator())([array._host.ctypes.data], None)
        for name in ("indptr", "indices", "kinds", "tiles", "bits", "lo", "hi"):
            got, count = getattr(index, name), expected.num_entries
            got = got[:count] if name in ("indices", "kinds", "tiles") else got
            np.testing.assert_array_equal(got, getattr(expected, name))
        assert (index.shape, index.block) == (expected.shape, expected.block)
    key, band = index_maker.index_key, library.masks.Band(-30, 9)
    others = [
        (0, blocks, band, frame, block), (1, blocks, band, frame, block), (0, blocks[:1], band, frame, block),
        (0, np.asfortranarray(blocks), band, frame, block), (0, blocks, library.masks.Band(), frame, block),
        (0, blocks, band, frame._replace(seqlen_kv=76), block), (0, blocks, band, frame, (16, 19)),
    ]  # fmt: skip
    assert len({key(*each) for each in others}) == len(others) and key(*others[0]) == key(*others[0])


def indices_of_masks_are_bound(library: ModuleType) -> None:
    with a_machine_for(library) as machine:
        for name in OF_MASKS:
            check_masks(machine, library, name)


def each_call_reads_its_mask(library: ModuleType) -> None:
    """Check that the key of a call excludes the contents of a mask, and includes all else that decides its lists."""
    contents_of = part(library, "masks.one_array").mask_contents

    def layout(array):
        return array.shape, array.strides

    blocks, causal = device_double.to_device(np.eye(4, dtype=bool)), library.masks.Causal()
    pattern = library.masks.BlockPattern
    first, again = (contents_of(pattern(blocks, 5) & causal, layout) for _ in range(2))
    assert first.key == again.key and first.arrays == (blocks,)
    others = (
        pattern(blocks, 6) & causal,
        pattern(blocks, 5) & library.masks.Band(0, 3),
        pattern(blocks[:2], 5) & causal,
    )
    assert all(contents_of(other, layout).key != first.key for other in others)
    assert contents_of(pattern(blocks, 5) & library.masks.Dense(blocks), layout) is None
    assert contents_of(blocks, layout).key != contents_of(pattern(blocks, 1), layout).key

    class Shifted(library.masks.Dense):
        def resolve(self, shape):
            return super().resolve(shape) & causal

    assert contents_of(Shifted(blocks), layout) is None


_SETTINGS = ModuleType("settings")
_SETTINGS.width = 3


def within_settings(b, h, i, j):
    return abs(i - j) < _SETTINGS.width


def within_default(b, h, i, j, module=_SETTINGS):
    return abs(i - j) < module.width


def width_of(module):
    return module.width


def importing(b, h, i, j):
    import settings_of_masks

    return abs(i - j) < settings_of_masks.width


def widen(number):
    _SETTINGS.width += number


def edits_of_masks_are_seen(library: ModuleType) -> None:
    """Check that a call with a host mask is repeated if and only if the contents of the mask are unchanged."""
    room = library.masks
    blocks, width = np.eye(4, dtype=bool), [3]
    matrix = scipy.sparse.csr_array(np.tri(20) > 0)

    def near(b, h, i, j, most=4):
        return (abs(i - j) < most) & blocks[i // 5, j // 5]

    def edit(number):
        blocks[number, 0] = not blocks[number, 0]

    holders = {
        "array": (blocks, edit), "pattern": (room.BlockPattern(blocks, 5), edit), "function": (near, edit),
        "defaults": (near, lambda number: setattr(near, "__defaults__", (5 + number,))),
        "matrix": (matrix, lambda number: matrix.data.__setitem__(number, False)),
        "attribute": (near, lambda number: setattr(near, "most", number)),
        "module": (within_settings, widen), "module of a default": (within_default, widen),
        "module that is passed": (lambda b, h, i, j: abs(i - j) < width_of(_SETTINGS), widen),
    }  # fmt: skip
    taken = part(library, "masks._snapshot").Snapshot.of
    for mask, change in holders.values():
        for number in (1, 2):
            snapshot = taken(mask)
            assert snapshot.is_current()
            change(number)
            assert not snapshot.is_current()
    for unseen in (
        lambda b, h, i, j: abs(i - j) < width[0], importing, lambda b, h, i, j: abs(i - j) < vars(_SETTINGS)["width"],
    ):
        assert taken(unseen) is None
    mask = room.BlockPattern(blocks, 5)
    library.attention(Q[:, :20], Q[:, :20], Q[:, :20], mask=mask)
    blocks[...] = True
    o = library.attention(Q[:, :20], Q[:, :20], Q[:, :20], mask=mask)
    assert_within_bounds(Example(q=Q[:, :20], k=Q[:, :20], v=Q[:, :20], mask=np.ones((20, 20), bool)), o=o)


def layouts_are_checked(library: ModuleType) -> None:
    with a_machine_for(library) as machine:
        check_layouts(machine, library)


def grids_are_numbered(library: ModuleType) -> None:
    check_large_grids(library)


CONTENTS, INDEX = "masks/one_array.py", "executors/index_maker.py"
SNAPSHOT = "masks/_snapshot.py"
FAULTS = {
    a_kept_index_goes_by_itself: {
        "what an index remembers leads back to it": Edit(
            "blocks/index.py", "BlockIndex._kept", "IndexMask(replace(self))", "IndexMask(self)"
        ),
        "a cached call holds its plan": Edit(
            "plans/plan.py", "Plan._bind", "return BoundPlan(",
            "return (lambda *of: vars(bound := BoundPlan(*of)).update(plan=self) or bound)(",
        ),
    },
    an_index_is_read_once_and_never_changes: {
        "indices share their calls": Edit(
            "planning/lookup.py", "lookup", "Lookup(without, owner=mask._kept.owner)", "Lookup(without)"
        ),
        "each call lists the index again": Edit("calls/_call.py", "_Arguments.of", "mask = mask._kept.mask", "pass"),
        "arrays can be written to": Edit("blocks/index.py", "_read_only", "view.flags.writeable = False", ""),
    },
    edits_of_masks_are_seen: {
        "elements are not compared": Edit(
            SNAPSHOT, "_are_equal", "bool((_words(array) == _words(copy)).all())", "True"
        ),
        "an array is compared with itself": Edit(SNAPSHOT, "_copied", 'value.copy("K")', "value"),
        "what a function reads is not compared": Edit(
            SNAPSHOT, "_read_by", "yield cell.cell_contents", "yield None"
        ),
        "attributes of modules are not compared": Edit(
            SNAPSHOT, "_of_modules", "module not in seen and", "False and"
        ),
        "modules in defaults are not compared": Edit(
            SNAPSHOT, "_flat", "yield from _flat(value) if type(value) is tuple else (value,)", "yield value"
        ),
        "modules that other functions read are not compared": Edit(
            SNAPSHOT, "_all_names", "yield from _all_names(each, seen)", "pass"
        ),
        "attributes of functions are not compared": Edit(
            SNAPSHOT, "_read_by", "yield tuple(vars(function).items())", "pass"
        ),
        "modules that a function imports are not compared": Edit(
            SNAPSHOT, "_names_what_it_reads", 'name.partition(".")[0] in _FIXED for', "True for"
        ),
        "values that a function looks up are not compared": Edit(
            SNAPSHOT, "_names_what_it_reads", "_UNSEEN.isdisjoint(_names(code)) and", ""
        ),
        "defaults are not compared": Edit(SNAPSHOT, "_read_by", "yield function.__defaults__", "yield None"),
        "sparse arrays have no elements": Edit(
            SNAPSHOT, "_parts", "yield from (part for part in vars(value).values() if token(part) is None)", "pass"
        ),
        "values of any kind are compared": Edit(SNAPSHOT, "_copied", "raise _Unseen", "pass"),
        "masks are not compared": Edit(
            "planning/lookup.py", "Lookup.find", "call if snapshot.is_current() else None", "call"
        ),
    },
    indices_are_those_of_their_blocks: {
        "an index has no intervals": Edit(
            INDEX, "IndexMaker.__init__", "self._facts |= self.lists.launches.lists", "pass"
        ),
        "batch entries are one": Edit(INDEX, "IndexMaker.__init__", '"batch": source.batch', '"batch": 1'),
        "one index serves all masks": Edit(INDEX, "index_key", "content(mask), shape", "shape"),
    },
    each_call_reads_its_mask: {
        "blocks of any size are alike": Edit(
            "masks/block_pattern.py", "BlockPattern._device_form", ", (self.block,))", ")"
        ),
        "closed forms do not count": Edit(CONTENTS, "mask_contents", "keys.append(content(part))", "content(part)"),
        "layouts do not count": Edit(
            CONTENTS, "mask_contents", "(type(part), *form.facts, layout)", "(type(part), *form.facts)"
        ),
        "a second array is left out": Edit(
            CONTENTS, "mask_contents", "if num_forms == 1 or", "if num_forms or"
        ),
        "a subclass has the elements of its parent": Edit(
            CONTENTS, "_own_form", 'if "_device_form" in vars(type(mask)) else None', ""
        ),
    },
    indices_of_masks_are_bound: {
        "indices in other blocks are made alike": Edit(
            INDEX, "repeated_index", '"index", contents.key, repr(arguments)', '"index", contents.key'
        ),
        "queries see keys up to their first": Edit(
            INDEX, "IntervalIndexMaker.__call__", 'start + offsets["hi"]', 'start + offsets["lo"]'
        ),
        "no block of row intervals is there": Edit(
            INDEX, "IntervalIndexMaker.__init__", "np.ones(1, bool)", "np.zeros(1, bool)"
        ),
        "each index binds its kernels": Edit(
            INDEX, "_maker", "CALLS.get_or_make(key, lambda: (_new_maker(mask.resolve(shape), shape, block),))",
            "(_new_maker(mask.resolve(shape), shape, block),)",
        ),
        "no index is remembered": Edit(
            "blocks/index.py", "BlockIndex.from_mask", "if index is not None:", "if False:"
        ),
    },
    layouts_are_checked: {
        "integers on a device start anywhere": Edit(
            "masks/fields.py", "take_arrays", "reasons += layout_reasons(name, value)", "pass"
        ),
    },
    grids_are_numbered: {
        "threads are not counted": Edit(
            "planning/list_kernels.py", "ListSource.can_be_numbered", "max(prod(self.grid), threads)", "prod(self.grid)"
        ),
        "blocks need not be added to threads": Edit(
            "planning/list_kernels.py", "ListSource.can_be_numbered", "<= MOST_THREADS", "<= 2 * MOST_THREADS"
        ),
    },
    lists_are_those_of_the_host: {
        "bytes of a packet are bits in reverse": Edit(
            "lists/classify.cu", "bits_of_keys", "ones * 0x0102040810204080 >> 56", "ones * 0x8040201008040201 >> 56"
        ),
        "intervals do not hide elements": Edit(
            "lists/classify.cu", "bits_of_keys", "if (key + n < lo || key + n >= hi)", "if (key + n < lo)"
        ),
        "keys past the end count": Edit(
            "lists/classify.cu", "kind_by_elements",
            "min(params.block_kv - first, params.seqlen_kv - key)", "params.block_kv - first",
        ),
        "a block that is cut off is never full": Edit(
            "lists/classify.cu", "kind_by_elements", "is_full &= allowed == exists;", "is_full &= allowed == 0xff;"
        ),
        "a block that only queries in its middle see is absent": Edit(
            "lists/classify.cu", "kind_of_whole_block", "has_some |= max(lo, key) < min(hi, last_key);", ""
        ),
        "the last batch axis is the first": Edit(
            "lists/classify.cu", "MaskMatrix", "p.mask_batch_strides[axis]", "p.mask_batch_strides[0]"
        ),
        "a cell counts itself before": Edit(
            "lists/ranks.cu", "rank_row", "((1u << ptx::lane()) - 1)", "((2u << ptx::lane()) - 1)"
        ),
        "columns are counted in the first matrix": Edit(
            "lists/ranks.cu", "count_column", "column / params.num_kv_blocks", "0"
        ),
        "a sum is read before it is there": Edit(
            "lists/running_sums.cuh", "sum_up", "sums[thread] += before; __syncthreads();", "sums[thread] += before;"
        ),
        "pointers begin anywhere": Edit("lists/running_sums.cuh", "sum_up", "counts[0] = start", "counts[0] = 1"),
        "steps have no kind": Edit("lists/entries.cu", "list", "4 * (first + n) + kinds[n]", "4 * (first + n)"),
        "parts of a column start where its entries do": Edit(
            "lists/entries.cu", "list_columns", "place += counts[at]", "place += 0 * counts[at]"
        ),
        "entries of a column are placed before all are counted": Edit(
            "lists/entries.cu", "list_columns", "= part.count(); __syncthreads();", "= part.count();"
        ),
        "a block that the last query sees is full": Edit(
            "lists/classify.cu", "kind_by_ends", "last_key <= first_hi) return", "last_key <= last_hi) return"
        ),
        "a block that neither the first nor the last query sees is absent": Edit(
            "lists/classify.cu", "kind_by_ends", "has_some ? kInterval : kBits", "has_some ? kInterval : kAbsent"
        ),
        "of equally many the first comes first": Edit(
            "lists/entries.cu", "put_in_order", "other > number", "other < number"
        ),
        "full blocks have bit tiles": Edit("lists/entries.cu", "list_row", "kind == kBits ?", "kind != kAbsent ?"),
        "the room behind the last entry is left as it is": Edit(
            "lists/entries.cu", "lists_entries", "clear_unused_entries(params);", ""
        ),
    },
}
