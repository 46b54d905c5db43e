"""Kernels read nothing beyond their inputs, write every element of their results and nothing else."""

from functools import partial

import numpy as np
import pytest
from executors import on_every_executor, on_kernels
from poison import EMPTY, STRUCTURES, Guarded, call

from cuflash.testing import assert_within_bounds


@on_kernels
@pytest.mark.parametrize("name", STRUCTURES)
def test_poison_around_every_array_is_neither_read_nor_overwritten(run, name):
    example = run.rounded(STRUCTURES[name].example())
    call(example, run, check=partial(assert_within_bounds, example))


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
