"""Every planted fault is detected by its guard: it gives a wrong number and no crash; on Hopper it may break a rule.

Tables map guards to the faults that they must detect, one table for each part of the sources. A table may have faults
of Python and of kernels. CUFLASH_PROFILE=long plants all faults. A short run plants, for each guard of Python's
arithmetic, the first fault and every eighth one; every twelfth fault of inputs; and every 24th fault of score
functions. For kernels, it plants the first fault of each guard that builds few kernels, and every sixtieth one. If a
fault of a guard is planted, the guard also runs without a fault; in a short run only if no other test makes its checks.
"""

from __future__ import annotations

import compileall
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from executors import is_long, needs_compiler
from lexing import Language

import cuflash
from mutations import (
    attention, blocks, cache_e4m3, cache_scores, cache_steps, calls, chosen, chosen_kernels, chosen_pages, decode,
    dq_in_order, dropout, fa1, faults_on_purpose, few_queries, fp8, fp8_kernels, host, interop, intervals,
    kernel_guards, kit, kv_cache, lists, mask_algebra, mask_inputs, mass_guards, non_finite, planting,
    prefill, pullbacks, python, python_guards, query_selectors, ranks, results, reuse, score_kernels,
    score_products, scores, selector_guards, selectors, sequences, simt, sinks, sm80, sm90_backward,
    sm90_backward_rows, sm90_backward_wide, sm90_forward, sm90_guards, staged_arrays, study, subnormals,
    tangent_kernels, tangents, tile,
)  # fmt: skip
from mutations.planting import Edit, planted

OF_INPUTS = (
    calls, mask_inputs, sequences, kv_cache, interop, fp8, study, cache_steps, reuse, pullbacks, kit, chosen, tangents,
    ranks, faults_on_purpose, subnormals,
)  # fmt: skip
# Faults of Python and of kernels.
OF_BOTH = (
    lists, intervals, non_finite, cache_scores, score_kernels, score_products, selectors, sinks, dropout, fa1,
    staged_arrays, dq_in_order, results, chosen_kernels, chosen_pages, few_queries, tangent_kernels, query_selectors,
)  # fmt: skip
OF_KERNELS = (
    simt, attention, tile, sm80, decode, cache_e4m3, prefill, sm90_forward, sm90_backward, sm90_backward_rows,
    sm90_backward_wide, blocks, fp8_kernels, *OF_BOTH,
)  # fmt: skip
Guard = Callable[..., None]
# Guards of shared work also run these two guards, and so detect their faults.
RUN_BY_OTHERS = (kernel_guards.attention_is_right, kernel_guards.all_steps_are_right)
# Guards that build many or large kernels for each fault, which only a long run uses. In a short run each table of
# faults has at least one cheaper guard.
OF_LONG_RUNS = (
    kernel_guards.work_is_shared_out, kernel_guards.tensor_cores_are_right, sm90_guards.forward_is_right,
    sm90_guards.gradients_are_right, sm90_guards.gradients_of_lists_are_right, score_kernels.sm80_is_exact,
    score_kernels.hopper_gradients_are_exact, dropout.hopper_gradients_are_right,
    blocks.gradients_in_turns_are_right, non_finite.doubles_follow_the_rule,
    non_finite.halves_follow_the_rule, mass_guards.tensor_cores_sum_masses,
    staged_arrays.staged_results_are_right, staged_arrays.layouts_change_no_bit,
    staged_arrays.uniform_steps_are_right, staged_arrays.sums_by_distance_are_right,
    staged_arrays.late_copies_are_waited_for,
    sinks.sm80_is_right, sinks.naive_is_right, dropout.sm90_is_right, dropout.simt_is_right,
    non_finite.kept_scores_follow_the_rule, cache_scores.sm90_prefill_is_scored,
    score_kernels.warps_that_share_elements_are_exact, score_kernels.nothing_past_the_end_matters,
    fp8_kernels.fp8_is_scheduled_right, chosen_kernels.large_groups_and_single_heads_are_right,
    tangent_kernels.sm80_is_right, tangent_kernels.sm90_is_right, tangent_kernels.sm90_has_second_derivatives,
    tangent_kernels.scores_have_second_derivatives,
)  # fmt: skip
# In a short run, other tests show that these guards pass: they make the same checks, or use structures of the same
# kinds.
RUN_IN_LONG = (
    sm90_guards.finished_gradients_are_right, sm90_guards.gradients_of_lists_are_right,
    sm90_guards.gradients_of_intervals_are_right, sm90_guards.gradients_of_cut_sequences_are_right,
    sm90_guards.gradients_in_two_walks_are_right, sm90_guards.wide_gradients_are_right,
    kernel_guards.parts_are_right, dq_in_order.sums_of_dq_are_in_order, dq_in_order.stored_parts_are_right,
    mask_algebra.operators_are_right, mask_algebra.index_operators_are_right, mask_algebra.closed_forms_are_right,
    mask_algebra.coarsening_is_right, mask_algebra.recall_is_right, mask_algebra.recall_has_scores,
    mask_algebra.scipy_is_read, host.magnitudes_are_right, host.nothing_is_raised, kv_cache.operations_are_right,
    selector_guards.masked_selections_are_right, chosen.lists_are_their_sets, chosen.results_are_right,
    chosen.queries_are_apart, chosen_kernels.lists_are_joined, chosen_kernels.queries_are_listed,
    chosen_kernels.many_blocks_come_in_ranges, chosen_kernels.large_groups_and_single_heads_are_right,
    chosen_kernels.parts_are_added, chosen_kernels.scores_are_right, chosen_kernels.plans_are_right,
    chosen_kernels.sources_are_right, tangent_kernels.simt_is_right, tangent_kernels.every_feature_is_right,
    tangent_kernels.sm80_is_right, tangent_kernels.sm90_is_right, tangent_kernels.second_derivatives_are_right,
    tangent_kernels.sm90_has_second_derivatives,
    tangent_kernels.scores_have_second_derivatives, ranks.ranks_agree, ranks.buffers_are_used_in_turn,
    ranks.faults_end_all_ranks, ranks.bits_do_not_depend_on_the_order_of_arrival, ranks.parts_are_rows_of_the_whole,
    ranks.kernels_see_places, ranks.kernels_draw_at_places, ranks.streams_wait_for_events, ranks.processes_agree,
    selector_guards.the_kernel_chooses, selector_guards.thread_blocks_choose_from_wide_rows,
    selector_guards.the_kernel_makes_means, selector_guards.the_kernels_of_pages_and_slashes_are_right,
    selector_guards.the_kernel_draws, mass_guards.groups_of_columns_are_turned, query_selectors.the_kernel_scores,
    query_selectors.the_kernel_lists, dq_in_order.checks_pass_where_no_key_is_seen,
    dq_in_order.sums_of_arrays_end_with_a_tile, dq_in_order.tiles_without_keys_have_no_sums, results.parts_are_merged,
    results.results_are_compared, chosen_kernels.lists_of_an_index_are_joined, chosen_kernels.tiles_are_right,
    chosen_kernels.sums_of_few_heads_are_right, chosen_kernels.large_groups_repeat,
    chosen_kernels.large_groups_repeat_on_hopper, chosen_kernels.tiles_on_hopper_are_right,
    chosen_kernels.parts_on_hopper_are_added, chosen_pages.bounds_are_right, chosen_pages.lists_are_right,
    chosen_pages.many_pages_are_listed, chosen_pages.results_are_right, chosen_pages.windows_are_right,
    chosen_pages.all_blocks_are_all_keys, chosen_pages.eight_bits_are_right, chosen_pages.scores_are_right,
    chosen_pages.kernels_keep_bounds, few_queries.results_are_right, few_queries.parts_are_apart,
    few_queries.other_keys_never_matter, few_queries.scores_are_right, staged_arrays.unaligned_steps_are_right,
    staged_arrays.hidden_elements_have_no_gradient, score_products.distances_are_right,
    score_kernels.packed_heads_are_exact, blocks.lengths_are_set_after_they_are_read,
)  # fmt: skip


def faults(*tables: ModuleType, language: Language | None = None) -> list[tuple[str, Guard, Edit]]:
    """Return each fault with its name and the guard that must detect it; if `language` is set, only its faults."""
    return [
        (f"{table.__name__.removeprefix('mutations.')}: {name} ({guard.__name__})", guard, edit)
        for table in tables
        for guard, edits in table.FAULTS.items()
        for name, edit in edits.items()
        if language in (None, "python" if edit.is_of_library else "cuda")
    ]


def sampled(planned: list[tuple[str, Guard, Edit]], step: int) -> list[tuple[str, Guard, Edit]]:
    """Return all faults if CUFLASH_PROFILE=long, otherwise every `step`-th one."""
    return planned if is_long() else planned[::step]


def sampled_by_guard(planned: list[tuple[str, Guard, Edit]], step: int) -> list[tuple[str, Guard, Edit]]:
    """Return all faults if CUFLASH_PROFILE=long, otherwise the first of each guard and every `step`-th one after it."""
    of_guard = {guard: [fault for fault in planned if fault[1] is guard] for _, guard, _ in planned}
    return [fault for each in of_guard.values() for fault in sampled(each, step)]


def planted_in_python() -> list[tuple[str, Guard, Edit]]:
    """Return the faults of Python that a run of this profile plants."""
    arithmetic = python, host, lists, mask_algebra, non_finite
    others = [table for table in (*OF_INPUTS, *OF_BOTH) if table not in arithmetic]
    return [
        *sampled_by_guard(faults(*arithmetic, language="python"), 8),
        *sampled(faults(*others, language="python"), 12),
        *sampled(faults(scores), 24),
    ]


def planted_in_kernels() -> list[tuple[str, Guard, Edit]]:
    """Return the faults of kernels that a run of this profile plants."""
    every = faults(*OF_KERNELS, language="cuda")
    return sampled_by_guard([fault for fault in every if is_long() or fault[1] not in OF_LONG_RUNS], 60)


def signs_of(guard: Guard) -> tuple[type[Exception], ...]:
    """Return the exceptions with which the guards of a module report a fault."""
    signs: tuple[type[Exception], ...] = sys.modules[guard.__module__].SIGNS
    return signs


def each(planned: list[tuple[str, Guard, Edit]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("guard", "edit"), [pytest.param(*fault, id=name) for name, *fault in planned])


def guards(*tables: ModuleType, language: Language | None = None) -> list[Guard]:
    return list(dict.fromkeys(guard for _, guard, _ in faults(*tables, language=language)))


PROBES = guards(calls)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the library with its bytecode, which takes longest to create, next to its sources."""
    folder = tmp_path_factory.mktemp("library") / planting.LIBRARY.name
    shutil.copytree(planting.LIBRARY, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "pycache_prefix", None)
        compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def edited(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Edit], ModuleType]]:
    """Return a function that imports a copy of the library with one edit, or with none, under another name."""
    monkeypatch.setattr(sys, "pycache_prefix", None)  # store bytecode next to the copies

    def load(edit: Edit | None) -> ModuleType:
        name = f"cuflash_edited_{abs(hash(edit))}"
        shutil.copytree(compiled, tmp_path / name, copy_function=os.link)
        if edit is not None:
            path = tmp_path / name / edit.file
            text = edit.planted_in(path.read_text("utf-8"))
            path.unlink()  # unlink first, so that the original, a hard link, stays unchanged
            path.write_text(text, "utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module(name)

    yield load
    for module in [module for module in sys.modules if module.startswith("cuflash_edited_")]:
        del sys.modules[module]


@each(planted_in_python())
@pytest.mark.filterwarnings("ignore")
def test_a_fault_of_python_is_seen(edited: Callable[[Edit], ModuleType], guard: Guard, edit: Edit) -> None:
    library = edited(edit)
    with pytest.raises(signs_of(guard)):
        guard(library)


def guards_to_run(planned: list[tuple[str, Guard, Edit]], others: Collection[Guard]) -> list[Guard]:
    """Return the guards of planted faults that this profile also runs without a fault."""
    left_out = {*others, *(() if is_long() else RUN_IN_LONG)}
    return [guard for guard in dict.fromkeys(guard for _, guard, _ in planned) if guard not in left_out]


@pytest.mark.parametrize("guard", guards_to_run(planted_in_python(), PROBES))
def test_the_library_as_it_is_passes_every_guard(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_guards, "MOST_SEEDS", python_guards.MOST_SEEDS if is_long() else 1)
    guard(cuflash)


@pytest.mark.filterwarnings("ignore")
def test_the_library_as_it_is_passes_every_probe(edited: Callable[[Edit | None], ModuleType]) -> None:
    library = edited(None)
    for probe in PROBES:
        probe(library)


@needs_compiler
@each(planted_in_kernels())
@pytest.mark.filterwarnings("ignore")
def test_a_fault_of_a_kernel_is_seen(guard: Guard, edit: Edit, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", edit), pytest.raises(signs_of(guard)):
        guard()


@needs_compiler
@pytest.mark.parametrize("guard", guards_to_run(planted_in_kernels(), RUN_BY_OTHERS))
def test_the_kernels_as_they_are_pass_every_guard(guard: Guard) -> None:
    guard()


def test_every_fault_fits_the_sources() -> None:
    planned = faults(python, host, mask_algebra, scores, *OF_INPUTS, *OF_KERNELS)
    assert planting.misfits(edit for _, _, edit in planned) == []


def test_a_long_run_plants_every_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "is_long", lambda: True)
    every = faults(python, host, mask_algebra, scores, *OF_INPUTS, *OF_BOTH, language="python")
    assert {name for name, *_ in planted_in_python()} == {name for name, *_ in every}
    assert {name for name, *_ in planted_in_kernels()} == {name for name, *_ in faults(*OF_KERNELS, language="cuda")}


def test_a_short_run_has_a_guard_of_every_table_of_kernels() -> None:
    planned = {guard for _, guard, _ in planted_in_kernels()}
    assert [table.__name__ for table in OF_KERNELS if planned.isdisjoint(guards(table, language="cuda"))] == []


def test_no_table_is_left_out() -> None:
    tables = {path.stem for path in Path(__file__).parent.glob("*.py") if "FAULTS = {" in path.read_text("utf-8")}
    named = (python, host, mask_algebra, scores, *OF_INPUTS, *OF_KERNELS)
    known = {table.__name__.split(".")[-1] for table in named}
    assert tables - {Path(__file__).stem} == known
