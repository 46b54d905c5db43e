"""Guards for faults in how the host scales scores, keeps NumPy's errors inside, and limits BLAS's threads.

Each guard takes a library: the one that is installed, or a copy with a fault under a name of its own.
"""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cuflash.testing import strategies
from hypothesis import strategies as st
from mutations.python_guards import hunt, part
from test_blas import assert_limits_are_kept, assert_threads_are_right
from test_magnitudes import (
    BROADCAST, assert_no_lse_is_too_large, assert_nothing_is_raised, assert_operands_may_be_huge,
    assert_powers_cancel, changed, powers, tame,
)  # fmt: skip

# float32 cannot hold the scale that makes up for 2^85 in both of q and k, and few drawn examples need one.
FAR = 85
TAME = strategies.Structure(seqlen_q=5, seqlen_kv=6, dtype="float32", values="lattice").example()

# pytest.raises fails with an exception of its own where nothing was raised.
SIGNS = (AssertionError, ValueError, pytest.fail.Exception)  # exceptions by which guards see a fault


def all_results(library):
    """Return a function that returns all results of an example by name, from `attention` and `attention_vjp`."""

    def everything(example):
        q, k, v, mask, scale = example.q, example.k, example.v, example.dense_mask, example.scale
        (o, lse), vjp = library.attention_vjp(q, k, v, mask=mask, scale=scale, return_lse=True)
        assert library.attention(q, k, v, mask=mask, scale=scale).tobytes() == o.tobytes()
        return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))

    return everything


def magnitudes_are_right(library):
    """Operands and scales of any size give right scores."""
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
    """No call raises an error of arithmetic, whatever errors the caller makes NumPy raise."""
    everything = all_results(library)
    assert_no_lse_is_too_large(library)
    assert_nothing_is_raised(everything, BROADCAST)

    @hunt(tame(longest=20, widest=8), st.sampled_from(["huge", "tiny", "tiny do"]), seeds=1, most=40)
    def check(example, size):
        assert_nothing_is_raised(everything, changed(example, size))
        assert_nothing_is_raised(everything, changed(example, size).but(scale=1e-70))


def blas_limits_are_kept(library):
    """BLAS has as many threads after overlapping calls as before."""
    assert_limits_are_kept(part(library, "executors.blas"))


def any_tile_memory_is_taken(library):
    """The host's tiles have a largest size, and a small call takes memory for its scores alone."""
    q = np.linspace(-1, 1, 2 * 40 * 8).reshape(2, 40, 8)
    expected, _ = library.attention_vjp(q, q, q)
    for memory in (1, 1 << 24, 1 << 30):
        device = library.DeviceSpec(name="x", num_processors=1, tile_memory_bytes=memory)
        ready = library.plan(q, q, q, device=device)
        assert ready.plan.tiling.scratch_scores <= 2 * 40 * 40
        o, lse = ready.forward(q, q, q)
        assert np.allclose(o, expected) and np.isfinite(ready.backward(o, q, q, q, o, lse).dq).all()
        long = library.ShapeDtype((1, 1 << 20, 8), np.float64)
        assert library.plan(long, long, long, device=device).workspace_bytes < 1 << 30


def threads_are_right(library):
    """Calls that share work among threads have equal bits, one thread of BLAS each, and raise their own errors."""
    assert_threads_are_right(library)


def forked_processes_are_told(library):
    """A process that was forked from one that had used CUDA does not use it, nor asks it for a device."""
    nvrtc, asked = part(library, "compiler.nvrtc"), []
    runtime = SimpleNamespace(getDevice=lambda: asked.append(1) or 3, CUDARuntimeError=RuntimeError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(nvrtc, "_process", None)
        patch.setattr(nvrtc, "_is_started", False)
        assert nvrtc.current_number() == 3 and nvrtc.current_device() == (cupy, 3) and nvrtc.current_number() == 3
        patch.setattr(os, "getpid", lambda: -1)
        nvrtc._after_fork()
        asked.clear()
        for ask in (nvrtc.current_number, nvrtc.current_device):
            with pytest.raises(RuntimeError, match="forked from one that had used CUDA"):
                ask()
        assert not asked
