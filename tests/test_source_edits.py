"""Faults planted in the library's own source: every one must be seen, as a wrong number and not as
a crash, by the property that guards its room.

Each edit is a line of the library and what stands in its place. An edit whose line is gone fails, so that the list
keeps up with the code.
"""

import copy
import dataclasses
import importlib
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import device_double
import numpy as np
import pytest
import scipy.sparse
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from planting import chosen

from test_block_index import blocks_of
from test_device_masks import changed, in_order, packed, sent
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
    "dq lacks the scale": ("cpu", "dq * self.wide(self.plan.problem.softmax_scale)", "dq"),
    "dk keeps log2(e)": ("cpu", "dk * self.wide(LN_2)", "dk"),
    "only the last step gives dv": ("cpu", "_plus(dv, p @ do)", "p @ do"),
    "columns are not masked": ("cpu", "self._mask_queries(tiles, places, steps, s, dp)", "pass"),
    "an empty row is exponentiated": (
        "cpu",
        "np.where(empty, np.inf, lse * LOG2_E)",
        "(lse * LOG2_E)",
    ),
    "the scale is left to q alone": ("cpu", "self.plan.problem.softmax_scale * LOG2_E", "LOG2_E"),
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
        shutil.copytree(Path(cuflash.__file__).parent, tmp_path / name)  # bytecode too: it takes longest to make
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


def hunt(*strategies):
    """Many examples from several seeds, so that no run of alike examples decides; reported at the first failure."""

    def run(check):
        options = settings(max_examples=120, database=None, phases=[Phase.generate])
        for number in range(5):
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
        shape, mask = shape_and_mask[0], changed(shape_and_mask[1], in_order)
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


GUARDS = {
    "masks": lists_on_a_device_are_right,
    "whole_grid": lists_on_a_device_are_right,
    "cpu": attention_is_right,
    "launch": attention_is_right,
    "work_list": work_is_right,
    "classify": indices_are_right,
    "block_set": indices_are_right,
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(edited, name):
    file, line, replacement = EDITS[name]
    library = edited(file, line, replacement)
    with pytest.raises((AssertionError, ValueError)):  # arrays may not fit each other
        GUARDS[file](library)


@pytest.mark.parametrize("guard", dict.fromkeys(GUARDS.values()))
def test_the_library_as_it_is_passes_the_same_guards(guard):
    guard(cuflash)


# Faults in what a call takes and refuses, in pickles, and in what the simulator keeps: each comes with what sees it.


Q = np.ones((2, 10, 8), np.float32)


class Foreign:
    """An array of another library, as far as DLPack goes."""

    def __init__(self, host, device=(1, 0), fault=None):
        self.host, self.device, self.fault = host, device, fault

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.fault is not None:
            raise self.fault
        return self.host.__dlpack__(**options)


class Traced:
    shape, ndim, dtype = Q.shape, Q.ndim, Q.dtype

    def __array_namespace__(self):
        return np.testing


def refuses(call, *words):
    """A probe: the library's call raises one of its two errors, whose message has these words."""

    def probe(library):
        try:
            call(library)
        except (TypeError, part(library, "errors").UnsupportedProblem) as error:
            assert all(word in str(error) for word in words), f"says {error}"
        except Exception as error:
            raise AssertionError(f"raises {error!r}") from error
        else:
            raise AssertionError("is taken")

    return probe


def takes(call):
    """A probe: the library's call raises nothing and is true."""

    def probe(library):
        try:
            assert call(library)
        except Exception as error:
            raise AssertionError(f"raises {error!r}") from error

    return probe


def attends(**options):
    return lambda library: library.attention(**{"q": Q, "k": Q, "v": Q, **options})


def twice(first, second):
    def call(library):
        attends(**first)(library), attends(**first)(library)
        return attends(**second)(library)

    return call


def untouched(**options):
    """The call is refused before it writes."""

    def call(library):
        out = np.full_like(Q, 7)
        try:
            attends(out=out, **options)(library)
        except (TypeError, ValueError):
            pass
        return (out == 7).all()

    return takes(call)


def pickled_after_use(make):
    """A pickle of a used object is as long as that of a fresh one, and is made at all."""

    def call(library):
        fresh, used = make(library, False), make(library, True)
        copy.deepcopy(used)
        return abs(len(pickle.dumps(used)) - len(pickle.dumps(fresh))) < 64

    return takes(call)


def a_plan(library, is_used):
    index = library.BlockIndex.from_blocks(np.eye(5, dtype=bool), 10, 10, 2)
    ready = library.plan(Q, Q, Q, mask=index)
    if is_used:
        ready.backward(Q, Q, Q, Q, *ready.forward(Q, Q, Q))
    return ready


def a_pullback(library, is_used):
    _, vjp = library.attention_vjp(Q, Q, Q)
    if is_used:
        vjp(Q)
    return vjp


def an_index(library, is_used):
    index = library.BlockIndex.from_blocks(np.eye(100, dtype=bool), 200, 200, 2)
    if is_used:
        index.block_rows, index.on_host
    return index


def a_resolved_mask(library, is_used):
    shape = part(library, "mask").MaskShape((), 1, 200, 200)
    mask = library.masks.BlockPattern(np.eye(100, dtype=bool), 2).resolve(shape)
    if is_used:
        mask.levels
    return mask


def an_example(library, is_used):
    example = part(library, "testing").Structure(seqlen_q=30, seqlen_kv=30).example()
    if is_used:
        example.bounds
    return example


def replaced(library):
    ready = a_plan(library, True)
    return not dataclasses.replace(ready, executor="sim")._repeated


def kept(library):
    """A library that was cut short is not taken for whole."""
    compiler = part(library, "sim.compiler")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.so"
        (Path(folder) / "made").write_bytes(b"machine code")
        compiler._publish([["cp", str(Path(folder) / "made"), target.name]], target, "a kernel")
        is_whole = compiler._is_whole(target)
        target.write_bytes(target.read_bytes()[:-3])
        return is_whole and not compiler._is_whole(target)


def build_error(command, *words):
    def call(library):
        compiler = part(library, "sim.compiler")
        with tempfile.TemporaryDirectory() as folder:
            try:
                compiler._publish([command], Path(folder) / "kernel.so", "a kernel")
            except compiler.BuildError as error:
                return all(word in str(error) for word in words)

    return takes(call)


def without_libraries(library):
    """The folder of a file system that is mounted with noexec keeps nothing."""
    compiler = part(library, "sim.compiler")
    compiler._forbids_libraries = lambda folder: True
    compiler._temporary_directory = Path
    return "noexec" in str(compiler.cache_directory())


PROBED = {
    "a plan takes its calls along": (
        "launch",
        '{**vars(self), "_repeated": {}}',
        "vars(self)",
        pickled_after_use(a_plan),
    ),
    "a plan for another executor repeats the first's calls": (
        "launch",
        "default_factory=dict, init=False, repr=False",
        "default_factory=dict, repr=False",
        takes(replaced),
    ),
    "a work list takes its memos along": (
        "work_list",
        "    def __getstate__(self) -> dict[str, Any]:\n        return without_memos(self)\n\n    @property\n"
        "    def is_implicit(self) -> bool:\n        return False\n",
        "    @property\n    def is_implicit(self) -> bool:\n        return False\n",
        pickled_after_use(a_plan),
    ),
    "an index takes its memos along": (
        "block_index",
        "    def __getstate__(self) -> dict[str, Any]:\n        return without_memos(self)\n\n",
        "",
        pickled_after_use(an_index),
    ),
    "a mask takes its memos along": (
        "mask",
        "        return without_memos(self)\n",
        "        return vars(self)\n",
        pickled_after_use(a_resolved_mask),
    ),
    "an example takes its memos along": (
        "testing/assertions",
        "        return without_memos(self)\n",
        "        return vars(self)\n",
        pickled_after_use(an_example),
    ),
    "a vjp is a closure": (
        "api",
        "Pullback(ready, q, k, v, o, lse)",
        "(lambda do, dlse=None: ready.backward(do, q, k, v, o, lse, dlse))",
        pickled_after_use(a_pullback),
    ),
    "what was cut short is whole": (
        "sim/compiler",
        "data[-_SEAL_BYTES:] == _seal(data[:-_SEAL_BYTES])",
        "len(data) > 0",
        takes(kept),
    ),
    "what was published is not sealed": ("sim/compiler", "file.write(_seal(made.read_bytes()))", "pass", takes(kept)),
    "a compiler that dies says nothing": (
        "sim/compiler",
        "run.stderr.strip() or _end(run)",
        "run.stderr.strip()",
        build_error(["sh", "-c", "exit 3"], "exit status 3", "sh -c 'exit 3'"),
    ),
    "words are decoded or not at all": (
        "sim/compiler",
        'encoding="utf-8", errors="backslashreplace",',
        'encoding="utf-8",',
        build_error(["sh", "-c", "printf 'caf\\351' >&2; exit 1"], r"caf\xe9"),
    ),
    "a compiler that does not start is Python's error": (
        "sim/compiler",
        "    except OSError as error:\n        raise BuildError(f\"{command[0]} does not start",
        "    except KeyError as error:\n        raise BuildError(f\"{command[0]} does not start",
        build_error(["/nowhere/g++"], "/nowhere/g++ does not start", "install g++"),
    ),
    "libraries are kept where none is loaded": (
        "sim/compiler",
        "elif _forbids_libraries(folder):",
        "elif False:",
        takes(without_libraries),
    ),
    "classes of arrays are arrays": (
        "arrays",
        "(np.ma.MaskedArray, np.matrix, np.generic, type)",
        "(np.ma.MaskedArray, np.matrix, np.generic)",
        refuses(attends(k=np.ndarray), "k must be an array; got the class ndarray"),
    ),
    "scalars of NumPy are arrays": (
        "arrays",
        "(np.ma.MaskedArray, np.matrix, np.generic, type)",
        "(np.ma.MaskedArray, np.matrix, type)",
        refuses(attends(k=np.float32(1)), "k must be an array; got np.float32(1.0)"),
    ),
    "a class has a namespace": (
        "arrays",
        'hasattr(array, "__array_namespace__") and not isinstance(array, type)',
        'hasattr(array, "__array_namespace__")',
        refuses(attends(q=np.ndarray), "q must be an array; got the class ndarray"),
    ),
    "durations are ints": (
        "arrays",
        "(bool, np.timedelta64)",
        "bool",
        refuses(attends(window=(np.timedelta64(3), 0)), "window must be (left, right)"),
    ),
    "flags of NumPy are none": (
        "arrays",
        "(value, (bool, np.bool))",
        "(value, bool)",
        takes(lambda library: (attends(deterministic=np.True_)(library) == 1).all()),
    ),
    "None is a dtype": (
        "arrays",
        "        if dtype is not None:\n",
        "        if True:\n",
        refuses(lambda library: library.ShapeDtype((2, 3), None), "dtype must be a dtype; got None"),
    ),
    "numbers are written in full": (
        "arrays",
        "value.bit_length() > 64",
        "False",
        refuses(attends(causal=10**5000), "causal must be", "an int of 16610 bits"),
    ),
    "words are written in full": (
        "arrays",
        "if len(written) <= _LONGEST",
        "if True",
        refuses(attends(kernel="x" * 99), "'xxxx", "..."),
    ),
    "shapes are truncated": (
        "arrays",
        "all(is_int(extent) and 0 <= extent < 2**63 for extent in shape)",
        "True",
        refuses(lambda library: library.ShapeDtype((2.5, 3), "f4"), "shape must be a tuple of ints"),
    ),
    "an export fails with another library's error": (
        "memory",
        "    except Exception as error:  # code of another library\n        raise UnsupportedProblem(\n            [\n"
        "                f\"{name} must be an array",
        "    except BufferError as error:\n        raise UnsupportedProblem(\n            [\n"
        "                f\"{name} must be an array",
        refuses(attends(k=Foreign(Q, fault=AttributeError("no data_ptr"))), "k must be an array that", "no data_ptr"),
    ),
    "a device is rubbish": (
        "memory",
        "    except Exception as error:  # code of another library\n        raise UnsupportedProblem(\n"
        "            [f\"{name} must say",
        "    except BufferError as error:\n        raise UnsupportedProblem(\n            [f\"{name} must say",
        refuses(attends(k=Foreign(Q, device=None)), "k must say on which device it lies"),
    ),
    "a silent error says nothing": (
        "memory",
        " or type(error).__name__",
        "",
        refuses(attends(k=Foreign(Q, fault=ValueError())), "(ValueError)"),
    ),
    "what is traced is taken": (
        "launch",
        "            elif is_array(value) and namespace(value).__name__ not in _HOMES.values():",
        "            elif False:",
        refuses(attends(k=Traced()), "k must be an array that DLPack gives away"),
    ),
    "do may be left out": (
        "launch",
        'if name != "dlse" or array is not None',
        "if array is not None",
        refuses(lambda library: a_pullback(library, False)(None), "do must be an array; got None"),
    ),
    "a pair is not offered": (
        "launch",
        'pair = ", or a pair (o, lse) of arrays" if name == "out" else ""',
        'pair = ""',
        refuses(attends(out=(Q, Q, Q)), "or a pair (o, lse)"),
    ),
    "arrays of another library are no masks": (
        "masks",
        '_take_arrays(self, {"allowed": "mask"})',
        "pass",
        takes(lambda library: library.masks.Dense(Foreign(np.tri(10, dtype=bool))).allowed.shape == (10, 10)),
    ),
    "arrays of another library are no lengths": (
        "masks",
        '_take_arrays(self, {"q": "q", "kv": "kv"})',
        "pass",
        takes(lambda library: library.masks.Lengths(kv=Foreign(np.array(3))).kv == 3),
    ),
    "arrays of another library are no prefix": (
        "masks",
        '_take_arrays(self, {"prefix": "prefix"})',
        "pass",
        takes(lambda library: library.masks.PrefixLM(Foreign(np.array(3))).prefix == 3),
    ),
    "arrays of another library are no documents": (
        "masks",
        '_take_arrays(self, {"q_ids": "q_ids", "kv_ids": "kv_ids"})',
        "pass",
        takes(lambda library: library.masks.Documents(Foreign(np.arange(3))).q_ids[2] == 2),
    ),
    "arrays of another library are no blocks": (
        "masks",
        '_take_arrays(self, {"blocks": "blocks"})',
        "pass",
        takes(lambda library: library.masks.BlockPattern(Foreign(np.eye(3, dtype=bool)), 2).blocks[2, 2]),
    ),
    "scales are strings": (
        "problem",
        "(str, bytes, complex, np.complexfloating)",
        "(bytes, complex, np.complexfloating)",
        refuses(attends(scale="0.5"), "scale must be a finite number or None; got '0.5'"),
    ),
    "scales are huge": (
        "problem",
        "(TypeError, ValueError, OverflowError)",
        "(TypeError, ValueError)",
        refuses(attends(scale=10**400), "scale must be a finite number or None; got an int of 1329 bits"),
    ),
    "scales are arrays": (
        "problem",
        ' and scale.dtype.kind in "iuf"',
        "",
        refuses(attends(scale=np.array("0.5")), "scale must be a finite number", "float(scale) makes one"),
    ),
    "precisions are arrays": (
        "problem",
        "not isinstance(precision, str) or precision not in PRECISIONS",
        "precision not in PRECISIONS",
        refuses(attends(precision=Q), "precision must be 'ieee'"),
    ),
    "causal is an array": (
        "work_list",
        'if isinstance(causal, str) and causal in ("bottom_right", "top_left") else None',
        'if causal in ("bottom_right", "top_left") else None',
        refuses(attends(causal=np.tri(10, dtype=bool)), "causal must be True, False"),
    ),
    "a side of a window is anything": (
        "work_list",
        "if not is_pair or not all(side is None or is_int(side) for side in window):",
        "if not is_pair:",
        refuses(attends(window=(Q, 0)), "window must be (left, right)"),
    ),
    "sides of a window go by their own names": (
        "work_list",
        "f\"window's {reason}\" for reason",
        "reason for reason",
        refuses(attends(window=(-1, 0)), "window's left must be"),
    ),
    "executors are unhashable": (
        "api",
        "if not isinstance(executor, str) or executor not in EXECUTORS:",
        "if executor not in EXECUTORS:",
        refuses(attends(executor=["cpu"]), "executor must be 'auto'"),
    ),
    "executors are arrays": (
        "api",
        'if not isinstance(executor, str) or executor != "auto":',
        'if executor != "auto":',
        refuses(attends(executor=Q), "executor must be 'auto'"),
    ),
    "kernels are arrays": (
        "api",
        'if not isinstance(kernel, str) or kernel not in ("auto", *families):',
        'if kernel not in ("auto", *families):',
        refuses(attends(kernel=Q), "kernel must be 'auto'"),
    ),
    "devices are names": (
        "api",
        "if device is not None and not isinstance(device, DeviceSpec):",
        "if False:",
        refuses(lambda library: library.plan(Q, Q, Q, device="H100"), "device must be a DeviceSpec", "DeviceSpec.gpu"),
    ),
    "a flag is whatever is true": (
        "api",
        '    reasons += flag_reasons("deterministic", deterministic)\n',
        "",
        refuses(attends(deterministic="no"), "deterministic must be True or False; got 'no'"),
    ),
    "lse is returned for whatever is true": (
        "api",
        "    if type(value) is not bool and (reasons := flag_reasons(name, value)):",
        "    if False and (reasons := flag_reasons(name, value)):",
        refuses(attends(return_lse=1), "return_lse must be True or False; got 1"),
    ),
    "results are written before a flag is looked at": (
        "api",
        "    if type(value) is not bool and (reasons := flag_reasons(name, value)):",
        "    if False and (reasons := flag_reasons(name, value)):",
        untouched(return_lse=np.array([True, False])),
    ),
    "what equals an option is one": (
        "api",
        "        return False\n    return type(kernel)",
        "        pass\n    return type(kernel)",
        refuses(twice({"scale": 2}, {"scale": 2 + 0j}), "scale must be a finite number or None; got (2+0j)"),
    ),
    "merge takes no arrays of another library": (
        "states",
        "    return as_arrays({name: value})[name]\n",
        "    return value\n",
        takes(lambda library: library.merge([Foreign(Q)], [Foreign(Q[..., 0])])[0].shape == Q.shape),
    ),
    "parts are whatever there is": (
        "states",
        "    except (TypeError, NotImplementedError) as error:",
        "    except NotImplementedError as error:",
        refuses(lambda library: library.merge(None, None), "outs must be a sequence of arrays"),
    ),
    "bounds take no arrays of another library": (
        "bounds",
        "    arrays = as_arrays(given)\n",
        "    arrays = given\n",
        takes(lambda library: library.error_bound(Foreign(Q), Q, Q).o.shape == Q.shape),
    ),
    "bounds take any gradient": (
        "bounds",
        "        reasons += _cotangent_reasons(\"do\", do, problem.o_shape())\n",
        "",
        refuses(lambda library: library.error_bound(Q, Q, Q, Q[:, :3]), "do must have shape (2, 10, 8)"),
    ),
    "bounds are for any dtype of products": (
        "bounds",
        "    except ValueError as error:\n        told = f\"product_dtype",
        "    except KeyError as error:\n        told = f\"product_dtype",
        refuses(lambda library: library.error_bound(Q, Q, Q, product_dtype=int), "product_dtype must be a dtype of"),
    ),
    "an index is made of anything": (
        "block_index",
        "        if not isinstance(mask, Mask):\n            fix",
        "        if False:\n            fix",
        refuses(
            lambda library: library.BlockIndex.from_mask(Q, part(library, "mask").MaskShape((), 1, 2, 2), 2),
            "mask must be a Mask; got an array",
        ),
    ),
    "an index is for any shape": (
        "block_index",
        "        reasons = shape_reasons(shape)\n",
        "        reasons = []\n",
        refuses(
            lambda library: library.BlockIndex.from_mask(library.masks.Causal(), (2, 2), 2), "shape must be a MaskShape"
        ),
    ),
    "an index of blocks is of any length": (
        "block_index",
        "        if reasons := length_reasons(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv):",
        "        if reasons := []:",
        refuses(
            lambda library: library.BlockIndex.from_scipy(scipy.sparse.bsr_array(np.eye(4)), "4", 4),
            "seqlen_q must be an int",
        ),
    ),
    "unsigned lengths wrap": (
        "block_index",
        "        shape = MaskShape(tuple(map(int, shape.batch)), *map(int, shape[1:]))\n",
        "",
        takes(
            lambda library: library.BlockIndex.from_blocks(np.eye(2, dtype=bool), np.uint8(4), 4, 2).num_q_blocks == 2
        ),
    ),
    "a device has no processors": (
        "device",
        '(("num_processors", 1),',
        '(("num_processors", -1),',
        refuses(
            lambda library: library.DeviceSpec(name="x", num_processors=0, tile_memory_bytes=1),
            "num_processors must be an int of at least 1; got 0",
        ),
    ),
    "names of devices are unhashable": (
        "device",
        "if not isinstance(name, str) or name not in _GPUS:",
        "if name not in _GPUS:",
        refuses(lambda library: library.DeviceSpec.gpu([]), "name must be one of"),
    ),
    "alignments are arrays": (
        "masks",
        'not (isinstance(align, str) and align in ("bottom_right", "top_left"))',
        'align not in ("bottom_right", "top_left")',
        refuses(lambda library: library.masks.Causal(Q), "align must be 'bottom_right', ", "got an array"),
    ),
    "a seed is anything": (
        "patterns",
        "    if all(is_int(each) and each >= 0 for each in ints):",
        "    if True:",
        refuses(lambda library: library.patterns.random(8, block=2, density=0.5, seed="x"), "seed must be an int"),
    ),
    "a density of NumPy is none": (
        "arrays",
        "is_int(value) or isinstance(value, (float, np.floating))",
        "is_int(value) or isinstance(value, float)",
        takes(lambda library: library.patterns.random(8, block=2, density=np.float32(0.5)) is not None),
    ),
    "unsigned lengths wrap in patterns": (
        "patterns",
        "    seqlen_q, seqlen_kv = int(seqlen_q), int(seqlen_kv)\n",
        "",
        takes(lambda library: library.patterns.butterfly(np.uint8(8), block=2).blocks.shape == (4, 4)),
    ),
    "a block is longer than any number": (
        "block_set",
        "1 <= side < 2**63 for",
        "1 <= side for",
        refuses(
            lambda library: library.BlockIndex.from_blocks(np.ones((1, 1), bool), 4, 4, 2**64), "block must be an int"
        ),
    ),
}  # fmt: skip


def test_no_probed_fault_is_without_its_line():
    texts = {file: (Path(cuflash.__file__).parent / f"{file}.py").read_text("utf-8") for file, *_ in PROBED.values()}
    assert [name for name, (file, line, *_) in PROBED.items() if texts[file].count(line) != 1] == []


@pytest.mark.parametrize("name", chosen(PROBED))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen_by_its_probe(edited, name):
    file, line, replacement, probe = PROBED[name]
    library = edited(file, line, replacement)
    with pytest.raises(AssertionError):
        probe(library)


@pytest.mark.filterwarnings("ignore")
def test_the_library_as_it_is_passes_every_probe(edited):
    library = edited("__init__", '__version__ = "0.1.0"', '__version__ = "0.1.0"')
    assert all(probe(library) is None for *_, probe in PROBED.values())
