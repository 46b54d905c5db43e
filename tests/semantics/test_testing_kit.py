"""The testing kit itself: strategies draw what they promise, assertions fail when they must, the oracle is right."""

import functools
import inspect
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import cuflash
from cuflash import UnsupportedProblem, masks, reference, testing
from cuflash.masks.base import And, Mask, Not, Or
from cuflash.testing import Structure, assert_within, assert_within_bounds, oracle, strategies
from cuflash.testing.strategies import laid_out

SHAPE = masks.MaskShape((2,), 2, 9, 12)
STRATEGIES = {
    "lengths": strategies.lengths(tile=64),
    "heads": strategies.heads(),
    "structures": strategies.structures(max_leaves=1),
    "masks": strategies.masks(SHAPE),
}


def parts_of(mask):
    """Return the masks that a mask consists of."""
    operands = [*getattr(mask, "operands", ()), *([mask.operand] if hasattr(mask, "operand") else [])]
    return [part for each in operands for part in parts_of(each)] if operands else [mask]


def sample(name):
    """Yield two thousand draws, the same in every run, lazily, because few tests need all of them."""
    for number in range(20):
        yield from drawn(name, number)


@functools.cache
def drawn(name, number):
    draws = []

    @settings(max_examples=100, phases=[Phase.generate], database=None, deadline=None)
    @seed(number)
    @given(STRATEGIES[name])
    def collect(value):
        draws.append(value)

    collect()
    return draws


# Strategies draw what they promise


def table_of(mask):
    return mask.toarray(**SHAPE._asdict())


def empty_rows(mask):
    return ~table_of(mask).any(axis=-1)


def has_negative(numbers):
    return np.ndim(numbers) > 0 and bool((numbers < 0).any())


def has(name, value):
    return lambda each: not isinstance(attribute := getattr(each, name), Mask) and attribute == value


OF_STRUCTURES = {
    **{
        f"{name} {value}": has(name, value)
        for name, values in {
            "dtype": ("float16", "bfloat16", "float32", "float64"),
            "values": strategies.VALUES,
            "scale": (None, *strategies.SCALES),
            "head_dim": strategies.HEAD_DIMS,
            "value_dim": strategies.HEAD_DIMS,
            "has_heads": (False,),
            "has_dlse": (True,),
            "has_low_rows": (True,),
            "mask": (None,),
            "seqlen_q": (0,),
            "seqlen_kv": (0,),
        }.items()
        for value in values
    },
    **{
        f"operand {operand} {layout}": lambda each, operand=operand, layout=layout: each.layouts[operand] == layout
        for operand in range(5)
        for layout in strategies.LAYOUTS
    },
    "more queries than keys": lambda each: each.seqlen_q > each.seqlen_kv > 0,
    "more keys than queries": lambda each: each.seqlen_kv > each.seqlen_q > 1,
    "an empty batch": lambda each: each.mask_shape.batch == (0,),
    "two leading axes": lambda each: len(each.mask_shape.batch) == 2,
    "keys stretched over the batch": lambda each: each.q_batch == (2,) and each.k_batch == (1,),
    "queries stretched over the batch": lambda each: each.q_batch == (1,) and each.k_batch == (2,),
    "values without a leading axis": lambda each: each.q_batch and not each.v_batch,
    "unequal dims": lambda each: each.head_dim != each.value_dim,
}
KINDS = (
    masks.Causal, masks.SlidingWindow, masks.Lengths, masks.PrefixLM, masks.Documents, masks.Dilated,
    masks.BlockPattern, masks.Dense, masks.FromFunction, masks.Sequences, And, Or, Not,
)  # fmt: skip
OF_MASKS = {
    **{kind.__name__: lambda mask, kind=kind: isinstance(mask, kind) for kind in KINDS},
    "an empty first row alone": lambda mask: empty_rows(mask)[..., 0].all() and not empty_rows(mask)[..., 1:].all(),
    "an empty last row": lambda mask: empty_rows(mask)[..., -1].all() and not empty_rows(mask)[..., 0].any(),
    "empty rows in the middle": lambda mask: (
        empty_rows(mask)[..., 4].all() and not empty_rows(mask)[..., [0, -1]].any()
    ),
    "nothing": lambda mask: not table_of(mask).any(),
    "everything": lambda mask: table_of(mask).all(),
    "a single cell": lambda mask: (table_of(mask).sum(axis=(-1, -2)) == 1).all(),
    "another mask for another head": lambda mask: np.diff(table_of(mask), axis=1).any(),
    "another mask for another batch entry": lambda mask: np.diff(table_of(mask), axis=0).any(),
    "lengths for each batch entry": lambda mask: any(
        isinstance(part, masks.Lengths) and np.ndim(part.kv) == 1 for part in parts_of(mask)
    ),
    "negative lengths": lambda mask: isinstance(mask, masks.Lengths) and has_negative(mask.kv),
    "negative ids": lambda mask: isinstance(mask, masks.Documents) and has_negative(mask.q_ids),
    "negative ids of keys": lambda mask: isinstance(mask, masks.Documents) and has_negative(mask.kv_ids),
    "documents out of order": lambda mask: isinstance(mask, masks.Documents) and (np.diff(mask.q_ids) < 0).any(),
    "sequences with keys of their own": lambda mask: isinstance(mask, masks.Sequences) and mask.kv_offsets is not None,
    "unequal blocks": lambda mask: isinstance(mask, masks.BlockPattern) and mask.block[0] != mask.block[1],
}
DRAWN = {
    "lengths": {
        str(length): lambda each, length=length: each == length
        for length in (0, 1, 2, 31, 63, 64, 65, 96, 127, 128, 129, 192, 255, 260)
    },
    "heads": {
        f"{group} times {heads}": lambda each, group=group, heads=heads: each == (group * heads, heads)
        for group in (1, 2, 3, 7, 8)
        for heads in (1, 2, 3)
    },
    "structures": OF_STRUCTURES,
    "masks": OF_MASKS,
}


@pytest.mark.parametrize(("strategy", "kind"), [(name, kind) for name, kinds in DRAWN.items() for kind in kinds])
def test_strategies_draw_every(strategy, kind):
    assert any(map(DRAWN[strategy][kind], sample(strategy)))


@given(strategies.structures(most_scores=5000, most_rows=200))
def test_structures_keep_their_caps(structure):
    batch, num_heads, seqlen_q, seqlen_kv = structure.mask_shape
    rows = int(np.prod(batch)) * num_heads * seqlen_q
    # The caps limit batch entries and heads, but one head of one batch entry is always allowed.
    assert rows <= 200 or rows == seqlen_q
    assert rows * seqlen_kv <= 5000 or rows == seqlen_q


@given(strategies.examples())
def test_examples_are_problems_of_cuflash(example):
    problem = example.problem
    assert (example.do.shape, example.do.dtype) == (problem.o_shape(), problem.dtype)
    assert example.allowed.shape == (*problem.lse_shape(), problem.seqlen_kv)
    if example.dlse is not None:
        assert (example.dlse.shape, example.dlse.dtype) == (problem.lse_shape(), problem.accumulator)


@given(strategies.structures())
def test_a_structure_always_makes_the_same_example(structure):
    first, second = structure.example(), structure.example()
    assert all(getattr(first, name).tobytes() == getattr(second, name).tobytes() for name in ("q", "k", "v", "do"))


NAMES = {"Structure": Structure, "masks": masks, "np": np, "cuflash": cuflash, "testing": testing}


@given(
    strategies.structures(
        most_scores=1 << 12, has_non_finite=True, has_sink=True, has_score=True, has_dropout=True, widest=8
    )
)
def test_the_repr_of_an_example_makes_it_again(structure):
    example = structure.example()
    again = eval(repr(example), NAMES)
    assert repr(again) == repr(example)
    for name in ("q", "k", "v", "do", "sink", "dense_mask"):
        assert np.array_equal(*(np.asarray(getattr(each, name), float) for each in (again, example)), equal_nan=True)
    assert again.dropout == example.dropout


RESTRICTED = {
    "batch": ([(2,), (5,)], lambda each: each.q.ndim == each.k.ndim == 4 and len(each.q) == len(each.v) in (2, 5)),
    "grouped_heads": (False, lambda each: each.q.ndim == 2 or each.q.shape[-3] == each.k.shape[-3]),
    "layouts": (["contiguous"], lambda each: each.q.flags.c_contiguous and each.v.flags.c_contiguous),
    "empty_rows": (False, lambda each: each.allowed.any(axis=-1).all()),
    "masks": (st.none(), lambda each: each.mask is None),
}
OF_SINKS = {
    "sink_dtypes": (["float32"], lambda each: each.sink.dtype == np.float32),
    "broadcast_sinks": (False, lambda each: each.sink.shape == (each.problem.num_heads,)),
}


@pytest.mark.parametrize("name", [*RESTRICTED, *OF_SINKS])
def test_examples_can_be_restricted(name):
    value, holds = {**RESTRICTED, **OF_SINKS}[name]

    @settings(database=None, phases=[Phase.generate], max_examples=15)
    @given(strategies.examples(**{name: value}, most_scores=1 << 12, widest=8, has_sink=name in OF_SINKS))
    def check(example):
        assert holds(example), repr(example)

    check()


def test_masks_of_a_function_fit_the_shape_and_wrong_restrictions_are_said():
    @settings(database=None, phases=[Phase.generate], max_examples=10)
    @given(
        strategies.structures(
            masks=lambda shape: st.just(masks.Dense(np.zeros((shape.seqlen_q, shape.seqlen_kv), bool))),
            empty_rows=False, layouts=("negative",), grouped_heads=False, batch=[(1, 2)],
        )
    )  # fmt: skip
    def check(structure):
        assert structure.layouts == ("negative",) * 5 and structure.num_heads == structure.num_kv_heads
        assert structure.q_batch == structure.v_batch == (1, 2) and structure.example().allowed.all()

    check()
    with pytest.raises(UnsupportedProblem) as refused:
        strategies.examples(batch=[2], grouped_heads="no", layouts=["dense"], empty_rows=0, masks=masks.Causal())
    assert {reason.split(" ")[0] for reason in refused.value.reasons} == {*RESTRICTED}


WRONG = {
    "tile": (0, 64.0),
    "most_scores": (0, True),
    "most_rows": (-1, None),
    "max_leaves": (0, "3"),
    "widest": (0, 2.5),
    "longest": (0, "a"),
    "dtypes": ("float32", np.float32, [np.float32], [], ["float31"], ["int32"], ["float32", "float8_e4m3fn"]),
    "has_non_finite": (1, None),
    "has_sink": (1, None),
    "has_score": (1, None),
    "has_dropout": (0.5, None),
    "sink_dtypes": ("float32", [np.float32], []),
    "broadcast_sinks": (0, None),
}


@pytest.mark.parametrize("draw", [strategies.examples, strategies.structures])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_flags_and_dtypes_are_said_before_anything_is_drawn(draw, name):
    for value in WRONG[name]:
        with pytest.raises(UnsupportedProblem) as refused:
            draw(**{name: value})
        (reason,) = refused.value.reasons
        assert reason.startswith(f"{name} must be ") and "; got " in reason


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ([np.dtype("float32")], "got [dtype('float32')]: write 'float32', as in dtypes=['float32']"),
        ([ml_dtypes.bfloat16, "float16"], "write 'bfloat16', as in dtypes=['bfloat16', 'float16']"),
        ("float64", "got 'float64': write 'float64', as in dtypes=['float64']"),
        (np.float16, "got the class float16: write 'float16', as in dtypes=['float16']"),
        ([object], "write 'float32', as in dtypes=['float32']"),
    ],
)
def test_dtypes_are_written_as_they_can_be_typed(dtypes, message):
    with pytest.raises(UnsupportedProblem) as refused:
        strategies.examples(dtypes=dtypes)
    assert message in str(refused.value)


def test_all_wrong_arguments_of_a_strategy_are_said_at_once():
    with pytest.raises(UnsupportedProblem) as refused:
        strategies.examples(**{name: values[0] for name, values in WRONG.items()})
    assert sorted(reason.split(" ")[0] for reason in refused.value.reasons) == sorted(WRONG)


# Layouts


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (2, 1, 4, 1), (1, 3, 1, 5), (0, 2, 3), (2, 0, 3)])
@pytest.mark.parametrize("layout", [layout for layout in strategies.LAYOUTS if layout != "broadcast"])
def test_a_layout_leaves_the_values(layout, shape, dtype):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    view = laid_out(values, layout)
    assert (view.shape, view.dtype) == (values.shape, values.dtype) and np.array_equal(view, values)


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        ("contiguous", (2, 3, 4), (96, 32, 8)),
        ("transposed", (2, 3, 4), (32, 64, 8)),
        ("transposed", (2, 3, 4, 5), (480, 40, 120, 8)),  # the sequence axis before the heads
        ("transposed", (3, 4), (8, 24)),
        ("padded", (2, 3, 4), (7 * 6 * 8, 7 * 8, 8)),
        ("stepped", (2, 3, 4), (6 * 8 * 8, 2 * 8 * 8, 2 * 8)),
        ("negative", (2, 3, 4), (96, -32, -8)),
        ("offset", (2, 3, 4), (96, 32, 8)),
        ("broadcast", (2, 3, 4), (0, 32, 8)),
        ("odd_strides", (1, 3, 1), (99_990_001 * 8, 8, 99_990_001 * 8)),
    ],
)
def test_a_layout_has_its_strides(layout, shape, strides):
    assert laid_out(np.zeros(shape), layout).strides == strides


def test_an_offset_view_is_off_by_one_element():
    assert laid_out(np.zeros((2, 3), np.float16), "offset").ctypes.data % 4 == 2


@pytest.mark.parametrize("layout", ["padded", "stepped", "offset"])
def test_the_gaps_of_a_layout_are_poisoned(layout):
    view = laid_out(np.zeros((2, 3, 4)), layout)
    while view.base is not None:
        view = view.base
    assert np.isnan(view).any()


# Assertions


@pytest.mark.parametrize(
    ("actual", "exact", "bound", "ratio"),
    [
        ([1.0], [1.0], [0.0], 0.0),
        ([1.5, 2.0], [1.0, 2.0], [1.0, 0.0], 0.5),
        ([-np.inf], [-np.inf], [0.0], 0.0),
        ([np.nan], [np.nan], [0.0], 0.0),
        ([5.0], [1.0], [np.inf], 0.0),
        ([np.inf], [1.0], [np.inf], 0.0),
        ([], [], [], 0.0),
    ],
)
def test_what_is_within_gives_its_share_of_the_bound(actual, exact, bound, ratio):
    assert assert_within("x", np.array(actual), np.array(exact), np.array(bound)) == ratio


@pytest.mark.parametrize(
    ("actual", "exact", "bound"),
    [
        ([np.nextafter(2.0, 3.0)], [1.0], [1.0]),
        ([np.nan], [1.0], [1.0]),
        ([1.0], [np.nan], [1.0]),
        ([np.inf], [1.0], [1.0]),
        ([0.0], [-np.inf], [1.0]),
        ([np.inf], [-np.inf], [1.0]),
        ([1e-300], [0.0], [0.0]),
        ([1.0], [1.0, 1.0], [1.0]),
        ([1.0], [0.0], [np.nan]),
    ],
)
def test_what_is_outside_fails(actual, exact, bound):
    with pytest.raises(AssertionError):
        assert_within("x", np.array(actual), np.array(exact), np.array(bound))


def test_a_failure_names_the_worst_and_the_first_element():
    exact = np.zeros((2, 3))
    actual = exact + [[0, 2, 0], [0, 0, 8]]
    with pytest.raises(AssertionError) as failure:
        assert_within("dq", actual, exact, np.ones((2, 3)), "of this call")
    assert str(failure.value).splitlines() == [
        "dq[1, 2] is 8.0, should be 0.0: off by 8, 8 times its bound of 1",
        "2 of 6 elements are outside their bounds, the first at dq[0, 1]",
        "of this call",
    ]


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_every_result_is_compared(name):
    example = Structure(seqlen_q=5, seqlen_kv=7).example()
    exact = getattr(example.exact, name)
    assert assert_within_bounds(example, **{name: exact}) == 0
    with pytest.raises(AssertionError, match=rf"{name}\["):
        assert_within_bounds(example, **{name: exact + 2 * getattr(example.bounds, name)})


def test_changed_operands_are_judged_again():
    example = Structure(seqlen_q=2, seqlen_kv=3).example()
    assert not np.array_equal(example.exact.o, example.but(v=2 * example.v).exact.o)


# The oracle


@pytest.mark.parametrize(("dtype", "wide"), [(np.float16, np.float64), (np.float64, np.longdouble)])
def test_the_oracle_is_wider_than_what_it_judges(dtype, wide):
    o, _ = oracle.Heads(*np.ones((3, 2, 2), dtype)).attention()
    assert o.dtype == wide


# Code for users


def documented_code():
    """Return the indented block of the package's docstring."""
    return re.search(r"^ {4}from .*?(?=^\S)", inspect.getdoc(testing), re.MULTILINE | re.DOTALL)[0]


def run_documented(my_attention):
    names = {"my_attention": my_attention}
    exec(inspect.cleandoc("\n" + documented_code()), names)
    for name, test in names.items():
        if name.startswith("test_"):
            test()


@pytest.fixture
def _profile():
    """Restore the profile that was loaded before, since the documented file loads a profile derived from it."""
    before = settings.default
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")


@pytest.mark.usefixtures("_profile")
def test_the_documented_test_file_passes_a_right_attention():
    run_documented(lambda q, k, v, *, mask, scale: cuflash.attention(q, k, v, mask=mask, scale=scale, return_lse=True))


@pytest.mark.usefixtures("_profile")
def test_the_documented_test_file_fails_a_wrong_one():
    settings.register_profile("without shrinking", settings.default, phases=[Phase.generate])
    settings.load_profile("without shrinking")

    def without_a_scale(q, k, v, *, mask, scale):
        return reference.attention(q, k, v, mask=mask, scale=1.0)

    with pytest.raises(AssertionError):
        run_documented(without_a_scale)


def test_every_check_of_the_module_is_in_one_list_and_names_its_source():
    checks = {name for name in vars(testing.properties) if name.startswith("check_")}
    listed = [*testing.FORWARD_PROPERTIES, *testing.GRADIENT_PROPERTIES, *testing.PAIR_PROPERTIES]
    assert sorted(check.__name__ for check in listed) == sorted(checks)
    assert all(re.search(r"\(\d+(, \d+)*\)\.$", inspect.getdoc(check)) for check in listed)


def test_the_kit_names_what_installs_hypothesis():
    code = "import sys; sys.modules['hypothesis'] = None; import cuflash.testing"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]
    assert output.startswith(
        "ModuleNotFoundError: cuflash.testing needs Hypothesis: pip install '.[testing]' in a clone"
    )
