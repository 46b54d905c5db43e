"""Faults planted in the library's own source: every one must be seen, as a wrong number and not as
a crash, by the property that guards its room.

Each edit is a line of the library and what stands in its place. An edit whose line is gone fails, so that the list
keeps up with the code.
"""

import importlib
import shutil
import sys
from itertools import chain
from pathlib import Path

import device_double
import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from test_blas import assert_limits_are_kept, assert_threads_are_right
from test_block_index import blocks_of
from test_device_masks import changed as changed_mask
from test_device_masks import in_order, packed, sent
from test_magnitudes import (
    BROADCAST,
    assert_no_lse_is_too_large,
    assert_nothing_is_raised,
    assert_operands_may_be_huge,
    assert_powers_cancel,
    changed,
    powers,
    tame,
)
from test_work_list import assert_longest_first, rebuilt

import cuflash

EDITS = {
    "o is not rescaled": ("cpu", "o_acc *= rescale[..., None]", "pass"),
    "row_sum is not rescaled": ("cpu", "row_sum * rescale + p_sum", "row_sum + p_sum"),
    "the row maximum is not subtracted from an empty start": (
        "cpu",
        "np.maximum(new_max, np.finfo(self.wide).min)",
        "new_max",
    ),
    "lse is base 2": ("cpu", "row_max * self.wide(LN_2) + np.log(divisor)", "row_max + np.log2(divisor)"),
    "an empty row has a finite lse": ("cpu", "self.write(\"lse\", rows, row_max", "self.write(\"lse\", rows, shift"),
    "an empty row is divided by 0": ("cpu", "divisor = np.maximum(row_sum, 1)", "divisor = row_sum"),
    "the first key of an interval is lost": ("cpu", "(j[:, None] < lo)", "(j[:, None] <= lo)"),
    "the key past an interval is seen": ("cpu", "(j[:, None] >= hi)", "(j[:, None] > hi)"),
    "a bit tile starts at its first key": ("cpu", "keys.start % work.block_kv", "0"),
    "a bit tile is read inverted": ("cpu", "return ~tile.T", "return tile.T"),
    "a key is lost where a run is cut": ("cpu", "start=segment.start + room)", "start=segment.start + room + 1)"),
    "a key is seen twice where a run is cut": ("cpu", "start=segment.start + room)", "start=segment.start + room - 1)"),
    "heads are grouped by remainder": (
        "cpu",
        "(tile.b, tile.h // self.group_size)",
        "(tile.b, tile.h % self.plan.problem.num_kv_heads)",
    ),
    "only the first head of a group gives dk and dv": (
        "cpu",
        "for head in range(self.group_size)",
        "for head in range(1)",
    ),
    "delta is left out": ("cpu", "    dp -= delta[..., None, :]\n", ""),
    "dlse has the wrong sign": ("cpu", "delta -= np.where(lse_2", "delta += np.where(lse_2"),
    "dq lacks the scale": ("cpu", "dq * self.wide(self.plan.problem.scaling.scale)", "dq"),
    "dk keeps log2(e)": ("cpu", "self.wide(LN_2 * self.score_factor)", "self.wide(self.score_factor)"),
    "dk lacks the power of two of its scores": ("cpu", "self.wide(LN_2 * self.score_factor)", "self.wide(LN_2)"),
    "scores lack their power of two": ("cpu", "np.multiply(s, self.wide(self.score_factor), out=s)", "s"),
    "q carries more than the scale's mantissa": ("cpu", "lift = max(exponent, 0)", "lift = 0"),
    "scales of any size stay as they are": ("problem", "-most < exponent <= most", "True"),
    "a scale is inf for float16": (
        "problem",
        "Scaling(max(-(2.0**126), min(scale, 2.0**126)), 0, 0)",
        "Scaling(scale, 0, 0)",
    ),
    "k has q's part of the scale": ("problem", "exponent - exponent // 2", "exponent // 2"),
    "scaled q and k are not used": ("launch", "self.plan, *self._scaled(q, k), v, o", "self.plan, q, k, v, o"),
    "gradients read q and k as they are": (
        "launch",
        'given["q"], given["k"] = self._scaled(given["q"], given["k"])',
        "pass",
    ),
    "gradients keep the powers of two": (
        "launch",
        'results["q"], results["k"] = self._scaled(results["q"], results["k"])',
        "pass",
    ),
    "calls are repeated without the powers of two": ("launch", " and not self._scales_arrays", ""),
    "what the caller has NumPy raise comes out of lse": (
        "cpu",
        'with np.errstate(all="ignore"):\n        lse_2',
        "if True:\n        lse_2",
    ),
    "what the caller has NumPy raise comes out of batches": (
        "cpu",
        'with np.errstate(all="ignore"), _scratch(plan)',
        "with _scratch(plan)",
    ),
    "what the caller has NumPy raise comes out of sums": (
        "launch",
        'with np.errstate(all="ignore"):\n        return gradient.sum',
        "if True:\n        return gradient.sum",
    ),
    "what the caller has NumPy raise comes out of scaling": (
        "launch",
        'with np.errstate(all="ignore"):\n        wide =',
        "if True:\n        wide =",
    ),
    "only the last step gives dv": ("cpu", "_plus(dv, p @ do)", "p @ do"),
    "columns are not masked": ("cpu", "self._mask_queries(tiles, places, steps, s, dp)", "pass"),
    "an empty row is exponentiated": (
        "cpu",
        "np.where(empty, np.inf, lse * LOG2_E)",
        "(lse * LOG2_E)",
    ),
    "the scale is left to q alone": ("cpu", "problem.scaling.scale * LOG2_E", "LOG2_E"),
    "tiles stop one row early": ("cpu", "min(start + block, length)", "min(start + block, max(length - 1, start + 1))"),
    "every batch entry reads the first": (
        "cpu",
        "[(*self.places[b], h) for b, h in places]",
        "[(*self.places[0], h) for b, h in places]",
    ),
    "batches that are not full are forgotten": ("cpu", "    yield from waiting.values()\n", ""),
    "tiles of unlike visits are batched": ("cpu", "alike = height, *visited", "alike = (height,)"),
    "a batch writes what belongs to its first tile": (
        "cpu",
        "self.arrays[name][where] = values",
        "self.arrays[name][where] = values[:1] if np.ndim(values) else values",
    ),
    "the masks of a batch all fall on its first tile": (
        "cpu",
        "_mask(s[number, here], None",
        "_mask(s[0, here], None",
    ),
    "a band ends one query late for its keys": (
        "work_list",
        "max(key - self.band.upper, 0)",
        "max(key - self.band.upper + 1, 0)",
    ),
    "a band starts one query late for its keys": (
        "work_list",
        "max(key - self.band.lower + 1, 0)",
        "max(key - self.band.lower, 0)",
    ),
    "a partial part is called full": (
        "work_list",
        "Segment(start, full_start, Kind.INTERVAL)",
        "Segment(start, full_start, Kind.FULL)",
    ),
    "what follows the full part is dropped": (
        "work_list",
        "        Segment(full_stop, stop, Kind.INTERVAL),\n",
        "",
    ),
    "neighbouring full blocks swallow a gap": ("work_list", " and last.stop == start:", ":"),
    "a bit tile loses its last used key": ("work_list", "start + int(used[1][tile])", "start + int(used[1][tile]) - 1"),
    "columns are listed in the rows' order": (
        "work_list",
        "entries = order[pointers[column]",
        "entries = np.arange(len(order))[pointers[column]",
    ),
    "the shortest rows come first": ("work_list", 'kind="stable")[:, ::-1]', 'kind="stable")'),
    "one list serves all heads": ("work_list", "(h if extents[1] > 1 else 0)", "0"),
    "intervals of the first entry serve all": ("work_list", "b if extents[0] > 1 else 0", "0"),
    "a block is full if its first element is": ("classify", "(allowed == exists).all((1, 2))", "allowed[:, 0, 0]"),
    "undecided blocks are taken for full": (
        "classify",
        "full.append(_cells(*(side[must & may]",
        "full.append(_cells(*(side[may]",
    ),
    "a quarter is dropped": (
        "classify",
        "for left, right in ((col0, col_cut), (col_cut, col1))",
        "for left, right in ((col0, col_cut),)",
    ),
    "equal hashes for unequal tiles": (
        "classify",
        "dictionary.setdefault(bits.tobytes(),",
        "dictionary.setdefault(next((k for k in dictionary if k[0] == bits.flat[0]), bits.tobytes()),",
    ),
    "a coarse cell counts as full": ("block_set", "num_full == num_children", "num_full > 0"),
    "a rectangle asks two corners": (
        "block_set",
        "for row in rows for col in cols]",
        "for row in rows[:1] for col in cols[:1]]",
    ),
    "on a device, a block that one row misses is absent": (
        "whole_grid",
        "< xp.minimum(end, stop)).any(axis=3)",
        "< xp.minimum(end, stop)).all(axis=3)",
    ),
    "on a device, a block that one row fills is full": (
        "whole_grid",
        "(stop <= end)).all(axis=3)",
        "(stop <= end)).any(axis=3)",
    ),
    "on a device, a block cut off by the lengths is never full": (
        "whole_grid",
        "(tiles | ~exists.reshape(blocks))",
        "tiles",
    ),
    "on a device, the last block keeps keys past the end": ("whole_grid", " & (j < grid.seqlen_kv)", ""),
    "on a device, bit tiles are mirrored": ("whole_grid", "tiles.swapaxes(2, 3)", "tiles.swapaxes(2, 3)[..., ::-1]"),
    "on a device, every batch entry is the first": ("whole_grid", "matrix // grid.num_heads,", "matrix * 0,"),
    "on a device, lists start one late": ("whole_grid", "ends - 1, room", "ends, room"),
    "on a device, columns are listed by rows": (
        "whole_grid",
        "grid.swapaxes(1, 2).reshape(",
        "grid.reshape(",
    ),
    "on a device, the shortest rows come first": (
        "whole_grid",
        "xp.arange(longest, -1, -1)[:, None]",
        "xp.arange(longest + 1)[:, None]",
    ),
    "on a device, rows are numbered from the wrong end": ("whole_grid", "[:, None, ::-1]", "[:, None]"),
    "on a device, the documents of one entry count on from those before": (
        "masks",
        "runs, side=side) - before)",
        "runs, side=side))",
    ),
    "on a device, a document ends before its neighbour's number": (
        "masks",
        "ids.array[..., 1:] != ids.array[..., :-1]",
        "ids.array[..., 1:] > ids.array[..., :-1] + 1",
    ),
    "the first call out gives BLAS its threads back": ("blas", "if _users == 0:", "if True:"),
    "BLAS is left on one thread": ("blas", "self._set(self._found)", "pass"),
    "a number of threads set during a call is lost": ("blas", "is not None and self._get() == 1", "is not None"),
    "a number of threads is given back twice": ("blas", "        self._found = None\n", ""),
    "a call leaves BLAS the threads that were set during another": (
        "blas",
        "if number > 1:",
        "if number > 1 and self._found is None:",
    ),
    "BLAS has its threads during a call": ("blas", "            self._set(1)\n", ""),
    "a thread's own number is not given back": ("blas", "            library.swap(number)\n", ""),
    "MKL's numbers are the process's": ("blas", 'found.internal_api == "mkl"', "False"),
    "OpenMP's numbers are the process's": ("blas", 'found.threading_layer == "openmp"', "False"),
    "threadpoolctl sets OpenBLAS": ("blas", "set_ or found.set_num_threads", "found.set_num_threads"),
    "names of OpenBLAS's functions have no suffix": ("blas", '("", "64_", "_64")', '("",)'),
    "a child counts its parent's calls": ("blas", "_lock, _users = threading.RLock(), 0", "_lock = threading.RLock()"),
    "a child waits for its parent's lock": ("blas", "_lock, _users = threading.RLock(), 0", "_users = 0"),
    "a child keeps the one thread of its parent's calls": (
        "blas",
        "            library.release()\n\n\nif",
        "            pass\n\n\nif",
    ),
    "an interrupt leaves BLAS on one thread": (
        "blas",
        "            blas.leave()\n            raise",
        "            raise",
    ),
    "an error on another thread is lost": ("cpu", "    if errors:\n", "    if False:\n"),
    "threads that cannot be started are an error": ("cpu", "except RuntimeError:", "except ZeroDivisionError:"),
    "a call ends before its threads": ("cpu", "                thread.join()\n", "                pass\n"),
    "BLAS keeps its threads on the calling thread": ("cpu", "on_one_thread(share_all)", "share_all()"),
    "BLAS keeps its threads on other threads": ("cpu", "on_one_thread(drain)", "drain()"),
    "broadcast gradients are not summed": (
        "launch",
        "gradient.sum(axis=(*range(missing), *narrow))",
        "gradient.max(axis=(*range(missing), *narrow))",
    ),
}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Import a copy of the library with one edit, under a name of its own."""

    def load(file, line, replacement):
        name = f"cuflash_edited_{abs(hash((file, line, replacement)))}"
        shutil.copytree(Path(cuflash.__file__).parent, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        path = tmp_path / name / f"{file}.py"
        source = path.read_text()
        assert source.count(line) == 1, (
            f"{line!r} stands {source.count(line)} times in {file}.py: bring the edit up to date"
        )
        path.write_text(source.replace(line, replacement))
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module(name)

    yield load
    for module in [module for module in sys.modules if module.startswith("cuflash_edited_")]:
        del sys.modules[module]


def part(library, name):
    return importlib.import_module(f"{library.__name__}.{name}")


def hunt(*strategies, seeds=5, most=120):
    """Many examples from several seeds, so that no run of alike examples decides; reported at the first failure."""

    def run(check):
        options = settings(max_examples=most, database=None, phases=[Phase.generate])
        for number in range(seeds):
            seed(number)(options(given(*strategies)(check)))()

    return run


def attention_is_right(library):
    """Every result within its bound, at tiles of any size."""
    launch, plans, work_list = (part(library, name) for name in ("launch", "plans", "work_list"))
    device = part(library, "device").DeviceSpec(name="test", num_processors=1, tile_memory_bytes=1 << 20)
    examples = part(library, "testing.strategies").examples(tile=16, most_scores=1 << 12, dtypes=["float32", "float64"])

    @hunt(examples, st.integers(8, 24), st.integers(8, 24))
    def check(example, block_q, block_kv):
        problem = part(library, "problem").Problem.of(example.q, example.k, example.v, scale=example.scale)
        mask = work_list.requested_mask(example.mask, False, None, problem.mask_shape)
        work = work_list.work_list(mask, problem.mask_shape, (block_q, block_kv))
        # As in any plan, no smaller than blocks of a list.
        tile = part(library, "tiles").Tile(max(block_q, work.block_q), max(block_kv, work.block_kv))
        ready = launch.Executable(plans.Plan(problem=problem, mask=mask, device=device, tile=tile, work=work))
        o, lse = ready.forward(example.q, example.k, example.v)
        dq, dk, dv = ready.backward(example.do, example.q, example.k, example.v, o, lse, example.dlse)
        part(library, "testing.assertions").assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


def magnitudes_are_right(library):
    """Operands and scales of any size have their scores; nothing that the caller has NumPy raise comes out."""

    def everything(example):
        q, k, v, mask, scale = example.q, example.k, example.v, example.dense_mask, example.scale
        (o, lse), vjp = library.attention_vjp(q, k, v, mask=mask, scale=scale, return_lse=True)
        assert library.attention(q, k, v, mask=mask, scale=scale).tobytes() == o.tobytes()
        return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))

    @hunt(tame(longest=20, widest=8), powers(), seeds=1, most=40)
    def check_powers(example, powers):
        assert_powers_cancel(everything, example, *powers)

    @hunt(tame(longest=20, widest=8), st.sampled_from([0.125, 100.0]), seeds=1, most=40)
    def check_huge(example, scale):
        assert_operands_may_be_huge(everything, example.but(scale=scale))

    zeros = np.zeros((4, 8), np.float16)
    assert (library.attention(zeros, zeros + 1, zeros + 1, scale=1e39) == 1).all()

    @hunt(tame(longest=20, widest=8), st.sampled_from(["huge", "tiny", "tiny do"]), seeds=1, most=40)
    def check_errors(example, size):
        assert_nothing_is_raised(everything, changed(example, size))
        assert_nothing_is_raised(everything, changed(example, size).but(scale=1e-70))

    assert_nothing_is_raised(everything, BROADCAST)
    assert_no_lse_is_too_large(library)


def shapes_and_masks(library):
    shapes = st.builds(
        part(library, "mask").MaskShape,
        st.sampled_from([(3,), (2, 2), ()]),
        st.sampled_from([1, 3]),
        st.integers(1, 90),
        st.integers(1, 90),
    )
    return shapes.flatmap(lambda shape: st.tuples(st.just(shape), part(library, "testing.strategies").masks(shape)))


def indices_are_right(library):
    """A block index holds exactly its mask, at blocks of any size."""
    index_of = part(library, "block_index").BlockIndex.from_mask

    @hunt(shapes_and_masks(library), st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def check(shape_and_mask, block):
        shape, mask = shape_and_mask
        index, expected = index_of(mask, shape, block), mask.dense(shape).reshape(shape.num_batch, *shape[1:])
        dense, states = index.dense(), index.states()
        assert (dense == expected).all()
        for place, elements in blocks_of(dense, block):
            assert states[place] == (1 if elements.all() else 2 if elements.any() else 0)


def work_is_right(library):
    """A work list tells exactly its mask, by rows and by columns, at tiles of any size."""
    work_list = part(library, "work_list")

    @hunt(shapes_and_masks(library), st.tuples(st.integers(1, 24), st.integers(1, 24)))
    def check(shape_and_mask, tile):
        shape, mask = shape_and_mask
        work = work_list.work_list(work_list.requested_mask(mask, False, None, shape), shape, tile)
        for transposed in (False, True):
            allowed, _ = rebuilt(work, shape, transposed)
            assert (allowed == mask.dense(shape).reshape(allowed.shape)).all()
        if not work.is_implicit:
            assert_longest_first(work.lists, work.index.batch * work.index.num_heads)


def lists_on_a_device_are_right(library):
    """Lists made on a device hold exactly their mask, and their columns what their rows hold."""
    index_of, listed = part(library, "block_index").BlockIndex.from_mask, part(library, "work_list").ListedWork

    drawn = st.one_of(shapes_and_masks(library), packed(part(library, "masks")))

    @hunt(drawn, st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def check(shape_and_mask, block):
        shape, mask = shape_and_mask[0], changed_mask(shape_and_mask[1], in_order)
        if not any(True for _ in part(library, "mask").held_arrays(mask)):
            return
        index, expected = index_of(sent(mask, device_double.to_device), shape, block), index_of(mask, shape, block)
        lists = {name: device_double.to_host(array) for name, array in listed(index=index).lists.items()}
        pointers, entries = (lists[f"column_{name}"] for name in ("pointers", "entries"))
        assert_longest_first(lists, index.batch * index.num_heads)
        with device_double.transfers_allowed():
            index = index.on_host
        for name in ("indptr", "indices"):
            assert np.array_equal(getattr(index, name), getattr(expected, name))
        assert (index.dense() == expected.dense()).all() and (index.states() == expected.states()).all()
        bits = (index.kinds == 3) & (expected.kinds == 3)
        assert np.array_equal(index.bits[index.tiles[bits]], expected.bits[expected.tiles[bits]])
        column = index.block_rows // index.num_q_blocks * index.num_kv_blocks + index.indices
        assert np.array_equal(entries[: pointers[-1]], np.argsort(column, kind="stable"))
        assert np.array_equal(np.diff(pointers), np.bincount(column, minlength=len(pointers) - 1))


def limits_are_kept(library):
    """BLAS has the threads that it had, whichever calls overlap."""
    assert_limits_are_kept(part(library, "blas"))


GUARDS = {
    "masks": [lists_on_a_device_are_right],
    "whole_grid": [lists_on_a_device_are_right],
    "blas": [limits_are_kept],
    "cpu": [assert_threads_are_right, magnitudes_are_right, attention_is_right],
    "launch": [magnitudes_are_right, attention_is_right],
    "problem": [magnitudes_are_right],
    "work_list": [work_is_right],
    "classify": [indices_are_right],
    "block_set": [indices_are_right],
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(edited, name):
    file, line, replacement = EDITS[name]
    library = edited(file, line, replacement)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):  # arrays may not fit each other
        for guard in GUARDS[file]:
            guard(library)


@pytest.mark.parametrize("guard", dict.fromkeys(chain(*GUARDS.values())))
def test_the_library_as_it_is_passes_the_same_guards(guard):
    guard(cuflash)
