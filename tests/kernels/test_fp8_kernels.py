"""FP8 kernels on the simulator and on a GPU: results are within the error bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash.executors import sim as sim_executor
from cuflash.executors.launch import run_alone
from cuflash.executors.sim import Simulator
from cuflash.fp8 import kernel_calls
from cuflash.fp8.e4m3 import transposed_values
from cuflash.planning.quantizing import (
    PLACES, Rounding, quantize_spec, quantizing, transpose_spec, transposing,
)  # fmt: skip
from executors import CPU, SIM, Run, hostile_schedules, in_turn, needs_compiler, on_sim_and_gpu
from refusals import require_reasons
from test_sm90 import FewBlocks

import cuflash
from cuflash import Quantized, Rotation, masks, reference

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def put(run: Run, x: Quantized) -> Quantized:
    """Copy a quantized operand to the device of a run."""
    if not run.is_on_device:
        return x
    return replace(x, data=run.put(x.data.view(np.uint8)), scale=run.put(x.scale))


def attention(run: Run, x8: Any, mask: Any = None, **named: Any) -> tuple[Any, Any]:
    sink = named.pop("sink", None)
    placed = mask
    if run.is_on_device and mask is not None:
        shapes = [np.empty(x.shape, np.float16) for x in x8]
        placed = mask if isinstance(mask, cuflash.BlockIndex) else run.put_mask(mask, *shapes)
    o, lse = cuflash.attention(
        *(put(run, x) for x in x8), mask=placed, sink=run.put(sink), executor=run.executor, return_lse=True, **named
    )
    return run.get(o), run.get(lse)


def operands(seqlen_q: int, seqlen_kv: int, dims: tuple[int, int], heads: tuple[int, int], dtype: str) -> list[Any]:
    rng = np.random.default_rng([seqlen_q, seqlen_kv, *dims])
    shapes = (heads[0], seqlen_q, dims[0]), (heads[1], seqlen_kv, dims[0]), (heads[1], seqlen_kv, dims[1])
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def without_one_block(seqlen: int, block: int) -> masks.Mask:
    """Return a mask of all blocks but one, whose indices need lists."""
    count = -(-seqlen // block)
    return masks.BlockPattern(np.arange(count * count).reshape(count, count) != 2 * count + 1, block)


def require_bounds(results: tuple[Any, Any], x8: Any, **named: Any) -> float:
    """Require that results are within their error bounds; return the largest ratio of an error to its bound."""
    bound = cuflash.error_bound(*x8, product_dtype=E4M3, **named)
    mask, causal, window = (named.get(name) for name in ("mask", "causal", "window"))
    q, k, v = (x.scaled(np.float64) for x in x8)
    allowed = None
    if mask is not None or causal or window:
        allowed = allowed_of(q, k, mask, causal or False, window)
    exact_o, exact_lse = reference.attention(q, k, v, mask=allowed, scale=named.get("scale"), **sink_of(named))
    errors = np.abs(results[0].astype(np.float64) - exact_o)
    with np.errstate(invalid="ignore", divide="ignore"):
        assert (errors <= bound.o).all(), np.nanmax(errors / bound.o)
        is_near = np.abs(results[1] - exact_lse) <= bound.lse
    assert (is_near | (results[1] == exact_lse)).all()
    return float(np.max(errors / np.maximum(bound.o, 1e-30)))


def sink_of(named: Any) -> dict[str, Any]:
    return {"sink": named["sink"]} if named.get("sink") is not None else {}


def allowed_of(q: Any, k: Any, mask: Any, causal: Any, window: Any) -> Any:
    from cuflash.blocks.work_list import requested_mask
    from cuflash.planning.problem import Problem

    shape = Problem.of(q, k, k).mask_shape
    return requested_mask(mask, causal, window, shape, np).toarray(**shape._asdict())


DOCUMENTS = masks.Documents(np.repeat(np.arange(4), 50))
BITS = np.random.default_rng(1).random((200, 200)) < 0.3
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "sink": np.float32([0.5, -1.0, 30.0, -np.inf])},
    "window": {"window": (40, 3)},
    "documents": {"mask": DOCUMENTS, "scale": -0.3},
    "bits": {"mask": BITS},
    "lengths": {"mask": masks.Lengths(q=70)},
    "a scale of 0": {"scale": 0.0},
}


@on_sim_and_gpu
@pytest.mark.parametrize(
    "name, dims, dtype, per",
    in_turn(CALLS, [(64, 64), (128, 128), (48, 80)], ["bfloat16", "float16", "float32"], ["block", "head", "tensor"]),
)
def test_results_are_within_the_bound(run: Run, name: str, dims: tuple[int, int], dtype: str, per: str) -> None:
    x8 = [cuflash.quantize(x, per=per) for x in operands(200, 200, dims, (4, 2), dtype)]
    results = attention(run, x8, **CALLS[name])
    assert results[0].dtype == DTYPES[dtype]
    assert require_bounds(results, x8, **CALLS[name]) < 1


@on_sim_and_gpu
@pytest.mark.parametrize("seqlen_q, seqlen_kv", [(1, 1), (40, 300), (129, 15), (260, 513)])
def test_any_length(run: Run, seqlen_q: int, seqlen_kv: int) -> None:
    x8 = [cuflash.quantize(x) for x in operands(seqlen_q, seqlen_kv, (64, 64), (2, 2), "bfloat16")]
    assert require_bounds(attention(run, x8, causal="bottom_right"), x8, causal="bottom_right") < 1


@on_sim_and_gpu
@pytest.mark.parametrize("block", [64, 128])
def test_a_list_is_the_mask_that_it_stands_for(run: Run, block: int) -> None:
    x8 = [cuflash.quantize(x, block=block) for x in operands(300, 300, (64, 64), (2, 1), "bfloat16")]
    mask = masks.Documents(np.repeat(np.arange(3), 100)) & masks.Causal() & without_one_block(300, block)
    index = cuflash.BlockIndex.from_mask(mask, block=block, batch=(), num_heads=2, seqlen_q=300, seqlen_kv=300)
    assert index.as_mask().row_intervals is None
    results = attention(run, x8, mask=index)
    assert require_bounds(results, x8, mask=mask) < 1


def rising_scores(seqlen: int) -> list[Quantized]:
    """Return operands whose scores increase from one block of keys to the next, faster in each further head.

    In the first head, the running maximum never needs an update. In the others, weights become too large or infinite
    without one.
    """
    q, k, v = operands(128, seqlen, (64, 64), (4, 4), "float32")
    q[..., 0], k[..., 0] = 8, (np.arange(seqlen) // 128 + np.arange(seqlen) % 128 / 128)
    k[..., 0] *= np.float32([0.5, 2, 40, 400])[:, None]
    v[:, :128] *= 8  # v gets another scale after these keys, which ends a sum of values
    return [cuflash.quantize(x) for x in (q, k, v)]


@on_sim_and_gpu
def test_maxima_that_rise_late(run: Run) -> None:
    x8 = rising_scores(640)
    assert require_bounds(attention(run, x8), x8) < 1
    assert require_bounds(attention(run, x8, causal="bottom_right"), x8, causal="bottom_right") < 1


@on_sim_and_gpu
def test_whole_numbers_are_exact(run: Run) -> None:
    """One key takes all of a query's weight, so each row of v is returned exactly, which reveals the order of keys."""
    keys, dim = 160, 128
    codes = np.where((np.arange(keys)[:, None] >> np.arange(8)) % 2, 1.0, -1.0)
    k = np.zeros((1, keys, dim), np.float32)
    k[0, :, :8] = codes
    v = np.random.default_rng(0).integers(-7, 8, (1, keys, dim)).astype(np.float32)
    x8 = [one_scale(x) for x in (64 * k, k, v)]
    o, lse = attention(run, x8, scale=1.0)
    np.testing.assert_array_equal(o, v)
    np.testing.assert_array_equal(lse, np.float32(512))


def one_scale(x: Any) -> Quantized:
    """Return a quantized operand with a scale of 1, from numbers that e4m3 represents exactly."""
    return Quantized(
        data=x.astype(E4M3), scale=np.ones((*x.shape[:-2], 1), np.float32), per="head", block=128, rotation=None,
        source_dtype=np.dtype(np.float32),
    )  # fmt: skip


@on_sim_and_gpu
def test_scales_move_through(run: Run) -> None:
    """The scale of a block of v multiplies its keys' contributions.

    Powers of two that cancel in q and k change nothing.
    """
    q8, k8, v8 = (cuflash.quantize(x) for x in operands(256, 256, (64, 64), (1, 1), "float32"))
    mask = masks.Documents(np.arange(256) // 128)
    before, _ = attention(run, [q8, k8, v8], mask=mask)
    scale = v8.scale.copy()
    scale[:, 1] *= 2
    after, _ = attention(run, [q8, k8, replace(v8, scale=scale)], mask=mask)
    np.testing.assert_array_equal(after[:, :128], before[:, :128])
    np.testing.assert_array_equal(after[:, 128:], 2 * before[:, 128:])
    larger = [replace(q8, scale=q8.scale * np.float32(8)), replace(k8, scale=k8.scale / np.float32(8)), v8]
    np.testing.assert_array_equal(attention(run, larger, mask=mask)[0], before)


@on_sim_and_gpu
def test_rows_without_keys_and_what_is_not_finite(run: Run) -> None:
    x = operands(200, 200, (64, 64), (2, 2), "bfloat16")
    x[2][1, 150, 3] = np.nan
    x8 = [cuflash.quantize(each) for each in x]
    mask = masks.Lengths(q=60, kv=100)
    o, lse = attention(run, x8, mask=mask)
    assert (o[:, 60:] == 0).all() and np.isneginf(lse[:, 60:]).all() and np.isfinite(lse[:, :60]).all()
    assert np.isfinite(o[0].astype(np.float32)).all()
    full, _ = attention(run, x8)
    assert np.isfinite(full[0].astype(np.float32)).all() and np.isnan(full[1].astype(np.float32)).all()
    none, none_lse = attention(run, [x8[0], *(cuflash.quantize(each[:, :0]) for each in x[1:])])
    assert not none.any() and np.isneginf(none_lse).all()


def require_same_nan(run: Run, place: int, number: float) -> None:
    """Require that a number in a row of each operand in turn makes the same elements NaN as on the host."""
    for operand in range(3):
        x = operands(90, 700, (64, 64), (2, 2), "bfloat16")
        x[operand][1, min(place, x[operand].shape[1] - 1), 3] = number
        x8 = [cuflash.quantize(each) for each in x]
        for result, expected in zip(attention(run, x8), attention(CPU, x8)):
            np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), np.isnan(expected.astype(np.float32)))


@on_sim_and_gpu
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 300, 699])
def test_nan_and_infinity_reach_results_from_every_block(run: Run, place: int, number: float) -> None:
    """A block whose scale is not finite may be in the first, an inner, or the last sum of values."""
    require_same_nan(run, place, number)


# A mask, a key whose block is NaN, and the queries that attend a key of the block.
NAN_BLOCKS: dict[str, tuple[Any, int, slice]] = {
    "first": (masks.Causal("bottom_right"), 0, slice(0, 90)),
    "inner": (masks.Causal("bottom_right"), 300, slice(0, 90)),
    "last, partial": (masks.Causal("bottom_right"), 650, slice(30, 90)),
    "before a window": (masks.SlidingWindow(120, 0, "bottom_right"), 300, slice(0, 0)),
    "first of a window, partial": (masks.SlidingWindow(120, 0, "bottom_right"), 400, slice(0, 22)),
    "past a length": (masks.Lengths(kv=300), 400, slice(0, 0)),
}


def require_nan_of_attended_blocks(run: Run, name: str) -> None:
    """Require that a block of keys that is NaN makes NaN of the queries that attend it, and of no other."""
    mask, place, rows = NAN_BLOCKS[name]
    x = operands(90, 700, (64, 64), (2, 2), "bfloat16")
    x[1][1, place, 3] = np.nan
    is_nan = np.zeros((2, 90), bool)
    is_nan[1, rows] = True
    o, lse = attention(run, [cuflash.quantize(each) for each in x], mask=mask)
    np.testing.assert_array_equal(np.isnan(lse), is_nan)
    np.testing.assert_array_equal(np.isnan(o.astype(np.float32)), np.broadcast_to(is_nan[..., None], o.shape))


@on_sim_and_gpu
@pytest.mark.parametrize("name", NAN_BLOCKS)
def test_a_block_of_nan_reaches_the_queries_that_attend_it(run: Run, name: str) -> None:
    require_nan_of_attended_blocks(run, name)


def require_nan_of_numbers(run: Run, place: int) -> None:
    """Require that an e4m3 NaN in a part with a finite scale makes NaN of its query, or of all queries of its key."""
    for operand, row in ((0, min(place, 89)), (1, place)):
        x8 = [one_scale(each) for each in operands(90, 700, (64, 64), (2, 2), "float32")]
        x8[operand].data[1, row, 3] = np.nan
        is_nan = np.zeros((2, 90), bool)
        is_nan[1, [row] if operand == 0 else slice(None)] = True
        o, lse = attention(run, x8)
        np.testing.assert_array_equal(np.isnan(lse), is_nan)
        np.testing.assert_array_equal(np.isnan(o), np.broadcast_to(is_nan[..., None], o.shape))


@on_sim_and_gpu
@pytest.mark.parametrize("place", [0, 127, 128, 300, 511, 512, 699])
def test_nan_with_a_finite_scale_reaches_results_from_every_block(run: Run, place: int) -> None:
    require_nan_of_numbers(run, place)


def require_tiny_scales(run: Run) -> None:
    """Require results within their bounds if products of the scales of q and k round to 0, or nearly."""
    q, k, v = operands(100, 300, (64, 64), (1, 1), "float32")
    for factor in (1e-18, 1e-20, 1e-25):
        x8 = [cuflash.quantize(x) for x in (q * np.float32(factor), k * np.float32(factor), v)]
        for causal in (False, "bottom_right"):
            assert require_bounds(attention(run, x8, causal=causal), x8, causal=causal) < 1


@on_sim_and_gpu
def test_scales_whose_product_rounds_to_0(run: Run) -> None:
    """Scores are 0, but those of masked keys, and of keys that fill up the last block, still have no weight."""
    require_tiny_scales(run)


@on_sim_and_gpu
def test_a_scale_of_any_size(run: Run) -> None:
    q, k, v = operands(100, 100, (64, 64), (1, 1), "float32")
    for factor in (1e-25, 1e12):
        x8 = [cuflash.quantize(x) for x in (q * np.float32(factor), k, v)]
        assert require_bounds(attention(run, x8, scale=0.125 / factor), x8, scale=0.125 / factor) < 1


@on_sim_and_gpu
def test_strides_and_batches(run: Run) -> None:
    """Kernels take data with any strides, broadcast batches, and two-dimensional operands."""
    rng = np.random.default_rng(5)
    q, v = rng.standard_normal((2, 3, 2, 70, 64), dtype=np.float32)
    k = rng.standard_normal((3, 1, 70, 64), dtype=np.float32)
    q8, k8, v8 = map(cuflash.quantize, (q, k, v[0, :1]))
    results = attention(run, [q8, k8, v8])
    right = attention(run, [q8, *(cuflash.quantize(np.repeat(x, 2, axis=-3)) for x in (k, v[0, :1]))])
    np.testing.assert_array_equal(results[0], right[0])
    turned = [replace(x, data=np.asfortranarray(x.data)) for x in (q8, k8, v8)]
    if not run.is_on_device:
        np.testing.assert_array_equal(attention(run, turned)[0], results[0])
    flat = [cuflash.quantize(x) for x in (q[0, 0], k[0, 0], v[0, 0])]
    with_heads = [cuflash.quantize(x[None]) for x in (q[0, 0], k[0, 0], v[0, 0])]
    np.testing.assert_array_equal(attention(run, flat)[0], attention(run, with_heads)[0][0])


@contextmanager
def on_simulator(machine: Simulator) -> Iterator[None]:
    """Run calls with executor="sim" on another simulator inside a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_executor, "_SIMULATOR", machine)
        yield


SCHEDULED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "sink": np.float32([0.5, -1.0, 30.0, -np.inf])},
    "window": {"window": (150, 3)},
    "list": {"mask": cuflash.BlockIndex.from_mask(
        masks.Documents(np.repeat(np.arange(3), 200)) & masks.Causal() & without_one_block(600, 64),
        block=64, batch=(), num_heads=4, seqlen_q=600, seqlen_kv=600,
    )},
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", SCHEDULED)
def test_no_schedule_changes_a_bit(name: str) -> None:
    """One thread block that computes all tiles under hostile schedules returns the same bits as one block per tile."""
    x8 = [cuflash.quantize(x, block=64) for x in operands(600, 600, (64, 64), (4, 2), "bfloat16")]
    right = attention(SIM, x8, **SCHEDULED[name])
    for schedule in hostile_schedules(f"fp8 {name}"):
        with on_simulator(FewBlocks(schedule)):
            results = attention(SIM, x8, **SCHEDULED[name])
        np.testing.assert_array_equal(results[0].view(np.uint16), right[0].view(np.uint16))
        np.testing.assert_array_equal(results[1], right[1])


@pytest.mark.parametrize("run", [CPU, pytest.param(SIM, marks=needs_compiler)], ids=str)
@pytest.mark.parametrize("leading", [(0, 2), (2, 0), (2, 2)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(5, 5), (0, 5), (5, 0), (0, 0)])
def test_axes_may_be_empty(run: Run, leading: tuple[int, int], seqlen_q: int, seqlen_kv: int) -> None:
    """Empty batches and sequences without rows give results of the right shapes; rows without keys are 0."""
    q, k = (np.ones((*leading, rows, 64), np.float16) for rows in (seqlen_q, seqlen_kv))
    x8 = [cuflash.quantize(x) for x in (q, k, k)]
    assert x8[2].transposed().shape == (*leading, 64, seqlen_kv + -seqlen_kv % 128)
    o, lse = attention(run, x8)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert (o == (seqlen_kv > 0)).all() and np.isneginf(lse).all() == (seqlen_kv == 0 or not lse.size)


def test_values_are_transposed_in_the_order_of_weights() -> None:
    v = np.arange(3 * 2, dtype=np.uint8).reshape(3, 2)
    np.testing.assert_array_equal(transposed_values(v)[:, :8], [[0, 2, 0, 0, 4, 0, 0, 0], [1, 3, 0, 0, 5, 0, 0, 0]])
    x8 = cuflash.quantize(np.ones((2, 200, 16), np.float32))
    assert x8.transposed() is x8.transposed() and x8.transposed().shape == (2, 16, 256)


X8 = cuflash.quantize(np.ones((2, 40, 64), np.float32))
IN_SMALL_BLOCKS = cuflash.quantize(np.ones((2, 40, 64), np.float32), block=16)
WIDE = cuflash.quantize(np.ones((2, 40, 256), np.float32), block=16)
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "more than 128 columns, and small blocks": (
        lambda: cuflash.attention(WIDE, WIDE, WIDE, executor="sim", score=lambda s, b, h, i, j: 2 * s),
        ["score, softcap and bias must be None with FP8", "q must have at most 128 columns",
         "v must have at most 128 columns",
         "k's scales must each cover a multiple of 64 rows", "v's scales must each cover a multiple of 64 rows"],
    ),
    "another family, and dropout": (
        lambda: cuflash.attention(X8, X8, X8, executor="sim", kernel="sm80", dropout=cuflash.Dropout(0.1, seed=1)),
        ["kernel must be 'auto' or 'sm90'", "dropout must be None with FP8"],
    ),
    "lists of small blocks": (
        lambda: cuflash.attention(
            X8, X8, X8, executor="sim",
            mask=cuflash.BlockIndex.from_blocks(np.eye(3, dtype=bool), 40, 40, 16),
        ),
        ["mask's blocks must be multiples of 64 queries and 64 keys"],
    ),
    "another precision and kernel": (
        lambda: cuflash.attention(X8, X8, X8, executor="sim", precision="tf32", kernel="naive"),
        ["precision must be 'ieee' for Quantized", "kernel must be 'auto' or 'sm90'"],
    ),
    "plain arrays among quantised ones, in blocks of 16 rows": (
        lambda: cuflash.attention(X8, IN_SMALL_BLOCKS, np.ones((2, 40, 64)), executor="sim"),
        ["v must be Quantized, since another operand is", "k's scales must each cover a multiple of 64 rows"],
    ),
    "arrays of the host on a GPU": (
        lambda: cuflash.attention(X8, X8, X8, executor="gpu", out=np.ones(3)),
        ["executor='gpu' takes CuPy arrays", "out must be None"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_all_that_is_wrong_is_said_at_once(name: str) -> None:
    require_reasons(*REFUSED[name])


def test_other_chips_are_refused() -> None:
    from cuflash.planning.device import DeviceSpec
    from cuflash.planning.families.sm90_fp8 import Sm90Fp8
    from cuflash.planning.problem import Problem

    shapes = kernel_calls.shapes(X8, X8, X8)
    problem = replace(Problem.of(*shapes), precision="fp8", rows_per_scale=kernel_calls.rows_per_scale(X8, X8, X8))
    assert Sm90Fp8().reasons(problem, DeviceSpec.gpu("H100")) == []
    (reason,) = Sm90Fp8().reasons(problem, DeviceSpec.gpu("A100"))
    assert reason.startswith("FP8 needs compute capability 9.0; got A100")


@needs_compiler
@pytest.mark.parametrize(
    "columns, block, dtype, rotates",
    [(64, 32, "float16", True), (128, 128, "bfloat16", True), (256, 64, "float32", True), (64, 16, "float32", False)],
)
def test_kernels_quantise_with_the_bits_of_the_host(columns: int, block: int, dtype: str, rotates: bool) -> None:
    x = np.random.default_rng(columns).standard_normal((3, 2, 150, columns)).astype(DTYPES[dtype])
    x[0, 1, 100:130] *= DTYPES[dtype](30)
    x[1, 0] = 0
    x[1, 1, 40, 5], x[2, 0, 3, 1] = np.nan, np.inf
    x[2, 1] *= DTYPES[dtype](1e-5)
    if dtype != "float16":  # scales below and above the range in which the kernel divides with three operations
        x[0, 0] *= DTYPES[dtype](1e-30)
        x[2, 1] *= DTYPES[dtype](1e35)
        x[0, 1, 30:60] = np.clip(x[0, 1, 30:60], -1, 1) * DTYPES[dtype](3.3e38)  # numbers with sums that overflow
    rotation = Rotation(columns, seed=2) if rotates else None
    right = cuflash.quantize(x, block=block, rotate=rotation)
    require_bits(x, right, block, rotation, 448.0)
    require_bits(x, cuflash.quantize(x, block=block, rotate=rotation, largest=2.0**-9), block, rotation, 2.0**-9)


def require_bits(
    x: Any, right: Quantized, block: int, rotation: Rotation | None, largest: float, target: Simulator = Simulator()
) -> None:
    """Require that the kernel on the simulator computes the host's numbers and scales."""
    spec = quantize_spec(x.dtype, x.shape[-1], block)
    assert spec is not None
    roundings = [Rounding(x.shape, is_transposed) for is_transposed in (False, True)]
    arrays: dict[str, Any] = {}
    for place in PLACES[:2]:
        data, scale = np.full(x.shape, 0xA5, np.uint8), np.full(right.scale.shape, -1, np.float32)
        arrays |= {f"{place}.x": x, f"{place}.data": data, f"{place}.scale": scale}
        arrays[f"{place}.signs"] = None if rotation is None else rotation.signs
    transposed = transposed_values(right.data)
    arrays["second.transposed"] = np.full(transposed.shape, 0xA5, np.uint8)
    run_alone(quantizing(spec, roundings, largest), arrays, target)
    for place in PLACES[:2]:
        np.testing.assert_array_equal(arrays[f"{place}.scale"], right.scale)
        np.testing.assert_array_equal(arrays[f"{place}.data"], right.data.view(np.uint8))
    np.testing.assert_array_equal(arrays["second.transposed"], transposed)


def beside_ties(exponent: int) -> Any:
    """Return blocks of 16 rows with all quotients that the kernel could round to the wrong side of a tie.

    A tie is the midpoint of two e4m3 numbers. A quotient rounds to a tie if it lies within half of a float's last place
    of it; those two distances are the limits. The kernel's quotient errs by at most 2^-22 of its last place before it
    is rounded, so it can fall to the wrong side only if a float lies that close to the product of the scale and a
    limit. A limit has 5 bits and half of a last place, so the product ends in the last 20 bits of the scale, which then
    are within 8 units of 0. The blocks have scales within 16 units, and the floats next to the nearest one. Scales are
    near 2^exponent.
    """
    numbers = np.arange(0x78, dtype=np.uint8).view(E4M3).astype(np.float32)  # 0 to 240
    ties = (numbers[1:] + numbers[:-1]) / 2
    limits = np.stack([ties + np.nextafter(ties, np.float32(end)).astype(np.float64) for end in (0, np.inf)]) / 2
    few, units = np.meshgrid(np.arange(8, 17), np.arange(-16, 17))
    scales = (few * 2.0**20 + units)[few * 2**20 + units < 2**24].reshape(-1, 1, 1) * 2.0**-24
    assert (scales.astype(np.float32) == scales).all()
    nearest = (scales * limits).astype(np.float32)  # the product in float64 is exact
    neighbours = [np.nextafter(nearest, np.float32(np.inf)), nearest, np.nextafter(nearest, np.float32(0))]
    x = np.zeros((len(scales), 16 * 64), np.float32)
    x[:, 0] = 256 * scales[:, 0, 0]
    values = np.concatenate(neighbours, axis=1).reshape(len(scales), -1)
    x[:, 1 : 1 + values.shape[1]] = values * np.where(np.arange(values.shape[1]) % 2, np.float32(-1), np.float32(1))
    return x.reshape(-1, 16, 64) * np.float32(2.0**exponent)


# a scale in the range where the kernel divides with three operations, and one below and one above it
EXPONENTS = [0, -110, 90]


@on_sim_and_gpu
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_numbers_beside_ties_fall_to_the_side_of_the_host(run: Run, exponent: int) -> None:
    x = beside_ties(exponent)
    right = cuflash.quantize(x, block=16, largest=256)
    if not run.is_on_device:
        return require_bits(x, right, 16, None, 256.0)
    quantized = cuflash.quantize(run.put(x), block=16, largest=256)
    np.testing.assert_array_equal(quantized.scale.get(), right.scale)
    np.testing.assert_array_equal(quantized.data.get(), right.data.view(np.uint8))


@on_sim_and_gpu
@pytest.mark.parametrize("columns", [48, 64, 128, 256])
def test_values_are_transposed_as_on_the_host(run: Run, columns: int) -> None:
    data = np.random.default_rng(columns).integers(0, 127, (2, 150, columns), dtype=np.uint8)
    spec, transposed = transpose_spec(columns), np.full((2, columns, 256), 0xA5, np.uint8)
    if run.is_on_device:
        x8 = replace(X8, data=data.view(E4M3), scale=np.ones((2, 2), np.float32))
        transposed = put(run, x8).transposed().get()
    elif spec is not None:
        run_alone(
            transposing(spec, data.shape, transposed.shape[-1]), {"data": data, "transposed": transposed}, Simulator()
        )
    else:
        pytest.skip("arrays of the host are transposed by NumPy where a kernel does not serve")
    np.testing.assert_array_equal(transposed, transposed_values(data))
