"""Examples with tangents of their arrays: the exact derivatives along the tangents, their bounds, and an assertion.

>>> import numpy as np
>>> from cuflash.testing import Structure
>>> moving = Moving(Structure(seqlen_q=3, seqlen_kv=5).example(), {"q": np.ones((1, 3, 8), np.float32)})
>>> moving.exact.o_dot.shape
(1, 3, 8)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .. import reference
from ..arrays import Array, accumulator_dtype
from ..bounds import Bounds
from ..planning.score_operands import numbers_of
from ..scores.program import Program, derived, pushed
from ..scores.values import Operands, values
from .assertions import Example, reference_is_finer, assert_within, on_lattice
from .memory_layouts import LAYOUTS, laid_out
from .strategies import examples


KINDS = ("normal", "lattice", "zero", "one_hot", "drift")


@dataclass(frozen=True, eq=False)
class Moving:
    """An example with tangents of its arrays.

    Parameters
    ----------
    example : Example
        The operands.
    tangents : dict of arrays
        Tangents by the name of their array: "q", "k", "v", "sink", arrays of the score, and "do" and "dlse".

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.testing import Structure
    >>> example = Structure(seqlen_q=3, seqlen_kv=5).example()
    >>> Moving(example, {"v": np.ones(example.v.shape, np.float32)}).exact.o_dot.round(6).max()
    np.float64(1.0)
    """

    example: Example
    tangents: Mapping[str, Array]

    def of_call(self, *, has_gradients: bool = False) -> dict[str, Any]:
        """Return the tangents as keywords of `attention_jvp`, or of `attention_hvp`.

        Parameters
        ----------
        has_gradients : bool
            Whether the call takes tangents of do and dlse.

        Returns
        -------
        dict
            Keywords.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.testing import Structure
        >>> sorted(Moving(Structure().example(), {"q": 1, "sink": 2, "do": 3}).of_call())
        ['q_dot', 'tangents']
        """
        own = ("q", "k", "v", "do", "dlse") if has_gradients else ("q", "k", "v")
        named = {f"{name}_dot": self.tangents[name] for name in own if name in self.tangents}
        others = {name: x for name, x in self.tangents.items() if name not in ("q", "k", "v", "do", "dlse")}
        return named | ({"tangents": others} if others else {})

    def scaled(self, factor: float) -> Moving:
        """Return the example with all tangents times a number.

        Parameters
        ----------
        factor : float
            The number; multiplication by a power of two is exact.

        Returns
        -------
        Moving
            The same example with the scaled tangents.

        Examples
        --------
        >>> import numpy as np
        >>> Moving(None, {"q": np.ones(1, np.float32)}).scaled(2).tangents
        {'q': array([2.], dtype=float32)}
        """
        return Moving(self.example, {name: np.asarray(x * x.dtype.type(factor)) for name, x in self.tangents.items()})

    @cached_property
    def exact(self) -> Bounds:
        """The exact tangents of o, lse, dq, dk, dv and dsink, with the names of their bounds.

        Tangents of other gradients are left out, and so are o and lse, which `example.exact` has.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.testing import Structure
        >>> example = Structure(seqlen_q=3, seqlen_kv=5).example()
        >>> Moving(example, {"q": np.zeros(example.q.shape, np.float32)}).exact.lse_dot.any()
        np.False_
        """
        example = self.example
        wide = self._wide
        own = {name: wide(getattr(example, name)) for name in ("q", "k", "v", "do", "dlse", "sink")}
        dots = {name: wide(self.tangents[name]) for name in own if name in self.tangents}
        options: dict[str, Any] = {
            "mask": example.dense_mask, "scale": example.scale, "weight_factors": example.weight_factors,
            "sink": own["sink"], "sink_dot": dots.get("sink"),
        }  # fmt: skip
        slopes = {}
        if example.score is not None:
            options |= {"score": self._of_score(False), "score_tangent": self._of_score(False, moves=True)}
            slopes = {"score_slope": self._of_score(True), "score_slope_tangent": self._of_score(True, moves=True)}
        moved = [dots.get(name) for name in "qkv"]
        o_dot, lse_dot = reference.attention_jvp(own["q"], own["k"], own["v"], *moved, **options)
        if example.do is None:
            return Bounds(o=None, lse=None, o_dot=o_dot, lse_dot=lse_dot)
        gradients = own["q"], own["k"], own["v"], own["do"]
        options |= {"do_dot": dots.get("do"), "dlse": own["dlse"], "dlse_dot": dots.get("dlse"), **slopes}
        dq, dk, dv, *dsink = reference.attention_hvp(*gradients, *moved, **options)
        return Bounds(
            o=None, lse=None, o_dot=o_dot, lse_dot=lse_dot, dq_dot=dq, dk_dot=dk, dv_dot=dv,
            dsink_dot=dsink[0] if dsink else None,
        )  # fmt: skip

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of `cuflash.error_bound`.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.testing import Structure
        >>> example = Structure(seqlen_q=3, seqlen_kv=5).example()
        >>> Moving(example, {"q": example.q}).bounds.dk_dot.shape
        (1, 5, 8)
        """
        return self.example._bounds(tangents=self.tangents)

    def _wide(self, x: Array) -> Array:
        """Convert an array to a dtype with a smaller unit roundoff than that of the results."""
        is_narrow = np.dtype(accumulator_dtype(self.example.q.dtype)).itemsize < 8
        return None if x is None else np.asarray(x).astype(np.float64 if is_narrow else np.longdouble)

    def _of_score(self, is_slope: bool, moves: bool = False) -> Callable[..., Array]:
        """Return the score's program, or its slope with respect to s, as a function of scores and optional tangents."""
        example = self.example
        score, shape = example.score, example.problem.mask_shape
        assert score is not None
        names = [array.name for array in score.program.arrays if array.name in self.tangents]
        kinds = {array.name: array.kind for array in score.program.arrays}
        arrays = [self._wide(x) if kinds[name] == "real" else x for name, x in score.arrays.items()]
        arrays += [self._wide(self.tangents[name]) for name in names if moves]
        numbers = numbers_of(score, shape, np.dtype(np.float64))
        program: Program = derived(score.program) if is_slope else score.program
        program = pushed(program, names) if moves else program
        h, i, j = np.ogrid[: shape.num_heads, : shape.seqlen_q, : shape.seqlen_kv]
        b = np.arange(math.prod(shape.batch)).reshape(*shape.batch, 1, 1, 1)

        def function(s: Array, s_dot: Array = None) -> Array:
            return values(program, Operands(numbers, arrays, shape.batch), s, b, h, i, j, s_dot)[-1]

        return function

    def __repr__(self) -> str:
        return f"Moving({self.example!r}, tangents of {', '.join(self.tangents)})"


def with_tangents(example: Example, kinds: Mapping[str, str], seed: int = 0, layout: str = "contiguous") -> Moving:
    """Add random tangents of some arrays to an example.

    Parameters
    ----------
    example : Example
        The operands.
    kinds : dict of str
        Kinds of values by the name of the array: "normal", "lattice" (integers -2..2), "zero", "one_hot", or "drift",
        which is nearly equal for all rows of an array.
    seed : int
        Seed of the values.
    layout : str
        The memory layout of tangents with at least two axes; see `laid_out`.

    Returns
    -------
    Moving
        The example with the tangents, which have the shapes and dtypes of their arrays.

    Examples
    --------
    >>> from cuflash.testing import Structure
    >>> with_tangents(Structure().example(), {"q": "zero"}).tangents["q"].any()
    np.False_
    """
    rng, tangents = np.random.default_rng(seed), {}
    for name, kind in kinds.items():
        x = _arrays(example)[name]
        drawn = rng.standard_normal(x.shape)
        if kind == "lattice":
            drawn = on_lattice(drawn)
        elif kind == "zero":
            drawn = np.zeros(x.shape)
        elif kind == "one_hot":
            drawn = (np.arange(x.size) == rng.integers(max(x.size, 1))).reshape(x.shape) * 3.0
        elif kind == "drift":
            drawn = 0.1 * drawn + 30 * rng.standard_normal((*x.shape[:-2], 1, *x.shape[-1:]) if x.ndim > 1 else ())
        filled = np.asarray(drawn).astype(x.dtype)
        tangents[name] = laid_out(filled, layout) if filled.ndim > 1 else filled
    return Moving(example, tangents)


def movings(**drawn: Any) -> st.SearchStrategy[Moving]:
    """Return a strategy for examples with tangents of some of their arrays.

    Parameters
    ----------
    **drawn : object
        Arguments of `examples`.

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        A strategy that draws a `Moving`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(movings(dtypes=["float32"], longest=20))
    ... def test(moving):
    ...     assert moving.tangents
    >>> test()
    """

    def tangents(example: Example) -> st.SearchStrategy[Moving]:
        names = st.sets(st.sampled_from(sorted(_arrays(example))), min_size=1)
        kinds = names.flatmap(lambda some: st.fixed_dictionaries(dict.fromkeys(sorted(some), st.sampled_from(KINDS))))
        return st.builds(with_tangents, st.just(example), kinds, st.integers(0, 99), st.sampled_from(LAYOUTS))

    return examples(**drawn).flatmap(tangents)


def assert_tangents_within_bounds(moving: Moving, **results: Array) -> float:
    """Assert that every element of the tangents is within its bound of the exact element.

    Parameters
    ----------
    moving : Moving
        The operands and tangents, which hold the exact results and the bounds.
    **results : array
        "o_dot", "lse_dot", "dq_dot", "dk_dot", "dv_dot" and "dsink_dot".

    Returns
    -------
    float
        The largest error divided by its bound.

    Raises
    ------
    AssertionError
        An element exceeds its bound. The message names the worst and the first wrong element, and the example.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.testing import Structure
    >>> example = Structure(seqlen_q=3, seqlen_kv=5).example()
    >>> assert_tangents_within_bounds(Moving(example, {"q": 0 * example.q}), o_dot=np.zeros((1, 3, 8), np.float32))
    0.0
    """
    __tracebackhide__ = True
    if not results:
        raise TypeError("pass at least one of o_dot, lse_dot, dq_dot, dk_dot, dv_dot; otherwise, nothing is compared")
    share = 1.0 if reference_is_finer(moving.example.q.dtype) else 2.0
    ratios = []
    for name, result in results.items():
        exact, bound = getattr(moving.exact, name), getattr(moving.bounds, name)
        assert np.shape(result) == np.shape(exact), f"{name} has shape {np.shape(result)}, should have {exact.shape}"
        ratios.append(assert_within(name, result, exact, share * bound, moving))
    return max(ratios)


def _arrays(example: Example) -> dict[str, Array]:
    """Return the arrays of an example that may have tangents, by name."""
    own = {name: getattr(example, name) for name in ("q", "k", "v", "do", "dlse", "sink")}
    arrays = {name: x for name, x in own.items() if x is not None}
    if example.score is not None:
        kinds = {array.name: array.kind for array in example.score.program.arrays}
        arrays |= {name: x for name, x in example.score.arrays.items() if kinds[name] == "real"}
    return arrays
