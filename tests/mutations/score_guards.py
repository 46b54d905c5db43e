"""Guards for faults of score functions: properties of programs, ranges, errors and results, for many functions.

Each guard takes a library: the installed one, or a copy with a fault under another name.
"""

import weakref
from dataclasses import replace

import numpy as np
import test_score_alignment as alignment
from executors import CPU
from hypothesis import strategies as st
from mutations.python_guards import hunt, part
from test_score_programs import (
    EXTENTS, RANGES, REFUSED, branches, check_arrays, check_exact_zeros, check_powers, check_repeated,
    check_repeated_scores, places, message_of,
)  # fmt: skip

SIGNS = (AssertionError, ValueError, IndexError, TypeError)  # exceptions with which a guard reports a fault
SEEDS = st.integers(0, 2**32 - 1)


def shape_of(library):
    return part(library, "masks.base").MaskShape((2, 2), 2, 5, 7)


def score_of_formula(library, formula, seed):
    shape = shape_of(library)
    arrays = formula.arrays(shape, seed)
    score = library.scores.Score(formula, **arrays)
    s = 4 * np.random.default_rng(seed).standard_normal((*shape.batch, *shape[1:]))
    return score, part(library, "scores.values").Operands(score.numbers, tuple(arrays.values()), shape.batch), s


def formulas_of(library):
    return part(library, "testing.formulas").formulas()


def values_are_right(library):
    """Check that a program has the values of its function, in float64."""
    for function in SMALL:
        score, s, i = library.scores.Score(function), np.linspace(-3, 3, 7), np.arange(7)
        operands = part(library, "scores.values").Operands(score.numbers, ())
        (actual,) = part(library, "scores.values").values(score.program, operands, s, 0, 0, i, 2)
        assert (actual == function(s, 0, 0, i, 2)).all(), score
    wide_integers_are_subtracted_exactly(library)
    batches_are_read_in_place(library)

    @hunt(formulas_of(library), SEEDS, seeds=3)
    def check(formula, seed):
        score, operands, s = score_of_formula(library, formula, seed)
        at = places(shape_of(library))
        wide = {name: x if x.dtype.kind in "iub" else x.astype(np.float64) for name, x in score.arrays.items()}
        with np.errstate(all="ignore"):
            exact = np.broadcast_to(formula(s, **at, **wide), s.shape)
            (result,) = part(library, "scores.values").values(score.program, operands, s, **at)
        assert np.array_equal(np.broadcast_to(result, s.shape), exact, equal_nan=True)


def texts_have_their_programs(library):
    check_repeated_scores(library)

    @hunt(formulas_of(library), SEEDS, seeds=3)
    def check(formula, seed):
        check_repeated(library, score_of_formula(library, formula, seed)[0])


SMALL = (
    lambda s, b, h, i, j: 0 - s, lambda s, b, h, i, j: s - 1, lambda s, b, h, i, j: s + 1, lambda s, b, h, i, j: -1 * s,
    lambda s, b, h, i, j: 0 + s, lambda s, b, h, i, j: s / 2, lambda s, b, h, i, j: s / 3, lambda s, b, h, i, j: 7 - s,
    lambda s, b, h, i, j: 7 / (s + 9), lambda s, b, h, i, j: np.where(s > 0, 2 * s, 5.5),
    lambda s, b, h, i, j: s + (i - j) % 3 + (j - i) // 2, lambda s, b, h, i, j: np.clip(s, -1, 1.5),
    lambda s, b, h, i, j: 2.5 * s + 3.5 * i + 4.5, lambda s, b, h, i, j: np.log2(s + 4) + np.log(s + 5),
    lambda s, b, h, i, j: np.exp2(s) + np.exp(s / 7), lambda s, b, h, i, j: 2 ** np.sign(s) + (i + 1) ** 2 + s**2,
)  # fmt: skip


def batches_are_read_in_place(library):
    """Check that an array's leading axes match those before the heads, from the right; axes of length 1 broadcast."""
    s, b = np.zeros((2, 3, 1, 2, 1)), np.arange(6).reshape(2, 3, 1, 1, 1)
    for leading in ((2, 3), (3,), (2, 1), (1, 3), (1,)):
        array = np.random.default_rng(0).standard_normal((*leading, 2))
        score = library.scores.Score(lambda s, b, h, i, j, a: s + a[..., i], a=array)
        operands = part(library, "scores.values").Operands((), (array,), (2, 3))
        i = np.arange(2)[:, None]
        (actual,) = part(library, "scores.values").values(score.program, operands, s, b, 0, i, 0)
        assert np.array_equal(actual, np.broadcast_to(array[..., None, :, None], s.shape))


def wide_integers_are_subtracted_exactly(library):
    time = np.array([2**30, 2**30 + 1, 2**40], np.int64)
    score = library.scores.Score(lambda s, b, h, i, j, time: s - (time[i] - time[j]) + time[2] * 0.0, time=time)
    i, j = np.ogrid[:2, :2]
    operands = part(library, "scores.values").Operands(score.numbers, (time,))
    (actual,) = part(library, "scores.values").values(score.program, operands, np.zeros((2, 2), np.float32), 0, 0, i, j)
    assert np.array_equal(actual, [[0, 1], [-1, 0]])
    least = library.scores.Score(lambda s, b, h, i, j, time: time[2] + i * 0, time=time)
    (actual,) = part(library, "scores.values").values(least.program, operands, np.zeros(1), 0, 0, 0, 0)
    assert float(np.max(actual)) == 2**31 - 1


def derivatives_are_right(library):
    """Check that derivatives equal those of dual numbers in long double, within the error allowed for float64."""
    program_of, roundoff = part(library, "scores.program"), part(library, "scores.roundoff")
    dual = part(library, "testing.dual")

    @hunt(formulas_of(library), SEEDS, seeds=6)
    def check(formula, seed):
        score, operands, s = score_of_formula(library, formula, seed)
        at, names = places(shape_of(library)), [x.name for x in score.program.arrays if x.kind == "real"]
        program = program_of.derived(score.program, tuple(names))
        model = roundoff.Arithmetic(2.0**-53, 1e-300, 1e300)
        results = roundoff.values_and_errors(program, operands, s, 0.0, **at, model=model)
        arrays = {name: x if x.dtype.kind in "iub" else x.astype(np.longdouble) for name, x in score.arrays.items()}
        reads = {name: dual.Captured(arrays[name]) for name in names}
        values_by_name = arrays | {name: each.read() for name, each in reads.items()}
        wide = s.astype(np.longdouble)
        with np.errstate(all="ignore"):
            f = formula(dual.Dual(wide, {"s": np.ones_like(wide)}), **at, **values_by_name)
        tangents = f.tangents if isinstance(f, dual.Dual) else {}
        wanted = [getattr(f, "value", f), tangents.get("s", 0)]
        for load in program_of.gradient_loads(program, names):
            name = program.arrays[program.instructions[load].value].name
            wanted.append(sum(x for key, x in tangents.items() if key[0] == id(reads[name])))
        for (value, error), exact in zip(results, wanted, strict=True):
            off = np.abs(value - exact)
            assert ((off <= 2 * error) | (np.isnan(value) & np.isnan(exact)) | (value == exact)).all(), score

    branches_do_not_leak(library)
    ties_are_kept(library)


def slope_of(library, function, x):
    score = library.scores.Score(function)
    operands = part(library, "scores.values").Operands(score.numbers, ())
    program = part(library, "scores.program").derived(score.program)
    actual = part(library, "scores.values").values(program, operands, np.array(x, float), 0, 0, 0, 0)[1]
    return np.broadcast_to(actual, np.shape(x))


def branches_do_not_leak(library):
    def f(s, b, h, i, j):
        log = np.log(s)
        return np.where(s > 0, log, 0) + np.where(s > 1, -log / 2, 0) - np.where(s > 2, np.sqrt(s - 2), 0)

    assert np.allclose(slope_of(library, f, [-1.0, 0.0, 0.5, 1.5]), [0, 0, 2, 1 / 3], rtol=1e-14, atol=0)

    def nested(s, b, h, i, j):
        return np.where(s > 0, np.where(s > 1, -np.log(s), 0), 0)

    assert np.array_equal(slope_of(library, nested, [-1.0, 0.0, 2.0]), [0, 0, -0.5])


def ties_are_kept(library):
    wanted = [
        (lambda s, b, h, i, j: np.abs(s), 0.0, 0), (lambda s, b, h, i, j: np.sign(s), 0.0, 0),
        (lambda s, b, h, i, j: np.minimum(2 * s, s), 0.0, 2), (lambda s, b, h, i, j: np.maximum(s, 2 * s), 0.0, 1),
        (lambda s, b, h, i, j: np.sqrt(s), 0.0, np.inf), (lambda s, b, h, i, j: s**3, 2.0, 12),
        (lambda s, b, h, i, j: 2.5**s, 0.0, np.log(2.5)), (lambda s, b, h, i, j: 1.5 / s, 2.0, -0.375),
        (lambda s, b, h, i, j: np.tanh(s), 0.0, 1), (lambda s, b, h, i, j: np.exp2(s), 0.0, np.log(2)),
        (lambda s, b, h, i, j: np.log2(s), 1.0, 1 / np.log(2)), (lambda s, b, h, i, j: np.arctan(s), 3.0, 0.1),
    ]  # fmt: skip
    for function, x, slope in wanted:
        assert float(slope_of(library, function, x)) == slope, slope


def errors_hold(library):
    """Check that float32 results of perturbed scores lie within the errors, at every operation."""
    program_of, roundoff = part(library, "scores.program"), part(library, "scores.roundoff")
    info = np.finfo(np.float32)
    model = roundoff.Arithmetic(float(info.eps) / 2, float(info.smallest_normal), float(info.max))

    @hunt(formulas_of(library), SEEDS, seeds=6)
    def check(formula, seed):
        score, operands, s = score_of_formula(library, formula, seed)
        rng, at = np.random.default_rng(seed), places(shape_of(library))
        e_s = 10.0 ** rng.integers(-6, 0) * np.abs(s)
        near = (s + e_s * rng.uniform(-0.95, 0.95, s.shape)).astype(np.float32)
        names = [x.name for x in score.program.arrays if x.kind == "real"]
        program = program_of.derived(score.program, tuple(names))
        bounds = roundoff.values_and_errors(program, operands, s, e_s + 2e-7 * np.abs(s), **at, model=model)
        results = part(library, "scores.values").values(program, operands, near, **at)
        for x, (value, error) in zip(results, bounds, strict=True):
            off = np.abs(np.subtract(x, value, dtype=np.float64))
            assert ((off <= error) | np.equal(x, value) | np.isnan(value)).all(), score

    functions_err_by_as_much_as_their_argument_lets_them(library, model)
    check_exact_zeros(library)


def functions_err_by_as_much_as_their_argument_lets_them(library, model):
    """Check, for large argument errors, that an operation's error covers both ends, but not ten times as much."""
    program_of, roundoff = part(library, "scores.program"), part(library, "scores.roundoff")
    functions = {
        "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh, "sqrt": np.sqrt,
        "abs": np.abs, "neg": np.negative, "arctan": np.arctan,
    }  # fmt: skip
    s, e_s = np.array([0.7, 2.0, 3.0]), np.array([0.5, 0.1, 1e-3])
    for op, function in functions.items():
        builder = program_of.Builder()
        program = builder.finish(builder.apply(op, builder.put("s", "real")))
        operands = part(library, "scores.values").Operands((), ())
        ((value, error),) = roundoff.values_and_errors(program, operands, s, e_s, 0, 0, 0, 0, model)
        reached = np.maximum(np.abs(function(s + e_s) - value), np.abs(function(s - e_s) - value))
        assert (reached * (1 - 1e-12) <= error).all() and (error <= 10 * reached).all(), op
    builder = program_of.Builder()
    divisor = builder.put("s", "real")
    program = builder.finish(builder.apply("div", builder.const(1.0), divisor))
    s, e_s = np.array([0.3, 0.3, -0.3]), np.array([0.1, 0.4, 0.1])
    operands = part(library, "scores.values").Operands((), ())
    ((_, error),) = roundoff.values_and_errors(program, operands, s, e_s, 0, 0, 0, 0, model)
    assert error[0] >= 1 / 0.2 - 1 / 0.3 - 1e-12 and error[2] == error[0] < 2 and np.isinf(error[1])


def programs_are_simple(library):
    """Check that programs have their own numbers, and depend on exactly what they read."""
    finished_programs_have_their_own_numbers(library)
    batched = library.scores.Score(lambda s, b, h, i, j, a: s + a[..., j], a=np.zeros((3, 4)))
    assert {"b", "j"} in part(library, "scores.program").depends(batched.program)


def finished_programs_have_their_own_numbers(library):
    """Check that functions with equal instructions share a program but not numbers, and zeros keep their sign."""
    evaluated, operands = part(library, "scores.values").values, part(library, "scores.values").Operands
    for function in (
        *(lambda s, b, h, i, j, by=by: s * by + np.tanh(s / 5) + 3 * j for by in (3.0, 2.5, 4.0)),
        *(lambda s, b, h, i, j, by=by: s / (by * np.where(i < j, 0.0, 0.0)) for by in (1.0, -1.0)),
    ):
        score = library.scores.Score(function)
        with np.errstate(divide="ignore"):
            (actual,) = evaluated(score.program, operands(score.numbers, ()), 4.0, 0, 0, 0, 2)
            wanted = function(4.0, 0, 0, 0, 2)
        assert actual == wanted, score
    score_of = library.scores.Score
    loads = [score_of(lambda s, b, h, i, j, a: s + a[i], a=np.ones(3, dtype)) for dtype in (np.float32, float)]
    assert [score.program.arrays[0].dtype for score in loads] == ["float32", "float64"]


def compositions_are_right(library):
    """Check that a composed score has the arguments of its own call, also if a composition is reused.

    On either side, s / cap is off by two roundoffs if it is computed with the reciprocal, tanh by two more, and three
    other results by one each; no sum cancels.
    """
    relative = 2 * (2 + 2 + 3) * np.finfo(float).eps / 2
    composition = part(library, "scores.composition").composition
    own = library.scores.Score(lambda s, b, h, i, j, a: s * a[h], a=np.array([2.0, 3.0]))
    others = library.scores.Score(lambda s, b, h, i, j, a: s * a[h], a=np.array([4.0, 5.0]))
    biases = [np.full((3, 4), 0.5), np.full((3, 4), 1.5), np.full((3, 1), 2.5), np.full((3, 4), 3.5, np.float32)]
    for score in (None, own, others):
        for cap in (2.0, 5.0, np.float32(3.0), None):
            for array in (*biases, *biases, None):
                composed = composition(score, cap, array, lambda bias: bias)
                if composed is None:
                    continue
                s = 1.0 if cap is None else float(cap) * np.tanh(1 / float(cap))
                s = s if array is None else s + np.broadcast_to(array, (3, 4))[1, 1]
                s = s if score is None else s * score.arrays["a"][1]
                operands = part(library, "scores.values").Operands(composed.numbers, tuple(composed.arrays.values()))
                (actual,) = part(library, "scores.values").values(composed.program, operands, 1.0, 0, 1, 1, 1)
                assert abs(actual - s) <= relative * s, (score, cap, array)
                assert all(each is array for name, each in composed.arrays.items() if name == "bias")
                assert [composed.arrays[each.name].dtype for each in composed.program.arrays] == [
                    each.dtype for each in composed.program.arrays
                ]
    large = np.zeros((5, 5))
    gone = weakref.ref(large)
    composition(None, None, large, lambda bias: bias)
    composition(own, 2.0, large, lambda bias: bias)
    del large
    assert gone() is None  # after a call, nothing keeps its array alive


def indices_are_proven(library):
    """Check that integers stay within their ranges, and that an index that may leave its axis is refused."""
    ranges = part(library, "scores.ranges")

    @hunt(formulas_of(library), SEEDS, seeds=2)
    def check(formula, seed):
        score, operands, s = score_of_formula(library, formula, seed)
        shape = shape_of(library)
        known = ranges.ranges(score.program, dict(zip("bhij", (shape.num_batch, *shape[1:]))))
        results = part(library, "scores.values").run(score.program, operands, s, **places(shape))
        for n, (least, most) in known.items():
            assert least <= np.min(results[n]) and np.max(results[n]) <= most, score

    for index, extent, reason in RANGES:
        def f(s, b, h, i, j, near, x):
            return s + near[index(i, j, x)]

        score = library.scores.Score(f, near=np.zeros(extent), x=np.zeros(20, np.int32))
        reasons = ranges.range_reasons(score.program, [(extent,), (20,)], (2,), EXTENTS, "float32")
        assert (reason in reasons[0]) if reason else (reasons == []), reason
    far = library.scores.Score(lambda s, b, h, i, j: s - np.abs(i - j))
    assert ranges.range_reasons(far.program, [], (), {**EXTENTS, "j": 2**24 + 1}, "float32")
    assert not ranges.range_reasons(far.program, [], (), {**EXTENTS, "j": 2**24}, "float32")
    assert not ranges.range_reasons(far.program, [], (), {**EXTENTS, "j": 2**24 + 1}, "float64")


def refusals_are_told(library):
    """Check that each function that no kernel can run is refused, with its line and the fix."""
    for function, arrays, wanted in REFUSED.values():
        try:
            library.scores.Score(function, **arrays)
        except library.UnsupportedProblem as error:
            assert wanted.format(line=branches.__code__.co_firstlineno + 1) in message_of(error)
        else:
            raise AssertionError(wanted)
    traced = []

    def keeps(s, b, h, i, j):
        traced.append(s)
        return traced[0]

    library.scores.Score(keeps)
    try:
        library.scores.Score(keeps)
    except library.UnsupportedProblem:
        return
    raise AssertionError("a symbol of an earlier call is taken")


def results_are_right(library):
    """Check that every cpu result is within its bound, with gradients of arrays, tile by tile in many blocks."""
    part(library, "executors.tile_program")._BLOCK = 64
    bounds_grow_with_the_function(library)
    drawn = part(library, "testing.strategies").examples(
        most_scores=1 << 11, most_rows=150, widest=16, longest=70, has_score=True
    )  # fmt: skip

    @hunt(drawn, seeds=2)
    def check(example):
        within_bounds(library, example)

    structures = part(library, "testing.strategies").Structure
    masks = library.masks
    for structure in (
        structures(num_heads=4, num_kv_heads=2, seqlen_q=37, seqlen_kv=53, mask=masks.Causal("bottom_right")),
        structures(q_batch=(2,), k_batch=(1,), v_batch=(2,), num_heads=2, seqlen_q=20, seqlen_kv=600, scale=2.0),
    ):
        plain = structure.example()
        shape = plain.problem.mask_shape
        rng = np.random.default_rng(0)
        bias = rng.standard_normal((shape.num_heads, 1, shape.seqlen_kv)).astype(np.float32)
        capped_bias = library.scores.bias(bias) @ library.scores.softcap(1.5)
        within_bounds(library, plain.but(score=capped_bias, wrt=("bias",)))
        temperature = library.scores.temperature(np.linspace(0.5, 2, shape.num_heads))
        within_bounds(library, plain.but(score=temperature, wrt=("per_head",)))
        allowed = np.broadcast_to(plain.allowed, (*shape.batch, *shape[1:])).copy()
        allowed[..., 3] = False
        full = np.where(allowed, rng.standard_normal(allowed.shape), np.nan).astype(np.float32)
        within_bounds(library, plain.but(score=library.scores.bias(full), wrt=("bias",), mask=allowed), is_finite=True)
        a = (np.arange(shape.seqlen_kv) != 3).astype(np.float32)
        logs = library.scores.Score(lambda s, b, h, i, j, a: s + np.log(a[j]), a=a)
        logs = plain.but(score=logs, wrt=("a",), mask=allowed)
        within_bounds(library, logs, is_finite=True)

        def hides(s, b, h, i, j):
            return np.where(i % 3 == 0, -np.inf, s) + np.log(np.where(j < 2, 0 * s, 1))

        results = within_bounds(library, plain.but(score=library.scores.Score(hides)))
        assert all(np.isfinite(results[name]).all() for name in ("dq", "dk", "dv"))


def bounds_grow_with_the_function(library):
    """Check that a slope that is a thousand times as steep gives bounds that are hundreds of times as large."""
    q = np.full((1, 4, 64), 0.5, np.float32)
    plain = library.error_bound(q, q, q, q)
    steep = library.error_bound(q, q, q, q, score=lambda s, b, h, i, j: 1000.0 * (s - 2))
    assert (steep.lse > 100 * plain.lse).all()


def within_bounds(library, example, is_finite=False):
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, scale=example.scale, score=example.score, wrt=example.wrt,
        return_lse=True,
    )  # fmt: skip
    gradients = vjp(example.do, example.dlse)
    results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients)))
    others = {name: gradients[name] for name in example.wrt}
    part(library, "testing.assertions").assert_within_bounds(example, **results, others=others)
    assert not is_finite or all(np.isfinite(x).all() for x in (*results.values(), *others.values()))
    return results


def calls_are_right(library):
    """Check the order of softcap, bias and score, numbers and arrays read at each call, and plans with other arrays."""
    q = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 4, 8)
    bias = np.linspace(-2, 1, 16, dtype=np.float32).reshape(4, 4)

    def lse_by_hand(cap, bias, slope):
        wide = q.astype(np.float64)
        s = wide @ wide.swapaxes(-1, -2) / np.sqrt(8)
        s = slope * ((s if cap is None else cap * np.tanh(s / cap)) + bias)
        return np.log(np.exp(s).sum(axis=-1))

    def require_bounds(lse, expected, **options):
        assert (np.abs(lse - expected) <= library.error_bound(q, q, q, **options).lse).all()

    for cap, added, slope in ((0.6, bias, 2.0), (0.75, bias, 2.0), (0.75, bias + 1, 2.0), (0.75, bias + 1, 3.0)):
        steep = library.scores.Score(lambda s, b, h, i, j: slope * s)
        options = {"softcap": cap, "bias": added, "score": steep}
        lse = library.attention(q, q, q, **options, return_lse=True)[1]
        require_bounds(lse, lse_by_hand(cap, added, slope), **options)
    ready = library.plan(q, q, q, bias=bias, wrt="bias")
    for actual, added in ((ready.forward(q, q, q)[1], bias), (ready.forward(q, q, q, bias=2 * bias)[1], 2 * bias)):
        require_bounds(actual, lse_by_hand(None, added, 1.0), bias=added)
    o, vjp = library.attention_vjp(q, q, q, bias=bias.astype(np.float16), wrt="bias")
    assert vjp(o)["bias"].shape == (4, 4) and vjp(o)["bias"].dtype == np.float16
    for options in (
        {"softcap": 1e39}, {"bias": bias[:2]},
        {"score": library.scores.relative_position(np.zeros((2, 8)), bidirectional=True), "wrt": "bucket"},
    ):  # fmt: skip
        try:
            library.attention_vjp(q, q, q, **options)
        except library.UnsupportedProblem as error:
            assert options.get("bias") is None or len(options["bias"]) == 4 or "bias must broadcast to" in str(error)
            continue
        raise AssertionError(options)
    wide = q.astype(np.float64)
    assert np.isfinite(library.attention(wide, wide, wide, softcap=1e39)).all()
    sums_have_one_order(library)


def sums_have_one_order(library):
    """Check that gradients of arrays are bitwise reproducible for any number of threads."""
    structure = part(library, "testing.strategies").Structure(num_heads=4, num_kv_heads=4, seqlen_q=2100, seqlen_kv=64)
    example = structure.example()
    host = part(library, "planning.host")
    before, host._SCORES_PER_WORKER = host._SCORES_PER_WORKER, 1
    try:
        score = library.scores.Score(lambda s, b, h, i, j, t: s * t, t=np.ones((), np.float32))
        device = replace(library.DeviceSpec.host(), num_processors=3)
        ready = library.plan(example.q, example.k, example.v, score=score, wrt="t", device=device)
        o, lse = ready.forward(example.q, example.k, example.v)
        results = {
            ready.backward(example.do, example.q, example.k, example.v, o, lse)["t"].tobytes() for _ in range(20)
        }
        assert len(results) == 1
    finally:
        host._SCORES_PER_WORKER = before


def aligned_scores_are_right(library):
    """Check that the last query of a call or packed sequence is aligned with the last key, as in a cache."""
    alignment.check_whole_text(library, alignment.both, 3, 40, CPU)
    for is_inner in (True, False):
        alignment.check_within(library, alignment.both, CPU, is_inner)
    alignment.check_cache(library)


def arrays_are_widened(library):
    """Check that a score that is called on arrays has the values of its program."""
    for dtype in (np.uint8, np.float16, np.uint64):
        check_arrays(library, "difference", dtype)
        check_arrays(library, "product", dtype)
    table = np.array([2**63], np.uint64)
    assert library.scores.Score(lambda s, b, h, i, j, t: s + t[j], t=table)(0.0, 0, 0, 0, 0) == 2**31 - 1


def powers_by_0_are_constant(library):
    """Check that a power with exponent 0 has the derivative 0, also for the base 0."""
    for name in ("of the score, by 0", "by an array", "by an index"):
        check_powers(library, name, "cpu")
