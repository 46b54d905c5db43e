"""Faults in how the host scales scores, keeps NumPy's errors to itself, and limits BLAS's threads."""

from __future__ import annotations

from mutations.host_guards import (
    any_tile_memory_is_taken, blas_limits_are_kept, forked_processes_are_told, magnitudes_are_right,
    nothing_is_raised, threads_are_right,
)  # fmt: skip
from mutations.planting import Edit

FAULTS = {
    any_tile_memory_is_taken: {
        "tiles are as large as the memory of a tile": Edit(
            "planning/host.py", "host_tile",
            "min(device.tile_memory_bytes // (problem.accumulator.itemsize * _BLOCK_Q), _MOST_BLOCK_KV)",
            "device.tile_memory_bytes // (problem.accumulator.itemsize * _BLOCK_Q)",
        ),
    },
    forked_processes_are_told: {
        "a forked process passes for the first one": Edit(
            "compiler/nvrtc.py", "_after_fork", "_is_started = False", "pass"
        ),
    },
    magnitudes_are_right: {
        "dk lacks the power of two of its scores": Edit(
            "executors/cpu.py", "_HostCall.backward_columns",
            "self.wide(self.natural * self.score_factor)",
            "self.wide(self.natural)",
        ),
        "scores lack their power of two": Edit(
            "executors/cpu.py", "_HostCall.scores", "np.multiply(s, self.wide(self.score_factor), out=s)", "s"
        ),
        "q carries more than the scale's mantissa": Edit(
            "executors/cpu.py", "_HostCall.of", "lift = max(exponent, 0)", "lift = 0"
        ),
        "scales of any size stay as they are": Edit(
            "planning/problem.py", "Problem.scaling", "-most < exponent <= most", "True"
        ),
        "a scale is inf for float16": Edit(
            "planning/problem.py", "Problem.scaling",
            "Scaling(max(-(2.0**126), min(scale, 2.0**126)), 0, 0)",
            "Scaling(scale, 0, 0)",
        ),
        "k has q's part of the scale": Edit(
            "planning/problem.py", "Problem.scaling", "exponent - exponent // 2", "exponent // 2"
        ),
        "gradients read q and k as they are": Edit(
            "plans.py", "Plan.backward",
            'given_arrays["q"], given_arrays["k"] = self._scaled(given_arrays["q"], given_arrays["k"])',
            "pass",
        ),
        "gradients keep the powers of two": Edit(
            "plans.py", "Plan.backward",
            'results["dq"], results["dk"] = self._scaled(results["dq"], results["dk"])',
            "pass",
        ),
        "calls are repeated without the powers of two": Edit(
            "plans.py", "Plan.can_bind", "and not self._scales_arrays", ""
        ),
    },
    nothing_is_raised: {
        "what the caller has NumPy raise comes out of lse": Edit(
            "executors/cpu.py", "backward", 'with np.errstate(all="ignore"):', "if True:"
        ),
        "what the caller has NumPy raise comes out of batches": Edit(
            "executors/host_threads.py", "_work_off",
            'with np.errstate(all="ignore"), _scratch(tiling)', "with _scratch(tiling)",
        ),
    },
    blas_limits_are_kept: {
        "the first call out gives BLAS its threads back": Edit(
            "executors/blas.py", "OneThread.leave", "if _users == 0:", "if True:"
        ),
        "BLAS is left on one thread": Edit("executors/blas.py", "_OfProcess.release", "self._set(self._found)", "pass"),
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
}  # fmt: skip
