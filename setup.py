"""Maps the folders at the top level into the namespace ``finetune``; all other metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
MAPPED = ("methods", "data_selection", "recipes")


def packages() -> list[str]:
    # The links inside finetune/ may be absent (zip archives, some Windows checkouts): what lies behind them is found
    # in the real folders.
    behind_links = tuple(f"finetune.{folder}" for folder in MAPPED)
    found = find_packages(str(ROOT / "finetune"))
    own = ["finetune", *(f"finetune.{name}" for name in found)]
    own = [name for name in own if not name.startswith(behind_links)]
    mapped = [f"finetune.{name}" for folder in MAPPED for name in (folder, *_below(folder))]
    return own + mapped


def _below(folder: str) -> list[str]:
    return [f"{folder}.{name}" for name in find_packages(str(ROOT / folder))]


setup(
    packages=packages(),
    package_dir={"finetune": "finetune", **{f"finetune.{folder}": folder for folder in MAPPED}},
    package_data={
        "finetune": ["py.typed"],
        "finetune.data": ["templates/*.jinja"],
        "finetune.recipes": ["**/*.yaml", "**/*.jsonl"],
        "finetune.report": ["templates/*"],
    },
    include_package_data=False,
    zip_safe=True,
)
