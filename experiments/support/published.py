"""Selection of the result rows that may be published, and of the rows that one table may combine.

A row can be reproduced only if its source tree was committed: rows whose commit is unknown or ends in `-dirty` are left
out. One line or one mean never combines different commits: a set of cases has the rows of the commit that measured the
most cases, or among several the newest. Missing cases are named.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]


def is_committed(row: Row) -> bool:
    """Return whether the row's code was committed, so that the row can be measured again."""
    return bool(row["commit"]) and not row["commit"].endswith("-dirty")


def committed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if is_committed(row)]


def of_one_commit(rows: Sequence[Row], line: str) -> Sequence[Row]:
    """Return the rows of one line of a table, if all are of one commit.

    Raises
    ------
    ValueError
        The rows are of several commits, or of a tree that was not committed.
    """
    commits = sorted({row["commit"] for row in rows})
    if len(commits) > 1 or not all(map(is_committed, rows)):
        raise ValueError(f"the line {line!r} must be of one commit; its rows are of {', '.join(commits) or 'none'}")
    return rows


def left_out(rows: Sequence[Row]) -> str:
    """Return a sentence about the rows that are not published; empty if all are."""
    dropped = [row for row in rows if not is_committed(row)]
    if not dropped:
        return ""
    commits = ", ".join(dict.fromkeys(row["commit"] or "no commit" for row in dropped))
    count = "1 row was" if len(dropped) == 1 else f"{len(dropped)} rows were"
    return f"*Left out: {count} measured on a tree with uncommitted changes ({commits}).*"


class Chosen(NamedTuple):
    """The rows of one commit that are published for a set of cases, and the cases that they lack."""

    rows: list[Row]
    missing: list[tuple[str, ...]]


def newest_fullest(rows: Sequence[Row], case: Sequence[str]) -> Chosen:
    """Choose the commit with the most cases of these rows; of several, the newest, then the last."""
    wanted = list(dict.fromkeys(_case(row, case) for row in rows))
    by_commit: dict[str, list[Row]] = {}
    for row in committed(rows):
        by_commit.setdefault(row["commit"], []).append(row)
    best: list[Row] = []
    for group in by_commit.values():
        if _fullness(group, case) >= _fullness(best, case):
            best = group
    covered = {_case(row, case) for row in best}
    return Chosen(best, [each for each in wanted if each not in covered])


def _case(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in columns)


def _fullness(rows: Sequence[Row], case: Sequence[str]) -> tuple[int, str]:
    return len({_case(row, case) for row in rows}), max((row["date"] for row in rows), default="")
