"""Kernels read nothing beyond their inputs, write every element of their results and nothing else."""

from functools import partial

import numpy as np
import pytest
from cuflash.planning.list_kernels import AT_CALL
from cuflash.testing import assert_within_bounds
from executors import Run, on_every_executor, on_kernels, on_kernels_for
from poison import EMPTY, STRUCTURES, Guarded, call

import cuflash


@on_kernels_for("name", STRUCTURES)
def test_poison_around_every_array_is_neither_read_nor_overwritten(run, name):
    example = run.rounded(STRUCTURES[name].example())
    call(example, run, check=partial(assert_within_bounds, example))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["bits", "full and interval blocks of 128", "blocks of 100 x 24, each head its own"])
def test_kernels_read_lists_made_at_the_call_amid_poison(mask):
    run, example = Run("gpu"), STRUCTURES[f"mask: {mask}"].example()
    q, k, v = (run.put(getattr(example, name)) for name in "qkv")
    plan = cuflash.plan(q, k, v, mask=run.put_mask(example.mask, q, k, v), scale=example.scale, executor="gpu")
    assert set(plan._captured) == {AT_CALL}
    call(example, run, check=partial(assert_within_bounds, example), ready=plan)


@on_every_executor
@pytest.mark.parametrize("name", EMPTY)
def test_a_problem_of_size_0_has_shaped_results(run, name):
    example = EMPTY[name].example()
    results = run.everything(example)
    assert_within_bounds(example, **results)
    assert results["o"].shape == example.problem.o_shape()


@on_kernels
def test_an_element_too_many_or_too_few_is_noticed(run):
    guarded = Guarded.of((3, 4), np.float32, run, 2)
    guarded.view[...] = 1
    assert (guarded.result("x", run) == 1).all()
    guarded.view[2, 3] = np.nan
    with pytest.raises(AssertionError, match="x has elements that were not written"):
        guarded.result("x", run)
    guarded.view[...] = 1
    guarded.memory[7] = 0
    with pytest.raises(AssertionError, match="memory around x was written"):
        guarded.result("x", run)
