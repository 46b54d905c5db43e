"""Score programs on tiles of the cpu executor have the same values in blocks of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_score_programs import SHAPE, made

from cuflash.executors import tile_program
from cuflash.executors.tile_scores import coordinates
from cuflash.scores.program import derived
from cuflash.scores.values import run
from cuflash.testing.formulas import Formula, formulas


@settings(max_examples=60)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1), size=st.sampled_from((1, 12, 40, 1000)))
def test_blocks_hold_the_values_of_the_program(formula: Formula, seed: int, size: int) -> None:
    score, operands = made(formula, seed)
    program = derived(score.program, score.arrays)
    heads = [(b, h) for b in range(SHAPE.num_batch) for h in range(SHAPE.num_heads)]
    queries, keys = slice(0, SHAPE.seqlen_q), slice(0, SHAPE.seqlen_kv)
    at = coordinates(heads, [queries] * len(heads), [keys] * len(heads))
    s = np.random.default_rng(seed).standard_normal((len(heads), keys.stop, queries.stop)).astype(np.float32)
    whole = run(program, operands, s, *at)
    is_done = np.zeros(s.shape, int)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(tile_program, "_BLOCK", size)
        for block in tile_program.blocks(program, operands, s.copy(), at, frozenset(program.results)):
            here = block.tiles, block.keys
            is_done[here] += 1
            for n in program.results:
                found = np.broadcast_to(block.values[n], s[here].shape)
                np.testing.assert_array_equal(found, np.broadcast_to(whole[n], s.shape)[here])
    assert (is_done == 1).all()
