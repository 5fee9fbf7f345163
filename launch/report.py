"""The report of a run: one HTML file that needs nothing else."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

FILE_NAME = "report.html"

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; }
td, th { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
pre { background: #f6f6f6; padding: 0.8rem; overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
svg { max-width: 100%; height: auto; }
"""


def write(
    out: Path,
    *,
    settings: Mapping[str, Any],
    facts: Mapping[str, str],
    curve: str,
    completion: Any,
    sample: str,
) -> Path:
    """The report's path, once it is written to the folder `out`.

    Args:
        settings: the configuration; nested mappings become rows with dotted names.
        facts: figures of the run, already as text.
        curve: the loss curve as SVG.
        completion: how the train step is split; shown as its own HTML if it has one, else as text.
        sample: generated text; the part is left out if there is none.
    """
    parts = [
        "<h1>Training run</h1>",
        _table(facts),
        "<h2>Loss</h2>",
        curve,
        *(["<h2>Sample</h2>", f"<pre>{escape(sample)}</pre>"] if sample else []),
        "<h2>How the train step is split</h2>",
        _shown(completion),
        "<h2>Configuration</h2>",
        _table(dict(_rows(settings))),
    ]
    path = out / FILE_NAME
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Training run</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    return path


def _shown(value: Any) -> str:
    as_html = getattr(value, "_repr_html_", None)
    return as_html() if as_html else f"<pre>{escape(str(value))}</pre>"


def _table(rows: Mapping[str, str]) -> str:
    cells = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>\n{cells}\n</table>"


def _rows(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        rows += _rows(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, str(value))]
    return rows
