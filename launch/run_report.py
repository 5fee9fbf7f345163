"""The report of a run: an HTML page, and beside it the page that explains the train step's shardings."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from sharding.planner import Plan

FILE_NAME = "report.html"
PLAN_NAME = "plan.html"

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
    plan: Plan | None = None,
) -> Path:
    """Write the report and the completion's page to the folder `out`; returns the report's path.

    Args:
        settings: the configuration; nested mappings become rows with dotted names.
        facts: results of the run, as text.
        curve: the loss curve as SVG.
        completion: of the train step.
        sample: generated text; empty for none.
        plan: that the run followed.
    """
    parts = [
        "<h1>Training run</h1>",
        _table(facts),
        "<h2>Loss</h2>",
        curve,
        *(["<h2>Sample</h2>", f"<pre>{escape(sample)}</pre>"] if sample else []),
        "<h2>Sharding of the train step</h2>",
        f'<p><a href="{PLAN_NAME}">Every array, collective and byte of the train step, with the reasons</a></p>',
        f"<pre>{escape(str(completion))}</pre>",
        "<h2>Configuration</h2>",
        _table(dict(_rows(settings))),
    ]
    completion.report(out / PLAN_NAME, tables=() if plan is None else plan.tables())
    path = out / FILE_NAME
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Training run</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    return path


def _table(rows: Mapping[str, str]) -> str:
    cells = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>\n{cells}\n</table>"


def _rows(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        rows += _rows(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, str(value))]
    return rows
