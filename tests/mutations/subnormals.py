"""Planted faults in subnormal numbers: in the simulator, which flushes them as a GPU does, and in bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
from cuflash.compiler import source as sources
from cuflash.testing import Example
from executors import SIM
from hypothesis import strategies as st
from mutations.planting import Edit
from mutations.python_guards import hunt
from test_subnormals import KERNELS, SHAPE, STRATEGIES

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault
# A process can load only one runtime of the simulator, so each fault has a process, in which the copy is the library.
CHILD = """
import sys
from pathlib import Path
import numpy as np
from cuflash.compiler import source
source.KERNELS = Path(sys.argv[1])
import probing
units = 2.0**-24, 2.0**-133, 2.0**-133
of_groups = probing.group_products("bfloat16", 16, True, units[1])
added = probing.bulk("runs of subnormal numbers", 2.0**-140)
for launch in (probing.exact_sums("float64"), probing.mma(units), of_groups, added, probing.subnormals()):
    probing.assert_expected(launch, launch.on_simulator())
assert np.array(1e-40, np.float32) * np.float32(0.5) > 0, "this thread flushes subnormal numbers"
"""


def launches_flush_as_gpus_do(library: ModuleType) -> None:
    """Check which operations of the copy's simulator flush, and that the thread that launches does not."""
    assert library.__file__ is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cuflash").symlink_to(Path(library.__file__).parent)
        path = {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
        command = [sys.executable, "-c", CHILD, str(sources.KERNELS)]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | path)
    assert run.returncode == 0, run.stderr


def bounds_hold_where_weights_underflow(library: ModuleType) -> None:
    """Check the copy's bounds against results of the simulator."""
    error_bound = import_module(f"{library.__name__}.bounds").error_bound

    def check(kernel: str, example: Example) -> None:
        options = {"scale": example.scale, "sink": example.sink, "dlse": example.dlse}
        if (own := example.dropout) is not None:
            options["dropout"] = library.Dropout(own.p, own.seed, own.offset)
        bounds = error_bound(example.q, example.k, example.v, example.do, **options)
        for name, result in replace(SIM, kernel=kernel).everything(example).items():
            assert (np.abs(result - getattr(example.exact, name)) <= getattr(bounds, name)).all(), name

    for strategy in STRATEGIES:
        for kernel in ("simt", "naive"):
            hunt(st.just(kernel), strategy(replace(SHAPE, dtype=KERNELS[kernel])), seeds=2, most=20)(check)


FAULTS = {
    launches_flush_as_gpus_do: {
        "a launch flushes nothing": Edit("sim/runtime/launch.cpp", None, "(request->flushes)", "(false)"),
        "only results are flushed": Edit("sim/runtime/subnormals.hpp", None, "= 0x8040", "= 0x8000"),
        "only operands are flushed": Edit("sim/runtime/subnormals.hpp", None, "= 0x8040", "= 0x40"),
        "the thread that launches stays changed": Edit(
            "sim/runtime/subnormals.hpp", None, "~Subnormals() { set_float_mode(before_); }", "~Subnormals() {}"
        ),
        "tensor cores flush bfloat16": Edit(
            "sim/runtime/matrix.cpp", "mma_m16n8k16", "of_tensor_cores(false)", "of_tensor_cores(true)"
        ),
        "tensor cores flush tf32": Edit(
            "sim/runtime/matrix.cpp", "execute_mma_m16n8k8_tf32", "of_tensor_cores(false)", "of_tensor_cores(true)"
        ),
        "tensor cores of warpgroups flush bfloat16": Edit(
            "sim/runtime/wgmma.cpp", "multiply", "of_tensor_cores(false)", "of_tensor_cores(true)"
        ),
        "additions to global memory flush": Edit("sim/runtime/bulk.cpp", None, "flushed(false)", "flushed(true)"),
        "powers scale subnormal numbers": Edit("sim/ptx/math.cuh", None, "::powf(sim::flushed(x), y)", "::powf(x, y)"),
        "doubles are rounded to normal floats": Edit(
            "sim/ptx/math.cuh", None, "{ return sim::rounded_float(x); }", "{ return static_cast<float>(x); }"
        ),
        "subnormal numbers are equally small": Edit(
            "sim/ptx/math.cuh", "min_or_nan", "sim::exact_double(x) < sim::exact_double(y)", "x < y"
        ),
        "magnitudes of subnormal numbers are 0": Edit(
            "sim/ptx/math.cuh", "larger_magnitude", "sim::exact_double(x) < sim::exact_double(magnitude)",
            "x < magnitude",
        ),
        "products of bfloat16 are flushed": Edit(
            "sim/ptx/packed.cuh", "multiply2", "sim::rounded_float(half(x, 0) * half(y, 0))",
            "static_cast<float>(half(x, 0) * half(y, 0))",
        ),
    },
    bounds_hold_where_weights_underflow: {
        "stored weights do not underflow": Edit("bounds/forward.py", "forward_tolerances", "+ model.wa)", ")"),
        "recomputed weights do not underflow": Edit("bounds/gradients.py", "gap_of", "+ np.minimum(p, wa)", ""),
        "weights of sinks do not underflow": Edit(
            "bounds/gradients.py", "sink_weight", "+ np.minimum(p_sink, operands.model.wa)", ""
        ),
        "nothing multiplies sums": Edit(
            "bounds/forward.py", "forward_tolerances", "weights.most * seqlen_kv * model.wa", "seqlen_kv * model.wa"
        ),
    },
}
