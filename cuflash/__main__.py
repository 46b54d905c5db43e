"""``python -m cuflash``: print what this machine can run."""

import io
import sys

from .doctor import doctor

if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what the terminal's encoding has no letter for
    sys.stdout.reconfigure(errors="backslashreplace")
print(doctor())
