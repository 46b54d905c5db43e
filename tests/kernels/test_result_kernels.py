"""Kernels that merge results, compare a mask's results with the unmasked ones, and add rows agree with formulas."""

from __future__ import annotations

from typing import Any

import cupy_machine
import numpy as np
import pytest
from cached_calls import cached
from cuflash.arrays import DTYPES, accumulator_dtype
from cuflash.executors.launch import BoundPass
from cuflash.executors.sim import Simulator
from cuflash.planning import _result_kernels
from cuflash.sim import Schedule
from cuflash.study._recall import compared
from executors import hostile_schedules, needs_compiler, to_device
from library_parts import part
from test_non_finite import MERGED, assert_merges

import cuflash

MARGIN = 4096  # elements after each result, to which no kernel may write
SHAPES = [(3, (2, 5, 7)), (1, (4, 1)), (2, (1, 300)), (5, (3, 2, 40, 8)), (128, (3, 5))]


def parts_of(count: int, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    """Draw o and lse of parts; some rows are empty in one part, and the last row is empty in all."""
    rng = np.random.default_rng((seed, count, *shape))
    outs = rng.standard_normal((count, *shape)).astype(dtype)
    lses = (5 * rng.standard_normal((count, *shape[:-1]))).astype(accumulator_dtype(np.dtype(dtype)))
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    lses[:, ..., -1] = -np.inf
    outs[lses == -np.inf] = np.nan
    return outs, lses


def assert_merged(outs: Any, lses: Any, o: Any, lse: Any) -> None:
    """Compare merged results with the union in float64.

    To first order, a weight has the rounding errors of its exponent and of its exponential, which is within two units
    in the last place; a sum of n terms adds n roundings; the quotient, the logarithm and its sum with the maximum add
    three.
    """
    u, finest = np.finfo(lses.dtype).eps / 2, np.finfo(lses.dtype).tiny
    wide, many = lses.astype(np.float64), len(outs) + 8
    most = wide.max(0)
    shift = np.where(most == -np.inf, 0, most)
    weights = np.exp(wide - shift)
    values = np.where(wide[..., None] == -np.inf, 0, outs.astype(np.float64))
    total = weights.sum(0)
    whole = np.where(total == 0, 1, total)
    errors = u * (many + np.where(weights > 0, np.abs(np.where(weights > 0, wide, 0) - shift), 0)) * weights
    relative = errors.sum(0) / whole
    exact = (weights[..., None] * values).sum(0) / whole[..., None]
    size = (weights[..., None] * np.abs(values)).sum(0) / whole[..., None]
    bound = (errors[..., None] * np.abs(values)).sum(0) / whole[..., None] + relative[..., None] * size
    of_dtype = 2.0**-8 if o.dtype == DTYPES[1] else np.finfo(o.dtype).eps / 2
    least = 2.0**-24 if o.dtype == np.float16 else finest
    assert (np.abs(o.astype(np.float64) - exact) <= 1.01 * bound + of_dtype * (np.abs(exact) + bound) + least).all()
    is_empty = total == 0
    assert (lse[is_empty] == -np.inf).all() and (o[is_empty] == 0).all()
    exact_lse = (shift + np.log(whole))[~is_empty]
    assert (np.abs(lse[~is_empty] - exact_lse) <= 1.01 * relative[~is_empty] + 4 * u * (1 + np.abs(exact_lse))).all()


def merged(parts: Any, planning: Any = _result_kernels, schedule: Schedule | None = None) -> tuple[Any, Any]:
    """Merge parts by the kernel on the simulator; results hold NaN where the kernel does not write."""
    outs, lses = parts
    kernels = planning.merging(len(outs), outs[0].shape, outs[0].dtype)
    rooms = [np.full(like.size + MARGIN, np.nan, like.dtype) for like in (outs[0], lses[0])]
    o, lse = (room[: like.size].reshape(like.shape) for room, like in zip(rooms, (outs[0], lses[0])))
    machine = Simulator() if schedule is None else Simulator(schedule=schedule)
    (launch,) = kernels.launches.values()
    bound = BoundPass.of(kernels, {}, (*launch.reads, *launch.writes), machine)
    bound.launch([each.ctypes.data for each in (*outs, *lses, o, lse)], machine.stream())
    assert all(np.isnan(room[-MARGIN:]).all() for room in rooms)
    return o, lse


def check_merges(planning: Any = _result_kernels) -> None:
    for dtype in DTYPES:
        for count, shape in SHAPES:
            outs, lses = parts_of(count, shape, dtype)
            assert_merged(outs, lses, *merged((list(outs), list(lses)), planning))


def check_non_finite_merges() -> None:
    for parts in MERGED:
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            assert_merges(lambda outs, lses: merged((outs, lses)), *parts, dtype)


def results_of(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """Draw o and lse without and with a mask; the first row has no key, and in the last row the mask keeps all keys."""
    rng = np.random.default_rng(shape)
    o, kept_o = rng.standard_normal((2, *shape)).astype(dtype)
    lse, kept_lse = rng.standard_normal((2, *shape[:-1])).astype(accumulator_dtype(np.dtype(dtype)))
    kept_lse = lse - np.abs(kept_lse)
    lse[..., :1], kept_lse[..., :1] = -np.inf, -np.inf
    if shape[-2] > 1:
        kept_lse[..., -1] = lse[..., -1] + 0.01  # larger than lse, as rounding can make it, but by more
    return o, lse, kept_o, kept_lse


def by_kernel(results: Any, planning: Any = _result_kernels, schedule: Schedule | None = None) -> tuple[Any, Any]:
    """Compare results by the kernel on the simulator, twice with the same workspaces."""
    o, lse, *_ = results
    kernels = planning.comparing(o.shape, o.dtype)
    of = {name: np.zeros(each.shape, each.dtype) for name, each in kernels.workspaces.items()}
    of["sums"].fill(np.nan)
    (launch,) = kernels.launches.values()
    names = (*launch.reads, *launch.writes)
    machine = Simulator() if schedule is None else Simulator(schedule=schedule)
    bound = BoundPass.of(kernels, {}, names, machine)
    outputs = []
    for _ in range(2):
        of |= {"mass": np.full_like(lse, np.nan), "error": np.full((), np.nan)}
        arrays = dict(zip(launch.reads, results)) | of
        bound.launch([arrays[name].ctypes.data for name in names], machine.stream())
        outputs.append((of["mass"], of["error"]))
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(*outputs))
    assert not of["num_arrived"].any()
    return outputs[0]


def rows_of(dtype: Any, is_wide: bool, columns: tuple[int, int], seed: int = 0) -> tuple[Any, ...]:
    """Draw terms of two arrays [2, 3, rows, columns], and a table of up to three terms for each row."""
    rng, count, received = np.random.default_rng(seed), 50, 30
    of_terms = accumulator_dtype(np.dtype(dtype)) if is_wide else np.dtype(dtype)
    own, others = (
        [rng.standard_normal((2, 3, rows, each)).astype(of_terms) for each in columns] for rows in (count, received)
    )
    for x in own:
        x[..., :5, :] = -0.0
    table = np.stack([
        rng.permutation(90)[:80], rng.integers(-1, count, 80), rng.integers(-1, count + received, 80),
        rng.integers(count, count + received, 80) * rng.integers(0, 2, 80) - 1,
    ], axis=1).astype(np.int32)  # fmt: skip
    table[:10, 1:], table[10:20, 2:] = -1, -1
    return own, others, table


def summed_rows(drawn: Any, dtype: Any, planning: Any = _result_kernels, is_odd: bool = False) -> list[Any]:
    """Write rows of heads 1 to 3 of 5 by the kernel on the simulator; the others are left as they are."""
    own, others, table = drawn
    rooms = [np.full(2 * 5 * 90 * x.shape[-1] + 8, 7, dtype) for x in own]
    to = [room[is_odd : room.size - 8 + is_odd].reshape(2, 5, 90, -1) for room in rooms]
    layouts = [
        {f"{name}_strides": [step // x.itemsize for step in x.strides[:2]] for name, x in zip(names, arrays)}
        | {"num_columns": arrays[0].shape[-1]}
        for names, arrays in ((("own", "received", "to"), each) for each in zip(own, others, to))
    ]
    is_wide = own[0].dtype != to[0].dtype
    kernels = planning.adding_rows(layouts, to[0].dtype, (2, 3), table.shape, own[0].shape[-2], is_wide)
    (launch,) = kernels.launches.values()
    machine = Simulator()
    bound = BoundPass.of(kernels, {}, (*launch.reads, *launch.writes), machine)
    arrays = own[0], others[0], own[1], others[1], table, *(x[:, 1:] for x in to)
    bound.launch([x.ctypes.data for x in arrays], machine.stream())
    return to


def check_sums_of_rows(planning: Any = _result_kernels) -> None:
    """Check the bits of rows that are sums in the order of the table, rounded once, also at odd addresses."""
    for dtype in DTYPES:
        for is_wide, columns, is_odd in ((True, (16, 8), False), (False, (8, 24), True), (False, (5, 32), False)):
            drawn = rows_of(dtype, is_wide, columns)
            own, others, table = drawn
            for x, *terms in zip(summed_rows(drawn, dtype, planning, is_odd), own, others):
                every = np.concatenate(terms, axis=-2).astype(accumulator_dtype(np.dtype(dtype)))
                expected = np.full(x.shape, 7, dtype)
                for to, first, *places in table:
                    total = every[..., first, :] if first >= 0 else np.zeros_like(every[..., 0, :])
                    for place in places:
                        total = total + every[..., place, :] if place >= 0 else total
                    expected[:, 1:4, to] = total.astype(dtype)
                assert x.tobytes() == expected.tobytes()


def assert_compared(results: Any, mass: Any, error: Any) -> None:
    """Compare with NumPy's formula: exponentials are within two units, and sums of squares add a rounding per term."""
    with np.errstate(over="ignore"):
        expected = compared(results[:2], results[2:])
    np.testing.assert_allclose(mass, expected.mass, rtol=4 * np.finfo(mass.dtype).eps)
    np.testing.assert_allclose(error, expected.output_error, rtol=(results[0].size + 8) * np.finfo(np.float64).eps)


def check_comparisons(planning: Any = _result_kernels) -> None:
    """Check one thread block and several, more rows than elements, and no rows."""
    for dtype in DTYPES:
        for shape in ((2, 3, 5), (2, 70, 70), (1, 1), (2, 5000, 0), (0, 4)):
            results = results_of(shape, dtype)
            assert_compared(results, *by_kernel(results, planning))


def check_special_comparisons() -> None:
    """Check that a zero has no error unless it changes, and that NaN in o or lse propagates to the results."""
    o, lse, kept_o, kept_lse = results_of((2, 40, 8), np.float32)
    zeros, broken = np.zeros_like(o), kept_o.copy()
    broken[1, 2, 3] = np.nan
    for one, other in ((zeros, zeros), (zeros, kept_o), (o, o), (o, broken)):
        assert_compared((one, lse, other, kept_lse), *by_kernel((one, lse, other, kept_lse)))
    lse[0, 5] = np.nan
    assert_compared((o, lse, kept_o, kept_lse), *by_kernel((o, lse, kept_o, kept_lse)))


@needs_compiler
@pytest.mark.parametrize(
    "check",
    [check_merges, check_non_finite_merges, check_comparisons, check_special_comparisons, check_sums_of_rows],
)
def test_the_kernel_does_what_the_host_does(check: Any) -> None:
    check()


@needs_compiler
@pytest.mark.parametrize("make", [
    lambda schedule: merged(parts_of(3, (9, 70), np.float16), schedule=schedule),
    lambda schedule: by_kernel(results_of((3, 100, 64), np.float16), schedule=schedule),
], ids=["merge", "compare"])  # fmt: skip
def test_results_have_the_same_bits_in_all_orders(make: Any) -> None:
    expected = make(None)
    for schedule in hostile_schedules("results", 2):
        assert all(map(np.array_equal, make(schedule), expected))


@pytest.fixture
def cupy(tmp_path: Any, monkeypatch: Any) -> Any:
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine


def laid_out(array: Any, way: str) -> Any:
    """Copy an array to another memory layout."""
    if way == "turned":
        return np.ascontiguousarray(array.swapaxes(0, -1)).swapaxes(0, -1)
    room = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    room[..., ::2] = array
    return {"dense": array, "gaps": room[..., ::2], "reversed": array[::-1].copy()[::-1]}[way]


def check_calls(send: Any, counts: Any = (1, 2, 7), library: Any = cuflash) -> None:
    """Check that parts in any memory layout are merged, in first calls and in repeated ones."""
    for dtype in DTYPES:
        for number, count in enumerate(counts):
            for way in ("dense", "turned", "gaps", "reversed")[:: 1 if dtype == np.float16 else 3]:
                for seed in range(2):
                    outs, lses = parts_of(count, (2, 3, 6), dtype, seed)
                    given_parts = ([send(laid_out(each, way)) for each in parts] for parts in (outs, lses))
                    o, lse = (each.get() for each in library.merge(*given_parts))
                    assert_merged(outs, lses, o, lse)


def check_bound_merges(machine: Any, library: Any = cuflash) -> None:
    """Check that a repeated call launches one kernel, a graph reads current data, and any number of stages works."""
    check_calls(lambda array: cupy_machine.Ndarray(array, 0), library=library)
    assert len(cached("merge", part(library, "planning._call_cache").CALLS)) == 30  # one for each layout
    outs, lses = parts_of(2, (4, 6), np.float16)
    sent = [list(map(machine.asarray, each)) for each in (outs, lses)]
    library.merge(*sent)
    stream = machine.cuda.Stream()
    with stream:
        machine.log.clear()
        stream.begin_capture()
        o, lse = library.merge(*sent)
        graph = stream.end_capture()
        assert machine.launched == ["merge"]
    assert_held(library, [o, lse])
    outs, lses = parts_of(2, (4, 6), np.float16, seed=1)
    for array, now in zip((*sent[0], *sent[1]), (*outs, *lses)):
        array[...] = now
    graph.launch()
    assert_merged(outs, lses, o.get(), lse.get())
    for count in (129, 300):
        outs, lses = parts_of(count, (4, 6), np.float16)
        o, lse = library.merge(list(map(machine.asarray, outs)), list(map(machine.asarray, lses)))
        assert o.dtype == np.float16 and lse.dtype == np.float32
        assert_merged(outs, lses, o.get(), lse.get())


def assert_held(library: Any, arrays: Any) -> None:
    """Check that arrays allocated by a captured call are kept alive for its graph."""
    held = {
        id(array) for pinned in part(library, "executors.gpu")._pinned for array in getattr(pinned, "_captured", ())
    }
    assert held.issuperset(map(id, arrays))


def check_refused_merges(machine: Any, library: Any = cuflash) -> None:
    """Check that misaligned addresses and arrays on another device are refused, also in repeated calls."""
    outs, lses = parts_of(2, (4, 6), np.float16)
    for name in ("outs", "lses"):
        sent = {"outs": list(map(machine.asarray, outs)), "lses": list(map(machine.asarray, lses))}
        library.merge(**sent)
        array = sent[name][1].host
        odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        sent[name][1] = cupy_machine.Ndarray(odd, 0)
        with pytest.raises(library.UnsupportedProblem, match=rf"{name}\[1\] must start at a multiple of its item size"):
            library.merge(**sent)
    on_device = [[cupy_machine.Ndarray(array, 1) for array in each] for each in (outs, lses)]
    with pytest.raises(library.UnsupportedProblem, match=r"outs\[0\] must be on the current device, 0; got device 1"):
        library.merge(*on_device)


def test_parts_on_a_device_are_merged_by_one_launch(cupy: Any) -> None:
    check_bound_merges(cupy)


def test_parts_that_kernels_do_not_reach_are_refused(cupy: Any) -> None:
    check_refused_merges(cupy)


def test_one_array_holds_all_parts_on_a_device(cupy: Any) -> None:
    outs, lses = parts_of(3, (4, 6), np.float32)
    o, lse = cuflash.merge(cupy.asarray(outs), cupy.asarray(lses))
    assert_merged(outs, lses, o.get(), lse.get())


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (3, 0)])
def test_parts_without_elements_are_merged(cupy: Any, shape: tuple[int, ...]) -> None:
    outs, lses = np.zeros((2, *shape), np.float32), np.ones((2, *shape[:-1]), np.float32)
    expected = cuflash.merge(outs, lses)
    results = cuflash.merge(cupy.asarray(outs), cupy.asarray(lses))
    for one, other in zip(results, expected):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one.get(), other, rtol=1e-6)


def check_recalls(send: Any, library: Any = cuflash) -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float64):
        q, k, v = rng.standard_normal((3, 2, 4, 40, 16)).astype(dtype)
        for mask in (library.masks.SlidingWindow(7, 0), library.masks.Band(), ~library.masks.Band()):
            for _ in range(2):
                sent = list(map(send, (q, k, v)))
                recalled = library.study.recall(*sent, mask=mask, causal=True)
                whole, with_mask = (
                    [each.get() for each in library.attention(*sent, mask=some, causal=True, return_lse=True)]
                    for some in (None, mask)
                )
                assert_compared((*whole, *with_mask), recalled.mass.get(), recalled.output_error.get())
                assert recalled.output_error.shape == () and recalled.output_error.dtype == np.float64


def check_bound_recalls(machine: Any, library: Any = cuflash) -> None:
    """Check that repeated calls only launch kernels and allocate results, and that a graph compares at each replay."""
    check_recalls(machine.asarray, library)
    assert len(cached("compare", part(library, "planning._call_cache").CALLS)) == 2  # one for each dtype
    q = machine.asarray(np.ones((2, 40, 16), np.float16))
    library.study.recall(q, q, q, mask=library.masks.SlidingWindow(7, 0))
    machine.log.clear()
    allocated = machine.allocated
    library.study.recall(q, q, q, mask=library.masks.SlidingWindow(7, 0))
    assert machine.allocated - allocated == 6  # o and lse of two calls, the masses and the error
    assert {kind for kind, *_ in machine.log} == {"launch"} and machine.launched[-1] == "compare"
    stream = machine.cuda.Stream()
    with stream:
        stream.begin_capture()
        recalled = library.study.recall(q, q, q, mask=library.masks.SlidingWindow(7, 0))
        graph = stream.end_capture()
    assert_held(library, recalled)
    recalled.mass[...], recalled.output_error[...] = np.nan, np.nan
    for _ in range(2):
        graph.launch()
        np.testing.assert_allclose(recalled.output_error.get(), 0, atol=1e-3)
        assert (recalled.mass.get() > 0).all()


def test_recall_on_a_device_waits_for_nothing(cupy: Any) -> None:
    check_bound_recalls(cupy)


@pytest.mark.gpu
def test_a_gpu_merges_and_compares() -> None:
    check_calls(to_device, counts=(1, 2, 7, 130))
    check_recalls(to_device)
