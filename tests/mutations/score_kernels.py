"""Planted faults in the score-function code of every kernel family, and in the printed form of a score program.

Results of the probe are small multiples of 1/16, so any fault changes them visibly.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import cuflash
import numpy as np
from cuflash import masks, scores
from cuflash.compiler import source as sources
from cuflash.executors.sim import Simulator
from cuflash.sim import Schedule
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import SIM
from mutations.planting import Edit
from poison import call
from probing import assert_expected, exact_sums
from test_score_kernels import (
    MASKS, WRT, Probe, check_few_queries, check_past_the_end, check_shared_elements, normal_call, normal_example,
)  # fmt: skip
from test_sm90_scores import check_hidden_queries

SIGNS = (AssertionError, ValueError)  # exceptions with which a guard reports a fault


def _check(kernel: str, mask: str, wrt: tuple[str, ...] = WRT, **options: Any) -> None:
    probe = Probe("float32" if kernel in ("simt", "naive") else "float16", MASKS[mask])
    probe.check(probe.run_results(replace(SIM, kernel=kernel, **options), wrt))


def _masked_keys_stay_hidden(kernel: str) -> None:
    """Check the order of softcap and mask: a softcap after the mask would turn scores of -inf into finite ones."""
    dtype = np.float32 if kernel in ("simt", "naive") else np.float16
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 16)).astype(dtype)
    example = Example(q=q, k=k, v=v, mask=masks.Causal("top_left"), score=scores.softcap(2.0))
    o, lse = cuflash.attention(
        q, k, v, executor="sim", kernel=kernel, causal="top_left", softcap=2.0, return_lse=True
    )
    assert_within_bounds(SIM.rounded(example), o=o, lse=lse)


def simt_is_exact() -> None:
    """Check accumulated dQ and dQ from a separate kernel, with masked steps and without a mask."""
    _masked_keys_stay_hidden("simt")
    _check("simt", "lengths")
    _check("simt", "nothing")
    _check("simt", "lengths", ("at",), deterministic=True)


def simt_waits_for_its_warps() -> None:
    """Check that gradients with a score function are within bounds, for threads out of order, in poisoned memory."""
    example = Structure(num_heads=2, seqlen_q=150, seqlen_kv=90, head_dim=24, value_dim=20).example()
    example = example.but(score=scores.softcap(2.0))
    plan = cuflash.plan(example.q, example.k, example.v, score=example.score, executor="sim", kernel="simt")
    for seed in range(3):
        machine = Simulator(Schedule(seed=seed, order="random"))
        call(example, SIM, machine, check=partial(assert_within_bounds, example), ready=plan)


def naive_is_exact() -> None:
    _masked_keys_stay_hidden("naive")
    _check("naive", "lengths")


def sm80_is_exact() -> None:
    """Check accumulated dQ and dQ from a separate kernel, over several tiles of keys."""
    _masked_keys_stay_hidden("sm80")
    probe = Probe("float16", None, batch=(2,), lengths=(20, 150))
    probe.check(probe.run_results(replace(SIM, kernel="sm80"), ("at", "row")))
    _check("sm80", "lengths")
    _check("sm80", "lengths", ("at",), deterministic=True)


def sm90_is_exact() -> None:
    _masked_keys_stay_hidden("sm90")
    _check("sm90", "lengths", ("at",), deterministic=True)


def hopper_gradients_are_exact() -> None:
    """Check tiles of 128 and of 64 queries, with several tiles of keys and a function that hides some queries."""
    _check("sm90", "lengths")
    probe = Probe("float16", None, batch=(2,), lengths=(70, 140), dim=80)
    probe.check(probe.run_results(replace(SIM, kernel="sm90")))
    check_hidden_queries(replace(SIM, kernel="sm90"))


def packed_heads_are_exact() -> None:
    check_few_queries(4, (3, 600))


def nothing_past_the_end_matters() -> None:
    check_past_the_end("sm80")


def warps_that_share_elements_are_exact() -> None:
    check_shared_elements()


def printed_functions_are_exact(library: ModuleType) -> None:
    """Check functions printed by the copy of the library, with the kernels of the installed one."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    probe = Probe("float32", batch=(2, 3), lengths=(5, 21))
    probe.check(probe.run_results(replace(SIM, kernel="simt"), library=library))


def _repeatable_gradients_are_right(library: ModuleType) -> None:
    actual = normal_call(SIM, "simt", library, deterministic=True)
    assert_within_bounds(normal_example("simt"), others=actual)


def exact_sums_are_right() -> None:
    launch = exact_sums("float32")
    assert_expected(launch, launch.on_simulator())


def repeatable_sums_are_right() -> None:
    _repeatable_gradients_are_right(cuflash)


def repeatable_sums_are_planned(library: ModuleType) -> None:
    """Check plans of the copy of the library, with the kernels of the installed one."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    _repeatable_gradients_are_right(library)


FAULTS = {
    simt_is_exact: {
        "scores are not scaled before their function": Edit(
            "attention/score.cuh", "apply_score", "key.whole, x * scale)", "key.whole, x)"
        ),
        "a function is that of the first head": Edit(
            "attention/score.cuh", "apply_score", "(batch_head.batch_index, rows[i].head", "(batch_head.batch_index, 0"
        ),
        "a function is that of the first batch entry": Edit(
            "attention/score.cuh", "apply_score", ".of_tile(batch_head.batch_index, rows[i].", ".of_tile(0, rows[i]."
        ),
        "keys and queries change places": Edit(
            "attention/score.cuh", "score_of_queries",
            "queries{work.first, work.last}, keys{block.start, block.stop}",
            "keys{work.first, work.last}, queries{block.start, block.stop}",
        ),
        "scores get their function after their mask": Edit(
            "simt/forward.cu", "simt_forward",
            "if constexpr (kHasScore) score_of_queries(s, score_function, params.shape.softmax_scale, work, block, "
            "kLog2E); else "
            "s.scale(softmax_scale_log2); mask_scores(s, params, work, block);",
            "mask_scores(s, params, work, block); if constexpr (kHasScore) score_of_queries(s, score_function, "
            "params.shape.softmax_scale, work, block, kLog2E); else s.scale(softmax_scale_log2);",
        ),
        "the slope is left out": Edit("attention/score_slopes.cuh", "score_to_p_and_ds", "df * slopes.d0", "df"),
        "masked elements have a gradient": Edit(
            "attention/score_slopes.cuh", "score_to_p_and_ds", "is_seen && lse_2", "lse_2"
        ),
        "slopes are taken at products that are not scaled": Edit(
            "attention/score_slopes.cuh", "score_to_p_and_ds", "const T scaled = s * scale;", "const T scaled = s;"
        ),
        "gradients of heads are added twice": Edit(
            "attention/score_slopes.cuh", "scores_to_p_and_ds",
            "if (adds) score.flush(of_tile, tile_sums);",
            "if (adds) score.flush(of_tile, tile_sums); if (adds) score.flush(of_tile, tile_sums);",
        ),
        "a running sum continues with the next element": Edit("tile/global_sum.cuh", "RunningSum.add", "sum = 0;", ""),
        "a running sum is lost where another element follows": Edit(
            "tile/global_sum.cuh", "RunningSum.add", "if (address != nullptr) tile::add(address, sum);", ""
        ),
        "the last running sum is lost": Edit(
            "attention/score_slopes.cuh", "scores_to_p_and_ds", "if (adds) score.flush(score_sums);", ""
        ),
        "a warp's sums go to its first lane's element": Edit(
            "tile/global_sum.cuh", "RunningSum.flush", "__all_sync(0xffffffffu, own", "__any_sync(0xffffffffu, own"
        ),
        "S^T is taken for S": Edit(
            "attention/score_slopes.cuh", "scores_to_p_and_ds_of_keys",
            "{work.first, work.last}, {block.start, block.stop}",
            "{block.start, block.stop}, {work.first, work.last}",
        ),
        "P is made before there is dP": Edit(
            "simt/backward.cu", "simt_backward",
            "if constexpr (!kHasScore) probabilities_of_keys(",
            "probabilities_of_keys(",
        ),
        "rows have slopes of no score function": Edit(
            "simt/backward_rows.cu", "simt_backward_rows", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "columns have slopes of no score function": Edit(
            "simt/backward_columns.cu", "simt_backward_columns", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "indices beyond an int wrap around": Edit(
            "attention/score_math.cuh", "whole", "if (x > static_cast<Element>(kMost)) return kMost;", ""
        ),
        "remainders of a wrong divisor": Edit(
            "attention/score_math.cuh", "remainder", "x % by +", "x % (by - 1) +"
        ),
        "batch entries are taken from the first axis on": Edit(
            "attention/score_math.cuh", "leading_offset", "b /= extent;", ""
        ),
    },
    simt_waits_for_its_warps: {
        "P of a score function is read before it is there": Edit(
            "simt/backward.cu", "simt_backward",
            "{ __syncthreads(); tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem); }",
            "{ tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem); }",
        ),
        "dO is overwritten before it is read": Edit(
            "simt/backward.cu", "simt_backward", "} __syncthreads(); if constexpr (!", "} if constexpr (!"
        ),
    },
    naive_is_exact: {
        "scores keep what they are without their function": Edit(
            "naive/scores.cu", "naive_scores", "kHasScore && !score::Function::kIsDerived", "false"
        ),
        "gradients have no score function": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores", "delta_of_row[i] = delta;", "delta_of_row[i] = 0;"
        ),
    },
    sm80_is_exact: {
        "scores get no function": Edit(
            "sm80/forward.cu", "sm80_forward", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "exponents are scaled as well": Edit(
            "attention/score.cuh", "exponent_scale", "? 1.0 :", "? shape.softmax_scale :"
        ),
        "gradients have the positions of the first keys": Edit(
            "attention/members_slopes.cuh", "scores_to_p_and_ds_of_step",
            "{work.first, work.last}, is_masked, row, Tile::", "{0, work.last}, is_masked, row, Tile::",
        ),
        "hidden elements are taken for seen ones": Edit(
            "attention/fragment_slopes.cuh", "scores_to_p_and_ds_of_rows",
            "!is_masked || !is_masked_score(s.at(i, j))",
            "true",
        ),
        "rows have no score function": Edit(
            "sm80/backward_rows.cu", "make_ds", "(kHasScore || Config::kHasDropout)", "(false)"
        ),
    },
    packed_heads_are_exact: {
        "heads in one tile have the first one's function": Edit(
            "sm80/forward.cu", "head_and_query", "work.batch_head.head + heads.quotient", "work.batch_head.head"
        ),
        "queries of a further head are counted on": Edit("sm80/forward.cu", "head_and_query", "heads.remainder", "row"),
    },
    warps_that_share_elements_are_exact: {
        "elements that two warps hold are added twice": Edit(
            "attention/members_slopes.cuh", "scores_to_p_and_ds_of_step", "Tile::is_first_owner());", "true);"
        ),
    },
    nothing_past_the_end_matters: {
        "queries past the end have a P": Edit(
            "attention/score_slopes.cuh", "score_to_p_and_ds",
            "is_seen && lse_2 != -ptx::negative_infinity<T>()",
            "is_seen",
        ),
    },
    sm90_is_exact: {
        "scores get no function": Edit(
            "sm90/forward.cu", "score_step", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "scores have the function of a later tile": Edit(
            "sm90/forward.cu", "prepare_tile_score", "(num_tiles_done)]", "(num_tiles_done + 1)]"
        ),
    },
    hopper_gradients_are_exact: {
        "a step has the keys of the first tile": Edit(
            "sm90/changed_weights.cuh", "positions_of_step", "{work.first, work.last}", "{0, work.last}"
        ),
        "a step has the queries of the first one": Edit(
            "sm90/changed_weights.cuh", "positions_of_step", "message.block.start, message.block.", "0, message.block."
        ),
        "a slope that is constant is left out": Edit(
            "sm90/changed_weights.cuh", "apply_slopes_in", "df.at(i, j) * slopes.d0", "df.at(i, j)"
        ),
        "what keys have in common goes to a thread's first key": Edit(
            "sm90/changed_weights.cuh", "StepScore.flush", ".flush(of_tile_, of_key_[i]", ".flush(of_tile_, of_key_[0]"
        ),
        "running sums are not added": Edit(
            "sm90/changed_weights.cuh", "StepScore.flush", "score_.flush(sums.of_score);", ""
        ),
        "P of a masked step is kept": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_p", "Base::template clamp_and_mask<true>(s, queries);", ""
        ),
        "a hidden query has a P": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_p", ">()) s.at(i, j) = 0", ">()) s.at(i, j) = s.at(i, j)"
        ),
        "dO of hidden queries is multiplied": Edit(
            "sm90/q_producer.cuh", "has_rows_to_zero", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "exponents are scaled twice": Edit(
            "sm90/q_pipeline.cuh", "run_roles", "(kHasScore ? 1 : attention::kLog2E)", "attention::kLog2E"
        ),
    },
    printed_functions_are_exact: {
        "numbers are read a slot late": Edit(
            "planning/score_launches.py", "_values", "list(numbers[: program.num_numbers])",
            "list(numbers[1 : program.num_numbers]) + list(numbers[:1])",
        ),
        "leading axes are the batch's first": Edit(
            "compiler/score_text.py", "Printer._of_levels",
            'f"batch_extents + {extents - axes}, {member}_strides"',
            'f"batch_extents, {member}_strides"',
        ),
        "gradients are not zeroed": Edit(
            "executors/launch.py", "BoundPass.__call__", "self._target.set_zero(arrays[i])", "pass"
        ),
        "slopes of arrays are those of the score": Edit(
            "compiler/score_text.py", "Printer.part", 'f"slopes.d{place + 1}"', 'f"slopes.d{place}"'
        ),
        "the forward kernel applies no score function": Edit(
            "planning/families/simt.py", None,
            "shared_bytes=_forward_bytes, applies_score=True", "shared_bytes=_forward_bytes",
        ),
        "the kernel of one walk adds no gradients": Edit(
            "planning/families/simt.py", None,
            "adds_gradients=True, draws_dropout=True, has_exponentials=True, products=(3",
            "draws_dropout=True, has_exponentials=True, products=(3",
        ),
    },
    exact_sums_are_right: {
        "a subnormal term lies a bit too high": Edit(
            "tile/exact_sum.cuh", "add", "exponent == 0 ? 0 : exponent - 1", "exponent"
        ),
        "a normal term lacks its first bit": Edit(
            "tile/exact_sum.cuh", "add", "static_cast<uint64_t>(exponent != 0)", "static_cast<uint64_t>(exponent == 0)"
        ),
        "negative terms are added": Edit("tile/exact_sum.cuh", "add_bits", "is_negative ? -value : value", "value"),
        "infinities are counted as NaN": Edit("tile/exact_sum.cuh", "add", "mantissa != 0 ? 0", "true ? 0"),
        "carries are lost": Edit(
            "tile/exact_sum.cuh", "for_digits", "sign * words[digit] + carry", "sign * words[digit]"
        ),
        "a negative sum is rounded by its low digits": Edit(
            "tile/exact_sum.cuh", "rounded", "carry_out(words, 1) < 0", "false"
        ),
    },
    repeatable_sums_are_right: {
        "sums hold what was there": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "static_cast<int*>(captured.sums)[n] = 0", "continue"
        ),
        "one part is the gradient": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "part < captured.num_parts", "part < 1"
        ),
        "exact sums are a word apart": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "Exact::kNumWords * n", "n"
        ),
    },
    repeatable_sums_are_planned: {
        "half of the words are set to 0": Edit(
            "planning/captured_sums.py", "with_captured_sums", "workspace.nbytes // _WORD", "workspace.nbytes // 8"
        ),
    },
}
