"""The page as one file: markup, style, code and data, nothing of which is fetched."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

SCRIPTS = ("dom", "data", "mesh", "why", "values", "table", "communication", "memory", "time", "page")
"""In the order in which they build on each other."""
HEIGHT_PIXELS = 720
"""Of a page inside another."""
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(contents: Mapping[str, Any]) -> str:
    """A whole HTML document.

    Args:
        contents: of `report.contents`. Texts in it may be anything: they are data, never markup.
    """
    data = json.dumps(contents, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)
    parts = {
        "title": html.escape(contents["name"]),
        "style": _text("style.css"),
        "data": data,
        "script": "\n".join(_text(f"{name}.js") for name in SCRIPTS),
    }
    # One after the other, each found once: what is put in is never looked through.
    found, rest = [], _text("page.html")
    for name, text in parts.items():
        before, _, rest = rest.partition(f"<!--{name}-->")
        found += [before, text]
    return "".join([*found, rest])


def frame(contents: Mapping[str, Any]) -> str:
    """The page inside another, as in a notebook; it can neither see nor change what is around it."""
    source = html.escape(page(contents), quote=True)
    title = html.escape(f"How {contents['name']} is split", quote=True)
    return (
        f'<iframe title="{title}" sandbox="allow-scripts" srcdoc="{source}" '
        f'style="width:100%;height:{HEIGHT_PIXELS}px;border:1px solid #8884;border-radius:8px"></iframe>'
    )


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
