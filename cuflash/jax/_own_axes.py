"""The axes of arrays besides those of the batch, for rules that add a batch axis or split one."""

from __future__ import annotations

from collections.abc import Mapping

from ..masks.arrays import Dense
from ..masks.block_pattern import BlockPattern
from ..masks.documents import Documents
from ..masks.lengths import Lengths
from ..masks.sequences import Sequences

# The number of axes of a mask's arrays after those that broadcast over the batch.
OWN_AXES: Mapping[type, int] = {Lengths: 0, Documents: 1, Sequences: 1, Dense: 3, BlockPattern: 3}
# The number of axes of other arrays, from that of heads on.
FROM_HEADS: Mapping[str, int] = {"q": 3, "k": 3, "v": 3, "o": 3, "do": 3, "lse": 2, "dlse": 2, "sink": 1}
