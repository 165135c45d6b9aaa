"""Templates of pages: one file each, no script, nothing loaded from anywhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

__all__ = ["embedded_picture", "render_page"]


def render_page(template: str, **context: Any) -> str:
    """Returns a page; every text in ``context`` is escaped.

    Args:
        template: File among the templates of this package.
        **context: What the template names.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(context)


def embedded_picture(file: Path) -> tuple[str, str]:
    """Returns the title and the base64 content of a PNG file."""
    return file.stem.replace("_", " "), base64.b64encode(file.read_bytes()).decode()
