"""Every kernel whose thread blocks share memory runs in blocks that run together, with races between them as errors.

The kernels are found in their sources: those that reach an atomic operation, a copy that adds, or a wait for a counter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import cache_calls
import numpy as np
import prefill_calls
import pytest
import test_block_mass
import test_decode
import test_few_queries
import test_fp8_kernels
import test_list_kernels
import test_page_bounds
import test_result_kernels
import test_score_kernels
import test_selection_kernels
import test_tangent_kernels
from cuflash.compiler.source import KERNELS
from cuflash.executors.sim import Simulator
from cuflash.testing import Structure, assert_within_bounds
from executors import SIM, check_simulated, hostile_schedules, is_long, needs_compiler, sampled
from lexing import spans, tokens

import cuflash
from cuflash import masks, sim

pytestmark = needs_compiler

# Operations of kernels_cu/ptx by which thread blocks share global memory. atomicOr is used on shared memory alone.
SHARING = {
    "fetch_add", "fetch_add_acq_rel", "red_add", "red_add_4", "red_add_release", "wait_for_counter", "bulk_add",
    "__threadfence",
}  # fmt: skip


def files_of(path: Path, texts: dict[Path, str]) -> dict[Path, str]:
    """Add a file and all that it includes to texts by path, and return these."""
    if path not in texts:
        texts[path] = path.read_text("utf-8")
        for name in re.findall(r"#include <(.*)>", texts[path]):
            files_of(KERNELS / name, texts)
    return texts


@cache
def names_of(text: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return each function of a text with the names in it."""
    every, every_span = tokens(text, "cuda"), list(spans(text, "cuda"))
    is_class = [any(other.name.startswith(f"{span.name}.") for other in every_span) for span in every_span]
    return tuple(
        (span.name.rpartition(".")[2], frozenset(t.text for t in every if span.start <= t.start < span.stop))
        for span, has_members in zip(every_span, is_class)
        if not has_members
    )


def shares_memory(kernel: Path) -> bool:
    """Return whether functions that a kernel may call, by their names, have an operation on memory of all blocks."""
    called: dict[str, set[str]] = {}
    for path, text in files_of(kernel, {}).items():
        for name, names in names_of(text) if path.parent.name != "ptx" else ():
            called.setdefault(name, set()).update(names)
    reached, waiting = set[str](), {token.text for token in tokens(kernel.read_text("utf-8"), "cuda")}
    while waiting:
        reached |= waiting
        waiting = set().union(*(called.get(name, ()) for name in waiting)) - reached
    return not reached.isdisjoint(SHARING)


def sharing_kernels() -> set[str]:
    return {f"{path.parent.name}_{path.stem}" for path in KERNELS.glob("*/*.cu") if shares_memory(path)}


# Calls that run them, each of which checks its results.


SIZES = {"num_heads": 2, "seqlen_q": 140, "seqlen_kv": 270, "head_dim": 24, "value_dim": 16}


def all_results(kernel: str, deterministic: bool = False, **structure: Any) -> None:
    check_simulated(kernel, Structure(**SIZES | structure), deterministic=deterministic)


def forward(kernel: str, **structure: Any) -> None:
    example = SIM.rounded(Structure(**SIZES | structure).example())
    o, lse = replace(SIM, kernel=kernel).attend(example.q, example.k, example.v, mask=example.mask, scale=example.scale)
    assert_within_bounds(example, o=o, lse=lse)


def captured_arrays(kernel: str, deterministic: bool = False) -> None:
    example = SIM.rounded(test_score_kernels.normal_example(kernel))
    others = test_score_kernels.normal_call(SIM, kernel, deterministic=deterministic)
    assert_within_bounds(example, others=others)


def masses(chip: str) -> None:
    """Check masses, of tiles that two thread blocks take until none is left."""
    test_block_mass.check_on_chip(chip, num_processors=2, **test_block_mass.HALVES["rows of one block and of several"])


def decoding(is_quantized: bool) -> None:
    call = test_decode.drawn(test_decode.KINDS["many parts"], (300, 130))
    attend = partial(cache_calls.attended, SIM, call, device=test_decode.KINDS["many parts"]["device"])
    o, lse, faults = attend(is_quantized=is_quantized)
    assert not faults
    if not is_quantized:
        cache_calls.assert_is_attention(call, o, lse, SIM.rounded)


def few_queries() -> None:
    example = SIM.rounded(test_few_queries.STRUCTURES["lengths, causal"].example())
    o, lse = test_few_queries.forward(example)
    assert_within_bounds(example, o=o, lse=lse)


def fp8() -> None:
    x8 = [
        cuflash.quantize(x, block=64)
        for x in test_fp8_kernels.operands(300, 300, (64, 64), (4, 2), "bfloat16")
    ]
    test_fp8_kernels.require_bounds(test_fp8_kernels.attention(SIM, x8, causal=True), x8, causal=True)


def appending(dtype: Any, is_quantized: bool = False) -> None:
    counts, dims = (26, 10, 1, 4), (64, 64) if is_quantized else (256, 256)
    rows, k, _, lengths, *_ = cache_calls.appended(SIM, dtype, dims, counts, 26, is_quantized=is_quantized)
    pages, wanted = cache_calls.expected(rows, counts)
    assert lengths.tolist() == wanted and (is_quantized or np.array_equal(k, pages[0]))


def compared() -> None:
    results = test_result_kernels.results_of((2, 3, 300, 16), "float16")
    mass, error = test_result_kernels.by_kernel(results)
    assert np.isfinite(mass[..., 1:]).all() and np.isfinite(error)


def prefill() -> None:
    call = prefill_calls.with_counts()
    o, lse, faults = prefill_calls.prefilled(SIM, "sm80", call, cache_calls.paged(call, 16, 0))
    assert faults == 0 and np.isfinite(o[0]).any()


def tangents(kernel: str, dtype: str) -> None:
    full = replace(test_tangent_kernels.FULL, dtype=dtype)
    moving = test_tangent_kernels.moved_along(full.example(), test_tangent_kernels.EVERY)
    test_tangent_kernels.check_gradients(replace(SIM, kernel=kernel), moving)


def choosing() -> None:
    scores = np.random.default_rng(0).random((2, 3, 70)).astype(np.float32)
    rule = test_selection_kernels.Budget(mass=0.5), test_selection_kernels.Forced(sink=1), (24, 560), (8, 8), 0, False
    test_selection_kernels.check_choice("sim", (scores, None, None, None, *rule))


def choosing_from_wide_rows() -> None:
    """Choose the half of each row with scores of 4: two sums find their places, where others need 33 and minutes."""
    scores = np.where(np.arange(1056) % 2, np.float32(4), np.float32(0.5)) * np.ones((1, 2, 1), np.float32)
    rule = test_selection_kernels.Budget(top_k=528), test_selection_kernels.Forced(diagonal=False)
    test_selection_kernels.check_choice("sim", (scores, None, None, None, *rule, (2, 1056), (1, 1), 0, False))


def of_many_elements() -> tuple[Any, Any, Any]:
    shape, mask, block = test_list_kernels.MANY[0]
    return mask, shape, block


def hopper_tangents(check: Callable[..., object]) -> None:
    moving = test_tangent_kernels.moved_along(test_tangent_kernels.HOPPER.example(), test_tangent_kernels.EVERY)
    check(replace(SIM, kernel="sm90"), moving)


HALF = {"dtype": "float16"}
LISTED = masks.BlockPattern(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool), (64, 128))
SHORT, ODD = {"seqlen_q": 70, "seqlen_kv": 150}, {"head_dim": 200, "value_dim": 130}
CASES: dict[str, Callable[[], None]] = {
    "cache_append": lambda: appending(np.float32),
    "cache_append_e4m3": lambda: appending(np.float16, is_quantized=True),
    "cache_key_bounds": lambda: test_page_bounds.check_kernel(SIM),
    "cache_query_intervals": prefill,
    "naive_gradient_scores": lambda: captured_arrays("naive"),
    "results_compare": compared,
    "simt_backward": lambda: all_results("simt", dtype="float32"),
    "simt_backward_columns": lambda: captured_arrays("simt", deterministic=True),
    "simt_backward_rows": lambda: captured_arrays("simt", deterministic=True),
    "sm80_backward": lambda: all_results("sm80", **HALF, mask=LISTED),
    "sm80_backward_rows": lambda: captured_arrays("sm80", deterministic=True),
    "sm80_block_mass": lambda: masses("A100"),
    "sm80_decode": lambda: decoding(is_quantized=False),
    "sm80_decode_e4m3": lambda: decoding(is_quantized=True),
    "sm80_few_queries": few_queries,
    "sm80_forward": prefill,
    "sm90_backward": lambda: all_results("sm90", **HALF, mask=LISTED),
    "sm90_backward_rows": lambda: all_results("sm90", deterministic=True, **HALF),
    "sm90_backward_wide": lambda: all_results("sm90", **HALF, **SHORT, **ODD),
    "sm90_block_mass": lambda: masses("H100"),
    "sm90_forward": lambda: forward("sm90", **HALF, mask=masks.Causal("bottom_right")),
    "sm90_forward_fp8": fp8,
    "sm90_backward_jvp_rows": lambda: hopper_tangents(test_tangent_kernels.check_gradients),
    "sm90_jvp": lambda: hopper_tangents(test_tangent_kernels.check),
}


@contextmanager
def together(schedule: sim.Schedule, sanitize: sim.Sanitizer = "blocks") -> Iterator[set[str]]:
    """Run kernels of the simulator in blocks that run together; yield the names of those with several blocks."""
    ran, launch = set[str](), Simulator.launch

    def launched(self: Simulator, spec: Any, grid: int, nbytes: int, arguments: tuple[Any, ...]) -> None:
        launch(replace(self, schedule=schedule, sanitize=sanitize, time_limit=250), spec, grid, nbytes, arguments)
        if grid > 1:
            ran.add(spec.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulator, "launch", launched)
        yield ran


def test_every_kernel_whose_blocks_share_memory_has_a_case() -> None:
    assert sharing_kernels() == CASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sampled(CASES, 8))
def test_blocks_that_run_together_race_for_nothing(kernel: str) -> None:
    (schedule,) = hostile_schedules(kernel, 1)[:1]
    with together(replace(schedule, resident_blocks=3)) as ran:
        CASES[kernel]()
    assert kernel in ran


# Kernels in which one block resets a counter for the next launch.
RESETTING = ("cache_append", "results_compare", "sm80_few_queries", "sm90_forward")
# Further calls under ThreadSanitizer, of kernels whose threads share memory within a block only.
WITHIN_BLOCKS: dict[str, Callable[[], None]] = {
    "fa1_forward": lambda: all_results("fa1", **HALF),
    "simt_backward_jvp_columns": lambda: tangents("simt", "float32"),
    "sm80_backward_jvp_columns": lambda: tangents("sm80", "float16"),
    "lists_key_scores": lambda: test_selection_kernels.check_key_scores(np.float32),
    "lists_slash_sums": lambda: test_selection_kernels.check_slashes((41, 1400), 1359),
    "lists_choose": choosing,
    "lists_choose_wide": choosing_from_wide_rows,
    "lists_pool": test_selection_kernels.check_means,
    "lists_ranks": lambda: test_list_kernels.lists_by_kernels(*of_many_elements()),
    "results_merge": test_result_kernels.check_merges,
}
CHILD = """
import sys
folders, *names = sys.argv[1:]
sys.path[:0] = folders.split(":")
import test_blocks_together as blocks
from cuflash import sim
for name in names:
    with blocks.together(sim.Schedule(order="random", resident_blocks=3), "thread") as ran:
        (blocks.CASES | blocks.WITHIN_BLOCKS)[name]()
    print("ran" if name in ran else "did not run", name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [RESETTING, *([name] for name in CASES | WITHIN_BLOCKS if is_long() and name not in RESETTING)], ids=str
)
def test_thread_sanitizer_reports_nothing(names: Sequence[str]) -> None:
    """Resets are atomic, since ThreadSanitizer lacks PTX's rule that atomics order later accesses to their word."""
    tests = Path(__file__).parents[1]
    folders = [folder for folder in sys.path if Path(folder).is_relative_to(tests.parent)]
    command = ["env", *(f"{name}={value}" for name, value in sim.preload_environment("thread").items())]
    command += [sys.executable, "-c", CHILD, ":".join([str(tests.parent), *folders]), *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0 and "WARNING" not in run.stderr, run.stderr
    assert run.stdout.split("\n")[:-1] == [f"ran {name}" for name in names]
