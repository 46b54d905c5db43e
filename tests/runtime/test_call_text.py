"""The canonical text of a call: its contents, and how to recreate the call from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import masks, scores
from cuflash.calls._call import Call
from cuflash.planning.options import Options

DTYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = {
    "none": None,
    "band": masks.Band(-5, 3),
    "window": masks.SlidingWindow(4, 0),
    "algebra": masks.Causal() | ~masks.Dilated(2) & masks.Band(None, 9),
    "prefix": masks.PrefixLM(3),
}
SCORES = {
    "none": {},
    "softcap": {"softcap": 3.0},
    "alibi": {"score": scores.alibi(np.float32([1, 2]))},
    "function": {"score": lambda s, b, h, i, j: np.where(i > j, s * 0.3, -np.inf)},
    "bias": {"bias": np.zeros((2, 30, 30), np.float32)},
}


def call_of(dtype: str = "float32", executor: str = "cpu", **options: Any) -> Call:
    x = cuflash.ShapeDtype((2, 30, 16), dtype)
    return Call.of(x, x, x, Options(executor=executor, **options))


@given(
    dtype=st.sampled_from(DTYPES),
    executor=st.sampled_from(["cpu", "sim"]),
    mask=st.sampled_from(sorted(MASKS)),
    score=st.sampled_from(sorted(SCORES)),
    causal=st.sampled_from([False, True, "top_left"]),
    scale=st.sampled_from([None, 0.5, 2, 1e-30]),
    dropout=st.sampled_from([None, cuflash.Dropout(0.3, seed=1)]),
    deterministic=st.booleans(),
)
def test_a_call_is_made_from_its_text_again(mask: str, score: str, **options: Any) -> None:
    call = call_of(mask=MASKS[mask], **SCORES[score], **options)
    again = Call.parse(call.text)
    assert again == call and again.text == call.text and again.digest == call.digest
    assert again.plan()._plan is call.plan()._plan  # equal calls share a plan


def test_calls_that_differ_have_other_texts_and_numbers_of_dropout_do_not_count() -> None:
    different = [
        {}, {"causal": True}, {"window": (3, 3)}, {"scale": 0.5}, {"softcap": 2.0}, {"softcap": 3.0},
        {"dropout": cuflash.Dropout(0.1, seed=0)}, {"dropout": cuflash.Dropout(0.2, seed=0)}, {"dtype": "float16"},
        {"deterministic": True}, {"executor": "sim"}, {"executor": "sim", "kernel": "simt"},
        {"sink": np.zeros(2, np.float32)}, {"sink": np.zeros(2, np.float32), "wrt": "sink"},
    ]  # fmt: skip
    calls = [call_of(**options) for options in different]
    assert len({call.digest for call in calls}) == len({call.text for call in calls}) == len(different)
    assert call_of(dropout=cuflash.Dropout(0.1, seed=5)) == call_of(dropout=cuflash.Dropout(0.1, seed=0))


@pytest.mark.parametrize("mask", [np.ones((30, 30), bool), lambda b, h, i, j: i >= j], ids=["an array", "a function"])
def test_a_call_whose_mask_holds_more_than_numbers_has_no_text(mask: Any) -> None:
    with pytest.raises(TypeError, match="has no text: write a mask in closed form"):
        _ = call_of(mask=mask).text
