"""Every numeric argument refuses booleans, and everything that is not a real number of Python or NumPy."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import find
from test_wrong_inputs import CALLS, DOCUMENTED, GOOD, precompile

import cuflash
from cuflash import BlockIndex, DeviceSpec, Dropout, KVCache, ShapeDtype, masks, patterns, reference, scores, selectors
from cuflash.cache._passes import SimulatedStep
from cuflash.selectors import Budget, Forced
from cuflash.testing import strategies

Q = np.random.default_rng(0).standard_normal((2, 16, 8), dtype=np.float32)
Q4 = Q[None]
Place = tuple[Callable[[Any], Any], Any]  # a call with one argument, and a valid value for it
SHAPE = ShapeDtype((2, 16, 8), np.float32)
H100 = DeviceSpec.gpu("H100")
INDEX = BlockIndex.from_blocks(np.eye(4, dtype=bool), 16, 16, 4)
ONE = Budget(top_k=1)
EIGHT = cuflash.quantize(Q, block=16)
KEYS = np.zeros((2, 1, 16, 8), np.float32)
PEAKS: dict[str, Any] = {"clock": 1.0, "hbm_bytes": 1.0}
CACHE = {"batch": 1, "num_kv_heads": 2, "head_dim": 8, "capacity": 64, "dtype": "float32"}
KV_BYTES = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float16"}
CHIP = {"num_processors": 1, "tile_memory_bytes": 1 << 20, "cache_bytes": 0}


def refused_after_one(monkeypatch: pytest.MonkeyPatch, scale: Any) -> None:
    """Call a cache's kernels with scale=1, and then with another scale."""
    monkeypatch.setattr(SimulatedStep, "attend", lambda *arguments: None)
    cache, rows = KVCache(**{**CACHE, "dtype": "float16"}), Q4[:, :, :3].astype(np.float16)
    cache.append(rows, rows)
    for each in (1, scale):
        cache.attention(rows[:, :, :1], scale=each, executor="sim")


@pytest.mark.parametrize("scale", [True, np.True_, Fraction(1), Decimal(1), 1 + 0j], ids=repr)
def test_scales_that_equal_one_are_refused_after_a_call_with_one(monkeypatch: pytest.MonkeyPatch, scale: Any) -> None:
    with pytest.raises(cuflash.UnsupportedProblem, match="^scale must be a finite number or None; got "):
        refused_after_one(monkeypatch, scale)


def a_cache(batch: int = 1) -> KVCache:
    cache, rows = KVCache(**{**CACHE, "batch": batch}), np.repeat(Q4[:, :, :3], batch, axis=0)
    cache.append(rows, rows)
    return cache


def taking(call: Callable[..., Any], good: dict[str, Any], name: str) -> Place:
    """Return a call that sets one of the arguments, and a valid value for it."""
    return lambda value: call(**good | {name: value}), good[name]


def with_one(call: Callable[..., Any], good: dict[str, Any], *names: str) -> dict[str, Place]:
    """Return such calls for several arguments, by the name of the call and the argument."""
    return {f"{call.__module__}.{call.__qualname__} {name}": taking(call, good, name) for name in names}


QKV = {"q": Q, "k": Q, "v": Q}
BLOCKS = {"q": Q, "k": Q, "budget": ONE, "block": 4, "scale": 0.5}
PATTERN = {"seqlen_q": 16, "seqlen_kv": 16, "block": 4}
PLACES: dict[str, Place] = {
    **{
        f"{name} {argument}": taking(call, good, argument)
        for name, (call, good) in (CALLS | DOCUMENTED).items()
        for argument, number in good.items()
        if isinstance(number, (int, float)) and not isinstance(number, bool)
    },
    **{
        f"{call.__name__} softcap": taking(call, QKV | {"softcap": 3.0}, "softcap")
        for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan, cuflash.error_bound)
    },
    "precompile softcap": taking(
        precompile, {"q": GOOD["q"], "k": GOOD["k"], "v": GOOD["v"], "device": H100, "softcap": 3.0}, "softcap"
    ),
    **with_one(cuflash.study.block_mass, {"q": Q, "k": Q, "block": 4, "scale": 0.5}, "block", "scale"),
    **with_one(cuflash.study.quantization_bound, {**QKV, "scale": 0.5, "q8": EIGHT, "k8": EIGHT, "v8": EIGHT}, "scale"),
    **with_one(reference.attention, {**QKV, "scale": 0.5}, "scale"),
    **with_one(reference.attention_vjp, {**QKV, "scale": 0.5, "do": Q}, "scale"),
    "Quantized scale": (lambda value: cuflash.attention(EIGHT, EIGHT, EIGHT, scale=value), 0.5),
    "KVCache.attention softcap": (lambda value: a_cache().attention(Q4[:, :, :1], softcap=value), 0.5),
    "KVCache.attention counts": (lambda value: a_cache().attention(Q4[:, :, :1], counts=[value]), 1),
    "KVCache.attention window": (lambda value: a_cache().attention(Q4[:, :, :1], window=(value, 0)), 1),
    "KVCache.append counts": (lambda value: a_cache().append(Q4[:, :, :1], Q4[:, :, :1], counts=[value]), 1),
    "KVCache.truncate": (lambda value: a_cache().truncate([value]), 1),
    "KVCache.reserve": (lambda value: a_cache().reserve([value]), 1),
    "KVCache.reset": (lambda value: a_cache().reset([value]), 0),
    "KVCache part_keys": (lambda value: KVCache(**CACHE, part_keys=value), 64),
    "KVCache.over lengths": (
        lambda value: KVCache.over(KEYS, KEYS.copy(), np.zeros((1, 1), np.int32), [value]), 3
    ),
    "KVCache.over part_keys": (
        lambda value: KVCache.over(KEYS, KEYS.copy(), np.zeros((1, 1), np.int32), [3], part_keys=value), 64
    ),
    **{
        f"{call.__name__} window {place}": (
            lambda value, call=call, place=place: call(
                *3 * (Q,), window=(value, 1)[:: 1 - 2 * place], causal="top_left"
            ),
            1,
        )
        for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan, cuflash.error_bound)
        for place in (0, 1)
    },
    "Dropout.keep shape": (lambda value: Dropout(0.5, 3).keep((value, 3, 4)), 2),
    "Dropout.keep shape, keys": (lambda value: Dropout(0.5, 3).keep((2, 3, value)), 2),
    **with_one(cuflash.quantize, {"x": Q, "block": 16, "largest": 2.0}, "block", "largest"),
    **with_one(cuflash.Rotation, {"head_dim": 8, "seed": 3}, "head_dim", "seed"),
    **with_one(selectors.pooled, {**BLOCKS, "self_similarity": 0.5}, "block", "scale", "self_similarity"),
    **with_one(selectors.antidiagonal, {**BLOCKS, "stride": 2}, "block", "scale", "stride"),
    **with_one(selectors.local, BLOCKS, "block", "scale"),
    **with_one(selectors.oracle, BLOCKS, "block", "scale"),
    **with_one(selectors.random, {**BLOCKS, "seed": 3}, "block", "scale", "seed"),
    **with_one(selectors.nsa, {**BLOCKS, "compression": (4, 2)}, "block", "scale"),
    "nsa compression": (lambda value: selectors.nsa(**BLOCKS, compression=(4, value)), 2),
    "nsa compression length": (lambda value: selectors.nsa(**{**BLOCKS, "block": 1}, compression=(value, 1)), 1),
    **with_one(
        selectors.vertical_slash,
        {"q": Q, "k": Q, "vertical": ONE, "slash": ONE, "block": 4, "scale": 0.5, "num_queries": 4},
        "block", "scale", "num_queries",
    ),
    **with_one(selectors.quest, {"q": Q, "k": Q, "budget": ONE, "page_size": 4}, "page_size"),
    **with_one(selectors.quest, {"q": Q, "k": Q, "budget": ONE, "block": (1, 4), "scale": 0.5}, "scale"),
    "quest block": (lambda value: selectors.quest(Q, Q, budget=ONE, block=(value, 4)), 1),
    **{
        f"{call.__name__} window": (lambda value, call=call: call(Q, Q, budget=ONE, window=(value, 1)), 1)
        for call in (selectors.pooled, selectors.local, selectors.vertical_slash, selectors.quest)
    },
    **with_one(selectors.page_bounds, {"q": Q, "k": Q, "page_size": 4}, "page_size"),
    "Budget top_k": (lambda value: Budget(top_k=value), 1),
    "Budget mass": (lambda value: Budget(mass=value), 1),
    "Budget density": (lambda value: Budget(density=value), 1),
    "Budget threshold": (lambda value: Budget(threshold=value), 1),
    "Budget min_blocks": (lambda value: Budget(top_k=1, min_blocks=value), 1),
    "Forced sink": (lambda value: Forced(sink=value), 1),
    "Forced local": (lambda value: Forced(local=value), 1),
    "longformer window": (lambda value: patterns.longformer((value, 1)), 1),
    "sink_local window": (lambda value: patterns.sink_local(1, (1, value)), 1),
    **with_one(masks.Lengths, {"q": 3, "kv": 3}, "kv"),
    "Lengths of an array": (lambda value: masks.Lengths(kv=np.array([value])), 3),
    "Documents": (lambda value: masks.Documents(np.array([value])), 3),
    "Sequences": (lambda value: masks.Sequences([0, value]), 1),
    "Sequences window": (lambda value: masks.Sequences([0, 3], window=(value, 0)), 1),
    "Sequences.of": (lambda value: masks.Sequences.of([value]), 3),
    **with_one(
        masks.MaskShape, {"batch": (1,), "num_heads": 1, "seqlen_q": 1, "seqlen_kv": 1},
        "num_heads", "seqlen_q", "seqlen_kv",
    ),
    "MaskShape batch": (lambda value: masks.MaskShape((value,), 1, 1, 1), 1),
    **with_one(
        masks.Causal("top_left").density, {"seqlen_q": 1, "seqlen_kv": 1, "num_heads": 1},
        "seqlen_q", "seqlen_kv", "num_heads",
    ),
    "toarray batch": (lambda value: masks.Causal().toarray(3, batch=(value,)), 1),
    **with_one(
        masks.Causal("top_left").picture,
        {"seqlen_q": 1, "seqlen_kv": 1, "num_heads": 1, "block": 1, "b": 0, "h": 0, "width": 8},
        "seqlen_q", "seqlen_kv", "num_heads", "block", "b", "h", "width",
    ),
    "picture batch": (lambda value: masks.Causal().picture(3, batch=(value,)), 1),
    "on_blocks pair": (lambda value: masks.Causal().on_blocks((2, value)), 2),
    "from_mask batch": (lambda value: BlockIndex.from_mask(masks.Causal(), **PATTERN, batch=(value,)), 1),
    "from_mask block": (
        lambda value: BlockIndex.from_mask(masks.Causal(), **{**PATTERN, "block": (4, value)}), 1
    ),
    **with_one(INDEX.report, {"head_dim": 8, "value_dim": 8, "itemsize": 2}, "head_dim", "value_dim", "itemsize"),
    "within offsets": (lambda value: scores.within(scores.softcap(2.0), [0, value]), 1),
    "DeviceSpec capability": (lambda value: DeviceSpec(name="x", compute_capability=(9, value), **CHIP), 0),
    "ShapeDtype": (lambda value: ShapeDtype((2, value), np.float32), 1),
    **with_one(cuflash.study.Peaks, {**PEAKS, "tensor_16": 1.0, "l2_bytes": 64}, *PEAKS, "tensor_16", "l2_bytes"),
    "Roofline.measured": (cuflash.study.roofline(cuflash.plan(SHAPE, SHAPE, SHAPE, device=H100)).measured, 1.0),
    "kv_cache_bytes of some": (lambda value: cuflash.study.kv_cache_bytes(**KV_BYTES, tokens=[5, value]), 5),
    "unpack offsets": (lambda value: cuflash.unpack(Q, [0, value]), 16),
    **with_one(
        strategies.structures,
        {"tile": 4, "most_scores": 99, "most_rows": 9, "max_leaves": 1, "widest": 4, "longest": 9},
        "tile", "most_scores", "most_rows", "max_leaves", "widest", "longest",
    ),
    "structures batch": (lambda value: strategies.structures(batch=[(value,)]), 1),
    "examples tile": (lambda value: strategies.examples(tile=value), 4),
    "testing.masks": (lambda value: find(strategies.masks(masks.MaskShape((), 1, 3, 3), value), lambda _: True), 2),
}  # fmt: skip
NO_NUMBERS = {
    "True": True, "False": False, "np.True_": np.True_, "np.False_": np.False_, "np.array(True)": np.array(True),
    "np.array([True])": np.array([True]), "Fraction": Fraction(1), "Decimal": Decimal(1), "'1'": "1", "b'1'": b"1",
    "complex": 1 + 0j, "np.complex64": np.complex64(1), "0-d complex": np.array(1 + 0j), "0-d str": np.array("1"),
    "[1]": [1.5],
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_number_is_refused(place: str) -> None:
    call, good = PLACES[place]
    call(good)
    taken = []
    for name, value in NO_NUMBERS.items():
        try:
            call(value)
        except (TypeError, cuflash.UnsupportedProblem):
            continue
        taken.append(name)
    assert taken == []


NUMBERS = {
    "int": 2, "float": 0.25, "float16": np.float16(0.5), "float32": np.float32(0.3), "float64": np.float64(0.7),
    "longdouble": np.longdouble(0.5), "bfloat16": ml_dtypes.bfloat16(0.5), "uint8": np.uint8(3), "int64": np.int64(-1),
    "0-d float": np.array(0.3), "0-d float32": np.array(0.3, np.float32), "0-d int": np.array(2),
    "0-d bfloat16": np.array(0.5, ml_dtypes.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_scale_is_any_real_number_of_python_or_numpy(name: str) -> None:
    number = NUMBERS[name]
    actual, wanted = (cuflash.attention(Q, Q, Q, scale=scale) for scale in (number, float(number)))
    assert actual.tobytes() == wanted.tobytes()


class Tracer:
    """A substitute for JAX's tracers, which the library recognizes by the class name."""


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (True, "got True$"),
        (np.True_, r"got np\.True_$"),
        (np.array(True), r"got an array of shape \(\) and dtype bool$"),
        (Fraction(1, 2), r"got Fraction: pass float\(scale\)$"),
        (Decimal("0.5"), r"got Decimal: pass float\(scale\)$"),
        (np.array([0.5]), r"got an array of shape \(1,\) and dtype float64: pass float\(scale\)$"),
        (float("inf"), "got inf$"),
        (10**400, "got an int of 1329 bits$"),
        (Tracer(), "got Tracer: name it in static_argnames, or multiply q by it$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Tracer) else str(value),
)
def test_a_wrong_scale_is_refused_with_its_fix(scale: Any, message: str) -> None:
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan, cuflash.error_bound):
        with pytest.raises(cuflash.UnsupportedProblem, match=f"^scale must be a finite number or None; {message}"):
            call(Q, Q, Q, scale=scale)


def test_a_huge_int_is_refused_after_calls_with_other_kinds_of_scales() -> None:
    """The key of a repeated call is compared with earlier ones, and NumPy converts the int to a float."""
    for scale in (np.float16(0.5), 0.5):
        cuflash.attention(Q, Q, Q, scale=scale)
    with pytest.raises(cuflash.UnsupportedProblem, match="scale must be a finite number or None; got an int of"):
        cuflash.attention(Q, Q, Q, scale=10**400)


@pytest.mark.parametrize("make", [lambda torch: torch.nn.Parameter(torch.tensor(0.3)), lambda torch: torch.ones(1)])
def test_a_tensor_is_no_scale(make: Any) -> None:
    torch = pytest.importorskip("torch")
    import cuflash.torch as adapter

    q = torch.ones(2, 16, 8)
    for call in (adapter.attention, cuflash.attention):
        with pytest.raises(cuflash.UnsupportedProblem, match=r"score=cuflash\.scores\.temperature\(per_head\)"):
            call(q, q, q, scale=make(torch))


def test_an_array_of_jax_is_no_scale() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for scale in (jnp.float32(0.3), jnp.ones(1)):
        with pytest.raises(cuflash.UnsupportedProblem, match=r"score=cuflash\.scores\.temperature\(per_head\)"):
            cuflash.attention(Q, Q, Q, scale=scale)
