"""Context parallelism inside `jax.shard_map`, on eight devices of the CPU, against one call."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import cuflash  # noqa: E402
import cuflash.jax  # noqa: E402
from cuflash import Dropout, UnsupportedProblem, masks, scores  # noqa: E402
from cuflash.jax._context_parallel import runs_of  # noqa: E402

HEADS, LENGTH = 4, 64
CASES = {
    "causal": {"causal": True},
    "a window and a sink": {"window": (20, 3), "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    "documents": {"mask": masks.Sequences([0, 9, 40, LENGTH], causal=True)},
    "alibi": {"score": scores.alibi(scores.alibi_slopes(HEADS)), "causal": "bottom_right"},
    "dropout": {"dropout": Dropout(0.25, seed=3), "causal": True},
}


def mesh_of(size):
    return jax.sharding.Mesh(np.array(jax.devices()[:size]), ("rows",))


def parallel(mesh, layout, **options):
    spec = jax.sharding.PartitionSpec(None, None, "rows")

    def local(q, k, v):
        return cuflash.jax.context_parallel(q, k, v, axis_name="rows", layout=layout, **options)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))


def order_of(size, layout):
    """Return the position of each row of the array whose parts devices have."""
    rows = LENGTH // size
    runs = [run for rank in range(size) for run in runs_of(rank, size, rows, layout)]
    return np.concatenate([np.arange(*run) for run in runs])


def check(size, layout, name):
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 2, HEADS, LENGTH, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, HEADS // 2, LENGTH, 16), dtype=np.float32)
    options, order = CASES[name], order_of(size, layout)
    assert np.array_equal(np.sort(order), np.arange(LENGTH))
    memory = "tokens_first" if name == "alibi" else "heads_first"
    o, pull = jax.vjp(parallel(mesh_of(size), layout, memory=memory, **options), *(x[..., order, :] for x in (q, k, v)))
    results = o, *pull(jax.numpy.asarray(do[..., order, :]))
    exact, vjp = cuflash.attention_vjp(q, k, v, **options)
    gradients, bound = vjp(do), cuflash.error_bound(q, k, v, do, **options)
    wanted = {"o": exact, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    for (each, expected), result in zip(wanted.items(), results):
        error = abs(np.asarray(result) - expected[..., order, :])
        assert (error <= 2 * getattr(bound, each)[..., order, :]).all(), (name, layout, size, each)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_one_device_has_all_rows(layout):
    check(1, layout, "causal")


def test_eight_devices_agree_with_one_call():
    """Runs in a process of its own, since JAX fixes the number of its devices when it starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    paths = [str(Path(__file__).parent), str(Path(cuflash.__file__).parents[1])]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    code = "import test_jax_context_parallel as tests; tests.on_eight_devices()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


def on_eight_devices():
    assert len(jax.devices()) == 8
    for size, layout, name in [
        (2, "contiguous", "alibi"), (4, "zigzag", "a window and a sink"), (8, "zigzag", "causal"),
        (8, "contiguous", "documents"), (8, "zigzag", "dropout"),
    ]:  # fmt: skip
        check(size, layout, name)


@pytest.mark.parametrize(("options", "reason"), [
    ({"layout": "ring"}, "layout must be 'contiguous' or 'zigzag'; got 'ring'"),
    ({"q_start": 3}, "q_start must be left out: devices see the positions of the whole sequence; got 3"),
])  # fmt: skip
def test_wrong_arguments_are_refused(options, reason):
    x = np.zeros((1, HEADS, LENGTH, 16), np.float32)
    with pytest.raises(UnsupportedProblem) as error:
        parallel(mesh_of(1), **{"layout": "contiguous"} | options)(x, x, x)
    assert error.value.reasons == (reason,)


@pytest.mark.parametrize("axis_name", ["columns", 3, None])
def test_an_axis_that_no_mesh_has_is_refused(axis_name):
    x = np.zeros((1, HEADS, LENGTH, 16), np.float32)
    with pytest.raises(UnsupportedProblem, match="axis_name must be the name of an axis of the mesh of jax.shard_map"):
        cuflash.jax.context_parallel(x, x, x, axis_name=axis_name)


def test_an_odd_number_of_rows_has_no_zigzag():
    x = np.zeros((1, HEADS, 7, 16), np.float32)
    with pytest.raises(UnsupportedProblem, match="layout='zigzag' needs an even number of rows on each device"):
        parallel(mesh_of(1), "zigzag")(x, x, x)
