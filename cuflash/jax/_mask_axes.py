"""The masks whose arrays may have batch axes, for rules that add a batch axis or split one."""

from __future__ import annotations

from collections.abc import Mapping

from ..masks.arrays import Dense
from ..masks.base import Mask
from ..masks.block_pattern import BlockPattern
from ..masks.documents import Documents
from ..masks.lengths import Lengths
from ..masks.sequences import Sequences

# The number of axes of a mask's arrays after those that broadcast over the batch.
OWN_AXES: Mapping[type, int] = {Lengths: 0, Documents: 1, Sequences: 1, Dense: 3, BlockPattern: 3}
IN_LIBRARY = Mask.__module__.rpartition(".")[0]  # users may define masks elsewhere
