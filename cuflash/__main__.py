"""``python -m cuflash``: print what this machine can run."""

from .doctor import doctor

print(doctor())
