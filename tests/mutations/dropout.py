"""Planted faults in dropout, in Python and in kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from cuflash.compiler import source as sources
from cuflash.dropout import Dropout
from cuflash.masks import BlockPattern, Sequences
from cuflash.testing import Structure, assert_within_bounds
from executors import check_simulated
from mutations.planting import Edit
from mutations.python_guards import part
from test_dropout import check_rng

from cuflash import sim

SIGNS = (AssertionError, ValueError, sim.SimulationError)  # exceptions with which a guard reports a fault
SEED = 0x9ABCDEF012345678
HEADS = {"num_heads": 4, "num_kv_heads": 2, "q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
SHORT = Structure(**HEADS, seqlen_q=40, seqlen_kv=33, dropout=Dropout(0.3, SEED, 5))
HALF = replace(SHORT, dtype="float16")


def the_host_is_right(library: ModuleType) -> None:
    """Check that the copy's own draws give results within bounds for the weights that the installed library drops."""
    example = SHORT.example()
    for seed in (SEED, np.array(SEED, np.uint64)):
        dropout = library.Dropout(0.3, seed, 5)
        assert np.array_equal(dropout.keep((2, 4, 40, 33)), SHORT.dropout.keep((2, 4, 40, 33)))
        (o, lse), vjp = library.attention_vjp(example.q, example.k, example.v, dropout=dropout, return_lse=True)
        results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))
        assert_within_bounds(example, **results)


def bounds_are_sharp(library: ModuleType) -> None:
    """Check that the bounds of the copy equal those of the installed library."""
    example = SHORT.example()
    bounds = import_module(f"{library.__name__}.bounds").error_bound(
        example.q, example.k, example.v, example.do, dlse=example.dlse, dropout=library.Dropout(0.3, SEED, 5)
    )
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(bounds, name), getattr(example.bounds, name), rtol=1e-9)


def wrong_numbers_are_refused(library: ModuleType) -> None:
    """Check that invalid arguments are refused, and valid ones are not."""
    wrong: tuple[tuple[Any, ...], ...] = ((1.0, 0), (-0.1, 0), (0.1, 0.5), (0.1, 2**64), (0.1, 0, -1), (0.1, 0, 2**32))
    for arguments in wrong:
        try:
            library.Dropout(*arguments)
        except library.UnsupportedProblem:
            continue
        raise AssertionError(f"{arguments} were taken")
    for place in (-1, 3):
        try:
            library.Dropout(0.5, 0).keep((3, 5), queries=np.array([place]))
        except library.UnsupportedProblem:
            continue
        raise AssertionError(f"row {place} was taken")
    library.Dropout(0, 2**64 - 1, 2**32 - 1)


def calls_are_told_apart(library: ModuleType) -> None:
    """Check that calls that differ only in their dropout do not share a cached result or plan."""
    q = np.random.default_rng(0).standard_normal((4, 20, 8), np.float32)
    dropouts = None, library.Dropout(0.5, 1), library.Dropout(0.5, 2), library.Dropout(0.5, 1, 1)
    outputs = {library.attention(q, q, q, dropout=dropout).tobytes() for _ in range(2) for dropout in dropouts}
    assert len(outputs) == 4


def calls_hand_over_their_numbers(library: ModuleType) -> None:
    """Check that kernels drop the same weights as the installed host function, for a threshold that ends in a 0 bit."""
    example = SHORT.example()
    part(library, "compiler.source").KERNELS = sources.KERNELS  # a copy of the library has no kernels
    ours, theirs = library.Dropout(0.4, SEED, 5), example.but(dropout=Dropout(0.4, SEED, 5))
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, dropout=ours, executor="sim", kernel="simt", return_lse=True
    )
    results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))
    assert_within_bounds(theirs, **results)


def simt_is_right() -> None:
    """Check dQ both accumulated by the backward kernel and computed by a separate kernel."""
    check_simulated("simt", SHORT)
    check_simulated("simt", SHORT, deterministic=True)


def naive_is_right() -> None:
    check_simulated("naive", SHORT)


def sm80_is_right() -> None:
    """Check accumulated dQ and dQ from a separate kernel, with several steps of keys and keys that blocks share."""
    check_simulated("sm80", replace(HALF, q_batch=(), k_batch=(), v_batch=(), seqlen_kv=150))
    check_simulated("sm80", HALF, deterministic=True)
    check_simulated("sm80", replace(HALF, seqlen_q=3, seqlen_kv=400))


def sm90_is_right() -> None:
    """Check that a warpgroup may skip more steps than the warps that draw numbers are ahead."""
    sequences = Sequences(np.array([0, 86, 150]), np.array([0, 50, 700]))
    one = replace(HALF, q_batch=(), k_batch=(), v_batch=())
    check_simulated("sm90", replace(one, seqlen_q=150, seqlen_kv=700, mask=sequences))


def hopper_gradients_are_right() -> None:
    """Check tiles of 128 and of 64 queries, with list blocks that start anywhere."""
    check_simulated("sm90", replace(HALF, seqlen_q=70, seqlen_kv=140, head_dim=80))
    blocks = BlockPattern(np.array([[True, False], [True, True]]), (136, 152))
    check_simulated("sm90", replace(HALF, q_batch=(), k_batch=(), v_batch=(), seqlen_q=150, seqlen_kv=200, mask=blocks))


def generators_are_drawn_from(library: ModuleType) -> None:
    check_rng(library)


FAULTS = {
    generators_are_drawn_from: {
        "a pattern does not draw from its generator": Edit(
            "dropout/generators.py", "generator_of", "if rng is not None:", "if False:"
        ),
        "a selector does not draw from its generator": Edit(
            "selectors/baselines.py", "random", "if rng is not None:", "if False:"
        ),
        "a dropout draws a seed of 32 bits": Edit(
            "dropout/generators.py", "seed_drawn_from", "integers(1 << 64,", "integers(1 << 32,"
        ),
    },
    the_host_is_right: {
        "heads of all batch entries draw alike": Edit(
            "executors/tile_dropout.py", "TileDropout.dropped", "(b * self.num_heads + h)", "(0 * b + h)"
        ),
        "a number at the threshold is dropped": Edit(
            "dropout/weights.py", "keep_mask", "is_kept: Array = np.uint64(0xFFFF)", "is_kept: Array = np.uint64(0)"
        ),
        "gradients by dropped weights count": Edit(
            "executors/tile_dropout.py", "Dropped.apply_to_gradients", "np.copyto(dp, 0, where=self.where)", "pass"
        ),
        "dv is that of all weights": Edit(
            "executors/cpu.py", "HostCall.column_terms", "dropped.apply(p)", "pass"
        ),
    },
    bounds_are_sharp: {
        "what dropout multiplies does not round": Edit(
            "bounds/forward.py", "Weights.of", "*factors.shape[1:]), factor, 2", "*factors.shape[1:]), factor, 1"
        ),
        "dropped weights count in dv": Edit(
            "bounds/gradients.py", "gradient_tolerances", "weights = z *", "weights ="
        ),
    },
    wrong_numbers_are_refused: {
        "an offset may have 33 bits": Edit(
            "dropout/weights.py", "Dropout.__post_init__", "0 <= self.offset <= _MASK", "0 <= self.offset <= 2 * _MASK"
        ),
        "the row after the last one is taken": Edit("dropout/weights.py", "_are_positions", "< length", "<= length"),
    },
    calls_are_told_apart: {
        "calls do not differ by what they draw": Edit(
            "planning/options.py", "Options.key", "scale, program, draws, wrt,", "scale, program, wrt,"
        ),
    },
    calls_hand_over_their_numbers: {
        "an offset clears the other half of its word": Edit(
            "executors/_records.py", "LaunchRecord.of", "int(words[word]), next(number)", "0, next(number)"
        ),
        "seed and offset change places": Edit(
            "planning/dropout_launches.py", None, 'NUMBERS = ("seed", "offset")', 'NUMBERS = ("offset", "seed")'
        ),
        "a forward kernel draws nothing": Edit(
            "planning/families/simt.py", None,
            "shared_bytes=_forward_bytes, applies_score=True, draws_dropout=True", "shared_bytes=_forward_bytes",
        ),
        "kernels draw by no seed": Edit(
            "executors/gpu.py", "bind", "addresses += numbers", "addresses += [0 for _ in numbers]"
        ),
    },
    simt_is_right: {
        "neighbouring keys change places": Edit(
            "attention/dropout.cuh", "WeightDraw.keeps", "position.key % 2 * 8", "(1 - position.key % 2) * 8"
        ),
        "numbers drawn last are another head's": Edit(
            "attention/dropout.cuh", "head_number", "batch_head.batch_index", "0 * batch_head.batch_index"
        ),
        "dropped weights stay in dv": Edit(
            "simt/backward.cu", "make_changed_p_and_ds", "drop_weights<Dp>(p, kept);", ";"
        ),
        "gradients by dropped weights count": Edit(
            "attention/dropout.cuh", "drop_gradients", "kept.at(i, j) ? element(dp, i, j) * factor : T(0)",
            "element(dp, i, j) * factor",
        ),
    },
    naive_is_right: {
        "the offset is not drawn with": Edit(
            "attention/dropout.cuh", "Draws.counter", "{{row, column, head, dropout_.offset}", "{{row, column, head, 0}"
        ),
        "P of the gradients keeps its size": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores", "s.scale(dropout.factor);", ";"
        ),
    },
    sm80_is_right: {
        "a step draws the next one's numbers": Edit(
            "sm80/forward.cu", "sm80_forward", ", params, state.work, first_key,", ", params, state.work, block.start,"
        ),
        "parts keep the size of their weights": Edit(
            "sm80/forward.cu", "write_part", "if constexpr (Config::kHasDropout) o.scale(dropout.factor);", ""
        ),
        "heads of a tile draw alike": Edit(
            "sm80/forward.cu", "drop_step", "work.batch_head.head + heads.quotient", "work.batch_head.head"
        ),
        "rows of a cell change places": Edit(
            "attention/dropout.cuh", "KeptFragments.bit", "4 * number + 2 * (i % 2)", "4 * number + 2 * (1 - i % 2)"
        ),
        "a level of numbers is not compared": Edit(
            "attention/dropout.cuh", "Draws.kept", "level < 8; ++level", "level < 7; ++level"
        ),
        "dropped weights have no gradient at all": Edit(
            "attention/dropout_gradient_mma.cuh", "dropout_score_gradients", "is_allowed ?", "is_allowed && is_kept ?"
        ),
    },
    hopper_gradients_are_right: {
        "where a plain step stands is not told": Edit(
            "sm90/q_tiles.cuh", None, "= kHasScore || Config::kHasDropout;", "= false;"
        ),
        "neighbours keep what they drew": Edit(
            "attention/dropout.cuh", "kept_fragments", "__shfl_xor_sync(0xffffffffu, drawn, 4)", "drawn"
        ),
        "a thread takes its own half of the other's": Edit(
            "attention/dropout.cuh", "kept_fragments", "? (number == 0 ? 8 : 24)", "? (number == 0 ? 24 : 8)"
        ),
        "neighbours draw the same cells": Edit(
            "attention/dropout.cuh", "kept_fragments", "2 * (first + n) + number", "2 * (first + n)"
        ),
        "steps that start anywhere draw as aligned ones": Edit(
            "attention/dropout.cuh", "kept_fragments", "if ((first_row | first_column) % 16 != 0)", "if (false)",
        ),
        "the next step has this one's weights": Edit(
            "sm90/backward.cu", "consume_with_next_dp", "draw_step(kept, next_positions, dropout, params.shape);", ";"
        ),
        "dP of a dropped weight is kept": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_operands",
            "(kept.at(i, j) ? dp.at(i, j) : 0.0f) * dropout.single_factor",
            "dp.at(i, j) * dropout.single_factor",
        ),
        "dV has what is dropped": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_operands",
            "s.at(i, j) = kept.at(i, j) ? s.at(i, j) : 0.0f;", ";"
        ),
        "dV keeps its size": Edit(
            "sm90/backward_epilogue.cuh", "write_gradients", "dv.scale(dropout.single_factor);", ";"
        ),
    },
    sm90_is_right: {
        "tiles that start anywhere draw as aligned ones": Edit(
            "attention/dropout.cuh", "kept_fragments", "if ((first_row | first_column) % 16 != 0)", "if (false)"
        ),
        "neighbouring keys change places": Edit(
            "attention/dropout.cuh", "KeptFragments.halves_at", "0x9988 : 0xbbaa", "0x8899 : 0xaabb"
        ),
        "drawers draw one warpgroup's rows for all": Edit(
            "sm90/drawn_weights.cuh", "draw_steps", "work.first + 64 * group - own_row", "work.first - own_row"
        ),
        "warpgroups read what was drawn for one": Edit(
            "sm90/drawn_weights.cuh", "read_kept", "Tile::warp_row() / 64 * kWarpgroupThreads", "0"
        ),
        "a warpgroup never leaves the rooms of what it passes over": Edit(
            "sm90/forward.cu", "skip_blocks", "if constexpr (kHasDrawers) skip_kept(num_k_blocks);", ""
        ),
        "no weight is dropped": Edit(
            "sm90/forward.cu", "pack_step", "p.fragments[k][e] &=", "p.fragments[k][e] |= 0 &"
        ),
    },
}
