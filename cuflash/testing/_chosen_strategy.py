"""A Hypothesis strategy for attention in which each query chooses its blocks, with head groups of every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from ..keywords import explains_keywords
from ..masks.base import Mask
from ..masks.diagonal import Causal, PrefixLM, SlidingWindow
from ..masks.lengths import Lengths
from ..masks.shape import MaskShape
from .assertions import Example
from .mask_strategies import chosen_blocks
from .formulas import formulas
from .strategies import DTYPE_NAMES, VALUES, Structure, dropouts, head_dims, lengths, scales, sinks

GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 32, 48, 64, 80)


@explains_keywords
@st.composite
def chosen(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPE_NAMES,
    most_scores: int = 1 << 16,
    longest: int = 260,
    widest: int = 64,
    has_intervals: bool = True,
    has_sink: bool = False,
    has_score: bool = False,
    has_dropout: bool = False,
) -> Example:
    """Return a strategy for examples whose mask is a `ChosenBlocks`, with head groups of any size.

    Parameters
    ----------
    dtypes : sequence of str
        Names of the dtypes to draw from.
    most_scores : int
        Upper limit of batch x heads x seqlen_q x seqlen_kv.
    longest, widest : int
        Upper limits of the sequence lengths, and of head_dim and value_dim.
    has_intervals : bool
        True to combine some masks with masks of row intervals, such as `Causal`.
    has_sink, has_score, has_dropout : bool
        As in `examples`.

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        A strategy that draws an `Example`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(chosen(longest=40, has_intervals=False))
    ... def test(example):
    ...     assert example.mask.block >= 1
    >>> test()
    """
    group, num_kv_heads = draw(st.sampled_from(GROUPS)), draw(st.integers(1, 3))
    num_heads = group * num_kv_heads
    most = min(longest, int((most_scores // num_heads) ** 0.5))
    seqlen_q, seqlen_kv = draw(st.tuples(*[lengths(64, max(8, most))] * 2))
    room = most_scores // max(1, num_heads * seqlen_q * seqlen_kv)
    batch = draw(st.sampled_from([(), (1,)] + [(2,)] * (room >= 2) + [(2, 3)] * (room >= 6)))
    shape = MaskShape(batch, num_heads, seqlen_q, seqlen_kv)
    mask: Mask = draw(chosen_blocks(shape, num_kv_heads))
    intervals = draw(_intervals(shape)) if has_intervals else None
    dtype = draw(st.sampled_from(tuple(dtypes)))
    sink, sink_dtype = draw(sinks(shape, dtype)) if has_sink else (None, "float32")
    structure: dict[str, Any] = {
        "q_batch": batch, "k_batch": batch, "v_batch": batch, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "head_dim": draw(head_dims(widest)),
        "value_dim": draw(head_dims(widest)), "dtype": dtype, "scale": draw(scales()),
        "values": draw(st.sampled_from(VALUES)), "has_dlse": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)), "sink": sink, "sink_dtype": sink_dtype,
        "score": draw(formulas()) if has_score else None, "dropout": draw(dropouts()) if has_dropout else None,
    }  # fmt: skip
    return Structure(**structure, mask=mask if intervals is None else mask & intervals).example()


@st.composite
def _intervals(draw: st.DrawFn, shape: MaskShape) -> Mask | None:
    """Draw a mask of row intervals to combine with the chosen blocks, or None."""
    align = draw(st.sampled_from(("bottom_right", "top_left")))
    keys = st.integers(0, shape.seqlen_kv)
    return draw(
        st.none()
        | st.just(Causal(align))
        | st.builds(SlidingWindow, keys, keys, st.just(align))
        | st.builds(lambda kv, q: Lengths(kv=kv, q=q), keys, st.integers(0, shape.seqlen_q))
        | st.builds(lambda prefix, kv: PrefixLM(prefix, align) & Lengths(kv=kv), keys, keys)
    )
