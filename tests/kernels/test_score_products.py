"""Score functions to which sm90's forward kernel passes q . k unscaled, so that constant factors are combined."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from cuflash.planning.spec import KernelSpec
from cuflash.scores.products import of_products
from cuflash.scores._primitives import Arithmetic
from cuflash.scores.roundoff import score_errors
from cuflash.scores.values import Operands
from cuflash.testing import Structure, assert_within, assert_within_bounds
from executors import Run, is_long
from test_scores import everything
from test_sm90 import on_sm90

import cuflash
from cuflash import masks, scores
from cuflash.scores import Score

SLOPES = np.array([0.5, -0.03], np.float32)
FUNCTIONS = {
    "alibi": scores.alibi(SLOPES),
    "temperature": scores.temperature(np.array([0.5, -1.5], np.float32)),
    "softcap": scores.softcap(3.0),
    "fast": scores.softcap(3.0, fast=True),
    "capped distances": scores.softcap(20.0) @ scores.alibi(SLOPES),
    "distances of a cap": scores.alibi(SLOPES) @ scores.softcap(3.0),
    "queries": Score(lambda s, b, h, i, j: 2 * s + 0.01 * i - np.tanh(s) * 0.5 + 0.02 * (j - i)),
    "both": Score(lambda s, b, h, i, j, slope: -(s - slope[h] * (j - i)) + 0.125, slope=SLOPES),
}


def spec_of(library: Any, score: Any, **options: Any) -> KernelSpec:
    """Return the forward kernel of a float16 problem."""
    x = library.ShapeDtype((2, 300, 128), np.dtype(np.float16))
    arguments = {
        "executor": "gpu",
        "device": library.DeviceSpec.gpu("H100"),
        "kernel": "sm90",
        "score": score,
    } | options
    spec: KernelSpec = library.plan(x, x, x, **arguments)._plan.specs["forward"]
    return spec


def check_plans(library: Any) -> None:
    """Check that factors are combined if they can neither overflow nor vanish, and no array is read at a position."""

    def takes(score: Any, **options: Any) -> bool:
        return spec_of(library, score, **options).score_takes_products

    softcap, table = library.scores.softcap, library.ShapeDtype((2, 300, 300), np.dtype(np.float16))
    assert takes(library.scores.alibi(SLOPES))
    assert takes(softcap(50.0))
    assert takes(softcap(50.0), scale=2.0)
    for scale in (0.0, -1.0, 2.0**-30, 2.0**30):
        assert not takes(softcap(50.0), scale=scale)
    assert not takes(softcap(1e30))
    assert not takes(softcap(1e-30))
    assert not takes(library.scores.bias(table))
    assert not takes(library.scores.Score(lambda s, b, h, i, j, x: s + x[h, i, 0], x=table))
    assert not takes(None)
    assert _takes_in_cache(library, 50.0)
    assert not _takes_in_cache(library, 1e30)


def _takes_in_cache(library: Any, cap: float) -> bool:
    """Return whether the kernel for chunks of a KV cache passes products to a softcap's function."""
    names = "planning.prefill", "cache.scoring", "planning.problem"
    prefill, scoring, problem = (import_module(f"{library.__name__}.{name}") for name in names)
    x = library.ShapeDtype((2, 1, 300, 128), np.dtype(np.float16))
    kind = scoring.ScoreKind.of_score(library.scores.softcap(cap))
    placed = kind.of(problem.Problem.of(x, x, x))
    spec: KernelSpec = prefill.prefill_spec(placed, library.DeviceSpec.gpu("H100"), "sm90")
    return spec.score_takes_products


def test_factors_are_joined_where_they_can_be() -> None:
    check_plans(cuflash)


SHARED = Score(lambda s, b, h, i, j: (lambda x: 0.5 * x - 0.25 * (x * x))(np.tanh(0.75 * s)) + 3 * (s * s))
OPERATIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "real": np.float64,
    "tanh": np.tanh, "tanh_fast": np.tanh, "logistic": lambda x: 1 / (1 + np.exp2(x)),
}  # fmt: skip


def check_values(library: Any) -> None:
    """Check that programs that take products have the values of the original functions."""
    of_products = import_module(f"{library.__name__}.scores.products").of_products
    rng, scale = np.random.default_rng(0), 0.25
    float64 = Arithmetic(np.finfo(float).eps / 2, np.finfo(float).smallest_normal, np.finfo(float).max)
    products, i, j = rng.standard_normal((2, 5, 7)), np.arange(5)[:, None], np.arange(7)
    for name, score in {**FUNCTIONS, "shared": SHARED}.items():
        program, is_unscaled = of_products(score.program)
        rounded = FUNCTIONS["softcap"] if name == "fast" else score  # this test computes both with NumPy's tanh
        operands, s = Operands(rounded.numbers, [*rounded.arrays.values()]), scale * products
        errors = score_errors(rounded.program, operands, (), s, float64.ua * np.abs(s), float64).e_f
        for head in range(2):
            arguments = {"s": products[head], "h": head, "i": i, "j": j, "scale": scale, "inverse_scale": 1 / scale}
            computed: list[Any] = []
            for each in program.instructions:
                args = [computed[a] for a in each.args]
                if each.op in ("const", "number"):
                    computed.append(each.value if each.op == "const" else score.numbers[each.value])
                elif each.op == "load":
                    computed.append([*score.arrays.values()][each.value].astype(np.float64)[*args])
                else:
                    computed.append(arguments[each.op] if each.op in arguments else OPERATIONS[each.op](*args))
            expected = score(products[head] * scale, 0, head, i, j)
            ours = computed[program.results[0]] * (scale if is_unscaled else 1)
            assert_within(name, ours, np.broadcast_to(expected, (5, 7)), 2 * errors[head])


def test_programs_of_products_have_the_values_of_functions() -> None:
    check_values(cuflash)


def test_a_score_costs_one_factor() -> None:
    """ALiBi multiplies no score, and a softcap one before the exponential, whatever the softmax scale is."""
    for name, count in (("alibi", 1), ("temperature", 1), ("softcap", 2)):
        result = of_products(FUNCTIONS[name].program)
        dependent = [False] * len(result.program.instructions)
        products = 0
        for n, each in enumerate(result.program.instructions):
            dependent[n] = each.op in ("s", "i", "j") or any(dependent[a] for a in each.args)
            products += each.op == "mul" and dependent[n]
        assert products == count
        assert result.is_unscaled == (name == "alibi")


def check_results(run: Run, names: tuple[str, ...], scales: tuple[float | None, ...] = (None,)) -> None:
    """Check results against their bounds, under a mask that has steps on both sides of the diagonal."""
    structure = Structure(
        num_heads=2, num_kv_heads=1, seqlen_q=200, seqlen_kv=300, head_dim=72, value_dim=72, dtype="float16",
        mask=masks.SlidingWindow(150, 60, "top_left"),
    )  # fmt: skip
    for name in names:
        for scale in scales:
            example = run.rounded(structure.example().but(score=FUNCTIONS[name], scale=scale))
            assert_within_bounds(example, **everything(run, example))


@on_sm90
def test_functions_of_products_are_within_their_bounds(run: Run) -> None:
    check_results(run, tuple(FUNCTIONS) if is_long() or run.executor == "gpu" else ("alibi", "queries"))


@on_sm90
def test_other_scales_are_within_their_bounds(run: Run) -> None:
    """Scales that are combined with the function's factors, and one that is not."""
    check_results(run, ("alibi",), (0.5, -0.25) if run.executor == "gpu" or is_long() else (0.5,))
