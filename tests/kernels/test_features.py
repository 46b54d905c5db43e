"""Parameters of a feature are a kernel argument of their own, after all others, in specifications that have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash.executors.launch import run as run_pass
from cuflash.executors.params import ParamsTemplate, View
from cuflash.planning.launches import Feature, Pass
from cuflash.compiler.params_layout import MATRICES
from cuflash.executors.sim import Simulator
from executors import SIM, Run, needs_compiler, on_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.executors import gpu

pytestmark = needs_compiler

SCALING = np.dtype([("bias", MATRICES), ("slopes", np.uint64), ("factor", np.float64)], align=True)


def scaled(bias: Any, slopes: Any, factor: float, batch: tuple[int, ...], spec: Any, run: Run = SIM) -> Any:
    """Run the test's kernel on a bias that broadcasts over the batch, through the library's launches."""
    num_heads, seqlen_q, value_dim = bias.shape[-3:]
    q, v = (np.zeros((*batch, num_heads, seqlen_q, dim), np.float32) for dim in (8, value_dim))
    plan = cuflash.plan(q, q, v, executor="sim").plan
    launch = plan.kernels.forward.launches["forward"]
    made = replace(
        launch, spec=spec("feature", block_q=launch.spec.block_q), reads=("bias", "slopes"), writes=("o",),
        features=("scaling",), shared_bytes=0,
    )  # fmt: skip
    feature = Feature("scaling", SCALING, {"factor": factor}, tables=("slopes",))
    kernels = Pass({"forward": made}, features=(feature,))
    arrays = {"o": np.full(v.shape, np.nan, np.float32), "bias": bias, "slopes": slopes}
    arrays = {name: run.put(array) for name, array in arrays.items()}
    run_pass(plan, kernels, gpu.Gpu() if run.is_on_device else Simulator(), arrays)
    return run.get(arrays["o"])


@on_kernels
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("is_broadcast", [False, True])
def test_a_kernel_reads_the_arrays_and_numbers_of_its_feature(run, kernels, spec, batch, is_broadcast) -> None:
    rng = np.random.default_rng(0)
    leading = tuple(1 if is_broadcast and place % 2 == 0 else extent for place, extent in enumerate(batch))
    bias = rng.standard_normal((*leading, 3, 40, 5), np.float32)
    slopes = rng.standard_normal(3, np.float32)
    factor = 0.75
    expected = np.broadcast_to((np.float32(factor) * slopes)[:, None, None] * bias, (*batch, 3, 40, 5))
    np.testing.assert_array_equal(scaled(bias, slopes, factor, batch, spec, run), expected)


def test_a_feature_without_its_array_is_a_fault_of_the_plan(kernels, spec) -> None:
    q = np.zeros((1, 4, 8), np.float32)
    plan = cuflash.plan(q, q, q, executor="sim").plan
    launch = replace(plan.kernels.forward.launches["forward"], features=("scaling",))
    with pytest.raises(ValueError, match="scaling"):
        run_pass(plan, Pass({"forward": launch}), Simulator(), {"q": q, "k": q, "v": q, "o": q})


@settings(max_examples=20)
@given(factor=st.floats(-8, 8, width=32), num_heads=st.integers(1, 4), seqlen=st.integers(1, 70))
def test_numbers_are_read_at_each_launch(factor: float, num_heads: int, seqlen: int) -> None:
    """Each of two features has a record of its own, with the numbers and addresses of its dtype."""
    first = Feature("first", SCALING, {"factor": factor})
    q = np.zeros((num_heads, seqlen, 8), np.float32)
    plan = cuflash.plan(q, q, q, executor="sim").plan
    views = (View.of("q", q), View.of("bias", q), View("slopes", np.dtype(np.float32), (num_heads,), (4,)))
    numbers = np.dtype([("scale", np.float64), ("seed", np.int64)])
    second = Feature("second", numbers, {"scale": -factor, "seed": seqlen})
    (arguments,) = ParamsTemplate.of(plan, views, features=(replace(first, tables=("slopes",)), second)).with_lists({})
    _, _, scaling, other = arguments.take([1 << 40, 2 << 40, 3 << 40]).kernels[0].records
    found = np.frombuffer(scaling.tobytes(), SCALING)[0]
    assert (int(found["bias"]["data"]), int(found["slopes"]), float(found["factor"])) == (2 << 40, 3 << 40, factor)
    assert np.frombuffer(other.tobytes(), second.dtype)[0].item() == (-factor, seqlen)
