"""Tests for attention: exact answers, bounds that mean something, and a search for what breaks.

For an attention function of your own, in whatever it is written, this is a test file:

    from hypothesis import given, settings, strategies
    from cuflash import testing

    settings.register_profile("attention", deadline=None)   # on a busy machine any example may take long
    settings.load_profile("attention")

    @given(testing.examples())
    def test_my_attention_is_right(example):
        o, lse = my_attention(example.q, example.k, example.v, mask=example.dense_mask, scale=example.scale)
        testing.assert_within_bounds(example, o=o, lse=lse)

    @given(testing.examples(), strategies.sampled_from(testing.FORWARD_PROPERTIES))
    def test_my_attention_has_its_properties(example, check):
        check(my_attention, example)

    @given(testing.examples())
    def test_my_attention_passes_the_exact_probes(example):
        testing.assert_exact_probes(my_attention, example)

The function takes ``(q, k, v, *, mask, scale)``, arrays as `cuflash.attention` takes them, with a bool array or None
for the mask, and returns o and lse. Gradients, ``(q, k, v, do, *, dlse, mask, scale) -> (dq, dk, dv)``, go to the same
assertion and to `GRADIENT_PROPERTIES`, both together to `PAIR_PROPERTIES`.

`examples(has_non_finite=True)` puts NaN and infinities into operands: of `PAIR_PROPERTIES`,
`check_non_finite_values_reach_what_they_should` is about these; the others want finite operands.

The kit needs Hypothesis (in a clone, ``pip install '.[testing]'``) and runs under any test runner.
"""

from importlib.util import find_spec

if find_spec("hypothesis") is None:
    raise ModuleNotFoundError(
        "cuflash.testing needs Hypothesis: pip install '.[testing]' in a clone of cuflash, or pip install hypothesis",
        name="hypothesis",
    )

from ._chosen_strategy import chosen
from .assertions import (
    Example,
    assert_exact_probes,
    assert_within,
    assert_within_bounds,
)
from .non_finite import assert_non_finite
from .properties import FORWARD_PROPERTIES, GRADIENT_PROPERTIES, PAIR_PROPERTIES
from .strategies import Structure, examples, masks, structures

__all__ = [
    "FORWARD_PROPERTIES",
    "GRADIENT_PROPERTIES",
    "PAIR_PROPERTIES",
    "Example",
    "Structure",
    "assert_exact_probes",
    "assert_non_finite",
    "assert_within",
    "assert_within_bounds",
    "chosen",
    "examples",
    "masks",
    "structures",
]


def __dir__() -> list[str]:
    return __all__
