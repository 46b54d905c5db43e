"""Planted faults in code that merges and compares attention results on a device, in Python and in kernels."""

from __future__ import annotations

from types import ModuleType

from cupy_machine import a_machine_for
from mutations.planting import Edit
from mutations.python_guards import part
from test_result_kernels import (
    check_bound_merges, check_bound_recalls, check_comparisons, check_merges, check_non_finite_merges,
    check_refused_merges, check_special_comparisons, check_sums_of_rows,
)  # fmt: skip

from cuflash.sim import SimulationError

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions with which a guard reports a fault


def parts_are_merged() -> None:
    check_merges()
    check_non_finite_merges()


def results_are_compared() -> None:
    check_comparisons()
    check_special_comparisons()


def rows_are_added() -> None:
    check_sums_of_rows()


def kernels_are_told_what_to_do(library: ModuleType) -> None:
    planning = part(library, "planning._result_kernels")
    check_merges(planning)
    check_comparisons(planning)
    check_sums_of_rows(planning)


def merges_on_a_device_are_bound(library: ModuleType) -> None:
    with a_machine_for(library) as machine:
        check_bound_merges(machine, library)


def merges_out_of_reach_are_refused(library: ModuleType) -> None:
    with a_machine_for(library) as machine:
        try:
            check_refused_merges(machine, library)
        except BaseException as error:  # pytest's own exception, if nothing is raised
            raise AssertionError(error) from error


def recall_on_a_device_is_bound(library: ModuleType) -> None:
    with a_machine_for(library) as machine:
        check_bound_recalls(machine, library)


MERGE, COMPARE, ADD = "results/merge.cu", "results/compare.cu", "results/add_rows.cu"
LAUNCHES = "planning/_result_kernels.py"
BOUND, MERGING, RECALL = "executors/_results.py", "merging.py", "study/_recall.py"
FAULTS = {
    parts_are_merged: {
        "an empty part brings its contents": Edit(
            MERGE, "results_merge", "if (lse == ptx::negative_infinity<Accumulator>()) continue;", ""
        ),
        "a row without keys is NaN": Edit(
            MERGE, "results_merge", "if (shift == ptx::negative_infinity<Accumulator>()) shift = 0;", ""
        ),
        "a row without keys divides by 0": Edit(
            MERGE, "results_merge", "is_empty ? Accumulator(0) : o[n] / total", "o[n] / total"
        ),
        "weights are not divided by their sum": Edit(MERGE, "results_merge", ": o[n] / total", ": o[n]"),
        "lse is that of the greatest part": Edit(MERGE, "results_merge", "shift + ptx::log_accurate(total)", "shift"),
        "the last columns of a row are left out": Edit(
            MERGE, "results_merge", "constexpr int kColumns = 4;", "constexpr int kColumns = 3;"
        ),
        "rows beyond the last are written": Edit(MERGE, "results_merge", "if (row >= merge.num_rows) return;", ""),
    },
    results_are_compared: {
        "a row that had no key loses all": Edit(COMPARE, "results_compare", "? Accumulator(1)", "? Accumulator(0)"),
        "a mass is above 1": Edit(
            COMPARE, "results_compare", "tile::min_or_nan(kept - lse, Accumulator(0))", "kept - lse"
        ),
        "no thread block is the last": Edit(
            COMPARE, "results_compare", "static_cast<int>(gridDim.x) - 1;", "static_cast<int>(gridDim.x);"
        ),
        "the next launch has no last block": Edit(
            COMPARE, "results_compare", "ptx::store_relaxed(of.num_arrived, 0);", ""
        ),
        "warps but the first are left out": Edit(
            COMPARE, "sum_over_block", "sums.change += of_warps[warp].change;", ""
        ),
        "the output that changes is the whole": Edit(
            COMPARE, "results_compare", "sums.whole += x * x;", "sums.whole += (x + change) * (x + change);"
        ),
        "an output of zeros that changes is NaN": Edit(
            COMPARE, "results_compare", "sums.whole != 0 ?", "true ?"
        ),
        "a thread block has the elements of its first step alone": Edit(
            COMPARE, "results_compare", "n < of.num_elements; n += step", "n < of.num_elements; n += of.num_elements"
        ),
        "warps read sums that others are yet to write": Edit(
            COMPARE, "sum_over_block", "= sums; __syncthreads();", "= sums;"
        ),
    },
    rows_are_added: {
        "a row without terms is not zero": Edit(
            ADD, "add_rows", "Accumulator total[kColumns] = {};", "Accumulator total[kColumns] = {1};"
        ),
        "received terms are own ones": Edit(ADD, "add_rows", "place < sums.num_own_rows", "true"),
        "the last term counts": Edit(ADD, "add_rows", "total[c] + each", "each"),
        "terms are added to 0": Edit(ADD, "add_rows", "term == 0 ? each : total[c] + each", "total[c] + each"),
        "batch entries are the first": Edit(ADD, "add_rows", "batch = matrix / sums.num_heads", "batch = 0"),
        "odd addresses are read in units": Edit(ADD, "add_rows", "reinterpret_cast<uint64_t>(data) % 16 == 0 &&", ""),
        "blocks have the rows of the first": Edit(
            ADD, "results_add_rows", "blockIdx.x % blocks_per_matrix * sums.rows_per_block", "0"
        ),
    },
    kernels_are_told_what_to_do: {
        "values have the matrices of keys": Edit(LAUNCHES, "adding_rows", "2 * num_matrices *", "num_matrices *"),
        "rows are merged as far as their elements": Edit(
            LAUNCHES, "merging", "num_rows * threads_per_row //", "num_rows //"
        ),
        "threads have one column less": Edit(
            LAUNCHES, "merging", "-(-num_columns // _COLUMNS)", "num_columns // _COLUMNS"
        ),
        "rows beyond the elements are not compared": Edit(
            LAUNCHES, "comparing", '"num_rows": num_rows', '"num_rows": min(num_rows, num_elements)'
        ),
        "results without elements have no launch": Edit(LAUNCHES, "comparing", "max(needed, 1)", "needed"),
    },
    merges_on_a_device_are_bound: {
        "parts with gaps are read without them": Edit(
            BOUND, "BoundMerge.__call__", "if not self._is_dense:", "if False:"
        ),
        "a graph writes to memory that is free": Edit(
            BOUND, "_Allocating.__call__", "[*read, *results, *workspaces]", "[*read, *results[1:], *workspaces]"
        ),
        "lses are outputs": Edit(BOUND, "BoundMerge.__call__", "(*of_outs, *of_lses)", "(*of_lses, *of_outs)"),
        "runs are rounded to the dtype of o": Edit(
            MERGING, "_merged_in_stages", "out.astype(lses[0].dtype, copy=False)", "out"
        ),
        "a run has the parts of the first": Edit(
            MERGING, "_merged_in_stages", "merge(wide[start : start + MOST_PARTS]",
            "merge(wide[: len(wide[start : start + MOST_PARTS])]",
        ),
        "calls are checked each time": Edit(MERGING, "merge", "CALLS.put(key, bound_merge)", "pass"),
    },
    merges_out_of_reach_are_refused: {
        "odd addresses of outputs are read": Edit(
            BOUND, "BoundMerge.__call__", "reduce(or_, of_outs) & self._odd_bits[0] or", ""
        ),
        "odd addresses of lse are read": Edit(
            BOUND, "BoundMerge.__call__", "or reduce(or_, of_lses) & self._odd_bits[1]", ""
        ),
        "another device is read": Edit(MERGING, "_check", "+ device_reasons(name, part)", ""),
    },
    recall_on_a_device_is_bound: {
        "the mask is compared with itself": Edit(
            RECALL, "compared", "compared_on_device(o, lse,", "compared_on_device(o, kept_lse,"
        ),
        "each call makes a kernel": Edit(
            BOUND, "compared", 'CALLS.get_or_make(("compare", layout_key(*results)), make)', "make()"
        ),
        "workspaces are lost": Edit(
            "executors/launch.py", "BoundPass.launch", "workspaces.give_back(stream, taken)", "pass"
        ),
    },
}
