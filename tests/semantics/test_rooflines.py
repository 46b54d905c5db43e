"""Rooflines count what masks allow, name the bottleneck, and are below all measured times in the results."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuflash.study._roofline import KernelRoofline, roofline_report
from cuflash.testing import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash import DeviceSpec, ShapeDtype, UnsupportedProblem, masks
from cuflash.study import Peaks, roofline

ROOT = Path(__file__).parents[2]
H100 = DeviceSpec.gpu("H100")


def planned(dtype: Any = np.float16, length: int = 200, dims: tuple[int, int] = (64, 32), **options: Any) -> Any:
    q, k, v = (ShapeDtype((2, h, length, dim), dtype) for h, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    return cuflash.plan(q, k, v, **{"device": H100} | options)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(["simt", "sm80"]))
def test_products_and_exponentials_are_those_of_the_elements_of_the_mask(data: Any, kernel: str) -> None:
    check_counts(cuflash, data, kernel)


def check_counts(library: Any, data: Any, kernel: str) -> None:
    shape = library.masks.MaskShape((2,), 4, 60, 60)
    mask = data.draw(strategies.masks(shape))
    num_allowed = int(mask.toarray(60, 60, batch=(2,), num_heads=4).sum())
    plan = planned(length=60, mask=mask, kernel=kernel)
    forward, backward = (library.study.roofline(plan, which=which).kernels for which in ("forward", "backward"))
    (kernel_row,) = [kernel for kernel in forward if kernel.name.endswith("forward")]
    assert (kernel_row.flops, kernel_row.exponentials) == (2 * num_allowed * (64 + 32), num_allowed)
    products = sum(kernel.flops for kernel in backward)
    walks = {"backward": 3 * 64 + 2 * 32, "backward_rows": 2 * 64 + 32, "backward_columns": 2 * 64 + 2 * 32}
    expected = sum(walks.get(kernel.name.split("_", 1)[1], 0) for kernel in backward)
    assert products == 2 * num_allowed * expected and expected >= 3 * 64 + 2 * 32


def test_memory_is_that_of_the_arrays() -> None:
    (kernel,) = roofline(planned(kernel="simt")).kernels
    inputs = 2 * 200 * (4 * 64 + 2 * 64 + 2 * 32)
    assert kernel.hbm_bytes == 2 * (inputs + 2 * 200 * 4 * 32) + 4 * 2 * 200 * 4
    assert kernel.l2_bytes > kernel.hbm_bytes
    assert kernel.seconds["memory"] == kernel.hbm_bytes / 3.35e12


def test_each_resource_binds_where_it_is_the_slowest() -> None:
    plan = planned()
    rates = {
        "products": "tensor_16", "exponentials": "exponentials", "memory": "hbm_bytes", "level-2 cache": "l2_bytes"
    }  # fmt: skip
    for resource, rate in rates.items():
        ample = dict.fromkeys(("hbm_bytes", "tensor_16", "exponentials", "l2_bytes", "flops_32"), 1e12)
        ample["hbm_bytes"] = 1e24
        slow = Peaks(clock=1e9, **ample | {rate: 1e-3})
        assert roofline(plan, peaks=slow).bound_by == resource
    wave = cuflash.scores.Score(lambda s, b, h, i, j: s * s * s - s)
    slow = Peaks(clock=1e9, hbm_bytes=1e24, tensor_16=1e12, exponentials=1e12, l2_bytes=1e12, flops_32=1e-3)
    assert roofline(planned(score=wave, kernel="sm80"), peaks=slow).bound_by == "multiply-adds"


def test_units_are_those_that_multiply() -> None:
    peaks = {"ieee": 256, "tf32": 2048, "tf32x3": 2048 / 3}
    for precision, rate in peaks.items():
        kernel, *_ = roofline(planned(np.float32, precision=precision)).kernels
        assert kernel.seconds["products"] == pytest.approx(kernel.flops / (rate * 132 * 1.98e9), rel=1e-12)
    (kernel,) = roofline(planned(np.float64)).kernels
    assert kernel.seconds["exponentials"] == 0 and kernel.seconds["products"] > 0


def test_no_time_of_the_results_is_below_its_bound() -> None:
    """A kernel faster than its roofline would disprove it; a bound below half of the best times would be useless."""
    shares = []
    with open(ROOT / "experiments/results/speed_vs_peers.csv", newline="") as file:
        rows = {tuple(row[name] for name in (
            "pass", "head_dim", "mask", "seqlen", "batch", "heads", "dtype", "kernel", "gpu", "cuflash_ms"
        )) for row in csv.DictReader(file)}  # fmt: skip
    plans: dict[Any, Any] = {}
    for which, dim, mask, length, batch, heads, dtype, kernel, gpu, milliseconds in rows:
        if mask not in ("full", "causal") or not milliseconds or "H100" not in gpu:
            continue
        family, _, precision = kernel.partition(" ")
        key = (dim, mask, length, batch, heads, dtype, kernel)
        if key not in plans:
            shape = ShapeDtype((int(batch), int(heads), int(length), int(dim)), bfloat16 if "b" in dtype else dtype)
            plans[key] = cuflash.plan(
                shape, shape, shape, causal=mask == "causal", kernel=family, precision=precision or "ieee", device=H100
            )
        measured = roofline(plans[key], which=which).measured(float(milliseconds) / 1e3)
        shares.append(measured.share)
    assert len(shares) > 50 and max(shares) <= 1 and max(shares) > 0.5


@pytest.mark.parametrize("name", ["flash_ladder_gpu", "flashattention1_tables_gpu"])
def test_no_time_of_other_results_is_below_its_bound(name: str) -> None:
    """Each row is for one kernel or method, with full and causal attention."""
    kernels = {"standard": "naive", "fa1": "fa1", "dense": "auto"}
    plans: dict[Any, Any] = {}
    shares = []
    with open(ROOT / "experiments/results" / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        kernel, mask, ways = row.get("kernel") or kernels.get(row["method"]), row.get("mask", "full"), [row["pass"]]
        if kernel is None or "H100" not in row["gpu"]:
            continue
        numbers = tuple(int(row[size]) for size in ("batch", "num_heads", "seqlen", "head_dim"))
        if (kernel, mask, numbers) not in plans:
            shape = ShapeDtype(numbers, np.float16)
            plans[kernel, mask, numbers] = cuflash.plan(
                shape, shape, shape, causal=mask == "causal", kernel=kernel, device=H100
            )
        ways = ["forward", "backward"] if ways == ["both"] else ways
        least = sum(roofline(plans[kernel, mask, numbers], which=way).least_seconds for way in ways)
        shares.append(least / (float(row["ms"]) / 1e3))
    assert len(shares) >= 40 and max(shares) <= 1


def test_a_plan_without_work_takes_no_time() -> None:
    empty = roofline(planned(length=0))
    assert empty.least_seconds == 0 and empty.bound_by == "nothing" and empty.kernels == ()


@pytest.mark.parametrize("junk", [None, 3, "plan", np.ones(3), KernelRoofline])
def test_what_is_no_plan_is_refused(junk: Any) -> None:
    with pytest.raises(TypeError, match="plan must be a result of cuflash.plan"):
        roofline(junk)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: roofline(cuflash.plan(*[np.ones((3, 4))] * 3)), "plan must be for a GPU; got a plan"),
        (lambda: roofline(planned(), which="both"), "which must be 'forward' or 'backward'; got 'both'"),
        (lambda: roofline(planned(), peaks=989), "peaks must be a Peaks or None; got 989"),
        (lambda: roofline(planned()).measured(0), "seconds must be a positive number; got 0"),
        (lambda: roofline(planned()).measured(np.nan), "seconds must be a positive number"),
        (lambda: roofline(planned()).share, "measured_seconds must be known for a share"),
        (lambda: Peaks(clock=0, hbm_bytes=-1), "2 reasons"),
        (lambda: Peaks(clock=1, hbm_bytes=1, l2_bytes="64"), "l2_bytes must be a finite rate"),
        (lambda: roofline(planned(device=DeviceSpec(
            name="X1", compute_capability=(9, 0), num_processors=9, tile_memory_bytes=232448
        ))), r"device must be one of T4, .* got X1: pass peaks="),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        call()


def test_the_command_prints_what_the_function_returns() -> None:
    line = "--heads 4 --kv-heads 2 --length 200 --head-dim 64 --dtype float16 --batch 2 --causal --backward"
    ready = planned(dims=(64, 64), causal=True)
    assert roofline_report(line.split()) == str(roofline(ready, which="backward"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--device TPU", "argument --device: name must be one of T4, "),
        ("--dtype complex64", "q's dtype must be one of"),
        ("--length -3", "--length must be at least 1; got -3"),
        ("--heads 0 --kv-length 0 --measured -1", "--heads must be at least 1; got 0; --kv-length must be at least 1; "
         "got 0; --measured must be a positive number; got -1"),
        ("--measured nan", "--measured must be a positive number; got nan"),
        ("--heads two", "argument --heads: invalid int value: 'two'"),
        ("--kernel fast", "kernel must be"),
    ],
)  # fmt: skip
def test_the_command_refuses_in_one_line(wrong: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        roofline_report(["--heads", "4", "--length", "64", *wrong.split()])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and line.startswith(f"python -m cuflash roofline: error: {message}")


def test_masks_that_hide_within_blocks_do_not_count() -> None:
    comb = masks.FromFunction(lambda b, h, i, j: (i + j) % 2 == 0)
    dense, half = (roofline(planned(mask=mask, kernel="sm80")).kernels[0] for mask in (None, comb))
    assert half.flops * 2 == dense.flops
