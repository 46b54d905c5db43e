"""Faults in how block lists are kept between calls and made on a device."""

from __future__ import annotations

from mutations.list_guards import (
    a_kept_index_goes_by_itself, an_index_is_read_once_and_never_changes, calls_read_masks_anew,
    indices_are_those_of_their_blocks, lists_are_those_of_the_host,
)  # fmt: skip
from mutations.planting import Edit

CONTENTS, INDEX = "masks/one_array.py", "executors/index_maker.py"
FAULTS = {
    a_kept_index_goes_by_itself: {
        "what an index remembers leads back to it": Edit(
            "blocks/index.py", "BlockIndex.remembered", "IndexMask(replace(self))", "IndexMask(self)"
        ),
        "a plan holds the index itself": Edit(
            "calls/checked_plan.py", "planned", "mask = mask.remembered.mask", "pass"
        ),
        "a call that is remembered holds its plan": Edit(
            "plans.py", "Plan.bind", "executor.forward(plan, dict(zip(names, (*arrays, *made))), numbers=numbers)",
            "EXECUTORS[self.executor].forward(plan, dict(zip(names, (*arrays, *made))))",
        ),
    },
    an_index_is_read_once_and_never_changes: {
        "indices share their calls": Edit("planning/lookup.py", "lookup", "Lookup(kept.calls, ", "Lookup(shared, "),
        "arrays can be written to": Edit("blocks/index.py", "_read_only", "view.flags.writeable = False", ""),
    },
    indices_are_those_of_their_blocks: {
        "an index has no intervals": Edit(
            INDEX, "IndexMaker.__init__", "self._facts |= self.lists.intervals", "pass"
        ),
        "batch entries are one": Edit(INDEX, "IndexMaker.__init__", '"batch": source.batch', '"batch": 1'),
        "one index serves all masks": Edit(INDEX, "index_key", "content(mask), shape", "shape"),
    },
    calls_read_masks_anew: {
        "blocks of any size are alike": Edit(CONTENTS, "_arrays_of", '(getattr(part, "block", None),)', "()"),
        "closed forms do not count": Edit(CONTENTS, "mask_contents", "keys.append(content(part))", "content(part)"),
        "layouts do not count": Edit(
            CONTENTS, "mask_contents", "(type(part), *more, layout)", "(type(part), *more)"
        ),
        "a second array is left out": Edit(
            CONTENTS, "mask_contents", "if layout is None or found is not None:", "if layout is None:"
        ),
    },
    lists_are_those_of_the_host: {
        "bytes of a packet are bits in reverse": Edit(
            "lists/classify.cu", "bits_of_keys", "ones * 0x0102040810204080 >> 56", "ones * 0x8040201008040201 >> 56"
        ),
        "intervals do not hide elements": Edit(
            "lists/classify.cu", "bits_of_keys", "if (key + n < lo || key + n >= hi)", "if (key + n < lo)"
        ),
        "keys past the end count": Edit(
            "lists/classify.cu", "kind_by_elements",
            "min(params.block_kv - first, params.seqlen_kv - key)", "params.block_kv - first",
        ),
        "a block that is cut off is never full": Edit(
            "lists/classify.cu", "kind_by_elements", "is_full &= allowed == exists;", "is_full &= allowed == 0xff;"
        ),
        "a block that only queries in its middle see is absent": Edit(
            "lists/classify.cu", "kind_of_whole_block",
            "has_some |= max(lo, key) < min(hi, last_key);", "",
        ),
        "the last batch axis is the first": Edit(
            "lists/classify.cu", "MaskMatrix", "p.mask_batch_strides[axis]", "p.mask_batch_strides[0]"
        ),
        "a cell counts itself before": Edit(
            "lists/ranks.cu", "rank_row", "((1u << ptx::lane()) - 1)", "((2u << ptx::lane()) - 1)"
        ),
        "columns are counted in the first matrix": Edit(
            "lists/ranks.cu", "count_column", "column / params.num_kv_blocks", "0"
        ),
        "a sum is read before it is there": Edit(
            "lists/pointers.cu", "lists_pointers",
            "sums[thread] += before; __syncthreads();", "sums[thread] += before;",
        ),
        "pointers begin anywhere": Edit("lists/pointers.cu", "lists_pointers", "pointers[0] = 0", "pointers[0] = 1"),
        "steps have no kind": Edit("lists/entries.cu", "list", "4 * (first + n) + kinds[n]", "4 * (first + n)"),
        "parts of a column start where its entries do": Edit(
            "lists/entries.cu", "list_columns", "place += counts[at]", "place += 0 * counts[at]"
        ),
        "entries of a column are placed before all are counted": Edit(
            "lists/entries.cu", "list_columns", "= part.count(); __syncthreads();", "= part.count();"
        ),
        "a block that the last query sees is full": Edit(
            "lists/classify.cu", "kind_by_ends", "last_key <= first_hi) return kFull",
            "last_key <= last_hi) return kFull",
        ),
        "a block that neither the first nor the last query sees is absent": Edit(
            "lists/classify.cu", "kind_by_ends", "has_some ? kInterval : kBits", "has_some ? kInterval : kAbsent"
        ),
        "of equally many the first comes first": Edit(
            "lists/entries.cu", "put_in_order", "other > number", "other < number"
        ),
        "full blocks have bit tiles": Edit("lists/entries.cu", "list_row", "kind == kBits ?", "kind != kAbsent ?"),
        "the room behind the last entry is left as it is": Edit(
            "lists/entries.cu", "lists_entries", "clear_unused_entries(params);", ""
        ),
    },
}
