"""Planted faults in the library's Python code."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.python_guards import (
    attention_is_right, indices_are_right, lists_on_a_device_are_right, rows_without_a_score_are_right, work_is_right,
    work_of_an_index_is_right,
)  # fmt: skip

FAULTS = {
    attention_is_right: {
        "o is not rescaled": Edit("executors/cpu.py", "HostCall.forward_rows", "o_acc *= rescale[..., None]", "pass"),
        "the row maximum is not subtracted from an empty start": Edit(
            "executors/cpu.py", "HostCall.forward_rows", "np.maximum(new_max, np.finfo(self.wide).min)", "new_max"
        ),
        "an empty row has a finite lse": Edit(
            "executors/cpu.py", "HostCall.forward_rows", "= row_max", "= np.maximum(row_max, np.finfo(self.wide).min)"
        ),
        "an empty row is divided by 0": Edit(
            "executors/cpu.py", "HostCall.forward_rows", "divisor = np.maximum(row_sum, 1)", "divisor = row_sum"
        ),
        "a bit tile starts at its first key": Edit(
            "executors/_host_tiles.py", "masked_elements", "keys.start % work.block_kv", "0"
        ),
        "a key is lost where a run is cut": Edit(
            "executors/_host_tiles.py", "_groups", "start=segment.start + remaining)",
            "start=segment.start + remaining + 1)",
        ),
        "heads are grouped by remainder": Edit(
            "executors/cpu.py", "HostCall.rows_of", ".h // self.group_size)", ".h % self.plan.problem.num_kv_heads)"
        ),
        "only the first head of a group gives dk and dv": Edit(
            "executors/cpu.py", "HostCall.backward_columns", "for head in range(self.group_size", "for head in range(1"
        ),
        "dlse has the wrong sign": Edit(
            "executors/cpu.py", "HostCall.backward_deltas", "delta -= np.where(", "delta += np.where("
        ),
        "dq lacks the scale": Edit(
            "executors/cpu.py", "backward", "call.wide(call.plan.problem.scaling.scale)", "1"
        ),
        "dk keeps log2(e)": Edit(
            "executors/cpu.py", "HostCall.backward_columns", "self.wide(self.natural * self.", "self.wide(self."
        ),
        "only the last step gives dv": Edit(
            "executors/cpu.py", "HostCall.backward_columns", "added(dv, dv_term)", "dv_term"
        ),
        "every batch entry reads the first": Edit(
            "executors/cpu.py", "HostCall.row_index", "[(*self.batch_indices[b], h)", "[(*self.batch_indices[0], h)"
        ),
        "batches that are not full are forgotten": Edit(
            "executors/_host_tiles.py", "_batches", "yield from waiting.values()", ""
        ),
        "tiles of unlike visits are batched": Edit(
            "executors/_host_tiles.py", "_batches", "key = height, *visited", "key = (height,)"
        ),
        "broadcast gradients are not summed": Edit(
            "arrays.py", "summed_to", "gradient.sum(axis=(*range(missing), *", "gradient.max(axis=(*range(missing), *"
        ),
        "the scale is left to q alone": Edit(
            "executors/cpu.py", "HostCall.of", "problem.scaling.scale * unit", "unit"
        ),
        "row_sum is not rescaled": Edit(
            "executors/cpu.py", "HostCall.forward_rows", "row_sum * rescale + p_sum", "row_sum + p_sum"
        ),
    },
    rows_without_a_score_are_right: {
        "an empty row is exponentiated": Edit(
            "executors/cpu.py", "bind", "np.where(empty, np.inf, in_unit)", "np.asarray(in_unit)"
        ),
    },
    work_is_right: {
        "a band starts one query late for its keys": Edit(
            "blocks/work_list.py", "IntervalWork._rows_starting_by", "- self.band.lower + 1, 0", "- self.band.lower, 0"
        ),
        "a bit tile loses its last used key": Edit(
            "blocks/work_list.py", "_segments", "start + int(used[1][tile])", "start + int(used[1][tile]) - 1"
        ),
        "one list serves all heads": Edit("blocks/work_list.py", "_owner", "(h if extents[1] > 1 else 0)", "0"),
    },
    work_of_an_index_is_right: {
        "blocks may be absent from a run of keys": Edit(
            "blocks/index_mask.py", "IndexMask.row_intervals",
            "(np.diff(index.indptr) != np.maximum(end - first, 0)).any() or not", "not",
        ),
        "blocks may be listed outside of a run of keys": Edit(
            "blocks/index_mask.py", "IndexMask.row_intervals", "or not is_touched.all()", ""
        ),
        "full blocks may be outside of a run of keys": Edit(
            "blocks/index_mask.py", "IndexMask.row_intervals",
            "if (is_inside | (index.kinds == BlockKind.INTERVAL)).all() else None", "",
        ),
        "runs of keys may go back": Edit(
            "blocks/index_mask.py", "IndexMask.row_intervals",
            "if (lo[..., 1:] < lo[..., :-1]).any() or (hi[..., 1:] < hi[..., :-1]).any():", "if False:",
        ),
    },
    indices_are_right: {
        "equal hashes for unequal tiles": Edit(
            "blocks/classify.py", "_evaluate",
            "dictionary.setdefault(bits.tobytes(),",
            "dictionary.setdefault(next((k for k in dictionary if k[0] == bits.flat[0]), bits.tobytes()),",
        ),
        "a rectangle asks two corners": Edit(
            "masks/block_set.py", "BlockSet.rectangle", "in rows for col in cols]", "in rows[:1] for col in cols[:1]]"
        ),
    },
    lists_on_a_device_are_right: {
        "copies on the host keep unused space": Edit(
            "blocks/index.py", "BlockIndex.to", 'slice(int(arrays["indptr"][-1]))', "slice(None)"
        ),
        "on a device, every batch entry is the first": Edit(
            "executors/evaluation.py", "evaluated", "matrix // num_heads,", "matrix * 0,"
        ),
        "on a device, the rows of each strip are the first": Edit(
            "executors/evaluation.py", "evaluated", "xp.arange(strip.start, strip.stop)", "xp.arange(strip.stop - top)"
        ),
        "on a device, an entry is its neighbour's": Edit(
            "blocks/index_mask.py", "IndexMask.table", "] = entry", "] = entry + 1"
        ),
        "on a device, the shortest rows come first": Edit(
            "blocks/work_list.py", "_longest_first",
            "key[:, None, :] > key[:, :, None]",
            "key[:, None, :] < key[:, :, None]",
        ),
        "on a device, rows are numbered from the wrong end": Edit(
            "blocks/work_list.py", "_longest_first", "num_rows + number", "num_rows - number"
        ),
        "on a device, the documents of one entry count on from those before": Edit(
            "masks/documents.py", "_run_bounds", "runs, side=side) - before)", "runs, side=side))"
        ),
        "on a device, a document ends before its neighbour's number": Edit(
            "masks/documents.py", "_run_bounds", "..., 1:] != ids.array[..., :-1]", "..., 1:] > ids.array[..., :-1] + 1"
        ),
    },
}  # fmt: skip
