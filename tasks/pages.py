"""HTML pages: each is one self-contained file, rendered from the templates beside this module."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from tasks.config.home import home
from tasks.figures import percent


def page_templates(**filters: Callable[..., Any]) -> jinja2.Environment:
    """The templates of pages.

    Args:
        filters: What a page formats its values with, besides `percent`, `number` and `code`.
    """
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": percent, "number": "{:,}".format, "code": as_code, **filters}
    return made


def as_code(text: str) -> Markup:
    """A text for people, with what it has in backticks, as in Markdown, as code; all of it is escaped."""
    parts = re.split(r"`([^`\n]+)`", text)
    shown = (Markup("<code>{}</code>").format(part) if n % 2 else escape(part) for n, part in enumerate(parts))
    return Markup().join(shown)


def keep_page(name: str, page: bytes) -> Path:
    """Write a page to the data folder, and return its path.

    Args:
        name: Of the file, without its suffix.
        page: Its content.
    """
    path = home() / "reports" / f"{name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(page)
    return path
