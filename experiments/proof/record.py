"""Does a change leave refusals, results, machine code and host times unchanged?

    python -m experiments record compare                       # the working tree against the kept record; no GPU
    python -m experiments record compare --parts results       # some parts of it
    python -m experiments record make                          # keep the record of the working tree
    python -m experiments record make --parts times            # on a GPU

The record is in experiments/results/record:

- refusals.csv: class and text of each refusal that tests expect, except those of planted faults
- results.csv: random calls as text, with digests of all bits of their results on the cpu executor and on the simulator
- kernels.csv: for each kernel and architecture, the number of specifications of the compile gate, a digest of their
texts and launch resources, and a digest of their machine code
- times.csv: host times of the calls of `host_time`

Bits on the cpu executor depend on the processor, its BLAS and NumPy; machine code depends on NVRTC's version.
record.csv lists the versions with which the record was made. If yours differ, check out the record's commit, `make` the
record there, and compare with that folder, `--with FOLDER`.

`compare` compiles only kernels whose texts differ from the record's. For each change it prints the row of the record
(-) and the row of the tree (+). A host time, scaled by the ratio of the launch times, counts as changed if it exceeds
the record's by more than `MOST_RISE_US` microseconds.

Expect: no changed row; exit status 0, otherwise 1.
Found:  no result is stored: each change lists the rows that it changes on purpose.

Cost: 12 minutes on two cores to compare; one more hour to compile all kernels; minutes of a GPU for times.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import drawn_calls
import same_machine_code
from command_line import Parser
from harness import RESULTS, machine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = RESULTS / "record"
NUM_CALLS = 2000
MOST_RISE_US = 1.0
FOLDERS_OF_TESTS = ("semantics", "masks", "kernels", "simulator", "runtime", "repository")
Row = tuple[str, ...]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refusals(_: Path) -> list[Row]:
    """Run the tests, and return the class and message of each refusal that they expect."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CUFLASH_REFUSALS": folder, "PYTHONPATH": str(Path(__file__).parent)}
        tests = [f"tests/{name}" for name in FOLDERS_OF_TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "expected_refusals", f"--numprocesses={cores()}", *tests]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        messages = {tuple(row) for path in Path(folder).iterdir() for row in json.loads(path.read_text("utf-8"))}
    return [("class", "text"), *sorted(messages)]


def results(records: Path) -> list[Row]:
    """Repeat the recorded calls, or draw new ones if none are recorded, and return the digests of their results."""
    path = records / "results.csv"
    calls = [row[0] for row in _rows(path)[1:]] if path.exists() else drawn_calls.drawn_calls(NUM_CALLS)
    executors = ("cpu", "sim")
    with ProcessPoolExecutor(cores()) as pool:
        columns = [
            list(pool.map(partial(drawn_calls.digest, executor=executor), calls, chunksize=8))
            for executor in executors
        ]
    return [("call", *executors), *zip(calls, *columns)]


def kernels(records: Path) -> list[Row]:
    """Return digests of the texts and machine code of all kernels; for equal texts, the code is the record's."""
    path = records / "kernels.csv"
    before = {row[:4]: row[4] for row in _rows(path)[1:]} if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(cores()) as pool:
        every = same_machine_code.kernels_of(ROOT, Path(folder))
        texts = same_machine_code.given_for(ROOT, Path(folder), list(range(len(every))))
        groups = defaultdict(list)
        for kernel, text in sorted(zip(every, texts)):
            groups[kernel.name, kernel.architecture].append((kernel, text))
        heads = {
            group: (*group, str(len(members)), _digest([(str(each), *text.code(), text[2]) for each, text in members]))
            for group, members in groups.items()
        }
        compile_one = partial(same_machine_code.kept_file, same_machine_code.CACHE)
        jobs = {
            text.code(): pool.submit(compile_one, text.text, text.options)
            for group, members in groups.items()
            if heads[group] not in before
            for _, text in members
        }
        rows = [
            (*head, before.get(head) or _digest([_shown(jobs[text.code()].result()) for _, text in groups[group]]))
            for group, head in heads.items()
        ]
    return [("kernel", "architecture", "specifications", "texts", "code"), *rows]


def times(_: Path) -> list[Row]:
    """Time every call of `host_time` on the GPU of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.csv"
        command = [sys.executable, "-m", "experiments", "host_time", "--budget-s", "200", "--csv", str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
        return _rows(path)


PARTS: Mapping[str, Callable[[Path], list[Row]]] = {
    part.__name__: part for part in (refusals, results, kernels, times)
}


def _shown(functions: Mapping[str, Any]) -> Any:
    return sorted((name, sorted((key, repr(value)) for key, value in each.items())) for name, each in functions.items())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [tuple(row) for row in csv.reader(file)]


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def changes(part: str, before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Return the rows that only one side has, the record's first; for times, the rows that increased."""
    if part == "times":
        return _risen(before, after)
    old, new = set(before), set(after)
    return [f"- {row}" for row in before if row not in new] + [f"+ {row}" for row in after if row not in old]


def _risen(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    sides = []
    for header, *rows in (before, after):
        named = [dict(zip(header, row)) for row in rows]
        sides.append({tuple(row[name] for name in ("library", "operation", "mask", "tokens")): row for row in named})
    slower = []
    for key in sorted(sides[0].keys() & sides[1].keys()):
        (us, launch), (now, now_launch) = ((float(side[key]["us"]), float(side[key]["launch_us"])) for side in sides)
        if now * launch / now_launch > us + MOST_RISE_US:
            slower.append(f"{' '.join(key)}: {us:.1f} us, launch {launch:.1f}; now {now:.1f}, launch {now_launch:.1f}")
    return slower + [f"- {key}" for key in sorted(sides[0].keys() - sides[1].keys())]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the record, or compare with it; return the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("action", choices=("make", "compare"))
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=["refusals", "results", "kernels"])
    parser.add_argument("--with", type=Path, default=FOLDER, dest="folder", metavar="FOLDER", help="the record folder")
    options = parser.parse_args(argv)
    num_changed = 0
    for part in options.parts:
        path = options.folder / f"{part}.csv"
        if options.action == "compare" and not path.exists():
            parser.error(f"--with must be a folder with {path.name}; got {options.folder}")
        rows = PARTS[part](options.folder)
        if options.action == "make":
            _write(path, rows)
            _write(options.folder / "record.csv", _rows_of_versions(options.folder / "record.csv", part))
            continue
        changed = changes(part, _rows(path), rows)
        num_changed += len(changed)
        print("\n".join([f"{part}: {len(rows) - 1} rows, {len(changed)} changes", *changed]))
    return 1 if num_changed else 0


def _rows_of_versions(path: Path, part: str) -> list[Row]:
    """Return the rows of record.csv, with this machine's versions in the row of a part."""
    facts = machine()
    header = ("part", *facts)
    recorded = {row[0]: row for row in _rows(path)[1:]} if path.exists() else {}
    recorded[part] = (part, *map(str, facts.values()))
    return [header, *(recorded[name] for name in PARTS if name in recorded)]


if __name__ == "__main__":
    sys.exit(main())
