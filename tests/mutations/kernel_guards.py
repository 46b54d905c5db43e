"""Guards for faults of the simt and sm80 families and of code that all families share, on the simulator.

Each fault gives a wrong number, and no crash. Removed barriers show under hostile schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import splitting
from executors import SIM
from poison import STRUCTURES, call
from probing import (
    FRAGMENTS,
    TF32,
    WALKS,
    assert_expected,
    loads,
    maps,
    products,
    quotients,
    stores,
    transposed_products,
    walk,
    wrong_tiles,
)
from test_probes import shared_banks

from cuflash import masks, sim
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, Structure, assert_within_bounds

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault


def examples() -> Iterator[Structure]:
    """Yield a few structures that reach every line with few tiles: bands, intervals, lists, groups, and many axes."""
    dims = {"head_dim": 24, "value_dim": 20, "layouts": ("padded",) * 5}
    two = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
    lengths = masks.Lengths(q=np.array([150, 60]), kv=np.array([130, 200]))
    yield Structure(
        **two, num_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_kv=200, **dims,
        mask=masks.Causal("bottom_right") & lengths,
    )  # fmt: skip
    yield Structure(num_heads=2, seqlen_q=300, seqlen_kv=290, **dims, mask=masks.SlidingWindow(170, 30, "top_left"))
    rng = np.random.default_rng(0)
    yield Structure(
        **two, num_heads=2, seqlen_q=150, seqlen_kv=140, **dims,
        mask=masks.BlockPattern(rng.random((2, 2, 7, 6)) < 0.5, 24) & masks.Dilated(2, align="top_left"),
    )  # fmt: skip
    yield STRUCTURES["five axes that do not fold"]


@cache
def beside_clean() -> list[tuple[Example, Example]]:
    """Return inputs of kernels, each with the same inputs without NaN, created once for all edits."""
    drawn = [*(structure.example() for structure in examples()), padded_with_nan()]
    return [(example, without_nan(example)) for example in drawn]


def attention_is_right() -> None:
    """Check that every result is within its bound, in poisoned memory, with threads in and out of order.

    dQ is accumulated by the backward kernel, or computed by a separate kernel.
    """
    for schedule in (sim.Schedule(), *(sim.Schedule(seed=seed, order="random") for seed in range(3))):
        for (example, clean), run in product(beside_clean(), (SIM, replace(SIM, deterministic=True))):
            call(example, run, Simulator(schedule), check=partial(assert_within_bounds, clean))


def padded_with_nan(dtype: str = "float32", head_dim: int = 24, value_dim: int = 20) -> Example:
    """Return an example with NaN in keys and values past a length, which ends in the middle of a tile."""
    example = Structure(
        num_heads=2, seqlen_q=150, seqlen_kv=90, head_dim=head_dim, value_dim=value_dim, mask=masks.Lengths(kv=40),
        dtype=dtype,
    ).example()  # fmt: skip
    k, v = example.k.copy(), example.v.copy()
    k[..., 40:, :] = v[..., 40:, :] = np.nan
    return example.but(k=k, v=v)


def beside_nan(example: Example, names: Iterable[str], extent: int, axis: int = -1) -> Example:
    """Return an example in which some inputs are views of arrays that are longer along an axis, with NaN after them."""
    wide = {}
    for name in names:
        values = getattr(example, name)
        widths = [(0, 0)] * values.ndim
        widths[axis] = (0, extent - values.shape[axis])
        room = np.pad(values.astype(np.float32), widths, constant_values=np.nan).astype(values.dtype)
        wide[name] = room[tuple(map(slice, values.shape))]
    return example.but(**wide)


def without_nan(example: Example) -> Example:
    return example.but(k=np.nan_to_num(example.k), v=np.nan_to_num(example.v))


@cache
def halves_beside_clean() -> list[tuple[Example, Example]]:
    """Return 16-bit inputs, some with a negative scale, each with the same inputs without NaN.

    There are few examples, because building a kernel takes seconds.
    """
    dims = {"head_dim": 24, "value_dim": 20, "layouts": ("padded",) * 5, "dtype": "float16"}
    rng = np.random.default_rng(0)
    structures = [
        Structure(
            num_heads=4, num_kv_heads=2, seqlen_q=200, seqlen_kv=210, **dims,
            mask=masks.Causal("bottom_right") & masks.Lengths(kv=180), scale=-3.0,
        ),
        *(
            # Blocks that are not square, and not multiples of tiles.
            Structure(
                num_heads=2, seqlen_q=150, seqlen_kv=140, **dims,
                mask=masks.BlockPattern(rng.random((2, 4, 6)) < 0.7, (40, 24)) & within,
            )
            for within in (masks.Dilated(3, align="top_left"), masks.Causal("top_left"))
        ),
        # Full tiles of more than 64 columns, rows that are multiples of 16 bytes, and gradients that are summed over an
        # axis.
        Structure(
            q_batch=(2,), k_batch=(1,), v_batch=(1,), num_heads=1, seqlen_q=186, seqlen_kv=130, head_dim=128,
            value_dim=128, dtype="float16",
        ),
        # More than 128 columns: a full step and a partial one.
        Structure(num_heads=1, seqlen_q=90, seqlen_kv=80, head_dim=136, value_dim=136, dtype="float16"),
    ]  # fmt: skip
    drawn = [
        *(structure.example() for structure in structures),
        padded_with_nan("float16"), padded_with_nan("float16", 32, 32),
    ]  # fmt: skip
    examples = [SIM.rounded(example) for example in drawn]
    examples[3] = beside_nan(examples[3], ("q", "do"), 192, axis=-2)  # NaN follows the last, short step of queries
    # Rows of Q and K, or of dO and V, are shorter than those of their tiles.
    narrow = Structure(num_heads=1, seqlen_q=270, seqlen_kv=270, head_dim=32, value_dim=24, dtype="float16")
    examples.append(beside_nan(SIM.rounded(narrow.example()), ("v", "do"), 32))
    narrow = replace(narrow, head_dim=24, value_dim=32)
    examples.append(beside_nan(SIM.rounded(narrow.example()), ("q", "k"), 32))
    return [(example, without_nan(example)) for example in examples]


def tensor_cores_are_right() -> None:
    """Check that every result of 16-bit inputs is within its bound."""
    for example, clean in halves_beside_clean():
        for run, order in product((SIM, replace(SIM, deterministic=True)), ("round_robin", "random")):
            check = partial(assert_within_bounds, clean)
            # rows are multiples of 16 bytes
            call(example, run, Simulator(sim.Schedule(order=order)), margin=8, check=check)


def work_is_shared_out() -> None:
    """Check that each query and key is in one tile, a list's longest tiles come first, and results are right."""
    for name in ("blocks of 16, 16 x 16", "blocks of 100 x 64, causal, 32 x 8"):
        plan, launch = walk(*WALKS[name])
        left = launch.on_simulator()
        assert wrong_tiles(plan, left[8]) == []
    attention_is_right()


def tiles_are_right() -> None:
    """Check that every index map equals that of NumPy."""
    launches = [maps("float32"), *loads("float32"), *stores("float32"), products("float32", 32, 64, 40)]
    launches += [maps(*FRAGMENTS), products("float64", 64, 40, 24, 8), products("float64", 128, 24, 40, 16)]
    launches += [transposed_products("float32", 5, 18), transposed_products("float64", 5, 18, 16)]
    launches += [quotients("float32")]
    for launch in launches:
        assert_expected(launch, launch.on_simulator())


@cache
def shared_among_parts() -> list[tuple[Example, int]]:
    """Return examples with numbers of parts; one has more parts than groups of threads can merge at a time."""
    parts = {"few queries, causal": 3, "window": 3, "bits": 3, "float32, few queries": 3, "wide": 9}
    return [(splitting.rounded(splitting.STRUCTURES[name].example()), number) for name, number in parts.items()]


def parts_are_right() -> None:
    """Check that split-KV results are within bounds: without a list, packed, with a list, and out of order."""
    for schedule in (sim.Schedule(), sim.Schedule(seed=1, order="random")):
        for example, num_parts in shared_among_parts():
            left = splitting.forward(example, num_parts, machine=Simulator(schedule))
            assert_within_bounds(example, o=left.o, lse=left.lse)


def all_steps_are_right() -> None:
    """Check steps of plain arithmetic, and steps that wait for tiles of dQ."""
    attention_is_right()
    tensor_cores_are_right()


def floats_on_tensor_cores_are_right() -> None:
    """Check that every tf32 product equals NumPy's, and that no read of its operands has a bank conflict."""
    for launch in TF32:
        assert_expected(launch, launch.on_simulator())
    assert [shared_banks(columns) for columns in (32, 96)] == [[], []]
