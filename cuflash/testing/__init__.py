"""A test kit for attention functions: exact results, derived error bounds, and strategies that search for failures.

`check` tests your own attention function with all of the kit, in whatever language it is written:

    def test_my_attention():
        testing.check(my_attention, my_gradients)

The following test file uses the parts of the kit with its own settings:

    from hypothesis import given, settings, strategies
    from cuflash import testing

    settings.register_profile("attention", deadline=None)   # any example may be slow on a busy machine
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

The function takes ``(q, k, v, *, mask, scale)``, with arrays as in `cuflash.attention` and a bool array or None as the
mask, and returns o and lse. Check gradients, ``(q, k, v, do, *, dlse, mask, scale) -> (dq, dk, dv)``, with the same
assertion and with `GRADIENT_PROPERTIES`, and check both functions together with `PAIR_PROPERTIES`.

`examples(has_non_finite=True)` puts NaN and infinities into operands. Use them only with
`check_non_finite_values_reach_what_they_should` of `PAIR_PROPERTIES`; all other properties need finite operands.

The kit needs Hypothesis (in a clone, ``pip install '.[testing]'``) and works with any test runner.
"""

from importlib.util import find_spec

if find_spec("hypothesis") is None:
    raise ModuleNotFoundError(
        "cuflash.testing needs Hypothesis: pip install '.[testing]' in a clone of cuflash, or pip install hypothesis",
        name="hypothesis",
    )

from ._check import check
from ._chosen_strategy import chosen
from .assertions import (
    Example,
    assert_exact_probes,
    assert_within,
    assert_within_bounds,
)
from .mask_strategies import masks
from .non_finite import assert_non_finite
from .properties import FORWARD_PROPERTIES, GRADIENT_PROPERTIES, PAIR_PROPERTIES
from .strategies import Structure, examples, structures

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
    "check",
    "chosen",
    "examples",
    "masks",
    "structures",
]


def __dir__() -> list[str]:
    return __all__
