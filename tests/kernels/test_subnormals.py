"""Bounds hold where weights and products underflow: the simulator flushes subnormal floats to 0, as a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from cuflash import Dropout
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import Run, on_kernels_for, on_sim_and_gpu
from hypothesis import given, target
from hypothesis import strategies as st
from test_tangent_kernels import QKV, check_gradients, moved_along
from test_tangent_kernels import check as check_tangents

TINY = np.finfo(np.float32).tiny
SHAPE = Structure(num_heads=2, num_kv_heads=1, seqlen_q=4, seqlen_kv=8, head_dim=8, value_dim=8)
# Kernels that keep weights relative to the maximum, and kernels that store them. bfloat16 has the exponents of float32.
KERNELS = {"simt": "float32", "naive": "float32", "sm80": "bfloat16", "sm90": "bfloat16"}


@st.composite
def beside_a_sink(draw: st.DrawFn, structure: Structure) -> Example:
    """Draw sinks next to which the weight of all keys is near the smallest normal number, and v that is large."""
    example = replace(structure, seed=draw(st.integers(0, 2**16))).example()
    distance = draw(st.floats(-4, 4)) - np.log(TINY)
    sink = (example.exact.lse.max(axis=-1) + distance).astype(np.float32)
    return example.but(sink=sink, v=example.v * example.v.dtype.type(2.0 ** draw(st.integers(4, 40))))


@st.composite
def beside_other_keys(draw: st.DrawFn, structure: Structure) -> Example:
    """Draw keys next to which the weight of the first key is near the smallest normal number, and its v is large."""
    example = replace(structure, seed=draw(st.integers(0, 2**16))).example()
    q, k, v = example.q / example.q.dtype.type(8), example.k.copy(), example.v.copy()
    q[..., 0], k[..., 0] = 1, 40
    k[..., 0, 0] += np.log(TINY) + draw(st.floats(-2, 3))
    v[..., 0, :] *= v.dtype.type(2.0 ** draw(st.integers(80, 100)))
    v[..., 1:, :] *= v.dtype.type(2.0**-80)
    return example.but(q=q, k=k, v=v, scale=1.0)


@st.composite
def dropped(draw: st.DrawFn, structure: Structure) -> Example:
    """Draw v whose products with weights are near the smallest normal number, before dropout multiplies sums."""
    share, seed = 2.0 ** -draw(st.integers(3, 6)), draw(st.integers(0, 2**16))
    example = replace(structure, seed=seed, dropout=Dropout(1 - share, seed)).example()
    return example.but(v=example.v * example.v.dtype.type(TINY * 2.0 ** draw(st.floats(0, 4))))


@st.composite
def small_sinks(draw: st.DrawFn, structure: Structure) -> Example:
    """Draw sinks whose weights are near the smallest normal number."""
    example = replace(structure, seed=draw(st.integers(0, 2**16))).example()
    sink = (example.exact.lse.max(axis=-1) + np.log(TINY) + draw(st.floats(-4, 4))).astype(np.float32)
    return example.but(sink=sink, do=example.do * example.do.dtype.type(2.0 ** draw(st.integers(0, 60))))


STRATEGIES = (beside_a_sink, beside_other_keys, dropped, small_sinks)


@on_kernels_for("kernel, strategy", [(kernel, each) for each in STRATEGIES for kernel in KERNELS], on=on_sim_and_gpu)
def test_results_are_within_their_bounds(
    run: Run, kernel: str, strategy: Callable[[Structure], st.SearchStrategy[Example]]
) -> None:
    run = replace(run, kernel=kernel)

    @run.settings
    @given(strategy(replace(SHAPE, dtype=KERNELS[kernel])))
    def check(example: Example) -> None:
        example = run.rounded(example)
        target(assert_within_bounds(example, **run.everything(example)))

    check()


@on_kernels_for(
    "kernel, strategy", [(kernel, each) for each in STRATEGIES for kernel in KERNELS if kernel != "naive"],
    on=on_sim_and_gpu,
)  # fmt: skip
def test_tangents_are_within_their_bounds(
    run: Run, kernel: str, strategy: Callable[[Structure], st.SearchStrategy[Example]]
) -> None:
    run = replace(run, kernel=kernel)

    @run.settings
    @given(strategy(replace(SHAPE, dtype=KERNELS[kernel])), st.integers(0, 80))
    def check(example: Example, exponent: int) -> None:
        moving = moved_along(example, QKV | ({} if example.sink is None else {"sink": "normal"}))
        if "sink" in moving.tangents:
            moving.tangents["sink"] *= np.float32(2.0**exponent)
        check_tangents(run, moving)
        check_gradients(run, moving)

    check()
