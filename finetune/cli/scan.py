"""``finetune scan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from finetune.cli.options import AsJson
from finetune.cli.output import print_json, print_table

EXAMPLES = """
finetune scan bundled:smollm2-135m-instruct
finetune scan ./model --threshold median --top-percent 50 --out scans
"""


def scan(
    model: Annotated[str, typer.Argument(help="Hub id, folder, GGUF file or bundled model.")],
    threshold: Annotated[
        Literal["spectrum", "median"],
        typer.Option("--threshold", help="spectrum: as published; median: above the edge of noise."),
    ] = "spectrum",
    top_percent: Annotated[
        float, typer.Option("--top-percent", help="Percentage of each type that is listed.", min=0.01, max=100)
    ] = 25,
    out: Annotated[Path, typer.Option("--out", help="Folder for scores, list and picture.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Ranks the modules of a model by how much they stand out from noise, as Spectrum does."""
    from tqdm import tqdm

    from finetune.scan.run import scan_model

    with tqdm(desc="signal to noise of weights", unit="matrix", disable=None) as bar:

        def begin(total: int) -> Callable[[], object]:
            bar.reset(total)
            return lambda: bar.update()

        found = scan_model(model, out, threshold=threshold, top_percent=top_percent, progress=begin)
    if as_json:
        print_json({"scores": found.scores, "chosen": found.chosen, "files": [str(file) for file in found.files]})
        return
    print_table(found.rows(), ["type", "modules", "chosen", "highest", "lowest", "chosen layers, best first"])
    for file in found.files:
        print(file)
    print(f"next: finetune train RECIPE method.name=spectrum method.scores={found.files[0]}")
