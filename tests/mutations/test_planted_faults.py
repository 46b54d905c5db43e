"""Each fault of the zoo is detected by the tier of checks meant for it, and attention without a fault passes."""

import functools

import pytest
from faulty_attention import FORWARD_FAULTS, GRADIENT_FAULTS, ROUNDING_FAULTS, attend, can_serve, pull
from hypothesis import HealthCheck, Phase, find, settings

from cuflash import masks
from cuflash.arrays import DTYPES
from cuflash.testing import (
    FORWARD_PROPERTIES,
    GRADIENT_PROPERTIES,
    PAIR_PROPERTIES,
    Structure,
    assert_exact_probes,
    assert_within_bounds,
    structures,
)
from cuflash.testing.assertions import assert_wide_accumulators

NARROW = ("float16", "bfloat16")
SEQLENS = (96, 200)
REAL_FAULTS = [fault for fault in FORWARD_FAULTS if fault not in ROUNDING_FAULTS]


@functools.cache
def example_of(dtype, seqlen, has_dlse=True):
    structure = Structure(
        num_heads=4, num_kv_heads=2, seqlen_q=seqlen, seqlen_kv=seqlen, head_dim=64, value_dim=32,
        dtype=dtype, mask=masks.Causal(), scale=0.125, has_dlse=has_dlse,
    )  # fmt: skip
    example = structure.example()
    return example.but(product_dtype=example.q.dtype)


def forward(example, fault):
    o, lse = attend(example.q, example.k, example.v, mask=example.dense_mask, scale=0.125, fault=fault)
    return {"o": o, "lse": lse}


def gradients(example, fault):
    operands = example.q, example.k, example.v, example.do
    results = pull(*operands, dlse=example.dlse, mask=example.dense_mask, scale=0.125, fault=fault)
    return dict(zip(("dq", "dk", "dv"), results))


def is_caught(check, *arguments, **options):
    try:
        check(*arguments, **options)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
@pytest.mark.parametrize("seqlen", SEQLENS)
def test_attention_without_a_fault_passes_every_tier(dtype, seqlen):
    example = example_of(dtype, seqlen)
    assert_within_bounds(example, **forward(example, None), **gradients(example, None))
    assert_exact_probes(attend, example)


@pytest.mark.parametrize("dtype", [*NARROW, "float32"])
@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize("fault", REAL_FAULTS)
def test_a_forward_fault_is_outside_the_bounds(fault, seqlen, dtype):
    example = example_of(dtype, seqlen)
    assert is_caught(assert_within_bounds, example, **forward(example, fault))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("fault", ROUNDING_FAULTS)
def test_rounding_in_the_wrong_place_is_outside_the_bounds_or_seen_by_a_probe(fault, dtype):
    example = example_of(dtype, max(SEQLENS))
    faulty = functools.partial(attend, fault=fault)
    assert is_caught(assert_within_bounds, example, **forward(example, fault)) or is_caught(
        assert_exact_probes, faulty, example
    )


@pytest.mark.parametrize("dtype", [*NARROW, "float32"])
@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_a_gradient_fault_is_outside_the_bounds(fault, seqlen, dtype):
    example = example_of(dtype, seqlen)
    assert is_caught(assert_within_bounds, example, **gradients(example, fault))


# The purpose of each tier


@pytest.mark.parametrize("dtype", [*NARROW, "float32"])
@pytest.mark.parametrize(
    "fault",
    ["last key dropped", "mask off by one", "padding key of zero logit", "key read for its neighbour", "lse in base 2"],
)
def test_lse_alone_sees_every_wrong_set_of_keys(fault, dtype):
    example = example_of(dtype, max(SEQLENS))
    assert is_caught(assert_within_bounds, example, lse=forward(example, fault)["lse"])


@pytest.mark.parametrize("seqlen", [1024, 8192])
def test_probable_bounds_see_one_key_missing_from_thousands(seqlen):
    structure = Structure(seqlen_q=2, seqlen_kv=seqlen, head_dim=64, value_dim=8, dtype="bfloat16", scale=0.125)
    example = structure.example()
    example = example.but(product_dtype=example.q.dtype)
    assert_within_bounds(example, **forward(example, None), probable=True)
    lse = forward(example, "last key dropped")["lse"]
    assert is_caught(assert_within_bounds, example, lse=lse, probable=True)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("fault", ["o accumulated in storage dtype", "l accumulated in storage dtype"])
def test_the_staircase_sees_narrow_accumulators(fault, dtype):
    assert is_caught(assert_wide_accumulators, functools.partial(attend, fault=fault), example_of(dtype, 96).q.dtype)


# Properties need no exact answer


@pytest.mark.parametrize("fault", REAL_FAULTS)
def test_a_forward_fault_breaks_a_property(fault):
    faulty = functools.partial(attend, fault=fault)
    assert any(is_caught(check, faulty, example_of("float32", 96)) for check in FORWARD_PROPERTIES)


@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_a_gradient_fault_breaks_a_property(fault):
    example, faulty = example_of("float32", 96), functools.partial(pull, fault=fault)
    assert any(is_caught(check, faulty, example) for check in GRADIENT_PROPERTIES) or any(
        is_caught(check, attend, faulty, example) for check in PAIR_PROPERTIES
    )


@pytest.mark.parametrize("has_dlse", [True, False])
def test_attention_without_a_fault_has_every_property(has_dlse):
    example = example_of("bfloat16", 70, has_dlse)
    for check in FORWARD_PROPERTIES:
        check(attend, example)
    for check in GRADIENT_PROPERTIES:
        check(pull, example)
    for check in PAIR_PROPERTIES:
        check(attend, pull, example)


# The strategies detect faults without hints

HUNT = settings(
    max_examples=200, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.parametrize("fault", REAL_FAULTS)
def test_two_hundred_examples_find_a_forward_fault(fault):
    def shows(structure):
        example = structure.example().but(do=None, dlse=None)
        example = example.but(product_dtype=example.q.dtype, scale=example.problem.softmax_scale)
        o, lse = attend(example.q, example.k, example.v, mask=example.dense_mask, scale=example.scale, fault=fault)
        return is_caught(assert_within_bounds, example, o=o, lse=lse)

    find(structures(max_leaves=1).filter(lambda each: can_serve(each.example())), shows, settings=HUNT)


@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_two_hundred_examples_find_a_gradient_fault(fault):
    def shows(structure):
        example = structure.example()
        example = example.but(product_dtype=example.q.dtype, scale=example.problem.softmax_scale)
        operands = example.q, example.k, example.v, example.do
        results = pull(*operands, dlse=example.dlse, mask=example.dense_mask, scale=example.scale, fault=fault)
        return is_caught(assert_within_bounds, example, **dict(zip(("dq", "dk", "dv"), results)))

    find(structures(max_leaves=1).filter(lambda each: can_serve(each.example())), shows, settings=HUNT)
