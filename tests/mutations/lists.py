"""Faults in how block lists are kept between calls and made on a device."""

from __future__ import annotations

from mutations.list_guards import a_kept_index_goes_by_itself, an_index_is_read_once_and_never_changes
from mutations.planting import Edit

FAULTS = {
    a_kept_index_goes_by_itself: {
        "what an index remembers leads back to it": Edit(
            "blocks/index.py", "BlockIndex.remembered", "IndexMask.of_index(replace(self))", "IndexMask.of_index(self)"
        ),
        "a plan holds the index itself": Edit("api.py", "plan", "mask = mask.remembered.mask", "pass"),
        "a call that is remembered holds its plan": Edit(
            "plans.py", "Executable.bind", "executor.forward(plan, dict(zip(names, (*arrays, *made))))",
            "EXECUTORS[self.executor].forward(plan, dict(zip(names, (*arrays, *made))))",
        ),
    },
    an_index_is_read_once_and_never_changes: {
        "indices share their calls": Edit("api.py", "calls_with", "(None, kept.calls)", "(None, shared)"),
        "lists are not kept": Edit(
            "blocks/work_list.py", "_work_of_index",
            "mask.works.setdefault(block, ListedWork(index=index))", "ListedWork(index=index)",
        ),
        "arrays can be written to": Edit("blocks/index.py", "_read_only", "view.flags.writeable = False", ""),
        "arrays of a copy can be written to": Edit(
            "blocks/index.py", "BlockIndex.__setstate__", "self.__post_init__()", ""
        ),
    },
}
