"""``finetune version``."""

from __future__ import annotations

from finetune.cli.options import AsJson
from finetune.cli.output import print_json

EXAMPLES = """
finetune version
finetune version --json
"""


def version(as_json: AsJson = False) -> None:
    """Prints the version."""
    from finetune.environment import toolkit_version

    found = toolkit_version()
    commit = f" ({found['commit']}{', changed' if found['dirty'] else ''})" if found["commit"] else ""
    print_json(found) if as_json else print(f"finetune {found['version']}{commit}")
