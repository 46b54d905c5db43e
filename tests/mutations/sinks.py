"""Planted faults in attention sinks, in Python and in kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from cuflash import masks
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import SIM
from executors import check_simulated
from mutations.planting import Edit

import cuflash

SIGNS = (AssertionError, ValueError)  # exceptions with which a guard reports a fault
HEADS = {"num_heads": 4, "num_kv_heads": 2, "sink": (4,)}
TWO = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
ROWS = np.arange(40)[:, None] % 3 > 0  # rows with keys; the others have none
SHORT = Structure(**HEADS, **TWO, seqlen_q=40, seqlen_kv=70, mask=masks.Dense(ROWS))
HALF = replace(SHORT, dtype="float16")
LISTED = Structure(
    **HEADS, seqlen_q=150, seqlen_kv=140, dtype="float16",
    mask=masks.BlockPattern(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool), (64, 64)),
)  # fmt: skip


def the_host_is_right(library: ModuleType) -> None:
    """Check that the copy's results are within bounds; a sink of -inf changes nothing, inf or NaN gives NaN."""
    for structure in (SHORT, replace(SHORT, seqlen_kv=0, mask=None), Structure(seqlen_q=5, seqlen_kv=9, sink=())):
        example = structure.example()
        results = _results(library, example)
        assert all(isinstance(result, np.ndarray) for result in results.values())
        assert_within_bounds(example, **results)
    example = SHORT.example()
    _assert_rows_without_keys_give_dlse(example, lambda changed: _results(library, changed))
    without = _results(library, example.but(sink=None))
    nothing = _results(library, example.but(sink=np.full(4, -np.inf, np.float32)))
    assert not nothing["dsink"].any()
    assert all(np.array_equal(nothing[name], result) for name, result in without.items())
    for structure in (SHORT, replace(SHORT, seqlen_kv=0, mask=None)):
        results = _results(library, structure.example().but(sink=np.array([0, np.inf, np.nan, 0], np.float32)))
        for name in ("o", "lse"):
            is_nan = np.isnan(results[name]).all(axis=(0, *range(2, results[name].ndim)))
            assert is_nan.tolist() == [False, True, True, False]


def bounds_are_sharp(library: ModuleType) -> None:
    """Check that the bounds of the copy equal those of the installed library."""
    error_bound = import_module(f"{library.__name__}.bounds").error_bound
    example = SHORT.example()
    operands = example.q, example.k, example.v, example.do
    wide = np.array([1e4, -1e39, 0.1, 0])
    for sink, bias in ((example.sink, None), (wide, None), (wide, np.where(ROWS, -np.inf, 0.1))):
        options = {"dlse": example.dlse, "mask": example.dense_mask, "sink": sink, "bias": bias}
        bounds, expected = error_bound(*operands, **options), cuflash.error_bound(*operands, **options)
        for name in ("o", "lse", "dsink"):
            np.testing.assert_allclose(getattr(bounds, name), getattr(expected, name), rtol=1e-9)


def calls_are_told_apart(library: ModuleType) -> None:
    """Check that calls that differ only in the sink, or in the requested gradients, are different calls."""
    q, sink = np.ones((4, 5, 8), np.float32), np.zeros(4, np.float32)
    plain, other = library.attention(q, q, q), library.attention(q, q, q, sink=sink)
    assert not np.array_equal(plain, other)
    for wrt in ((), "sink"):
        for _ in range(2):
            o, vjp = library.attention_vjp(q, q, q, sink=sink, wrt=wrt)
            assert set(vjp(o).others) == ({"sink"} if wrt else set())
    raised = library.attention(q, q, q, sink=sink + 1)
    assert not np.array_equal(raised, other)


def _assert_rows_without_keys_give_dlse(example: Example, results: Callable[[Example], Any]) -> None:
    """Check that NaN in do reaches a sink of any size, except from rows without keys."""
    do = np.where(ROWS, example.do, np.nan).astype(example.do.dtype)
    assert_within_bounds(example, dsink=results(example.but(do=do))["dsink"])
    do[:, 1, 1] = np.nan
    for sink in (example.sink, np.full(4, 25, np.float32)):
        assert np.isnan(results(example.but(do=do, sink=sink))["dsink"]).tolist() == [False, True, False, False]


def _results(library: ModuleType, example: Any) -> dict[str, Any]:
    sink = {} if example.sink is None else {"sink": example.sink, "wrt": "sink"}
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, mask=example.dense_mask, scale=example.scale, return_lse=True, **sink
    )
    gradients = vjp(example.do, example.dlse)
    results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients)))
    return results | {f"d{name}": gradient for name, gradient in gradients.others.items()}


def simt_is_right() -> None:
    check_simulated("simt", SHORT)
    check_simulated("simt", replace(SHORT, sink=(2, 1), sink_dtype="bfloat16"))
    check_simulated("simt", replace(SHORT, sink=(1,), sink_dtype="float16"))
    check_simulated("simt", replace(SHORT, sink_dtype="float64"))
    example = SHORT.example()
    run = replace(SIM, kernel="simt")
    _assert_rows_without_keys_give_dlse(example, run.everything)
    nothing = run.everything(example.but(sink=np.full(4, -np.inf, np.float32)))
    assert not nothing.pop("dsink").any()
    plain = run.everything(example.but(sink=None))
    assert all(np.array_equal(nothing[name], plain[name]) for name in ("o", "lse"))


def naive_is_right() -> None:
    check_simulated("naive", SHORT)


def sm80_is_right() -> None:
    """Check full tiles, and keys that thread blocks share."""
    check_simulated("sm80", HALF)
    check_simulated("sm80", replace(HALF, seqlen_q=3, seqlen_kv=600, mask=None))


def sm90_is_right() -> None:
    """Check calls without a list, and with a list that leaves some tiles without a key."""
    check_simulated("sm90", HALF)
    check_simulated("sm90", LISTED)


FAULTS = {
    the_host_is_right: {
        "a sink's weight is left out of o": Edit(
            "executors/cpu.py", "HostCall.forward_rows", "o = o * factor[..., None]", "pass"
        ),
        "lse leaves the sink out": Edit(
            "executors/cpu.py", "_with_sink", "np.where(is_sink, shift + np.log(total), lse)", "lse"
        ),
        "the sink's gradient has the wrong sign": Edit(
            "executors/cpu.py", "HostCall.sink_gradient", "return -np.where(", "return np.where("
        ),
        "the gradient of no sink is NaN": Edit(
            "executors/cpu.py", "HostCall.sink_gradient", "(sink == -np.inf, self.wide(0), terms", "(True, terms, sink"
        ),
        "all tiles have the first head's sink": Edit(
            "executors/cpu.py", "HostCall.forward_rows", "1]).reshape(len(tiles), 1)", "1]).reshape(len(tiles), 1)[:1]"
        ),
        "without keys lse is as without a sink": Edit(
            "executors/without_keys.py", "_forward", 'arrays["lse"][...] = lse', 'arrays["lse"][...] = -np.inf'
        ),
        "without keys o is 0 whatever the sink": Edit(
            "executors/without_keys.py", "_forward", "xp.where(xp.isnan(lse), np.nan, 0", "xp.where(xp.isnan(lse), 0, 0"
        ),
        "without keys a sink has no gradient": Edit(
            "executors/without_keys.py", "_write_gradients", '["dsink"][...] = terms.sum(axis=-1)', '["dsink"][...] = 0'
        ),
        "gradients over broadcast axes are not summed": Edit(
            "planning/plan.py", "KernelPlan.kernel_gradients", "= self.kernels is None or self.", "= self."
        ),
        "rows without keys give NaN": Edit(
            "executors/cpu.py", "HostCall.sink_gradient", "if np.isnan(delta).any():", "if False:"
        ),
        "dlse of rows without keys is forgotten": Edit(
            "executors/cpu.py", "HostCall.sink_gradient", 'if "dlse" in self.arrays', "if False"
        ),
        "a gradient without axes is a number": Edit("arrays.py", "summed_to", "keepdims=True", "keepdims=False"),
    },
    bounds_are_sharp: {
        "the sink's weight has no error": Edit(
            "bounds/forward.py", "forward_tolerances", "=True) + excess_of(log_p_sink, p_sink, eta_sink)", "=True)"
        ),
        "a float64 sink is not rounded": Edit(
            "bounds/rounding.py", "Rounding.as_read", "self.ua * np.abs(array) + self.wa, 0)", "0, 0)"
        ),
        "beyond float32 a sink stays finite": Edit(
            "bounds/rounding.py", "Rounding.as_read", "np.where(is_held, array, narrow)", "array"
        ),
        "without a key a float64 sink is lse": Edit(
            "bounds/forward.py", "forward_tolerances", ".where(is_row, tol_lse, e_logit)", ".where(is_row, tol_lse, 0)"
        ),
        "delta has no error": Edit("bounds/gradients.py", "sink_tolerance", "+ p_sink * e_factor", ""),
        "lse has no error for the sink": Edit(
            "bounds/gradients.py", "sink_weight", "forward.tol_lse + operands.e_logit", "operands.e_logit"
        ),
    },
    calls_are_told_apart: {
        "calls do not differ by their operands": Edit(
            "calls/_forward.py", "run",
            'looked_up.key("attention", layout, *outs, wants_lse, *operands, *facts)',
            'looked_up.key("attention", layout_key(q, k, v, *outs.values()), *outs, wants_lse, *facts)',
        ),
        "calls do not differ by what gradients are asked of": Edit(
            "planning/options.py", "Options.key", "draws, wrt, words,", "draws, (), words,"
        ),
    },
    simt_is_right: {
        "rows without keys give NaN": Edit(
            "attention/sink_delta.cuh", "delta_beside_sink", "if (delta == delta) return delta;", "return delta;"
        ),
        "rows that the sink dwarfs count as without keys": Edit(
            "attention/sink_delta.cuh", "delta_beside_sink", "!= 0) return delta;", "!= 0) break;"
        ),
        "dlse of rows without keys has the wrong sign": Edit(
            "attention/sink_delta.cuh", "delta_beside_sink", "return -matrix<T>(params.", "return matrix<T>(params."
        ),
        "o keeps the weights without a sink": Edit(
            "simt/forward.cu", "simt_forward", "o.scale_row(i, merge_sink(row_lse, logit)", "merge_sink(row_lse, logit"
        ),
        "every head has the first one's sink": Edit(
            "simt/forward.cu", "simt_forward", ">(sink, batch_head, batch_head.head)", ">(sink, batch_head, 0)"
        ),
        "lse is that of the keys": Edit(
            "attention/sink.cuh", "merge_sink", "lse = most + ptx::log_accurate(total);", ""
        ),
        "a sink counts in base 2": Edit("attention/sink.cuh", "sink_weight", "* T(kLog2E)", ""),
        "weights are not divided by their sum": Edit(
            "attention/sink.cuh", "merge_sink", "return weight / total;", "return weight;"
        ),
        "no sink is NaN": Edit(
            "attention/sink.cuh", "merge_sink", "if (sink == ptx::negative_infinity<T>()) return 1;", ""
        ),
        "the gradient of no sink is NaN": Edit(
            "attention/sink.cuh", "sum_sink_gradient", "if (logit == ptx::negative_infinity<T>()) continue;", ""
        ),
        "halves are read as bfloat16": Edit(
            "attention/sink.cuh", "of_head", "return of(ptx::Half());", "return of(ptx::BFloat16());"
        ),
        "a float64 sink is read as float32": Edit(
            "attention/sink.cuh", "of_head", "return of(double());", "return of(float());"
        ),
        "a float64 sink has a float32 gradient": Edit(
            "attention/sink.cuh", "sum_sink_gradient", "write(double());", "write(float());"
        ),
        "bfloat16 is written as halves": Edit(
            "attention/sink.cuh", "sum_sink_gradient",
            "matrix<ptx::BFloat16>(sink.dsink, first, first.head, 1, 1).at(0, 0) = "
            "ptx::bfloat16_by_integers(static_cast<float>(-partial_sums[0]));",
            "write(ptx::Half());",
        ),
        "heads that share a sink are not summed": Edit(
            "attention/sink.cuh", "sum_sink_gradient", "= shared(sink.dsink.head_stride, shape.num_heads);", "= 1;"
        ),
        "batch entries are not summed": Edit(
            "attention/sink.cuh", "sum_sink_gradient", "batch_head.batch[axis] += rest % extent;", ""
        ),
        "the last thread's sum is left out": Edit(
            "attention/sink.cuh", "sum_sink_gradient", "threadIdx.x) < half)", "threadIdx.x) < half - 1)"
        ),
        "delta is the first head's": Edit(
            "simt/sink_gradient.cu", "simt_sink_gradient", "delta, batch_head, batch_head.head", "delta, batch_head, 0"
        ),
    },
    naive_is_right: {
        "P keeps the weights without a sink": Edit(
            "naive/softmax.cu", "naive_softmax", "/ divisor * factor;", "/ divisor;"
        ),
        "lse is without the sink": Edit(
            "naive/softmax.cu", "naive_softmax", "Config::kHasSink ? row_lse :", "false ? row_lse :"
        ),
        "dlse is left out": Edit(
            "naive/sink_gradient.cu", "naive_sink_gradient", "if (params.dlse.data != nullptr)", "if (false)"
        ),
    },
    sm80_is_right: {
        "o of whole tiles keeps the weights without a sink": Edit(
            "sm80/forward.cu", "write_results",
            "o.scale_row(i, merge_sink(row_lse[i], logit_of(first_row + o.row(i))));",
            "merge_sink(row_lse[i], logit_of(first_row + o.row(i)));",
        ),
        "the merge of parts leaves the sink out": Edit(
            "sm80/combine.cu", "sm80_combine", "if (Config::kHasSink) total += weight(logit, max_lse);", ""
        ),
        "a sink above all scores overflows": Edit(
            "sm80/combine.cu", "sm80_combine", "= fmaxf(max_lse, logit);", "= fminf(max_lse, logit) - 200;"
        ),
    },
    sm90_is_right: {
        "o of a tile keeps the weights without a sink": Edit(
            "sm90/forward_tiles.cuh", "merge_sink_into",
            "o.scale_row(i, attention::merge_sink(row_lse[i], logit_of(o.first_row() + o.row(i))));",
            "attention::merge_sink(row_lse[i], logit_of(o.first_row() + o.row(i)));",
        ),
        "tiles without a key know no sink": Edit(
            "sm90/forward_hooks.cuh", "write_empty_rows", ", 0) = row_lse;", ", 0) = ptx::negative_infinity<float>();"
        ),
        "delta is that of the first tile": Edit(
            "sm90/sink_gradient.cu", "run", "[query_tile_number<Listed>(params, query, kBlockQ)]", "[0]"
        ),
    },
}
