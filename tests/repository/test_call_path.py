"""Ceilings for the modules and functions that a public call passes, which `experiments/support/call_path.py` counts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
# For each call: library modules that it enters, transitions between modules, and distinct functions. The ceilings only
# fall: lower a number whenever the code improves, and never raise one.
CEILINGS = {
    "cpu warm": (12, 16, 39),
    "cpu cold": (34, 169, 239),
    "gradients warm": (15, 39, 68),
    "cache warm": (22, 57, 101),
    "sim warm": (16, 29, 33),
    "sim gradients warm": (19, 68, 50),
}


def test_a_call_passes_no_more_modules_and_functions_than_it_did() -> None:
    # a new process, in which no other test has made calls
    command = [sys.executable, "-m", "experiments.support.call_path"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert set(counts) >= {row for row in CEILINGS if "sim" not in row or shutil.which("g++")}
    above = [row for row, each in counts.items() if any(np.greater(each, CEILINGS[row])) or min(each) < 1]
    assert not above, f"{above} of {counts}"
