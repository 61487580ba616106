"""Draw pictures of the documentation.

    python -m scripts.pictures

Writes `docs/images/NAME.svg`: Megatron's split on a mesh, schedules of a pipeline, chunks. Plots of
results are drawn by `scripts.benchmark_plots`.
"""

from __future__ import annotations

from scripts.benchmark_plots import IMAGES
from scripts.pictures import chunks, megatron, schedules

PICTURES = {
    "megatron_split": megatron.draw,
    "pipeline_schedules": schedules.draw,
    "chunks": chunks.draw,
}


def main() -> None:
    for name, draw in PICTURES.items():
        path = IMAGES / f"{name}.svg"
        path.write_text(str(draw()), encoding="utf-8")
        print(path.relative_to(IMAGES.parents[1]))


if __name__ == "__main__":
    main()
