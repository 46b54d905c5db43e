"""Arrays that a vjp reads again cannot change unnoticed: results are read-only, and others have checksums."""

from __future__ import annotations

import copy
import gc
import pickle
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cuflash
from cuflash.calls.unchanged import _SHORT_BYTES
from library_parts import part

RNG = np.random.default_rng(0)
SHAPE = (2, 12, 8)
LAYOUTS = {
    "contiguous": lambda x: x,
    "reversed": lambda x: x[::-1].copy()[::-1],
    "Fortran": np.asfortranarray,
    "every other column": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "tokens before heads": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
}


def an_array(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape or SHAPE).astype(dtype)


def everything(dtype: Any = np.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return q, k, v, bias, sink, captured arrays of three kinds and a seed by name, and a call's options."""
    wide = np.float64 if dtype == np.float64 else np.float32
    arrays = {name: an_array(dtype=dtype) for name in ("q", "k", "v")}
    arrays |= {"bias": an_array(12, 12, dtype=wide), "sink": an_array(2, dtype=wide), "slope": an_array(2, dtype=wide)}
    arrays |= {"table": np.arange(12), "is_kept": RNG.random(12) < 0.7, "dropout_seed": np.array(3)}
    captured = {name: arrays[name] for name in ("slope", "table", "is_kept")}

    def function(s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any, table: Any, is_kept: Any) -> Any:
        return np.where(is_kept[j], s * slope[h] + table[i], s)

    options = {
        "bias": arrays["bias"], "sink": arrays["sink"], "score": cuflash.scores.Score(function, **captured),
        "dropout": cuflash.Dropout(0.1, arrays["dropout_seed"]), "wrt": ("sink", "bias", "slope"),
    }  # fmt: skip
    return arrays, options


def change(array: np.ndarray[Any, Any], place: int) -> None:
    """Change one element to another finite value, in any dtype."""
    array.flags.writeable = True
    index = np.unravel_index(place % array.size, array.shape)
    array[index] = ~array[index] if array.dtype == bool else array[index] + 1


@pytest.mark.parametrize("executor", ["cpu", "sim"])
@pytest.mark.parametrize("name", [*everything()[0], "o", "lse"])
def test_a_changed_array_is_named(executor: str, name: str) -> None:
    arrays, options = everything()
    (arrays["o"], arrays["lse"]), vjp = cuflash.attention_vjp(
        arrays["q"], arrays["k"], arrays["v"], **options, executor=executor, return_lse=True
    )
    do = an_array()
    first = vjp(do)
    before = arrays[name].copy()
    change(arrays[name], 5)
    for pullback in (vjp, copy.copy(vjp), pickle.loads(pickle.dumps(vjp)), copy.deepcopy(vjp)):
        with pytest.raises(RuntimeError, match=rf"^{name} must stay unchanged .*: change a copy, {name}\.copy\(\)"):
            pullback(do)
    arrays[name][...] = before
    again = vjp(do)
    assert all((a == b).all() for a, b in zip((*first, *first.others.values()), (*again, *again.others.values())))


def test_all_changed_arrays_are_named_at_once() -> None:
    q, k, v = (an_array() for _ in range(3))
    _, vjp = cuflash.attention_vjp(q, k, v)
    q += 1
    v[1, 2, 3] = np.nan
    with pytest.raises(RuntimeError, match=r"^q and v must stay unchanged"):
        vjp(q)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (0, 8), (1, 1), (2, 3, 1, 1)])
def test_empty_and_tiny_calls_have_gradients(shape: tuple[int, ...]) -> None:
    x = np.broadcast_to(np.float32(np.nan), shape)  # read-only
    o, vjp = cuflash.attention_vjp(x, x, x)
    assert vjp(np.ones(shape, np.float32)).dq.shape == shape and not o.flags.writeable


def test_an_operand_that_only_the_forward_pass_reads_may_change() -> None:
    q, sink = an_array(), an_array(2)
    _, vjp = cuflash.attention_vjp(q, q, q, sink=sink)
    expected = vjp(q).dv
    sink += 1
    assert (vjp(q).dv == expected).all()


@pytest.mark.parametrize(
    "make", [lambda x: x, cuflash.masks.Dense, lambda x: cuflash.masks.Causal() & x], ids=["array", "Dense", "and"]
)
@pytest.mark.parametrize("executor", ["cpu", "sim"])
def test_a_mask_that_changes_later_changes_nothing(executor: str, make: Any) -> None:
    q, allowed = an_array(2, 300, 8), np.tri(300, dtype=bool)
    o, vjp = cuflash.attention_vjp(q, q, q, mask=make(allowed.copy()), executor=executor)
    expected = vjp(o)
    _, vjp = cuflash.attention_vjp(q, q, q, mask=make(allowed), executor=executor)
    allowed[...] = True
    assert all((a == b).all() for a, b in zip(vjp(o), expected))


# Results.


def test_results_are_read_only_while_a_vjp_lives() -> None:
    q = an_array()
    (o, lse), vjp = cuflash.attention_vjp(q, q, q, return_lse=True)
    for result in (o, lse):
        with pytest.raises(ValueError, match="read-only"):
            result -= 1
        result.copy()[...] = 0
    twin = copy.copy(vjp)
    del vjp
    gc.collect()
    assert not o.flags.writeable and not lse.flags.writeable
    twin(o)
    del twin
    gc.collect()
    assert o.flags.writeable and lse.flags.writeable


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("is_view", [False, True])
def test_an_array_to_write_to_has_its_flag_back(is_pair: bool, is_view: bool) -> None:
    q = an_array()
    o, lse = np.empty((4, 12, 8), np.float32), np.empty((4, 12), np.float32)
    outputs = (o[1:3], lse[1:3]) if is_view else (np.empty(SHAPE, np.float32), np.empty(SHAPE[:-1], np.float32))
    for _ in range(3):  # the vjp of the previous iteration is still alive
        results, vjp = cuflash.attention_vjp(q, q, q, out=outputs if is_pair else outputs[0], return_lse=is_pair)
        assert (results[0] if is_pair else results) is outputs[0]
        assert [each.flags.writeable for each in outputs] == [False, not is_pair]
    assert o.flags.writeable
    o[2] += 1
    if is_view:
        with pytest.raises(RuntimeError, match="^o must stay unchanged"):
            vjp(q)
    del vjp
    gc.collect()
    assert all(each.flags.writeable for each in outputs)


def test_vjps_that_share_an_output() -> None:
    """The flag is restored when the last vjp ends, in any order; a vjp with an overwritten output says so."""
    q, buffer = an_array(), np.empty(SHAPE, np.float32)
    _, first = cuflash.attention_vjp(q, q, q, out=buffer)
    _, second = cuflash.attention_vjp(2 * q, q, q, out=buffer)
    part_of_it = buffer[:1]
    with pytest.raises(RuntimeError, match="^o must stay unchanged"):
        first(q)
    second(q)
    with pytest.raises(cuflash.UnsupportedProblem, match="out must be writeable; .* release the vjp that reads it"):
        cuflash.attention(q, q, q, out=buffer)
    del first
    gc.collect()
    assert not buffer.flags.writeable
    _, third = cuflash.attention_vjp(q, q, q, out=buffer)
    del second
    gc.collect()
    assert not buffer.flags.writeable
    del third
    gc.collect()
    assert buffer.flags.writeable and not part_of_it.flags.writeable
    cuflash.attention(q, q, q, out=buffer)


def test_a_view_has_its_flag_back_while_the_array_under_it_is_held() -> None:
    q, buffer = an_array(), np.empty(SHAPE, np.float32)
    view = buffer[:1]
    _, of_view = cuflash.attention_vjp(q[:1], q[:1], q[:1], out=view)
    _, of_all = cuflash.attention_vjp(q, q, q, out=buffer)
    del of_view
    gc.collect()
    assert view.flags.writeable and not buffer.flags.writeable
    del of_all
    gc.collect()
    assert buffer.flags.writeable


def test_a_refused_call_leaves_flags_as_they_were() -> None:
    q, buffer, frozen = an_array(), np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)
    frozen.flags.writeable = False
    for out, held in ((buffer, False), (buffer, True), (frozen, False)):
        vjp = cuflash.attention_vjp(q, q, q, out=out)[1] if held else None
        before = out.flags.writeable
        with pytest.raises(cuflash.UnsupportedProblem):
            cuflash.attention_vjp(q, q, q, out=out, scale="1", executor="cpu")
        with pytest.raises(cuflash.UnsupportedProblem):
            cuflash.attention_vjp(q, q, q, out=(out, out))
        assert out.flags.writeable == before
        del vjp
    with pytest.raises(cuflash.UnsupportedProblem, match="out must be writeable"):
        cuflash.attention_vjp(q, q, q, out=frozen)


def test_memory_that_numpy_cannot_make_writable_again_stays_as_it_is() -> None:
    q, out = an_array(), np.from_dlpack(np.empty(SHAPE, np.float32))
    for each in (out, out[...]):
        assert each.flags.writeable
        o, vjp = cuflash.attention_vjp(q, q, q, out=each)
        assert o is each and each.flags.writeable
        each -= 1
        with pytest.raises(RuntimeError, match="^o must stay unchanged"):
            vjp(q)


# Checksums.

DTYPES = [
    np.dtype(dtype) for dtype in (bool, np.int8, np.uint16, np.int32, np.int64, np.float16, ml_dtypes.bfloat16,
                                  np.float32, np.float64)
]  # fmt: skip
SMALL_SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
LONG_SHAPES = [(5000, 9), (3, 7, 1999), (70001,), (40000, 1), (2, 40, 512)]


def drawn_bits(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray[Any, Any]:
    """Draw elements with arbitrary bits, including NaN; booleans for bool."""
    rng = np.random.default_rng(seed)
    if dtype == bool:
        return rng.random(shape) < 0.5
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(bits).view(dtype).reshape(shape)


def check_checksum(library: ModuleType, x: np.ndarray[Any, Any], place: int) -> None:
    """Check that a checksum depends on all bits and their order, but not on the layout."""
    checksum = part(library, "calls.unchanged").checksum
    expected = checksum(x)
    if x.ndim:
        assert [checksum(layout(x)) for name, layout in LAYOUTS.items() if x.ndim > 1 or "heads" not in name] == [
            expected for name in LAYOUTS if x.ndim > 1 or "heads" not in name
        ]
        padded = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
        padded[..., 1:-2] = x
        assert checksum(padded[..., 1:-2]) == expected
    if not x.size:
        return
    bits = x.tobytes()
    others = [x.copy() for _ in range(2)]
    for other, bit in zip(others, (1, 1 << 8 * x.itemsize - 1)):
        other.reshape(-1).view(f"u{x.itemsize}")[place % x.size] ^= bit
    for axis in range(x.ndim):
        others += [np.flip(x, axis), np.roll(x, 1 + place % 7, axis)]
    assert not [number for number, y in enumerate(others) if y.tobytes() != bits and checksum(y) == expected]


@given(SMALL_SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32), st.integers(0, 2**20))
def test_checksums_of_short_arrays(shape: tuple[int, ...], dtype: Any, seed: int, place: int) -> None:
    check_checksum(cuflash, drawn_bits(shape, dtype, seed), place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LONG_SHAPES, ids=str)
def test_checksums_of_long_arrays(shape: tuple[int, ...], dtype: Any) -> None:
    x = drawn_bits(shape, dtype, 1)
    assert x.nbytes > _SHORT_BYTES or dtype.itemsize < 4
    for place in (0, 12345, -1):
        check_checksum(cuflash, x, place)
