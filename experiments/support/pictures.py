"""Draws the pictures of masks that the README shows.

    python -m experiments pictures              # writes build/results/masks.png
    python -m experiments pictures --publish    # writes docs/images/masks.png

Each panel is one head of a mask in blocks: absent (white), partial (light) and full (dark). The picture depends only on
the library, since it shows no measurement.

Cost: Seconds on one core.
"""

import os
from pathlib import Path

import numpy as np
from cuflash import BlockIndex, masks, patterns
from command_line import Parser
from harness import UNPUBLISHED, atomic_path
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

PUBLISHED = Path(__file__).parents[2] / "docs" / "images"
SEQLEN, BLOCK = 512, 16
COLOURS = ListedColormap(["white", "#2b5d8a", "#9cc3e0"])  # by `BlockKind`: absent, full, partial


def shown() -> dict[str, masks.Mask]:
    """Return title and mask of each panel."""
    documents = np.repeat([0, 1, 2], [150, 240, 122])
    return {
        "Causal() & Documents(ids)": masks.Causal() & masks.Documents(documents),
        "sink_local(16, (127, 0))": patterns.sink_local(16, (127, 0)),
        "bigbird(512, block=16)": patterns.bigbird(SEQLEN, block=BLOCK),
        "butterfly(512, block=16)": patterns.butterfly(SEQLEN, block=BLOCK),
    }


def draw() -> Figure:
    """Draw one row of panels, one for each mask."""
    panels = shown()
    figure = Figure(figsize=(2.5 * len(panels), 2.9), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        index = BlockIndex.from_mask(mask, SEQLEN, SEQLEN, BLOCK)
        axes.imshow(index.to_scipy().toarray(), cmap=COLOURS, vmin=0, vmax=2, interpolation="nearest")
        axes.set_title(title, fontsize="small", family="monospace")
        axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    return figure


def main() -> None:
    """Draw the picture to the file that the command line selects."""
    parser = Parser(__doc__)
    parser.add_argument("--publish", action="store_true", help="write to docs/images, which the README shows")
    path = (PUBLISHED if parser.parse_args().publish else UNPUBLISHED) / "masks.png"
    with atomic_path(path) as partial:
        draw().savefig(partial, dpi=110)
    print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
