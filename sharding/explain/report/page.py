"""The page as one self-contained HTML file: markup, style, scripts and data, with no external resources."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...display.axis_colors import style_sheet

SCRIPTS = ("dom", "data", "mesh", "why", "values", "table", "communication", "memory", "time", "page")
"""In dependency order."""
HEIGHT_PIXELS = 720
"""The height of an embedded page."""
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(contents: Mapping[str, Any]) -> str:
    """A complete HTML document.

    Args:
        contents: the result of `report.contents`. Its strings are untrusted: they are data, never markup.
    """
    data = json.dumps(contents, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)
    parts = {
        "title": html.escape(contents["name"]),
        "style": _text("style.css") + style_sheet(max(1, len(contents["mesh"]))),
        "data": data,
        "script": "\n".join(_text(f"{name}.js") for name in SCRIPTS),
    }
    # One pass over the template: inserted text is never searched for placeholders.
    found, rest = [], _text("page.html")
    for name, text in parts.items():
        before, _, rest = rest.partition(f"<!--{name}-->")
        found += [before, text]
    return "".join([*found, rest])


def frame(contents: Mapping[str, Any]) -> str:
    """The page as a sandboxed iframe, for notebooks; it cannot read or change the surrounding document."""
    source = html.escape(page(contents), quote=True)
    title = html.escape(f"Shardings of {contents['name']}", quote=True)
    return (
        f'<iframe title="{title}" sandbox="allow-scripts" srcdoc="{source}" '
        f'style="width:100%;height:{HEIGHT_PIXELS}px;border:1px solid #8884;border-radius:8px"></iframe>'
    )


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
