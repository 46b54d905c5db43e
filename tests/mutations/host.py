"""Planted faults in how the host scales scores, hides NumPy's floating-point errors, and limits BLAS's threads.

Each guard takes a library: the installed one, or a copy with a fault under another name.
"""

from __future__ import annotations


import numpy as np
import pytest
from cuflash.testing import strategies
from hypothesis import strategies as st
from mutations.planting import Edit
from mutations.python_guards import hunt, part
from test_blas import assert_limits_are_kept, assert_threads_are_right, assert_turns_are_kept
from test_magnitudes import (
    BROADCAST, assert_no_lse_is_too_large, assert_nothing_is_raised, assert_operands_may_be_huge,
    assert_other_calls_raise_nothing, assert_powers_cancel, changed, powers, tame,
)  # fmt: skip

# The scale that compensates for 2^85 in both q and k is out of float32's range, and few drawn examples need such a
# scale.
FAR = 85
QUIET = {  # functions besides those of attention, by name, which keep NumPy from raising floating-point errors
    "_of_parts": "fp8/quantize.py", "Quantized.scaled": "fp8/quantize.py", "Rotation._hadamard": "fp8/rotation.py",
    "run": "calls/_forward.py", "quantized_rows": "fp8/rows.py", "block_mass": "study/_masses.py",
    "compared": "study/_recall.py", "pooled": "selectors/estimates.py", "antidiagonal": "selectors/estimates.py",
    "oracle": "selectors/baselines.py", "vertical_slash": "selectors/slashes.py",
    "nsa": "selectors/compressed.py", "quest": "selectors/pages.py", "page_bounds": "selectors/pages.py",
}  # fmt: skip
TAME = strategies.Structure(seqlen_q=5, seqlen_kv=6, dtype="float32", values="lattice").example()

# If nothing was raised, pytest.raises fails with its own exception type.
SIGNS = (AssertionError, ValueError, pytest.fail.Exception)  # exceptions with which a guard reports a fault


def all_results(library):
    """Return a function that returns all results of an example by name, from `attention` and `attention_vjp`."""

    def everything(example):
        q, k, v, mask, scale = example.q, example.k, example.v, example.dense_mask, example.scale
        (o, lse), vjp = library.attention_vjp(q, k, v, mask=mask, scale=scale, return_lse=True)
        assert library.attention(q, k, v, mask=mask, scale=scale).tobytes() == o.tobytes()
        return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))

    return everything


def magnitudes_are_right(library):
    """Check that operands and scales of any size give right scores."""
    everything = all_results(library)
    zeros = np.zeros((4, 8), np.float16)
    assert (library.attention(zeros, zeros + 1, zeros + 1, scale=1e39) == 1).all()
    for sign in (1, -1):
        assert_powers_cancel(everything, TAME, sign * FAR, sign * FAR)

    @hunt(tame(longest=20, widest=8), powers(), seeds=1, most=40)
    def check_powers(example, powers):
        assert_powers_cancel(everything, example, *powers)

    @hunt(tame(longest=20, widest=8), st.sampled_from([0.125, 100.0]), seeds=1, most=40)
    def check_huge(example, scale):
        assert_operands_may_be_huge(everything, example.but(scale=scale))


def nothing_is_raised(library):
    """Check that no call raises a floating-point error, whatever errors the caller makes NumPy raise."""
    everything = all_results(library)

    def check(example, size):
        assert_nothing_is_raised(everything, changed(example, size))
        assert_nothing_is_raised(everything, changed(example, size).but(scale=1e-70))

    for uses_exp2 in (True, False):  # which of both a processor takes by default depends on its instructions
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part(library, "executors.cpu"), "WEIGHTS_USE_EXP2", uses_exp2)
            assert_no_lse_is_too_large(library)
            assert_nothing_is_raised(everything, BROADCAST)
            hunt(tame(longest=20, widest=8), st.sampled_from(["huge", "tiny", "tiny do"]), seeds=1, most=40)(check)


def other_calls_raise_nothing(library):
    assert_other_calls_raise_nothing(library)


def blas_limits_are_kept(library):
    """Check that BLAS has as many threads after overlapping calls as before."""
    assert_limits_are_kept(part(library, "executors.blas"))


def threads_are_right(library):
    """Check that calls with threads have equal bits, use one BLAS thread each, and raise their own errors."""
    assert_threads_are_right(library)


def turns_are_kept(library):
    """Check that threads add to dQ in the same order, whichever is slow or fails."""
    assert_turns_are_kept(library)


FAULTS = {
    magnitudes_are_right: {
        "dk lacks the power of two of its scores": Edit(
            "executors/cpu.py", "HostCall.backward_columns", "(self.natural * self.score_factor)", "(self.natural)"
        ),
        "scores lack their power of two": Edit(
            "executors/cpu.py", "HostCall.scores", "np.multiply(s, self.wide(self.score_factor), out=s)", "s"
        ),
        "q carries more than the scale's mantissa": Edit(
            "executors/cpu.py", "HostCall.of", "lift = max(exponent, 0)", "lift = 0"
        ),
        "scales of any size stay as they are": Edit(
            "planning/problem.py", "Problem.scaling", "-most < exponent <= most", "True"
        ),
        "a scale is inf for float16": Edit(
            "planning/problem.py", "Problem.scaling", "(max(-(2.0**126), min(scale, 2.0**126)), 0, 0)", "(scale, 0, 0)"
        ),
        "k has q's part of the scale": Edit(
            "planning/problem.py", "Problem.scaling", "exponent - exponent // 2", "exponent // 2"
        ),
        "gradients keep the powers of two": Edit(
            "executors/_bound_plan.py", "BoundPlan._finished", "name[1:] in self._exponents", "False"
        ),
        "calls are repeated without the powers of two": Edit(
            "executors/_bound_plan.py", "BoundPlan.__init__", "not (self._exponents or", "not ("
        ),
        "gradients read q and k as they are": Edit(
            "executors/_bound_plan.py", "BoundPlan.run", "[self._scaled(name, array) for",
            "[array if self._name == 'backward' else self._scaled(name, array) for",
        ),
    },
    nothing_is_raised: {
        "what the caller has NumPy raise comes out of lse": Edit(
            "executors/cpu.py", "bind", 'with np.errstate(all="ignore"):', "if True:"
        ),
        "what the caller has NumPy raise comes out of batches": Edit(
            "executors/host_threads.py", "_work_off", 'np.errstate(all="ignore"), _scratch(tiling, num_tiles)',
            "_scratch(tiling, num_tiles)",
        ),
    },
    other_calls_raise_nothing: {
        f"what the caller has NumPy raise comes out of {function}": Edit(
            file, function, 'np.errstate(all="ignore")', "np.errstate()"
        )
        for function, file in QUIET.items()
    },
    blas_limits_are_kept: {
        "the first call out gives BLAS its threads back": Edit(
            "executors/blas.py", "OneThread.leave", "if _users == 0:", "if True:"
        ),
        "BLAS is left on one thread": Edit("executors/blas.py", "_OfProcess.release", "self._set(self._saved)", "pass"),
        "a number of threads set during a call is lost": Edit(
            "executors/blas.py", "_OfProcess.release", "is not None and self._get() == 1", "is not None"
        ),
        "BLAS has its threads during a call": Edit("executors/blas.py", "_OfProcess.hold", "self._set(1)", ""),
        "a child keeps the one thread of its parent's calls": Edit(
            "executors/blas.py", "_after_fork", "library.release()", "pass"
        ),
        "an interrupt leaves BLAS on one thread": Edit(
            "executors/blas.py", "on_one_thread", "blas.leave()\nraise", "raise"
        ),
    },
    threads_are_right: {
        "an error on another thread is lost": Edit("executors/host_threads.py", "_share", "if errors:", "if False:"),
        "threads that cannot be started are an error": Edit(
            "executors/host_threads.py", "_share", "except RuntimeError:", "except ZeroDivisionError:"
        ),
        "a call ends before its threads": Edit("executors/host_threads.py", "_share", "thread.join()", "pass"),
        "BLAS keeps its threads on the calling thread": Edit(
            "executors/host_threads.py", "run", "on_one_thread(share_all)", "share_all()"
        ),
    },
    turns_are_kept: {
        "no tile waits": Edit("executors/host_threads.py", "Turn.wait", "while each", "while False and each"),
        "rows are finished too early": Edit(
            "executors/host_threads.py", "Turn.advance", "self.num_finished[head] = stop",
            "self.num_finished[head] = float('inf')"
        ),
        "a tile forgets the earlier ones": Edit(
            "executors/cpu.py", "HostCall.backward_columns", "if turn.earlier and not turn.wait(head, math.inf):",
            "if False:"
        ),
        "tiles of a head have no order": Edit(
            "executors/host_threads.py", "in_turn", "last.update(dict.fromkeys(heads, turn))", "pass"
        ),
    },
}  # fmt: skip
