"""Properties of attention on every executor, its bounds, and closed forms of masks."""

from dataclasses import replace

import numpy as np
import pytest
from executors import (
    CPU,
    DTYPES,
    GPU,
    SIM,
    holds_for_examples,
    in_turn,
    needs_compiler,
    on_every_backward,
    on_every_deterministic_backward,
    on_kernels_for,
)
from hypothesis import target

import cuflash
from cuflash import masks
from cuflash.testing import (
    FORWARD_PROPERTIES,
    GRADIENT_PROPERTIES,
    PAIR_PROPERTIES,
    Structure,
    assert_exact_probes,
    assert_within,
    assert_within_bounds,
)
from cuflash.testing.properties import (
    check_empty_rows_give_nothing,
    check_gradients_repeat_bitwise,
    check_non_finite_values_reach_what_they_should,
)

OVER_MANY_TILES = Structure(
    num_heads=2, seqlen_q=700, seqlen_kv=1100, head_dim=40, value_dim=24, dtype="float16",
    mask=masks.SlidingWindow(600, 0, "bottom_right") | masks.Dilated(7, align="bottom_right"),
)  # fmt: skip


# Properties of results that must be bitwise reproducible: dq only if the call requests it.
REPEATABLE_PROPERTIES = (check_empty_rows_give_nothing, check_gradients_repeat_bitwise)


def repeatable(run, results):
    return [name for name in results if name != "dq" or run.deterministic or not run.is_on_device]


def checks(properties):
    return pytest.mark.parametrize("check", properties, ids=lambda check: check.__name__.removeprefix("check_"))


@holds_for_examples(on_every_backward)
def test_every_result_is_within_its_bound(run, example):
    target(assert_within_bounds(example, **run.everything(example)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_hosts_results_are_within_their_bounds_over_many_tiles(dtype):
    assert_within_probable_bounds(CPU, replace(OVER_MANY_TILES, dtype=dtype))


@on_kernels_for("dtype", ["float16", "float32"])
def test_kernels_results_are_within_their_bounds_over_many_tiles(run, dtype):
    """Lengths suit the simulator's kernels, whose tiles are a quarter of the host's."""
    lengths = {} if run.is_on_device else {"seqlen_q": 280, "seqlen_kv": 410}
    assert_within_probable_bounds(run, replace(OVER_MANY_TILES, dtype=dtype, **lengths))


def assert_within_probable_bounds(run, structure):
    example = run.rounded(structure.example())
    assert_within_bounds(example, **run.everything(example), probable=True)


@holds_for_examples()
def test_the_exact_probes_pass(run, example):
    assert_exact_probes(run.attend, example)


@checks(FORWARD_PROPERTIES)
@holds_for_examples()
def test_forward(run, example, check):
    check(run.attend, example)


@holds_for_examples(
    on_kernels_for(
        "check", [check for check in GRADIENT_PROPERTIES if check not in REPEATABLE_PROPERTIES], on_every_backward
    ),
    most_scores=1 << 15,
)  # fmt: skip
def test_gradients(run, example, check):
    check(run.pull, example)


@checks(REPEATABLE_PROPERTIES)
@holds_for_examples(on_every_deterministic_backward, most_scores=1 << 15)
def test_repeatable_gradients(run, example, check):
    check(run.pull, example)


@checks([check for check in PAIR_PROPERTIES if check is not check_non_finite_values_reach_what_they_should])
@holds_for_examples(on_every_backward, most_scores=1 << 15)
def test_both_passes(run, example, check):
    check(run.attend, run.pull, example)


# Pairs of equivalent masks (20), and padding that is never read


@on_kernels_for("dtype, where", in_turn(DTYPES, ["queries", "keys"]), on_every_backward)
def test_padding_past_an_end_may_hold_nan(run, dtype, where):
    lengths = {"q": 70} if where == "queries" else {"kv": 70}
    example = run.rounded(
        Structure(num_heads=2, seqlen_q=200, seqlen_kv=200, dtype=dtype, mask=masks.Lengths(**lengths)).example()
    )
    names = ("q", "do") if where == "queries" else ("k", "v")
    poisoned = {name: getattr(example, name).copy() for name in names}
    for array in poisoned.values():
        array[..., 70:, :] = np.nan
    clean, other = run.everything(example), run.everything(example.but(**poisoned))
    assert all(np.array_equal(clean[name], other[name]) for name in repeatable(run, clean))
    assert_within("dq", other["dq"], clean["dq"], 2 * example.bounds.dq, example)


@holds_for_examples()
def test_out_receives_the_same_bits(run, example):
    o, lse = run.attend(example.q, example.k, example.v, mask=example.mask, scale=example.scale)
    out = tuple(run.put(np.full_like(x, np.nan)) for x in (o, lse))
    run.attention(example.q, example.k, example.v, mask=example.mask, scale=example.scale, out=out)
    assert run.get(out[0]).tobytes() == o.tobytes() and run.get(out[1]).tobytes() == lse.tobytes()


# Comparisons of executors


in_pairs = pytest.mark.parametrize(
    "pair",
    [
        pytest.param((CPU, SIM), marks=needs_compiler, id="cpu-sim"),
        pytest.param((CPU, GPU), marks=pytest.mark.gpu, id="cpu-gpu"),
        pytest.param((SIM, GPU), marks=[needs_compiler, pytest.mark.gpu], id="sim-gpu"),
    ],
)


def side_by_side(dtype, **changes):
    for mask in (None, masks.Causal("bottom_right"), masks.BlockPattern(np.eye(3, 5, dtype=bool), (50, 40))):
        yield Structure(
            num_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_kv=200, head_dim=24, dtype=dtype, mask=mask, **changes
        ).example()


@in_pairs
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_executors_agree_on_exact_sums_bit_for_bit(pair, dtype):
    for example in side_by_side(dtype, values="lattice"):
        flat = example.but(q=np.zeros_like(example.q))  # all weights of a row are equal
        first, second = (run.attention(flat.q, flat.k, flat.v, mask=flat.mask) for run in pair)
        assert_within("o", second, first, 0.0, flat)


@needs_compiler
@pytest.mark.parametrize(
    ("chip", "example"), in_turn(["T4", "A100", "H100"], side_by_side("float64", values="outliers"))
)
def test_float64_is_within_its_bounds_however_a_chip_multiplies(chip, example):
    arrays = example.q, example.k, example.v
    ready = cuflash.plan(*arrays, mask=example.mask, executor="sim", device=cuflash.DeviceSpec.gpu(chip))
    o, lse = ready.forward(*arrays)
    dq, dk, dv = ready.backward(example.do, *arrays, o, lse, dlse=example.dlse)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@on_kernels_for("dtype", DTYPES)
def test_kernels_give_the_same_bits_every_time(run, dtype):
    example = Structure(
        q_batch=(2,), k_batch=(1,), v_batch=(2,), num_heads=2, num_kv_heads=1, seqlen_q=150, seqlen_kv=200,
        dtype=dtype, mask=masks.Dilated(3, align="bottom_right"),
    ).example()  # fmt: skip
    first, second = run.everything(example), run.everything(example)
    assert all(first[name].tobytes() == second[name].tobytes() for name in repeatable(run, first))


@needs_compiler
@pytest.mark.parametrize("kernel", ["simt", "naive", "fa1", "sm80", "sm90"])
def test_a_scale_below_the_kernels_numbers_is_0(kernel):
    """2^-126 is the smallest normal number of float32, and a GPU may replace smaller numbers by 0."""
    example = Structure(num_heads=2, num_kv_heads=1, seqlen_q=70, seqlen_kv=90, dtype="float16", head_dim=40).example()
    arrays = example.q, example.k, example.v
    results = []
    for each in (0.0, 1e-39, -1e-39, 1e-50, -1e-320):
        ready = cuflash.plan(*arrays, scale=each, executor="sim", kernel=kernel, device=cuflash.DeviceSpec.gpu("H100"))
        o, lse = ready.forward(*arrays)
        results.append([x.tobytes() for x in (o, lse, *ready.backward(example.do, *arrays, o, lse))])
    assert all(tiny == results[0] for tiny in results)
    bound = example.but(scale=0.0).bounds.lse
    assert_within("lse", lse, np.full(lse.shape, np.log(90)), bound)
