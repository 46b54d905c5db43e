"""``python -m cuflash`` prints what this machine can run, ``python -m cuflash memory`` what a KV cache takes."""

import io
import sys

from .calculators import memory_report
from .doctor import doctor

if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what the terminal's encoding has no letter for
    sys.stdout.reconfigure(errors="backslashreplace")
print(memory_report(sys.argv[2:]) if sys.argv[1:2] == ["memory"] else doctor())
