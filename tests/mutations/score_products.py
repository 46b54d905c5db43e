"""Planted faults in score functions to which sm90's forward kernel passes q . k products instead of scores."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from cuflash.sim import SimulationError
from executors import SIM
from mutations.planting import Edit
from test_score_products import check_plans, check_results, check_values

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions with which a guard reports a fault


def distances_are_right() -> None:
    check_results(replace(SIM, kernel="sm90"), ("alibi",))


def factors_are_joined_where_they_can_be(library: ModuleType) -> None:
    check_plans(library)


def values_are_those_of_functions(library: ModuleType) -> None:
    check_values(library)


SCORE, PRODUCTS = "sm90/tile_score.cuh", "scores/products.py"
FAULTS = {
    distances_are_right: {
        "distances count from the first key of the step": Edit(
            SCORE, "apply_to_each", "query(i) - block.start - Tile::first_column()", "query(i) - block.start"
        ),
        "keys of a step lie together": Edit(
            SCORE, "apply_to_each", "T(Tile::column(j))", "T(j)"
        ),
        "the softmax scale is not among the factors": Edit(
            SCORE, "prepare", "work.batch_head.head, softmax_scale)", "work.batch_head.head)"
        ),
        "all keys of a tile are in its first step": Edit(
            "attention/block_iterator.cuh", "BlockIterator.next",
            "position_ + (end_ - position_ - 1) / Width * Width", "position_",
        ),
        "a warpgroup's first step of a reversed tile is its last": Edit(
            "sm90/kv_producer.cuh", "step_flags", "!kVisitsLastFirst &&", ""
        ),
        "products are scaled before too": Edit(
            SCORE, "apply_to_each", "Score::kTakesProducts ? s.at(i, j) :", "false ? s.at(i, j) :"
        ),
        "exponents have no scale": Edit(
            "attention/score.cuh", "exponent_scale", "&& !score::Function::kIsUnscaled", ""
        ),
    },
    factors_are_joined_where_they_can_be: {
        "negative scales are joined": Edit(
            PRODUCTS, "can_take_products", "_LEAST_SCALE <= scale <= _GREATEST_SCALE", "abs(scale) <= _GREATEST_SCALE"
        ),
        "numbers of any size are joined": Edit(
            PRODUCTS, "can_take_products", "_LEAST_NUMBER <= abs(x) <= _GREATEST_NUMBER", "True"
        ),
        "chunks of a cache join numbers of any size": Edit(
            "planning/prefill.py", "prefill_spec", "score=problem.score, numbers=problem.numbers", "score=problem.score"
        ),
        "arrays are read at positions": Edit(
            PRODUCTS, "can_take_products", 'dependencies[n] & {"i", "j"}', "False"
        ),
    },
    values_are_those_of_functions: {
        "a value that others need loses its factors": Edit(
            PRODUCTS, "_times", 'new.put("mul", "real", self.value(n), self._product(factors))', "self.value(n)"
        ),
        "tanh loses its factors": Edit(
            PRODUCTS, "_times", "one = self._product(factors) if factors else new.const(1.0)", "one = new.const(1.0)"
        ),
        "a chain of factors loses one": Edit(
            PRODUCTS, "_times", "factors = [*factors, self.value(of_tile[0])]", "factors = [self.value(of_tile[0])]"
        ),
    },
}
