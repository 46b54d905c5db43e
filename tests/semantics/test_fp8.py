"""FP8 operands: their numbers equal those of ml_dtypes, attention is within bounds, and invalid calls are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash.fp8 import e4m3
from cuflash.testing import assert_within, examples
from executors import to_device
from foreign import Foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import require_reasons

import cuflash
from cuflash import Quantized, Rotation, UnsupportedProblem, reference

RNG = np.random.default_rng(0)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def floats_around_e4m3() -> Any:
    """Return every bfloat16 up to 464, and floats at and next to each e4m3 number and each midpoint of two."""
    halves = np.arange(2**16, dtype=np.uint32) << 16
    number = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    edges = np.concatenate([number, (number[1:] + number[:-1]) / 2])
    near = (edges.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)).ravel()
    x = np.concatenate([halves.view(np.float32), near.view(np.float32), -near.view(np.float32)])
    return x[~(np.abs(x) > 464)]


def test_integers_round_to_e4m3_as_ml_dtypes_does() -> None:
    x = floats_around_e4m3()
    with np.errstate(invalid="ignore"):
        right = np.where(np.isnan(x), 0x7F, x.astype(E4M3).view(np.uint8))
    bits = e4m3.bits_by_integers(x)
    np.testing.assert_array_equal(bits & 0x7F, right & 0x7F)
    np.testing.assert_array_equal(bits[~np.isnan(x)], right[~np.isnan(x)])
    np.testing.assert_array_equal(e4m3.from_float32(x).view(np.uint8)[~np.isnan(x)], right[~np.isnan(x)])


def test_all_numbers_of_e4m3_come_back() -> None:
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e4m3.to_float32(bits), bits.view(E4M3).astype(np.float32))
    np.testing.assert_array_equal(e4m3.to_float32(bits.view(E4M3)), bits.view(E4M3).astype(np.float32))


@pytest.mark.parametrize("head_dim", [1, 2, 8, 64, 128, 256])
def test_a_rotation_is_the_product_with_its_matrix(head_dim: int) -> None:
    rotation = Rotation(head_dim, seed=3)
    matrix = np.ones((1, 1))
    while len(matrix) < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = RNG.standard_normal((5, head_dim))
    sums, roundoff = np.abs(x).sum(axis=-1, keepdims=True), np.finfo(np.float64).eps / 2
    # Each level of a rotation rounds sums once, and the scale and its product add three roundings; NumPy's product
    # rounds all its sums.
    levels = np.log2(head_dim) + 3
    bound = (levels + head_dim + 3) * roundoff * sums / np.sqrt(head_dim)
    assert_within("rotated", rotation.apply(x), x * rotation.signs @ matrix / np.sqrt(head_dim), bound)
    assert_within("x", rotation.undo(rotation.apply(x)), x, 2 * levels * roundoff * sums)
    assert rotation.apply(x.astype(np.float16)).dtype == np.float32


def test_seeds_choose_the_signs() -> None:
    first, second = Rotation(64), Rotation(64, seed=1)
    assert first == Rotation(64, 0) != second and hash(first) == hash(Rotation(64))
    assert set(first.signs) == {-1.0, 1.0} and (first.signs != second.signs).any()


shapes = st.sampled_from([(5, 64), (2, 40, 64), (2, 3, 33, 16), (1, 0, 64), (2, 100, 128)])


@settings(max_examples=25, deadline=None)
@given(
    shape=shapes, per=st.sampled_from(["block", "head", "tensor"]), block=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]), rotates=st.booleans(),
    power=st.integers(-20, 6), seed=st.integers(0, 99),
)  # fmt: skip
def test_numbers_are_nearest_ones_of_their_block(
    shape: tuple[int, ...], per: str, block: int, dtype: str, rotates: bool, power: int, seed: int
) -> None:
    """In each block the largest number is 448, and the others are within half a unit in the last place."""
    x = (np.random.default_rng(seed).standard_normal(shape) * 2.0**power).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )
    rotation = Rotation(shape[-1]) if rotates else None
    x8 = cuflash.quantize(x, per=per, block=block, rotate=rotation)
    assert x8.data.dtype == E4M3 and x8.shape == x.shape and x8.source_dtype == x.dtype and x8.ndim == x.ndim
    wide = x.astype(np.float32) if rotation is None else rotation.apply(x)
    numbers, scaled = x8.data.astype(np.float64), x8.scaled(np.float64)
    rows = {"block": block, "head": shape[-2] or 1, "tensor": shape[-2] or 1}[per]
    for place in np.ndindex(shape[:-2]):
        for number, start in enumerate(range(0, shape[-2], rows)):
            part = (*place, slice(start, start + rows))
            scale = x8.scale[(*place, number) if per != "tensor" else (0,) * x8.scale.ndim]
            largest = np.abs(wide if per == "tensor" else wide[part]).max()
            assert scale == (largest / np.float32(448) if largest else 1)
            np.testing.assert_array_equal(scaled[part], numbers[part] * np.float64(scale))
            last_place = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(numbers[part]), 2.0**-6))), 2.0**-6) / 8
            exact = wide[part].astype(np.float64) / scale
            assert (np.abs(numbers[part] - exact) <= last_place / 2 * (1 + 2.0**-20)).all()
    np.testing.assert_array_equal(x8.dequantized(), x8.scaled() if rotation is None else rotation.undo(x8.scaled()))


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_block_longer_than_the_rows_takes_no_memory(rows: int) -> None:
    """Padding the rows to a block of 2^31 - 16 rows would exceed this machine's memory."""
    x = np.random.default_rng(3).standard_normal((2, rows, 16), dtype=np.float32)
    long, head = cuflash.quantize(x, block=2**31 - 16), cuflash.quantize(x, per="head")
    np.testing.assert_array_equal(long.data.view(np.uint8), head.data.view(np.uint8))
    np.testing.assert_array_equal(long.dequantized(), head.dequantized())
    assert long.scale.shape == (2, min(rows, 1))


def test_zeros_have_scale_1_and_what_is_not_finite_makes_its_block_nan() -> None:
    x = np.zeros((3, 40, 16), np.float32)
    x[1, 3, 2], x[2, 20, 5] = np.nan, np.inf
    x8 = cuflash.quantize(x, block=16)
    assert (x8.scale[0] == 1).all() and not x8.scaled()[0].any()
    is_nan = np.isnan(x8.scaled())
    assert is_nan[1, 3, 2] and is_nan[2, 16:32].all() and not is_nan[1, 16:].any() and not is_nan[2, :16].any()


def test_tiny_numbers_have_the_smallest_normal_scale() -> None:
    x8 = cuflash.quantize(np.full((16, 4), 1e-44, np.float32))
    assert (x8.scale == 2.0**-126).all() and not x8.data.view(np.uint8).any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 64, 256])
@pytest.mark.parametrize("per", ["block", "head", "tensor"])
def test_finite_numbers_stay_finite_at_the_end_of_the_range(per: str, head_dim: int, dtype: Any) -> None:
    """Errors are at most 2^-4 of a number, or 2^-10 of its scale; a rotation preserves the norm of a row's errors."""
    top = ml_dtypes.finfo(dtype).max.astype(np.float64)
    equal, mixed = np.full((20, head_dim), top), RNG.uniform(-1, 1, (20, head_dim)) * top
    mixed[3], mixed[16:] = 0, 1e-30
    with np.errstate(all="raise"):
        for x in (equal.astype(dtype), mixed.astype(dtype)):
            for rotation in (None, Rotation(head_dim, seed=3)):
                x8 = cuflash.quantize(x, per=per, block=16, rotate=rotation)
                assert np.isfinite(x8.scale).all() and np.isfinite(x8.dequantized()).all()
                wide = x.astype(np.float64)
                error, norm = (np.linalg.norm(each, axis=-1) for each in (x8.dequantized() - wide, wide))
                scale = np.repeat(x8.scale.astype(np.float64), 16 if per == "block" else 20)[:20]
                # 2^-9 allows for the roundoff of rotations in float32.
                assert (error <= norm * 2.0**-4 * (1 + 2.0**-9) + scale * 2.0**-10 * head_dim**0.5).all()
                small = cuflash.quantize(x, per=per, block=16, rotate=rotation, largest=2.0**-9)
                assert np.isfinite(small.scale).all() and np.isfinite(small.dequantized()).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("head_dim", [2, 128, 256])
def test_a_rotation_is_finite_where_its_numbers_are_in_range(head_dim: int, dtype: Any) -> None:
    scale = 2.0 ** (np.finfo(dtype).maxexp - 2) / np.sqrt(head_dim)
    x = RNG.uniform(-1, 1, (5, head_dim)).astype(dtype)
    x[0] = 1
    rotation = Rotation(head_dim, seed=1)
    with np.errstate(all="raise"):
        large = x * dtype(scale)
        for turn in (rotation.apply, rotation.undo):
            exponent = np.frexp(scale)[1]  # scaling by a power of two changes no mantissa bit
            wanted = turn(np.ldexp(large, -exponent).astype(dtype))
            np.testing.assert_array_equal(turn(large), np.ldexp(wanted, exponent))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_powers_of_two_and_their_scales_are_exact(dtype: str) -> None:
    """e4m3 represents each number exactly, so results equal those of the plain call bit for bit."""
    x = RNG.integers(-7, 8, (3, 2, 70, 64)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x[..., :1, 0] = 7
    x8 = [cuflash.quantize(each, largest=448, per="head") for each in x]
    for each, each8 in zip(x, x8):
        np.testing.assert_array_equal(each8.dequantized(), each.astype(np.float32))
    q8, k8, v8 = x8
    o, lse = cuflash.attention(q8, k8, v8, return_lse=True)
    assert o.dtype == x.dtype and lse.dtype == np.float32
    plain, plain_lse = cuflash.attention(*x.astype(np.float32), return_lse=True)
    np.testing.assert_array_equal(o, plain.astype(x.dtype))
    np.testing.assert_array_equal(lse, plain_lse)
    larger = replace(q8, scale=q8.scale * np.float32(8)), replace(k8, scale=k8.scale / np.float32(8)), v8
    np.testing.assert_array_equal(cuflash.attention(*larger), o)


@settings(max_examples=12, deadline=None)
@given(example=examples(dtypes=("float16", "float32")), per=st.sampled_from(["block", "head", "tensor"]))
def test_attention_is_within_both_bounds(example: Any, per: str) -> None:
    """Results are within one bound of attention to dequantized operands, and within both bounds of plain attention."""
    plain = tuple(np.asarray(x, np.float32) for x in (example.q, example.k, example.v))
    assert all(np.isfinite(x).all() for x in plain)
    x8 = [cuflash.quantize(x, per=per, block=32) for x in plain]
    named = {"mask": example.mask, "scale": example.scale}
    o, lse = cuflash.attention(*x8, return_lse=True, **named)
    bound = cuflash.error_bound(*x8, **named)
    exact_o, exact_lse = reference.attention(
        *(x.scaled(np.float64) for x in x8), mask=example.allowed, scale=example.scale
    )
    assert within(o, exact_o, bound.o) and within(lse, exact_lse, bound.lse)
    change = cuflash.study.quantization_bound(*plain, *x8, **named)
    wide_o, wide_lse = reference.attention(
        *(x.astype(np.float64) for x in plain), mask=example.allowed, scale=example.scale
    )
    assert within(exact_o, wide_o, change.o) and within(exact_lse, wide_lse, change.lse)


def within(actual: Any, right: Any, bound: Any) -> bool:
    """Return whether errors are within their bounds plus the rounding of the float64 in which they are computed."""
    with np.errstate(invalid="ignore"):
        is_near = np.abs(actual - right) <= bound * (1 + 1e-9) + 1e-11
    return bool((is_near | (actual == right)).all())


def test_a_rotation_leaves_results_within_the_bound_and_errs_less_with_outliers() -> None:
    normal, outliers = np.random.default_rng(0).standard_normal((2, 3, 2, 256, 64), np.float32)
    q, k, v = normal + 10 * outliers * (np.random.default_rng(1).random(normal.shape) < 0.001)
    rotation = Rotation(64)
    exact = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))[0]
    errors = []
    for rotate in (None, rotation):
        x8 = cuflash.quantize(q, rotate=rotate), cuflash.quantize(k, rotate=rotate), cuflash.quantize(v)
        o = cuflash.attention(*x8)
        bound = cuflash.study.quantization_bound(q, k, v, *x8).o + cuflash.error_bound(*x8).o
        assert (np.abs(o - exact) <= bound).all()
        errors.append(np.sqrt(np.mean((o - exact) ** 2)))
    assert errors[1] < errors[0]


def test_everything_else_of_a_call_applies() -> None:
    x = RNG.standard_normal((3, 2, 4, 50, 64), np.float32)
    q8, k8, v8 = x8 = [cuflash.quantize(each) for each in x]
    for named in ({"causal": True, "softcap": 5.0}, {"sink": np.float32([0, 1, 2, 3])}, {"window": (3, 3)}):
        actual, right = cuflash.attention(*x8, **named), cuflash.attention(*(y.scaled() for y in x8), **named)
        np.testing.assert_array_equal(actual, right)
    one_head = cuflash.quantize(x[1, :, :1]), cuflash.quantize(x[2, :, :1])
    assert cuflash.attention(q8, *one_head).shape == q8.shape
    assert "rotation=None" in repr(q8) and cuflash.study.quantization_bound(*x, *x8).o.shape == q8.shape


def test_torch_tensors_are_quantised() -> None:
    torch = pytest.importorskip("torch")
    x = RNG.standard_normal((40, 64), np.float32)
    actual = cuflash.quantize(torch.from_numpy(x).to(torch.bfloat16))
    right = cuflash.quantize(x.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(actual.data.view(np.uint8), right.data.view(np.uint8))
    assert actual.source_dtype == ml_dtypes.bfloat16


X = np.ones((2, 40, 64), np.float32)
X8 = cuflash.quantize(X)
ROTATED = cuflash.quantize(X, rotate=Rotation(64))
REFUSED = {
    "a precision of that name": (
        lambda: cuflash.attention(X, X, X, precision="fp8", window=3),
        ["precision must be 'ieee', 'tf32', 'tf32x3'; got 'fp8': pass cuflash.quantize(q), and likewise for k and v",
         "window must"],
    ),
    "operands of other lengths and dtypes": (
        lambda: cuflash.quantize(X, X[..., :32], X.astype(np.float64), rotate=Rotation(64)),
        ["v must have dtype float16, bfloat16 or float32; got float64", "rotate must have the length of the rows, 32"],
    ),
    "a rotation of another length": (
        lambda: cuflash.quantize(X, rotate=Rotation(32), largest=0, per="row", block=20),
        ["rotate must have the length of the rows, 64; got Rotation(head_dim=32, seed=0): use Rotation(64)",
         "largest must be a number from 2**-9 to 448; got 0", "per must be one of 'block', 'head', 'tensor'",
         "block must be a multiple"],
    ),
    "a rotation of a length that none has": (
        lambda: cuflash.quantize(X[..., :48], rotate=Rotation(32)),
        ["rotate must have the length of the rows, 48; got Rotation(head_dim=32, seed=0): no rotation has this length"],
    ),
    "other sources": (
        lambda: cuflash.quantize(np.zeros(3), dtype="float8_e5m2"),
        ["x must have dtype float16", "dtype must be float8_e4m3fn", "x must have shape (..., rows"],
    ),
    "an output, a window and a scale": (
        lambda: cuflash.attention(X8, X8, X8, window=3, scale="large", out=X),
        ["out must be None for Quantized q, k and v; got an array", "scale ", "window "],
    ),
    "plain arrays among quantised ones, and a sink": (
        lambda: cuflash.attention(X8, X, X8, sink=np.zeros(3, np.float32), softcap=-1),
        ["k must be Quantized, since another operand is", "sink must", "softcap must"],
    ),
    "arrays that another library does not export": (
        lambda: cuflash.attention(X8, Foreign(X, fault=BufferError("no")), X8, scale="large"),
        ["k must be Quantized, since another operand is"],
    ),
    "plain arrays among quantised ones": (
        lambda: cuflash.attention(X8, X, ROTATED), ["k must be Quantized, since", "v must not be rotated"]
    ),
    "two rotations, and an odd scale": (
        lambda: cuflash.attention(ROTATED, X8, X8, scale="large"), ["q and k must have the same rotation", "scale must"]
    ),
    "other executors, and out": (
        lambda: cuflash.attention(X8, X8, X8, executor="gpu", out=X),
        ["executor='gpu' takes CuPy arrays", "out must be None for Quantized q, k and v; got an array"],
    ),
    "another precision of what is quantised": (
        lambda: cuflash.attention(X8, X8, X8, precision="fp8"), ["precision must be 'ieee', 'tf32', 'tf32x3'; got"]
    ),
    "gradients": (lambda: cuflash.attention_vjp(X8, X8, X8), ["q, k and v must not be Quantized here"]),
    "plans": (lambda: cuflash.plan(X8, X8, X8), ["q, k and v must not be Quantized here"]),
    "scales that are not positive": (
        lambda: replace(X8, scale=X8.scale * np.float32(0)), ["scale must be positive and finite; got 0.0"]
    ),
    "a scale that is NaN": (
        lambda: replace(X8, scale=np.where(X8.scale == X8.scale[0, 0], np.float32(np.nan), X8.scale)),
        ["scale must be positive and finite; got nan"],
    ),
    "scales that do not fit": (
        lambda: replace(X8, scale=X8.scale[:1]), ["scale must have shape (2, 1) and dtype float32"]
    ),
    "data of another dtype": (
        lambda: replace(X8, data=X8.data.astype(np.float32), source_dtype=np.float64),
        ["data must have dtype float8_e4m3fn", "source_dtype must be float16"],
    ),
    "bounds of gradients": (
        lambda: cuflash.error_bound(X8, X8, X8, X, precision="tf32"), ["do must be None", "precision must be 'ieee'"]
    ),
    "bounds of what is not quantised yet": (
        lambda: cuflash.error_bound(X, X, X, precision="fp8"), ["precision must be 'ieee', 'tf32', 'tf32x3'; got"]
    ),
    "a block that no kernel counts": (lambda: cuflash.quantize(X, block=2**31), ["block must be a multiple of 16,"]),
    "numbers times their scales of another dtype": (
        lambda: X8.scaled(np.float16), ["dtype must be float32 or float64; got float16"]
    ),
    "bounds of other shapes": (
        lambda: cuflash.study.quantization_bound(X, X[:, :9], X, X8, X8, X),
        ["v8 must be Quantized", "k8 must have k's shape", "v must have k's"]
    ),
    "seeds": (lambda: Rotation(96, seed=-1), ["head_dim must be a power of two", "seed must be an int"]),
    "rows that a rotation has not": (lambda: Rotation(32).apply(X), ["x must have rows of 32 numbers"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_all_that_is_wrong_is_said_at_once(name: str) -> None:
    require_reasons(*REFUSED[name])


@pytest.mark.parametrize(
    "call",
    [
        lambda: cuflash.quantize([["1.0"]]),
        lambda: cuflash.quantize(X, X),
        lambda: Rotation(2).apply([1.0, None]),
        lambda: replace(X8, scale=1.0),
        lambda: cuflash.study.quantization_bound(None, X, X, X8, X8, X8),
    ],
)
def test_what_is_no_array_is_a_type_error(call: Any) -> None:
    with pytest.raises(TypeError, match="must be an array"):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("per", ["block", "head", "tensor"])
@pytest.mark.parametrize("rotate", [None, Rotation(64)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gpu_gives_the_same_bits(dtype: str, rotate: Any, per: str) -> None:
    import cupy

    x = RNG.standard_normal((2, 3, 77, 64)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x[0, 0, 3] *= 100
    x[1, 2, 40, 1] = np.nan
    on_host, on_device = (cuflash.quantize(each, per=per, block=32, rotate=rotate) for each in (x, to_device(x)))
    assert isinstance(on_device.data, cupy.ndarray) and isinstance(on_device, Quantized)
    np.testing.assert_array_equal(on_device.scale.get(), on_host.scale)
    np.testing.assert_array_equal(on_device.data.get(), on_host.data.view(np.uint8))
    np.testing.assert_array_equal(on_device.scaled().get(), on_host.scaled())
    with pytest.raises(UnsupportedProblem, match="must hold NumPy arrays"):
        cuflash.error_bound(on_device, on_device, on_device)


@pytest.mark.gpu
def test_a_gpu_rounds_all_floats_around_e4m3_alike() -> None:
    x = floats_around_e4m3()
    np.testing.assert_array_equal(e4m3.from_float32(to_device(x)).get(), e4m3.from_float32(x).view(np.uint8))


def test_a_rotation_asks_a_device_for_nothing_that_it_lacks(device: Any) -> None:
    rotation = Rotation(16, seed=2)
    x = np.float32(2.0**120) * RNG.standard_normal((5, 16), np.float32)
    with device.transfers_allowed():  # copies the signs
        rotated = device.to_host(rotation.apply(device.to_device(x)))
    assert np.array_equal(rotated, rotation.apply(x))
