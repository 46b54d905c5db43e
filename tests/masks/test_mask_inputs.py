"""Arguments of masks: numbers of every kind and size, user-defined classes, and wide and deep trees.

Checks take the library as an argument, so that they can also guard copies of it with planted faults.
"""

import copy
import enum
import inspect
import itertools
import math
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import ClassVar

import device_double
import numpy as np
import pytest
import scipy.sparse
from executors import needs_compiler
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import UnsupportedProblem, masks, patterns
from cuflash.masks.base import And, Band, Mask, Or, Xor
from cuflash.masks.content import content, held_arrays
from cuflash.masks.shape import MAX_SEQLEN, MaskShape
from cuflash.planning import plan_cache
from cuflash.testing import mask_strategies
from cuflash.blocks.work_list import work_list
from library_parts import part

EXECUTORS = ["cpu", pytest.param("sim", marks=needs_compiler)]


def seen(library, executor, seqlen_q, seqlen_kv, mask=None, **options):
    """Return which keys each query attends; scores are 0, and V has a different row for each key."""
    q, k, v = np.zeros((seqlen_q, 1)), np.zeros((seqlen_kv, 1)), np.eye(seqlen_kv)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    return library.attention(q, k, v, mask=mask, executor=executor, **options) > 0


# Numbers


FAR = (0, 1, 7, 8, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32, 2**62)
FAR += (2**63 - 9, 2**63 - 1, 2**63, 2**64, 2**70)
LENGTHS = (6, 9)


def numbers(least=0):
    """Return a strategy for Python and NumPy ints: small, the largest of each type, and beyond any length."""
    small = st.builds(mask_strategies.as_kind, st.integers(least, 12), mask_strategies.INTEGER_KINDS)
    greatest = st.sampled_from([kind(np.iinfo(kind).max) for kind in mask_strategies.INTEGER_TYPES])
    return small | greatest | st.sampled_from([number for number in FAR if number >= least])


def sides():
    return st.none() | numbers()


def windows():
    return st.tuples(numbers(), numbers())


RULES = {  # strategies of arguments, and a rule: does query i attend key j?
    "window": (
        (sides(), sides()),
        lambda at, left, right: (left is None or at >= -left) and (right is None or at <= right),
    ),
    "dilated": (
        (numbers(1), sides(), sides()),
        lambda at, dilation, left, right: at % dilation == 0
        and (left is None or at >= -left * dilation)
        and (right is None or at <= right * dilation),
    ),
    "band": (
        (st.none() | numbers() | numbers().map(lambda number: -int(number)), sides()),
        lambda at, lower, upper: (lower is None or at >= lower) and (upper is None or at <= upper),
    ),
    "longformer": ((windows(),), lambda at, window: -window[0] <= at <= window[1]),
    "strided": ((numbers(1),), lambda at, stride: -stride < at <= 0 or at <= 0 and at % stride == 0),
}
PLACED_RULES = {  # rules in which positions matter in addition to arguments
    "compressed": (
        (numbers(1), numbers(1)), lambda i, j, length, stride: j * stride + length - 1 <= i,
    ),
    "prefix": ((numbers(),), lambda i, j, prefix: j <= i or j < prefix),
    "lengths": (
        (sides(), sides()),
        lambda i, j, q, kv: (q is None or i < q) and (kv is None or j < kv),
    ),
    "sink_local": (
        (numbers(), windows()),
        lambda i, j, sinks, window: j <= i + window[1] and (j < sinks or i - j <= window[0]),
    ),
    "fixed": (
        (numbers(1), numbers()),
        lambda i, j, stride, summary: j <= i and (i // stride == j // stride or j % stride >= stride - summary),
    ),
}


@st.composite
def numbered(draw):
    """Draw a name of the tables above, and arguments for it."""
    name = draw(st.sampled_from([*RULES, *PLACED_RULES]))
    arguments = draw(st.tuples(*(RULES | PLACED_RULES)[name][0]))
    if name == "fixed" and arguments[1] > arguments[0]:
        arguments = arguments[::-1] if arguments[1] else (1, 0)
    if name == "band" and None not in arguments and int(arguments[0]) > int(arguments[1]):
        arguments = arguments[::-1]
    if name == "lengths" and arguments == (None, None):
        arguments = (0, None)
    return name, arguments


def numbered_mask(library, name, arguments, align):
    rooms = part(library, "masks")
    kinds = {
        "window": rooms.SlidingWindow, "dilated": rooms.Dilated, "band": rooms.Band, "prefix": rooms.PrefixLM,
        "lengths": lambda q, kv: rooms.Lengths(q=q, kv=kv), "compressed": rooms.Compressed,
    }  # fmt: skip
    make = kinds[name] if name in kinds else getattr(part(library, "patterns"), name)
    aligned = {"align": align} if "align" in inspect.signature(make).parameters else {}
    return make(*arguments, **aligned)


def numbered_table(name, arguments):
    exact = [
        tuple(map(int, number)) if isinstance(number, tuple) else None if number is None else int(number)
        for number in arguments
    ]
    rule = (RULES | PLACED_RULES)[name][1]
    return np.array(
        [
            [rule(j - i, *exact) if name in RULES else rule(i, j, *exact) for j in range(LENGTHS[1])]
            for i in range(LENGTHS[0])
        ]
    )


def check_numbers(library, name_and_arguments, executor):
    name, arguments = name_and_arguments
    mask, expected = numbered_mask(library, name, arguments, "top_left"), numbered_table(name, arguments)
    shape = part(library, "masks.shape").MaskShape((), 1, *LENGTHS)
    assert (mask.toarray(**shape._asdict())[0] == expected).all()
    assert ((~mask).toarray(**shape._asdict())[0] == ~expected).all()
    lists = part(library, "blocks.work_list")
    band = getattr(lists.work_list(lists.requested_mask(mask, False, None, shape), shape, (4, 4)), "band", None)
    for bound in () if band is None else (band.lower, band.upper):
        assert bound is None or abs(bound) <= 2**62, "kernels add places to it in int64"
    if executor is not None:
        assert (seen(library, executor, *LENGTHS, mask) == expected).all()
        if name == "window":
            causal = seen(library, executor, *LENGTHS, window=arguments, causal="top_left")
            assert (causal == expected & np.tri(*LENGTHS, dtype=bool)).all()


@given(numbered())
@example(("window", (np.uint8(3), np.uint8(0))))
@example(("window", (np.int8(127), np.int8(127))))
@example(("window", (0, 2**63 - 1)))
@example(("window", (0, 2**70)))
@example(("dilated", (np.uint8(200), np.uint8(200), np.uint8(200))))
@example(("fixed", (2**70, 2**70 - 3)))
@example(("band", (None, np.int8(127))))
def test_numbers_of_every_kind_and_size_mean_what_they_say(name_and_arguments):
    check_numbers(cuflash, name_and_arguments, "cpu")


@needs_compiler
@settings(max_examples=25)
@given(numbered())
@example(("window", (0, 2**63 - 1)))
@example(("window", (None, 2**63 - 2)))
@example(("band", (-(2**70), 2**70)))
def test_numbers_of_every_kind_and_size_mean_the_same_to_kernels(name_and_arguments):
    check_numbers(cuflash, name_and_arguments, "sim")


def check_shapes(library, kind):
    """Check that differences of lengths, and products of processor counts, do not wrap around."""
    shape_of = part(library, "masks.shape").MaskShape
    shape, plain = shape_of((kind(1),), kind(1), kind(9), kind(6)), shape_of((1,), 1, 9, 6)
    assert shape == plain and {type(extent) for extent in (*shape.batch, *shape[1:])} == {int}
    causal = part(library, "masks").Causal("bottom_right")
    assert (causal.toarray(**shape._asdict()) == np.tri(9, 6, -3, dtype=bool)).all()
    device = library.DeviceSpec(name="x", num_processors=kind(100), tile_memory_bytes=kind(100), cache_bytes=kind(100))
    assert device.num_processors * device.tile_memory_bytes * device.cache_bytes == 100**3
    extents = library.ShapeDtype((kind(9),), np.float32).shape
    assert extents == (9,) and type(extents[0]) is int


@pytest.mark.parametrize("kind", mask_strategies.INTEGER_TYPES)
def test_shapes_and_devices_take_numbers_of_every_kind(kind):
    check_shapes(cuflash, kind)


def check_indices(library, kind):
    index_of = library.BlockIndex
    blocks = np.random.default_rng(0).random((100, 4, 4)) < 0.5
    plain = index_of.from_blocks(blocks, 100, 100, 25)
    index = index_of.from_blocks(blocks, kind(100), kind(100), (kind(25), kind(25)))
    assert (index.to_scipy(kind(0), kind(99)).toarray() == plain.to_scipy(0, 99).toarray()).all()
    assert index.picture(width=kind(100)) == plain.picture(width=100)
    assert index.report(head_dim=kind(100), value_dim=kind(100), itemsize=kind(4)) == plain.report(head_dim=100)
    assert all(type(side) is int for side in (index.seqlen_q, index.seqlen_kv, *index.block))
    assert index_of.from_scipy(plain.to_scipy(elements=True), kind(100), kind(100)).picture() == plain.picture()


@pytest.mark.parametrize("kind", mask_strategies.INTEGER_TYPES)
def test_indices_take_numbers_of_every_kind(kind):
    check_indices(cuflash, kind)
    shape = MaskShape((), 1, 100, 100)
    counts = {"butterfly": {"max_stride": 4}, "bigbird": {"num_global_blocks": 2}, "random": {"num_heads": 1}}
    for name, options in counts.items():
        density = {"density": 0.5} if name == "random" else {}
        one, other = (
            getattr(patterns, name)(
                number(100), block=number(30), **{key: number(value) for key, value in options.items()}, **density
            )
            for number in (kind, int)
        )
        assert np.array_equal(one.toarray(**shape._asdict()), other.toarray(**shape._asdict()))


NUMBERS_REFUSED = {
    "Band's lower is a float": (lambda: Band(-0.5, None), "lower must be an int, or None for no bound; got -0.5"),
    "Band's upper is a bool": (lambda: Band(None, True), "upper must be an int, or None for no bound; got True"),
    "a window of a bool": (lambda: masks.SlidingWindow(True, 0), "left must be an int of at least 0 (the window's k"),
    "a window of a 0-d array": (lambda: masks.SlidingWindow(0, np.array(3)), "right must be an int of at least 0"),
    "an alignment": (lambda: masks.Causal("left"), "align must be"),
    "a prefix of a word": (lambda: masks.PrefixLM("2"), "prefix must be an int"),
    "ids of floats": (lambda: masks.Documents(np.zeros(2)), "q_ids must be an integer array"),
    "a negative dilation": (lambda: masks.Dilated(-1), "dilation must be an int of at least 1; got -1"),
    "a dilation of longformer": (
        lambda: patterns.longformer((2, 2), dilation=1.0), "dilation must be an int of at least 1"
    ),
    "a window of longformer": (lambda: patterns.longformer(3), "got 3: use (3, 0) for 3 tokens before the query"),
    "a window between the dilation's keys": (
        lambda: patterns.longformer((4, 3), dilation=2), "window must be two multiples of dilation=2; got (4, 3)"
    ),
    "an even window of bigbird": (
        lambda: patterns.bigbird(64, num_window_blocks=2), "num_window_blocks must be odd"
    ),
    "a batch that is not a tuple": (lambda: MaskShape(2, 1, 3, 3), "batch must be a tuple of ints"),
    "a negative length": (lambda: masks.Lengths(kv=-1), "kv must be an int of at least 0, or an integer array"),
    "a block beyond all": (lambda: masks.BlockPattern(np.ones((1, 1), bool), 2**40), "block must be at most 10737418"),
    "a pattern too long": (lambda: patterns.butterfly(2**70), "lengths must be at most 1073741824"),
    "a shape of floats": (lambda: MaskShape((), 1, 2.0, 3), "seqlen_q must be an int of at least 0; got 2.0"),
    "a negative extent": (
        lambda: cuflash.ShapeDtype((-1,), "f4"), "shape must be a tuple of ints from 0 to 2**63 - 1; got (-1,)"
    ),
    "half a processor": (
        lambda: cuflash.DeviceSpec(name="x", num_processors=0.5, tile_memory_bytes=1),
        "num_processors must be an int of at least 1; got 0.5",
    ),
}


@pytest.mark.parametrize("name", NUMBERS_REFUSED)
def test_what_is_no_number_is_refused_in_words(name):
    make, words = NUMBERS_REFUSED[name]
    with pytest.raises(UnsupportedProblem) as refused:
        make()
    assert words in str(refused.value)


CALLS_REFUSED = {
    "a length that may be of queries or of keys": (
        lambda: masks.Lengths(np.array([50, 37])), "Lengths takes keywords: masks.Lengths(kv=lengths) for key padding"
    ),
    "a length of one side by its place": (lambda: masks.Lengths(3, kv=4), "for key padding, q= for query padding"),
    "no length": (lambda: masks.Lengths(), "Lengths takes keywords: masks.Lengths(kv=lengths) for key padding"),
    "lengths of None": (lambda: masks.Lengths(q=None, kv=None), "q= for query padding; got None for both"),
    "a band of one number": (lambda: Band(8), "masks.Band(-8, 8) has 8 keys on either side of the query"),
    "a window of one number": (lambda: masks.SlidingWindow(8), "SlidingWindow(8, 0) has the query's own key and 8"),
    "an index of blocks": (
        lambda: cuflash.BlockIndex(np.ones((2, 2), bool)), "with BlockIndex.from_blocks, BlockIndex.from_mask or"
    ),
    "an index of nothing": (lambda: cuflash.BlockIndex(), "make an index with BlockIndex.from_blocks"),
}


@pytest.mark.parametrize("name", CALLS_REFUSED)
def test_a_call_with_two_readings_names_the_one_that_is_meant(name):
    make, words = CALLS_REFUSED[name]
    with pytest.raises(TypeError) as refused:
        make()
    assert words in str(refused.value)


OPERATORS = {
    "+": operator.add, "*": operator.mul, "@": operator.matmul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
OPERATORS_OF_ONE = {"unary -": operator.neg, "unary +": operator.pos, "abs()": operator.abs}
INDEX = cuflash.BlockIndex.from_mask(masks.Causal(), 8, 8, 4)


@pytest.mark.parametrize("sign", OPERATORS)
def test_masks_and_indices_name_the_operators_that_they_have(sign):
    table = np.eye(8, dtype=bool)
    for one, other in itertools.product((masks.Causal(), INDEX), (masks.Causal(), INDEX, 1, table)):
        for pair in ((one, other), (other, one)):
            with pytest.raises(TypeError) as refused:
                OPERATORS[sign](*pair)
            assert f"have no {sign}: combine them with & (both), | (either), ^ (one of two), - (w" in str(refused.value)


@pytest.mark.parametrize("sign", OPERATORS_OF_ONE)
def test_masks_and_indices_have_no_other_operators_of_one(sign):
    for one in (masks.Causal() | masks.Lengths(q=3), INDEX):
        with pytest.raises(TypeError, match="combine them with &") as refused:
            OPERATORS_OF_ONE[sign](one)
        assert f"have no {sign}: " in str(refused.value)


def test_a_bound_may_be_given_by_name_alone():
    assert Band(lower=2) == Band(2, None) and Band(2, upper=3) == Band(2, 3) and Band(upper=3) == Band(None, 3)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9))
def test_an_intersection_of_bands_may_be_empty_and_a_band_may_not(a, b, c, d):
    first, second = Band(min(a, b), max(a, b)), Band(min(c, d), max(c, d))
    both = first & second
    assert (both.toarray(6, 9) == first.toarray(6, 9) & second.toarray(6, 9)).all()
    assert (both.resolve(MaskShape((), 1, 6, 9)).to(np.copy).toarray(6, 9) == both.toarray(6, 9)).all()
    assert (seen(cuflash, "cpu", 6, 9, both) == both.toarray(6, 9)).all()
    if a != b:
        with pytest.raises(UnsupportedProblem, match="lower must be at most upper; .*: exchange them, or write ~masks"):
            Band(max(a, b), min(a, b))


def check_coordinates(library, kind, drawn):
    """Check that a mask can add numbers to coordinates even if their dtype cannot represent the sums."""
    rooms, shape = part(library, "masks"), part(library, "masks.shape").MaskShape((), 1, 9, 9)
    grid = np.ogrid[:1, :1, :9, :9]
    narrow = [side.astype(kind) for side in grid]
    wide = ~rooms.Band(-200, 300) | rooms.Dilated(300) | part(library, "patterns").fixed(300, 295)
    for mask in (drawn.resolve(shape), wide, rooms.BlockPattern(np.ones((1, 1), bool), 300).resolve(shape)):
        values, expected = (np.broadcast_to(mask(*places), (1, 1, 9, 9)) for places in (narrow, grid))
        assert np.array_equal(values, expected)


@given(st.sampled_from(mask_strategies.INTEGER_TYPES), mask_strategies.masks(MaskShape((), 1, 9, 9)))
def test_coordinates_of_every_kind_are_told_the_same(kind, drawn):
    check_coordinates(cuflash, kind, drawn)


# Document ids


ALIKE_IDS = (  # ids that are equal in some dtype
    (0, 1, 2, 127, 128, 255),
    (2**53, 2**53 + 1, 2**60, 2**60 + 1),
    (-1, 2**64 - 1, 0, 2**53, 2**53 + 1),
    (-(2**63), -(2**63) + 1, 0, 1, 2**63 - 1, 2**63, 2**63 + 1),
    (2**60, 2**60 + 1, 0, 2**63, -(2**31)),
)


@st.composite
def documents(draw):
    """Draw ids of queries and keys, each in any integer dtype that holds them, often in order."""
    sides, is_in_order = [], draw(st.booleans())
    chosen = draw(st.sampled_from(ALIKE_IDS))
    every = st.sampled_from(mask_strategies.INTEGER_TYPES)
    wide = st.permutations([np.uint64, np.int64])
    dtypes = draw(wide | st.tuples(every, every) | st.permutations([np.uint64, draw(every)]))
    for length, dtype in zip(LENGTHS, map(np.dtype, dtypes)):
        held = [number for number in chosen if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max] or [0]
        ids = draw(st.lists(st.sampled_from(held), min_size=length, max_size=length))
        sides.append(np.array(sorted(ids) if is_in_order else ids, dtype))
    return sides[0], sides[1], is_in_order


def check_documents(library, drawn):
    q_ids, kv_ids, is_in_order = drawn
    mask = part(library, "masks").Documents(q_ids, kv_ids)
    shape = part(library, "masks.shape").MaskShape((), 1, *LENGTHS)
    expected = np.array([[int(own) == int(other) for other in kv_ids] for own in q_ids])
    assert (mask.toarray(**shape._asdict())[0] == expected).all()
    assert (np.broadcast_to(mask(*np.ogrid[:1, :1, : LENGTHS[0], : LENGTHS[1]]), (1, 1, *LENGTHS)) == expected).all()
    if is_in_order:
        with device_double.transfers_allowed():
            on_device = mask.to(device_double.to_device)
        index = part(library, "blocks.index").BlockIndex.from_mask(on_device, block=4, **shape._asdict())
        with device_double.transfers_allowed():
            assert (index._on_host.toarray()[0, 0] == expected).all()


@given(documents())
@example((np.array([2**60, 2**60 + 1] * 3, np.uint64), np.array([2**60, 2**60 + 1, -1] * 3), False))
@example((np.full(6, 2**63, np.uint64), np.full(9, -(2**63)), True))
@example((np.full(6, -1, np.int8), np.full(9, 2**64 - 1, np.uint64), True))
@example((np.full(6, 2**60, np.uint64), np.full(9, 0, np.int8), True))
def test_ids_of_all_dtypes_are_compared_exactly(drawn):
    check_documents(cuflash, drawn)


@given(st.lists(st.sampled_from((0, 1, 5, 127, 2**53, 2**63, 2**64 - 1)), min_size=2, max_size=2))
def test_lengths_of_all_dtypes_are_compared_exactly(kv):
    fitting = [kind for kind in mask_strategies.INTEGER_TYPES if max(kv) <= np.iinfo(kind).max]
    for kind, make in itertools.product(fitting, (masks.Lengths, masks.PrefixLM)):
        lengths = np.array(kv, kind)
        mask = make(kv=lengths) if make is masks.Lengths else make(lengths, "top_left")
        expected = [[[j < n or (make is masks.PrefixLM and j <= i) for j in range(9)] for i in range(6)] for n in kv]
        assert (mask.toarray(6, 9, batch=(2,), num_heads=1)[:, 0] == np.array(expected)).all()


# Lengths


def check_limits(library):
    """Check that the largest lengths and numbers of matrices and tiles are accepted, and any larger one is refused."""
    spec, most, rooms = library.DeviceSpec.gpu("A100"), part(library, "masks.shape").MAX_SEQLEN, part(library, "masks")

    def planned(q, k, **options):
        q, k = (library.ShapeDtype(shape, "float32") for shape in (q, k))
        return library.plan(q, k, k, **({"device": spec, "kernel": "simt"} | options))._plan

    assert planned((most, 1), (4, 1)).work.band == planned((4, 1), (most, 1)).work.band == rooms.Band()
    with pytest.raises(library.UnsupportedProblem, match="^seqlen_q must be at most 1073741824; got 1073741825: call"):
        planned((most + 1, 1), (4, 1))
    with pytest.raises(library.UnsupportedProblem, match="^seqlen_kv must be at most 1073741824; got 1073741825: att"):
        planned((4, 1), (most + 1, 1))
    for lengths in ((4, most + 1), (most + 1, 4)):
        shape = rooms.MaskShape((), 1, *lengths)
        with pytest.raises(library.UnsupportedProblem, match="must be at most 1073741824; got 1073741825"):
            library.BlockIndex.from_mask(rooms.Band(), block=1 << 28, **shape._asdict())
    few, many, tall = ((extent, 1 << 16, length, 1) for extent, length in ((1 << 14, 1), (16385, 1), (1 << 14, 1000)))
    assert planned(few, few).problem.num_batch_heads == 1 << 30
    for shape in (many, tall):
        with pytest.raises(library.UnsupportedProblem, match="have at most 1073741824 tiles for simt_forward; got"):
            planned(shape, shape)
    host = {"device": library.DeviceSpec.host(), "kernel": "auto"}
    assert planned(many, many, **host).problem.num_batch_heads == 16385 << 16


def test_what_int32_does_not_count_is_refused():
    check_limits(cuflash)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("mask", [Band(MAX_SEQLEN - 5, None), Band(MAX_SEQLEN - 5, 2**70)], ids=str)
def test_the_last_keys_of_the_longest_sequence_are_found(executor, mask):
    keys = np.broadcast_to(np.zeros((1, 1), np.float32), (MAX_SEQLEN, 1))
    _, lse = cuflash.attention(keys[:1], keys, keys, mask=mask, executor=executor, return_lse=True)
    # Two roundoffs of the logarithm, one for the change of its base, and one of that base's constant.
    assert (abs(lse - math.log(5)) <= 4 * np.finfo(np.float32).eps / 2 * math.log(5)).all()


def test_lists_hold_the_longest_lengths():
    shape = MaskShape((), 1, 1, MAX_SEQLEN)
    for mask in (masks.Lengths(kv=2**40), masks.PrefixLM(2**40, "top_left"), masks.Lengths(q=1)):
        work = work_list(mask.resolve(shape), shape, (128, 128))
        assert (work.lo.tolist(), work.hi.tolist()) == ([[[0]]], [[[MAX_SEQLEN]]])


def test_a_mask_itself_knows_no_longest_length():
    shape, far = MaskShape((), 1, 1, 2**40), 2**40 - 1
    for mask in (masks.Lengths(q=1), masks.Lengths(kv=2**40), masks.PrefixLM(2**40, "top_left"), Band(None, None)):
        assert mask.resolve(shape)(0, 0, np.array([0]), np.array([far])).all()
    assert not masks.Lengths(kv=far).resolve(shape)(0, 0, np.array([0]), np.array([far])).any()


# Empty batches


def masks_of(library, batch):
    """Yield masks of 6 queries and 6 keys that hold an array with the axes of a batch, and a function."""
    of, counts, blocks = library.masks, np.ones(batch, np.int64), np.zeros((*batch, 1, 6, 2), np.int64)
    yield from (of.Lengths(kv=counts), of.Lengths(q=counts), of.PrefixLM(counts))
    yield of.Dense(np.ones((*batch, 1, 6, 6), bool))
    yield of.Documents(np.zeros((*batch, 6), np.int64))
    yield of.Sequences(np.broadcast_to([0, 2, 6], (*batch, 3)), causal=True)
    yield from (of.BlockPattern(np.ones((*batch, 1, 3, 3), bool), 2), of.ChosenBlocks(blocks, 2))
    yield of.FromFunction(lambda b, h, i, j: i + b >= j)


def check_empty_batches(library, batch, executor):
    """Check that a call without batch entries, its gradients, index and selections are empty under every mask."""
    q, k = np.ones((*batch, 4, 6, 3), np.float32), np.ones((*batch, 2, 6, 3), np.float32)
    few = {"budget": library.selectors.Budget(top_k=2), "block": 2}
    for each in masks_of(library, batch):
        for mask in (each, each & library.masks.Causal(), ~each):
            o, vjp = library.attention_vjp(q, k, k, mask=mask, executor=executor)
            assert (o.shape, vjp(o.copy()).dk.shape) == (q.shape, k.shape)
            assert mask.density(6, batch=batch, num_heads=4) == 0.0
            for select in (library.selectors.pooled, library.selectors.quest):
                assert library.attention(q, k, k, mask=select(q, k, mask=mask, **few)).shape == q.shape


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("batch", [(0,), (2, 0), (0, 3)], ids=str)
def test_an_empty_batch_takes_every_mask(batch, executor):
    check_empty_batches(cuflash, batch, executor)


# Return values


WRONG_ANSWERS = {
    "of a wrong shape": (lambda b, h, i, j: np.ones((3, 3), bool), "broadcasts to the shape of its coordinates"),
    "of further axes": (lambda b, h, i, j: (i >= j)[None], "broadcasts to the shape of its coordinates"),
    "of numbers": (lambda b, h, i, j: i - j, "a boolean array; got int64"),
    "of nothing": (lambda b, h, i, j: None, "a boolean array; got NoneType"),
}


def check_answers(library):
    bases = part(library, "masks.base")

    class Answers(bases.Mask):
        def __init__(self, rule):
            self.rule = rule

        def __call__(self, b, h, i, j):
            return self.rule(b, h, i, j)

    rooms = part(library, "masks")
    shape = rooms.MaskShape((), 2, 8, 8)
    kinds = {rooms.FromFunction: "FromFunction's function", Answers: "Answers's __call__"}
    for (kind, who), (rule, words) in itertools.product(kinds.items(), WRONG_ANSWERS.values()):
        for mask in (kind(rule), kind(rule) & rooms.Causal(), ~kind(rule) | rooms.Band(0, 0)):
            for ask in (
                lambda mask: seen(library, "cpu", 8, 8, mask),
                lambda mask: mask.toarray(**shape._asdict()),
                lambda mask: library.BlockIndex.from_mask(mask, block=4, **shape._asdict()),
            ):
                with pytest.raises(library.UnsupportedProblem, match=f"^{who} must return .*{words}"):
                    ask(mask)


def test_answers_that_are_none_are_refused_in_words():
    check_answers(cuflash)


PYTHON_WORDS = {
    "and": lambda b, h, i, j: (i >= j) and (j > 2),
    "or": lambda b, h, i, j: (i >= j) or (j > 2),
    "not": lambda b, h, i, j: not (i >= j),
    "if": lambda b, h, i, j: i >= j if (i > 2) else i <= j,
}


@pytest.mark.parametrize("name", PYTHON_WORDS)
def test_a_rule_that_asks_for_the_truth_of_an_array_is_told_what_to_write(name):
    q = np.ones((2, 8, 4), np.float32)
    mask = masks.FromFunction(PYTHON_WORDS[name])
    for ask in (
        lambda: mask.toarray(8),
        lambda: (mask & masks.Causal()).toarray(8),
        lambda: cuflash.BlockIndex.from_mask(mask, 8, 8, block=4),
        lambda: cuflash.attention(q, q, q, mask=PYTHON_WORDS[name]),
    ):
        with pytest.raises(ValueError) as refused:
            ask()
        text = "\n".join([str(refused.value), *getattr(refused.value, "__notes__", [])])
        note = "write &, |, ~ and numpy.where instead of and, or, not and if"
        of_one_element = "must return a boolean array; got bool: use i >= j, np.where, & and | instead of if, and, or"
        assert "truth value" in text and note in text or of_one_element in text


@dataclass(frozen=True, eq=False)
class OwnMask(masks.Mask):
    rule: Callable

    def __call__(self, b, h, i, j):
        return self.rule(b, h, i, j)


@dataclass(frozen=True, eq=False)
class OwnIntervals(masks.Mask):
    rule: Callable

    def intervals(self, b, h, i):
        return self.rule(b, h, i, i)


USERS_RULES = {
    "function": lambda rule: rule,
    "FromFunction": masks.FromFunction,
    "function & mask": lambda rule: masks.Causal() & rule,
    "mask | function": lambda rule: rule | masks.Band(0, 0),
    "not function": lambda rule: ~masks.FromFunction(rule),
    "own mask": OwnMask,
    "own mask & mask": lambda rule: OwnMask(rule) & masks.Causal(),
    "own intervals": OwnIntervals,
}
Q = np.random.default_rng(0).standard_normal((2, 24, 8), dtype=np.float32)
USES_OF_MASKS = {
    "attention": lambda mask: cuflash.attention(Q, Q, Q, mask=mask),
    "attention, causal": lambda mask: cuflash.attention(Q, Q, Q, mask=mask, causal=True),
    "sim": lambda mask: cuflash.attention(Q, Q, Q, mask=mask, executor="sim"),
    "vjp": lambda mask: cuflash.attention_vjp(Q, Q, Q, mask=mask),
    "plan": lambda mask: cuflash.plan(Q, Q, Q, mask=mask),
    "plan for a GPU": lambda mask: cuflash.plan(Q, Q, Q, mask=mask, device=cuflash.DeviceSpec.gpu("H100")),
    "index": lambda mask: cuflash.BlockIndex.from_mask(mask, 24, 24, block=8),
    "recall": lambda mask: cuflash.study.recall(Q, Q, Q, mask=mask),
    "block_mass": lambda mask: cuflash.study.block_mass(Q, Q, block=8, mask=mask),
    "error_bound": lambda mask: cuflash.error_bound(Q, Q, Q, mask=mask),
    "selector": lambda mask: cuflash.selectors.oracle(
        Q, Q, block=8, budget=cuflash.selectors.Budget(top_k=1), mask=mask
    ),
}
ERRORS = (ZeroDivisionError, TypeError, ValueError, KeyError, IndexError, AttributeError, NotImplementedError, OSError)


def check_error(kind, who, use, is_noted=True):
    """Assert that the error of a rule, which `use` calls, comes first and alone, with a note that names `who`."""

    def rule(b, h, i, j):
        raise kind("no such table")

    try:
        use(rule)
    except Exception as caught:
        error = caught
    assert type(error) is kind and error.args == ("no such table",)
    assert error.__context__ is error.__cause__ is None
    notes = getattr(error, "__notes__", [])
    prefix = f"Raised in {who}, which was called with integer arrays of the shapes b ("
    assert len(notes) <= 1 and all(note.startswith(prefix) for note in notes) and (notes or not is_noted)


@pytest.mark.parametrize("use", USES_OF_MASKS)
@pytest.mark.parametrize("make", USERS_RULES)
def test_an_error_of_a_users_rule_comes_first_and_alone(make, use):
    who, is_noted = "the mask function rule", True
    if make.startswith("own mask"):
        who = "the __call__ of the mask OwnMask"
    elif make == "own intervals":  # its intervals are called directly, or by the class's __call__
        who, is_noted = "the __call__ of the mask OwnIntervals", False
    for kind in ERRORS:
        check_error(kind, who, lambda rule: USES_OF_MASKS[use](USERS_RULES[make](rule)), is_noted)


PATTERN = masks.BlockPattern(np.ones((4, 2, 2), bool), 4)
LEADING = {
    "blocks of more heads": (lambda: PATTERN.toarray(8), "batch= and num_heads= in toarray, picture and BlockIndex"),
    "an index of more heads": (lambda: cuflash.BlockIndex.from_mask(PATTERN, 8, 8, block=4), "num_heads="),
    "blocks of more heads than q": (lambda: cuflash.attention(*[np.ones((3, 8, 4))] * 3, mask=PATTERN), "q's axes"),
    "documents of a batch": (lambda: masks.Documents(np.zeros((2, 8), int)).toarray(8), "q's axes before its heads"),
    "lengths of a batch": (lambda: masks.Lengths(kv=np.ones(3, int)).toarray(8), "or for batch= in toarray"),
}


@pytest.mark.parametrize("name", LEADING)
def test_axes_that_do_not_fit_are_told_what_they_stand_for(name):
    ask, words = LEADING[name]
    with pytest.raises(cuflash.UnsupportedProblem) as refused:
        ask()
    for reason in refused.value.reasons:
        for expected in ("the leading axes of ", " must broadcast to (", "): they stand for ", words):
            assert expected in reason
    assert PATTERN.toarray(8, num_heads=4).shape == (4, 8, 8)


# User-defined classes


class FirstKeys(Mask):
    """A user-defined mask that defines only `__call__`."""

    def __init__(self, n):
        self.n = n

    def __call__(self, b, h, i, j):
        return (j < self.n) & (i >= 0)


class OfBand(Band):
    def __init__(self, n):
        super().__init__(0, 0)
        self.n = n

    def intervals(self, b, h, i):
        return 0 * i, 0 * i + self.n


class OfLengths(masks.Lengths):
    """A user-defined mask that derives from one of the library's, with another constructor."""

    def __init__(self, n):
        super().__init__(kv=n)


class Resolving(masks.Causal):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def resolve(self, shape):
        return masks.Lengths(kv=self.n).resolve(shape)


class Slotted(Mask):
    __slots__ = ("__n",)

    def __init__(self, n):
        object.__setattr__(self, "_Slotted__n", n)

    def __call__(self, b, h, i, j):
        return (j < self.__n) & (i >= 0)


class Alike(FirstKeys):
    """A user-defined mask with an `__eq__` that says that all masks of its class are equal."""

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 0


@dataclass(frozen=True, eq=False)
class Declared(Mask):
    n: int

    __call__ = FirstKeys.__call__


@dataclass(frozen=True)
class DeclaredAlike(Mask):
    """A user-defined mask that is a dataclass with fields that are excluded from comparisons."""

    n: int = field(compare=False)

    __call__ = FirstKeys.__call__


@dataclass(frozen=True, slots=True)
class DeclaredSlotted(Mask):
    n: int

    __call__ = FirstKeys.__call__


@dataclass(frozen=True)
class DeclaredAndMore(Mask):
    kind: ClassVar[str] = "more"
    argument: int

    def __post_init__(self):
        object.__setattr__(self, "n", self.argument)

    __call__ = FirstKeys.__call__


class ByParent(Declared):
    """A user-defined mask that is a dataclass only by inheritance."""

    def __init__(self, n):
        super().__init__(0)
        object.__setattr__(self, "own", n)

    def __call__(self, b, h, i, j):
        return (j < self.own) & (i >= 0)


@dataclass(frozen=True)
class OfList(Mask):
    n: list

    def __call__(self, b, h, i, j):
        return (j < self.n[0]) & (i >= 0)


@dataclass(frozen=True)
class OfMask(Mask):
    inner: Mask

    def __call__(self, b, h, i, j):
        return self.inner(b, h, i, j)


class Size(enum.Enum):
    TWO, EIGHT = 2, 8

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


@dataclass(frozen=True)
class OfParts(Mask):
    parts: tuple

    @cached_property
    def n(self):
        return self.parts[0][0].value

    __call__ = FirstKeys.__call__


# Functions that create a mask of the first n keys, for queries that may attend all of them.
NOT_REMEMBERED = {
    "plain": FirstKeys,
    "of Band": OfBand,
    "of Lengths": OfLengths,
    "resolves to another": Resolving,
    "slotted": Slotted,
    "all alike": Alike,
    "declares less than it holds": DeclaredAndMore,
    "declared by its parent": ByParent,
    "declares a list": lambda n: OfList([n]),
    "declares a mask that is plain": lambda n: OfMask(FirstKeys(n)),
}
REMEMBERED = {
    "declared": Declared,
    "declared, all alike": DeclaredAlike,
    "declared with slots": DeclaredSlotted,
    "declares a mask": lambda n: OfMask(masks.Lengths(kv=n)),
    "declares parts": lambda n: OfParts(((Size(n), np.float32(1), np.dtype("int8"), frozenset("ab")), None)),
}
MAKERS = NOT_REMEMBERED | REMEMBERED


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_mask_is_never_taken_for_another_of_its_class(name, executor):
    q, v = np.zeros((8, 1), np.float32), np.eye(8, dtype=np.float32)
    for n in (2, 8):
        expected = np.broadcast_to(np.arange(8) < n, (8, 8))
        mask = MAKERS[name](n)
        for mine in (mask, mask & Band(), ~~mask | Band(9, None)):
            assert (seen(cuflash, executor, 8, 8, mine) == expected).all()
        assert ((cuflash.plan(q, q, v, mask=mask, executor=executor).forward(q, q, v)[0] > 0) == expected).all()


@pytest.mark.parametrize("name", MAKERS)
def test_a_mask_of_any_class_is_copied_and_sent_whole(name):
    mask = MAKERS[name](2)
    for mine in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask), mask.to(np.copy)):
        assert type(mine) is type(mask) and seen(cuflash, "cpu", 8, 8, mine).sum() == 16


def check_classes(library):
    """Check that no user-defined class, whatever it defines, makes a call use the plan of another mask."""
    bases, rooms, contents = part(library, "masks.base"), part(library, "masks"), part(library, "masks.content")

    class Plain(bases.Mask):
        def __init__(self, n):
            self.n = n

        def __call__(self, b, h, i, j):
            return (j < self.n) & (i >= 0)

    class OfBand(rooms.Band):
        def __init__(self, n):
            super().__init__(0, 0)
            self.n = n

        __call__ = Plain.__call__

    class OfCausal(rooms.Causal):
        def __init__(self, n):
            super().__init__()
            self.n = n

        __call__ = Plain.__call__

    class Slotted(bases.Mask):
        __slots__ = ("n",)

        __call__ = Plain.__call__

    @dataclass(frozen=True)
    class Alike(bases.Mask):
        n: int = field(compare=False)

        __call__ = Plain.__call__

    @dataclass(frozen=True)
    class More(bases.Mask):
        argument: int = field(compare=False)

        def __post_init__(self):
            object.__setattr__(self, "n", self.argument % 10)
            object.__setattr__(self, "argument", 0)

        __call__ = Plain.__call__

    @dataclass(frozen=True)
    class MoreInSlot(Slotted):
        argument: int = field(compare=False)

        __post_init__ = More.__post_init__

    class AsItsParent(rooms.Lengths):
        pass

    for cls in (Plain, OfBand, OfCausal, Alike, More, MoreInSlot):
        for n in (2, 8):
            expected = np.broadcast_to(np.arange(8) < n, (8, 8))
            for mine in (cls(n), ~cls(n), cls(n).to(np.copy)) if cls in (Plain, OfBand) else (cls(n),):
                assert (seen(library, "cpu", 8, 8, mine) == (expected if type(mine) is cls else ~expected)).all(), cls
            q, v = np.zeros((8, 1), np.float32), np.eye(8, dtype=np.float32)
            assert ((library.plan(q, q, v, mask=cls(n)).forward(q, q, v)[0] > 0) == expected).all()
    with pytest.raises(TypeError, match="is not hashed, since it is not a dataclass itself"):
        contents.content(AsItsParent(kv=3))


@pytest.mark.parametrize("name", NOT_REMEMBERED)
def test_what_a_mask_does_not_declare_keeps_it_from_being_hashed(name):
    mask = NOT_REMEMBERED[name](2)
    for variant in (mask, ~mask | masks.Causal()):
        with pytest.raises(TypeError, match="is not hashed, since it|whose contents are never hashed"):
            content(variant)
    if type(mask).__eq__ is Mask.__eq__:
        assert mask == mask and mask != NOT_REMEMBERED[name](2)
        with pytest.raises(TypeError):
            hash(mask)


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_mask_that_declares_what_it_holds_is_remembered(name, monkeypatch):
    two, eight = REMEMBERED[name](2), REMEMBERED[name](8)
    assert content(two) == content(REMEMBERED[name](2)) and content(two) != content(eight)
    created = []
    monkeypatch.setattr(plan_cache, "_new_plan", lambda *arguments: created.append(arguments))
    plan_cache._cached_plan.cache_clear()
    problem = part(cuflash, "planning.problem").Problem.of(*[np.zeros((8, 1))] * 3)
    for each in (two, REMEMBERED[name](2), eight):
        plan_cache.plan_for(problem, each, cuflash.DeviceSpec.host(), None, False)
    plan_cache._cached_plan.cache_clear()
    assert [arguments[1] for arguments in created] == [two, eight]


def test_a_list_that_changes_changes_the_answer():
    mask = OfList([2])
    assert seen(cuflash, "cpu", 8, 8, mask).sum() == 16
    mask.n[0] = 8
    assert seen(cuflash, "cpu", 8, 8, mask).sum() == 64


@dataclass(frozen=True)
class Holds(Mask):
    value: object

    def __call__(self, b, h, i, j):
        return i >= j


ALIKE = [1, True, 1.0, np.int64(1), np.float64(1), np.bool_(True), 1 + 0j, 0.0, -0.0, "1", b"1", (1,), (True,), None]
ALIKE += [np.dtype("i4"), np.dtype("u4")]


def check_types(library):
    """Check that values that Python considers equal are distinguished by their types."""
    bases, contents = part(library, "masks.base"), part(library, "masks.content")

    @dataclass(frozen=True)
    class Own(bases.Mask):
        value: object

    for one, other in itertools.combinations(ALIKE, 2):
        assert contents.content(Own(one)) != contents.content(Own(other)), (one, other)
    for one in ALIKE:
        assert contents.content(Own(one)) == contents.content(Own(one))
        assert contents.content(Own(one)) == contents.content(Own(copy.deepcopy(one)))


def test_equal_numbers_of_unlike_types_are_not_one():
    check_types(cuflash)
    assert Holds(math.nan) != masks.Causal() and content(Holds(math.nan)) == content(Holds(float("nan")))


CHANGEABLE = [[1], {}, set(), print, object(), np.ones(2), np.zeros(1, "i4,i4")[0], Size, bytearray(1)]


@pytest.mark.parametrize("value", CHANGEABLE, ids=lambda value: type(value).__name__)
def test_what_may_change_is_never_hashed(value):
    with pytest.raises(TypeError, match="Holds holds .*, whose contents are never hashed"):
        content(Holds(value))
    with pytest.raises(TypeError, match="whose contents are never hashed"):
        content(Holds((1, (value,))))


def test_arrays_of_plain_masks_are_where_the_library_looks_for_them():
    """The library finds the arrays of a plain class like those of a dataclass, wherever the object stores them."""

    class Kept(Mask):
        def __init__(self, table):
            self.table = table

    class KeptInSlot(Mask):
        __slots__ = ("table",)

        def __init__(self, table):
            object.__setattr__(self, "table", table)

    table = np.ones(3)
    for kind in (Kept, KeptInSlot):
        assert list(held_arrays(kind(table) & masks.Causal())) == [table]
        moved = kind(table).to(lambda array: array + 1)
        assert (moved.table == 2).all() and type(moved) is kind


def test_masks_of_sparse_blocks_are_equal_if_they_hold_the_same_array():
    blocks = scipy.sparse.eye_array(4, format="csr")
    one, other = masks.BlockPattern(blocks, 2), masks.BlockPattern(blocks.copy(), 2)
    assert one == one and one != other and one == copy.copy(one)
    with pytest.raises(TypeError, match="contents are never hashed"):
        hash(one)


# Trees


def wide(library, kind, count):
    band = part(library, "masks").Band
    return reduce(kind, [band(-(n % 5), n % 5) for n in range(count)])


def deep(library, count):
    """Build a mask of alternating operators, and the boolean table that it must equal."""
    rooms, mask = part(library, "masks"), part(library, "masks").Causal()
    i, j = np.ogrid[:8, :8]
    allowed = j <= i
    for n in range(count):
        at = n % 15 - 7
        if n % 3 == 0:
            mask, allowed = ~(mask | rooms.Band(at, at)), ~(allowed | (j - i == at))
        elif n % 3 == 1:
            mask, allowed = mask & ~rooms.Lengths(kv=n % 8), allowed & ~(j < n % 8)
        else:
            mask, allowed = rooms.Lengths(q=n % 9) | mask, (i < n % 9) | allowed
    return mask, allowed


def check_tree(library, mask, allowed):
    """Check every method of a mask that is wider and deeper than Python's stack."""
    shape = part(library, "masks.shape").MaskShape((), 1, 8, 8)
    try:
        assert (mask.toarray(**shape._asdict())[0] == allowed).all()
        assert bool(mask(0, 0, 3, 2)) == allowed[3, 2]
        resolved = mask.resolve(shape)
        may, must = resolved.rectangle(0, 0, np.array([2]), np.array([3]), np.array([5]), np.array([6]))
        assert may[0] >= allowed[2, 5] >= np.all(must)
        assert mask._natural_block is None and mask._has_intervals == (mask.intervals(0, 0, 0) is not None)
        assert list(part(library, "masks.content").held_arrays(mask)) == []
        assert mask == mask.to(np.copy) and hash(mask) == hash(mask.to(np.copy)) and mask != ~mask
        assert pickle.loads(pickle.dumps(mask)) == mask == copy.deepcopy(mask) == copy.copy(mask)
        assert repr(mask).count("(") == repr(mask).count(")") > 100
        index = part(library, "blocks.index").BlockIndex.from_mask(mask, block=4, **shape._asdict())
        assert (index.toarray()[0, 0] == allowed).all()
        assert (seen(library, "cpu", 8, 8, mask) == allowed).all()
    except RecursionError as error:
        raise AssertionError("recursion") from error


@pytest.mark.parametrize("kind", [operator.or_, operator.and_])
def test_a_wide_tree_answers_all_that_a_mask_is_asked(kind):
    at = np.arange(8) - np.arange(8)[:, None]
    bands = [abs(at) <= n for n in range(5)]
    check_tree(cuflash, wide(cuflash, kind, 1200), reduce(kind, bands))


def test_a_deep_tree_answers_all_that_a_mask_is_asked():
    check_tree(cuflash, *deep(cuflash, 1200))


@given(st.data())
def test_trees_are_kept_flat_and_shown_as_they_are(data):
    shape = MaskShape((), 1, 5, 5)
    one, two, three = (data.draw(mask_strategies.masks(shape, max_leaves=2)) for _ in range(3))
    for kind, node in ((operator.and_, And), (operator.or_, Or)):
        assert kind(kind(one, two), three) == kind(one, kind(two, three)) == node((one, two, three))
        nested = kind(kind(one, two), three)
        assert not any(type(operand) is node for operand in nested.operands)
        assert repr(nested) == f" {'&' if node is And else '|'} ".join(map(in_brackets, nested.operands))
    assert repr(~one) == f"~{in_brackets(one)}" and (~one).operand is one
    assert repr(And((masks.Causal(),))) == "Causal()"


def in_brackets(mask):
    return f"({mask!r})" if type(mask) in (And, Or, Xor) else repr(mask)


def check_written(library, mask):
    """Check that the repr of a mask evaluates to the mask; arrays and functions are abbreviated."""
    names = {name: getattr(library.masks, name) for name in library.masks.__all__} | {"array": np.array}
    names |= {kind.__name__: kind for kind in mask_strategies.INTEGER_TYPES}
    text = repr(mask)
    assert "=None" not in text and "=False" not in text.replace("by_head=False", "")
    if "<" not in text and "Checkered" not in text:
        again = eval(text, names)
        assert repr(again) == text and type(again).__name__ == type(mask).__name__
        shape = part(library, "masks.shape").MaskShape((), 1, 9, 9)
        assert (again.toarray(**shape._asdict()) == mask.toarray(**shape._asdict())).all()


@given(mask_strategies.masks(MaskShape((), 1, 9, 9)))
def test_a_mask_prints_as_it_is_written(drawn):
    check_written(cuflash, drawn)


LONG = np.arange(9) // 2
TEXTS = {
    "Causal() & SlidingWindow(15, 0)": lambda library: library.masks.Causal() & library.masks.SlidingWindow(15, 0),
    "Causal(align='top_left') | ~(Lengths(kv=3) ^ Dilated(2, left=1))": lambda library: (
        library.masks.Causal("top_left") | ~(library.masks.Lengths(kv=3) ^ library.masks.Dilated(2, 1))
    ),
    "Causal() & ~Band(upper=-2)": lambda library: library.masks.Causal() - library.masks.Band(None, -2),
    "(Causal() & Band(lower=-1)) | Band(lower=0, upper=2)": lambda library: (
        library.masks.Causal() & library.masks.Band(-1, None) | library.masks.Band(0, 2)
    ),
    "SlidingWindow(None, 0)": lambda library: library.masks.SlidingWindow(None, 0),
    "Sequences(array([0, 2, 9]), causal='top_left')": lambda library: (
        library.masks.Sequences([0, 2, 9], causal="top_left")
    ),
    "Documents(<int64 array of shape (9,)>)": lambda library: library.masks.Documents(LONG),
    "ChosenBlocks(<int64 array of shape (1, 9, 0)>, 1)": lambda library: (
        library.masks.ChosenBlocks(np.empty((1, 9, 0), np.int64), 1)
    ),
    "Dense(<bool array of shape (9, 9)>) & Causal()": lambda library: (
        library.masks.Dense(LONG == LONG[:, None]) & library.masks.Causal()
    ),
    "Sparse(<csr_array of shape (9, 9), 9 stored>)": lambda library: (
        library.masks.Sparse(scipy.sparse.eye_array(9, format="csr"))
    ),
    "FromFunction(<lambda>)": lambda library: library.masks.FromFunction(lambda b, h, i, j: i >= j),
    "(Causal() & Band()).on_blocks((4, 2), mirrored=True)": lambda library: (
        (library.masks.Causal() & library.masks.Band()).on_blocks((4, 2), mirrored=True)
    ),
    "<BlockIndex of 1 full and 2 partial blocks of 4 x 4, 75.0 % of all with lengths (8, 8), batch 1, num_heads 1>"
    ".as_mask() & Lengths(q=3)": lambda library: (
        library.BlockIndex.from_mask(library.masks.Causal(), 8, 8, 4) & library.masks.Lengths(q=3)
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_masks_print_short(text):
    assert repr(TEXTS[text](cuflash)) == text


def test_trees_are_made_of_masks():
    for operands in ((), (1, masks.Causal())):
        with pytest.raises(TypeError, match="operands must be masks, at least one; got"):
            And(operands)
