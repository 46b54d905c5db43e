"""Planted faults in FP8 operands, each with the guard that must detect it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from cuflash import reference
from mutations.planting import Edit

SIGNS = (AssertionError, ValueError, TypeError)  # exceptions with which a guard reports a fault
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
RNG = np.random.default_rng(0)
OPERANDS = RNG.standard_normal((3, 2, 70, 64)).astype(np.float32)


def bits_are_right(library: ModuleType) -> None:
    """Check the bits of e4m3 numbers, of midpoints of two, and of floats next to either."""
    number = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    edges = np.concatenate([number, (number[1:] + number[:-1]) / 2])[1:]
    near = (edges.view(np.int32)[:, None] + np.arange(-1, 2, dtype=np.int32)).ravel().view(np.float32)
    x = np.concatenate([near, -near])
    actual = import_module(f"{library.__name__}.fp8.e4m3").bits_by_integers(x)
    np.testing.assert_array_equal(actual, x.astype(E4M3).view(np.uint8))
    assert import_module(f"{library.__name__}.fp8.e4m3").bits_by_integers(np.float32([np.nan])) == 0x7F


def rotations_are_orthogonal(library: ModuleType) -> None:
    rotation, other = library.Rotation(32), library.Rotation(32, seed=1)
    matrix = rotation.apply(np.eye(32))
    # Elements are 1 / sqrt(32) up to three roundoffs; products of rows sum 32 products of two such elements, each 1 /
    # 32.
    roundoff = np.finfo(np.float64).eps / 2
    assert (np.abs(np.abs(matrix) - 32**-0.5) <= 3 * roundoff * 32**-0.5).all()
    for product in (matrix @ matrix.T, rotation.undo(matrix)):
        assert (np.abs(product - np.eye(32)) <= (32 + 2 * 3) * roundoff).all()
    assert (rotation.signs != other.signs).any() and (rotation.signs < 0).any()


def parts_have_scales_of_their_own(library: ModuleType) -> None:
    x = OPERANDS[0] * np.exp2(np.arange(-60, 80, dtype=np.float32)).reshape(2, 70, 1)
    for per, parts in {"block": 10, "head": 2, "tensor": 1}.items():
        x8 = library.quantize(x, per=per, block=16)
        assert len(set(x8.scale.ravel().tolist())) == parts == x8.scale.size
        assert (np.abs(x8.data.astype(np.float32)).max() == 448) and np.isfinite(x8.scaled()).all()
    blocks = np.abs(x8_blocks(library, x)).max(axis=(-2, -1))
    assert (blocks == 448).all()
    assert (library.quantize(0 * x).scale == 1).all()
    with np.errstate(invalid="ignore"):
        assert (library.quantize(x[:, :16] * 0 + 1e-44).scale > 0).all()


def x8_blocks(library: ModuleType, x: Any) -> Any:
    """Return the numbers of the full blocks of 16 rows."""
    return library.quantize(x, block=16).data.astype(np.float32)[:, :64].reshape(2, 4, 16, 64)


def ends_of_the_range_are_finite(library: ModuleType) -> None:
    x = np.full((20, 64), np.finfo(np.float32).max)
    rows, rotation = import_module(f"{library.__name__}.fp8.rows"), library.Rotation(64)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isfinite(rotation.apply(x / 16)).all()
        assert np.isfinite(rows.dequantized_rows(*rows.quantized_rows(x), np.float32)).all()
        for rotate in (None, rotation):
            x8, small = (library.quantize(x, block=16, rotate=rotate, largest=largest) for largest in (448, 2.0**-9))
            assert np.isfinite(x8.scale).all() and np.isfinite(small.scale).all()
            assert np.abs(x8.data.astype(np.float32)).max() == 448
            # With or without rotation, a number has a relative error of 2^-4, or an error of 2^-10 of its scale if it
            # is below 2^-6.
            wide = x.astype(np.float64)
            error, most = (np.linalg.norm(each, axis=-1) for each in (x8.dequantized() - wide, wide))
            assert (error <= most * (2.0**-4 + 2.0**-15)).all()
        x[3, 2] = np.inf
        assert not np.isfinite(library.quantize(x, block=16, rotate=rotation).scale[0])
    for least in (1e-45, 2.0**-10):
        try:
            library.quantize(x, largest=least)
        except library.UnsupportedProblem:
            continue
        raise AssertionError("all numbers would be 0")


def results_are_within_bounds(library: ModuleType) -> None:
    """Check that results are within the bounds for dequantized and for plain operands, which are sharp enough."""
    q, k, v = OPERANDS
    v = v + 2
    rotation = library.Rotation(64)
    x8 = library.quantize(q, rotate=rotation, block=32), library.quantize(k, rotate=rotation), library.quantize(v)
    o, lse = library.attention(*x8, return_lse=True)
    exact = reference.attention(*(x.scaled(np.float64) for x in x8))
    bound = library.error_bound(*x8)
    assert (np.abs(o - exact[0]) <= bound.o).all() and (np.abs(lse - exact[1]) <= bound.lse).all()
    assert bound.o.max() < 1e-3
    plain = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    change = library.study.quantization_bound(q, k, v, *x8)
    assert (np.abs(exact[0] - plain[0]) <= change.o).all() and (np.abs(exact[1] - plain[1]) <= change.lse).all()
    assert change.o.max() < 0.5
    k8, v8 = library.quantize(k[:, :1], rotate=rotation), library.quantize(v[:, :1])
    one = library.study.quantization_bound(q, k[:, :1], v[:, :1], x8[0], k8, v8)
    alone = np.abs(library.quantize(v[:, :1]).scaled(np.float64) - v[:, :1])
    np.testing.assert_allclose(one.o, np.broadcast_to(alone, one.o.shape), rtol=1e-12)


def mixtures_are_refused(library: ModuleType) -> None:
    x = OPERANDS[0]
    plain, rotated = library.quantize(x), library.quantize(x, rotate=library.Rotation(64))
    fields = {"data": plain.data, "per": "block", "block": 128, "rotation": None, "source_dtype": np.dtype(np.float32)}
    for reason, call in {
        "q and k must have the same rotation": lambda: library.attention(plain, rotated, plain),
        "scale must be a finite number": lambda: library.attention(plain, x, plain, scale="large"),
        "window must be": lambda: library.attention(plain, x, plain, window=1),
        "executor='gpu' takes CuPy arrays": lambda: library.attention(plain, plain, plain, executor="gpu"),
        "scale must be positive": lambda: library.Quantized(**fields, scale=-plain.scale),
    }.items():
        try:
            call()
        except library.UnsupportedProblem as error:
            assert reason in str(error), error
            continue
        except Exception as error:  # the call was not refused, so other code failed later
            raise AssertionError(reason) from error
        raise AssertionError(reason)


E4M3_FILE, ROTATION, QUANTIZE = "fp8/e4m3.py", "fp8/rotation.py", "fp8/quantize.py"
ERROR, OPERAND = "bounds/quantization.py", "fp8/operands.py"
FAULTS = {
    bits_are_right: {
        "ties round away from zero": Edit(E4M3_FILE, "bits_by_integers", "(magnitude >> 20 & 1)", "1"),
        "subnormals are cut as others are": Edit(E4M3_FILE, "bits_by_integers", "0x3C800000", "0"),
        "NaN is a number": Edit(E4M3_FILE, "bits_by_integers", "magnitude > 0x7F800000", "magnitude < 0"),
    },
    rotations_are_orthogonal: {
        "there are no signs": Edit(ROTATION, "Rotation.signs", "np.where(bits,", "np.where(bits > 1,"),
    },
    ends_of_the_range_are_finite: {
        "rotated rows are out of range": Edit(
            QUANTIZE, "_parts_and_scale", "rotation.apply(parts / units)", "rotation.apply(parts)"
        ),
        "scales are infinite": Edit(QUANTIZE, "_parts_and_scale", "xp.where(is_too_large,", "xp.where(False,"),
        "the scale of what is not finite is finite": Edit(
            QUANTIZE, "_parts_and_scale", "(scale > _LARGEST_SCALE / units) & xp.isfinite(magnitude)",
            "scale > _LARGEST_SCALE / units",
        ),
        "rounding leads out of the range": Edit(
            QUANTIZE, "Quantized.dequantized", "xp.clip(self.rotation.undo(rows), -most, most)",
            "self.rotation.undo(rows)",
        ),
        "all may become 0": Edit(QUANTIZE, "quantize", "_LEAST <= largest", "0 < largest"),
    },
    parts_have_scales_of_their_own: {
        "tiny numbers are divided by 0": Edit(
            QUANTIZE, "_parts_and_scale", "xp.maximum(magnitude / largest, _SMALLEST_SCALE)", "magnitude / largest"
        ),
    },
    results_are_within_bounds: {
        "scales belong to the next block": Edit(
            QUANTIZE, "Quantized._of_rows", "axis=-1)[..., : self.shape[-2]]", "axis=-1)[..., -self.shape[-2] :]"
        ),
        "changes of v do not count": Edit(ERROR, "_bound", "+ grown * added", ""),
        "changes of scores do not count in lse": Edit(ERROR, "_bound", "np.log1p(r)[..., 0]", "0 * r[..., 0]"),
    },
    mixtures_are_refused: {
        "rotations may differ": Edit(OPERAND, "operand_reasons", "q.rotation != k.rotation", "False"),
        "calls are looked at no further once operands are refused": Edit(
            "calls/_forward.py", "_refuse_quantized", "(x, Quantized) or is_array(x)", "(x, Quantized)"
        ),
        "other executors are ignored": Edit(
            OPERAND, "place_reasons", 'are_on_host == {executor != "gpu"}', "are_on_host"
        ),
        "scales may be negative": Edit(QUANTIZE, "Quantized._scale_reasons", "(self.scale > 0) & ", ""),
    },
}
