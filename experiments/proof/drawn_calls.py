"""Random calls, stored as text, whose results can be compared bitwise between two versions of the source tree.

A call is an expression of the functions below: `gradients(Structure(...))` of an example of cuflash.testing, or
`packed(7)`, `options(7)`, `fp8(7)`, `cached(7)`, `selected(7)` or `masses(7)`, whose arguments follow from a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import BlockIndex, Dropout, KVCache, Rotation, UnsupportedProblem, masks, reference, scores, selectors
from cuflash.selectors import Budget, Forced
from cuflash.testing import Structure, strategies
from hypothesis import HealthCheck, Phase, given, settings

Arrays = dict[str, Any]
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FLOATS = (*HALVES, np.dtype(np.float32), np.dtype(np.float64))
FAMILIES = ("sm90", "sm80", "simt")
NUM_SEEDS = 100  # number of seeds for each function that takes one
MOST_CHARACTERS = 500  # maximum length of a call's text; an array of booleans may take thousands of characters


def drawn_calls(total: int) -> list[str]:
    """Return `total` calls as text, which depend only on the versions of cuflash.testing and Hypothesis."""
    seeded = [f"{function.__name__}({seed})" for function in SEEDED for seed in range(NUM_SEEDS)]
    plain = _drawn_structures(wanted := (total - len(seeded)) // 2)
    odd = _drawn_structures(wanted, has_sink=True, has_score=True, has_dropout=True, has_non_finite=True)
    return [*plain, *odd, *seeded]


def _drawn_structures(wanted: int, **features: bool) -> list[str]:
    """Return calls of `gradients` on different small structures with short texts."""
    drawn = dict[str, None]()
    small = strategies.structures(widest=64, most_scores=1 << 13, most_rows=400, **features)

    @settings(
        max_examples=3 * wanted, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(small)
    def keep(structure: Structure) -> None:
        if len(text := f"gradients({structure!r})") <= MOST_CHARACTERS:
            drawn.setdefault(text)

    keep()
    return list(drawn)[:wanted]


def digest(call: str, executor: str) -> str:
    """Return a digest of a call's results, or the class of a refusal and a digest of its message.

    On the simulator, calls use the kernel families in rotation, or the default family if the selected one does not
    support the call.
    """
    try:
        return digest_of(eval(call, NAMES)(executor=executor))  # noqa: S307, of text that this module wrote
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__} {hashlib.sha256(str(error).encode()).hexdigest()[:16]}"


def digest_of(results: Arrays) -> str:
    """Return a digest of the bits, names, dtypes and shapes of arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(results.items()):
        array = np.asarray(array)
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _attempt(call: Callable[..., Arrays], seed: int, executor: str) -> Arrays:
    """Make a call with the family selected in rotation, or with the default family if that one does not support it."""
    if executor == "sim":
        with suppress(UnsupportedProblem):
            return call(executor=executor, kernel=FAMILIES[seed % len(FAMILIES)])
    return call(executor=executor)


def _results(o: Any, lse: Any, gradients: Any = None) -> Arrays:
    named = {"o": o, "lse": lse}
    if gradients is not None:
        named |= {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
        named |= {f"d{name}": gradients[name] for name in gradients.others}
    return named


def gradients(structure: Structure) -> Callable[[str], Arrays]:
    """Return the call that computes both passes for a drawn example."""
    example = structure.example()
    given_options: dict[str, Any] = {"mask": example.mask, "scale": example.scale, "return_lse": True}
    wrt = list(example.wrt)
    if example.score is not None:
        given_options["score"] = example.score
    if example.dropout is not None:
        given_options["dropout"] = example.dropout
    if example.sink is not None:
        given_options["sink"] = example.sink
        wrt.append("sink")

    def call(**where: str) -> Arrays:
        q, k, v = example.q, example.k, example.v
        is_repeatable = bool(structure.seed % 2)
        (o, lse), vjp = cuflash.attention_vjp(
            q, k, v, wrt=tuple(wrt), deterministic=is_repeatable, **given_options, **where
        )
        return _results(o, lse, vjp(example.do, example.dlse))

    return partial(_attempt, call, structure.seed)


def _operands(rng: np.random.Generator, *shapes: tuple[int, ...], dtype: Any) -> list[Any]:
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def _sizes(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return batch, num_heads, num_kv_heads and head_dim."""
    num_kv_heads = int(rng.integers(1, 3))
    return int(rng.integers(1, 3)), num_kv_heads * int(rng.choice([1, 2, 4])), num_kv_heads, int(rng.choice([32, 64]))


def packed(seed: int) -> Callable[[str], Arrays]:
    """Return a call of both passes on packed sequences, some of them empty."""
    rng = np.random.default_rng([1, seed])
    _, num_heads, num_kv_heads, head_dim = _sizes(rng)
    counts = rng.integers(0, 70, int(rng.integers(1, 6)))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    tokens, dtype = int(offsets[-1]), FLOATS[seed % 3]
    q, k, v, do = _operands(
        rng, *[(heads, tokens, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)], dtype=dtype
    )
    mask = masks.Sequences(offsets)
    window = (int(rng.integers(0, 40)), 0) if seed % 4 == 3 else None

    def call(**where: str) -> Arrays:
        (o, lse), vjp = cuflash.attention_vjp(
            q, k, v, mask=mask, causal=bool(seed % 2), window=window, return_lse=True, deterministic=True, **where
        )
        return _results(o, lse, vjp(do))

    return partial(_attempt, call, seed // 3)


def options(seed: int) -> Callable[[str], Arrays]:
    """Return a call of both passes with arguments that examples lack: causal, window, softcap, bias and indices."""
    rng = np.random.default_rng([2, seed])
    batch, num_heads, num_kv_heads, head_dim = _sizes(rng)
    seqlen_q, seqlen_kv = (int(length) for length in rng.integers(1, 150, 2))
    dtype = FLOATS[seed % 4]
    q, k, v, do = _operands(
        rng, (batch, num_heads, seqlen_q, head_dim), (batch, num_kv_heads, seqlen_kv, head_dim),
        (batch, num_kv_heads, seqlen_kv, head_dim), (batch, num_heads, seqlen_q, head_dim), dtype=dtype,
    )  # fmt: skip
    wide = np.float64 if dtype == np.float64 else np.float32
    kind = seed % 10
    given_options: dict[str, Any] = {"causal": ("bottom_right", "top_left", False)[seed % 3], "wrt": ()}
    if kind in (0, 1):
        given_options |= {"softcap": 5.0 + kind}
    if kind in (1, 2):
        bias = rng.standard_normal((num_heads, seqlen_q, seqlen_kv) if seed % 4 else (1, seqlen_kv)).astype(wide)
        given_options |= {"bias": bias, "wrt": ("bias",)}
    if kind == 3:
        given_options |= {"score": scores.alibi(scores.alibi_slopes(num_heads).astype(wide))}
    if kind == 4:
        given_options |= {"window": (int(rng.integers(0, 60)), None), "scale": -0.3, "causal": "bottom_right"}
    if kind in (5, 6):
        block = (16, 32)[kind - 5]
        shape = (num_heads, -(-seqlen_q // block), -(-seqlen_kv // block))
        index = BlockIndex.from_blocks(rng.random(shape) < 0.5, block=block, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        given_options |= {"mask": index}
    if kind == 7:
        given_options |= {"mask": rng.random((seqlen_q, seqlen_kv)) < 0.4}
    if kind == 8:
        given_options |= {"dropout": Dropout(0.3, seed=seed), "sink": rng.standard_normal(num_heads).astype(wide)}
        given_options |= {"wrt": ("sink",)}
    precision = ("tf32", "tf32x3")[seed % 2]

    def call(**where: str) -> Arrays:
        if kind == 9 and dtype == np.float32 and where["executor"] != "cpu":
            where = where | {"precision": precision, "kernel": "sm80"}
        (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, deterministic=True, **given_options, **where)
        return _results(o, lse, vjp(do, lse if seed % 2 else None))

    return partial(_attempt, call, seed // 4)


def fp8(seed: int) -> Callable[[str], Arrays]:
    """Return a forward call on FP8 operands, quantized by blocks, heads or tensors."""
    rng = np.random.default_rng([3, seed])
    batch, num_heads, num_kv_heads, head_dim = _sizes(rng)
    seqlen_q, seqlen_kv = (int(length) for length in rng.integers(1, 300, 2))
    dtype = FLOATS[seed % 3]
    q, k, v = _operands(
        rng, (batch, num_heads, seqlen_q, head_dim), (batch, num_kv_heads, seqlen_kv, head_dim),
        (batch, num_kv_heads, seqlen_kv, head_dim), dtype=dtype,
    )  # fmt: skip
    per = ("block", "head", "tensor")[seed % 3]
    rotation = Rotation(head_dim, seed=seed) if seed % 2 else None

    def call(executor: str) -> Arrays:
        rotated = [cuflash.quantize(x, per=per, rotate=rotation) for x in (q, k)]
        causal = ("bottom_right", False)[seed % 2]
        o, lse = cuflash.attention(
            *rotated, cuflash.quantize(v, per=per), causal=causal, return_lse=True, executor=executor
        )
        return {"o": o, "lse": lse, "data": rotated[0].data.view(np.uint8), "scale": rotated[0].scale}

    return call


def cached(seed: int) -> Callable[[str], Arrays]:
    """Return some steps of a KV cache: a prompt, then single tokens, with or without pages and FP8."""
    rng = np.random.default_rng([4, seed])
    batch, num_heads, num_kv_heads, head_dim = _sizes(rng)
    dtype = FLOATS[seed % 3]
    is_fp8 = seed % 5 == 4
    page_size = (None, 16, 32)[seed % 3]

    def call(**where: str) -> Arrays:
        rng = np.random.default_rng([5, seed])
        pages = {} if page_size is None else {"page_size": page_size, "num_pages": batch * 160 // page_size}
        cache = KVCache(
            batch=batch, num_kv_heads=num_kv_heads, head_dim=head_dim, capacity=160,
            dtype="float8_e4m3fn" if is_fp8 else dtype, **pages,
        )  # fmt: skip
        results = {}
        for step, count in enumerate((int(rng.integers(1, 90)), 1, 1, int(rng.integers(2, 20)))):
            q, k, v = _operands(
                rng, (batch, num_heads, count, head_dim), *[(batch, num_kv_heads, count, head_dim)] * 2, dtype=dtype
            )
            cache.append(k, v)
            window = (30, 0) if seed % 4 == 3 else None
            o, lse = cache.attention(q, window=window, return_lse=True, **where)
            results |= {f"o{step}": o, f"lse{step}": lse}
        return results

    return partial(_attempt, call, seed // 3)


def selected(seed: int) -> Callable[[str], Arrays]:
    """Return a selection of blocks, and attention to them."""
    rng = np.random.default_rng([6, seed])
    batch, num_heads, num_kv_heads, head_dim = _sizes(rng)
    tokens, dtype = int(rng.integers(33, 200)), FLOATS[seed % 4]
    q, k, v = _operands(
        rng, (batch, num_heads, tokens, head_dim), *[(batch, num_kv_heads, tokens, head_dim)] * 2, dtype=dtype
    )
    name = ("pooled", "antidiagonal", "nsa", "oracle", "local", "random", "vertical_slash")[seed % 7]
    budget = (Budget(top_k=2), Budget(mass=0.7))[seed % 2]
    budgets = {"vertical": budget, "slash": budget} if name == "vertical_slash" else {"budget": budget}
    extra = {"compression": (16, 16)} if name == "nsa" else {}

    def call(executor: str) -> Arrays:
        where = {} if name in ("local", "random") else {"executor": executor}
        choose = getattr(selectors, name)
        index = choose(q, k, block=32, causal=bool(seed % 3), forced=Forced(sink=1), **budgets, **extra, **where)
        o, lse = cuflash.attention(q, k, v, mask=index, return_lse=True, executor=executor)
        return {"o": o, "lse": lse, "blocks": index.states()}

    return call


def masses(seed: int) -> Callable[[str], Arrays]:
    """Return block masses, the recall of a mask, the merge of two halves, error bounds, and the reference."""
    rng = np.random.default_rng([7, seed])
    batch, num_heads, num_kv_heads, head_dim = _sizes(rng)
    tokens, dtype = int(rng.integers(2, 150)), FLOATS[seed % 4]
    q, k, v, do = _operands(
        rng, *[(batch, heads, tokens, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)],
        dtype=dtype,
    )  # fmt: skip
    half = tokens // 2
    mask = masks.Causal() & masks.SlidingWindow(20, 0)

    def call(executor: str) -> Arrays:
        results = {"mass": cuflash.study.block_mass(q, k, block=(16, 32), causal=bool(seed % 2), executor=executor)}
        halves = [
            cuflash.attention(q, k[..., part, :], v[..., part, :], return_lse=True, executor=executor)
            for part in (slice(half), slice(half, None))
        ]
        results |= dict(zip(("o", "lse"), cuflash.merge(*map(list, zip(*halves)))))
        if executor == "cpu":
            results |= {"kept": cuflash.study.recall(q, k, v, mask=mask, causal=True).mass}
            bounds = cuflash.error_bound(q, k, v, do, mask=mask)
            results |= {f"bound of {name}": getattr(bounds, name) for name in ("o", "lse", "dq", "dk", "dv")}
            results |= {"exact": reference.attention(q, k, v, mask=mask.toarray(tokens, tokens))[0]}
        return results

    return call


SEEDED = (packed, options, fp8, cached, selected, masses)
NAMES = {
    "np": np, "cuflash": cuflash, "masks": masks, "testing": cuflash.testing, "Structure": Structure,
    **{function.__name__: function for function in (gradients, *SEEDED)},
}  # fmt: skip
