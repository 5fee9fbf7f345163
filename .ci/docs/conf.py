"""Sphinx: the README, the notebooks with their outputs and a page per public package, as a static site in `build/docs`.

`make docs` runs it. The pages are assembled in `build/docs-source`, so that links from the README to the notebooks hold
on the site as they do in the repository. Notebooks run once and again only when they change (`build/docs-notebooks`).
"""

import importlib
import inspect
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "build" / "docs-source"
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PACKAGES = """
sharding
sharding.explain sharding.cost sharding.hardware sharding.rules sharding.checkpoint
sharding.zero sharding.tensor sharding.sequence sharding.expert sharding.kernels
sharding.pipeline sharding.pipeline.schedules sharding.pipeline.cutting
""".split()
"""The public packages: every name in their `__all__` is documented."""

project = "sharding"
author = "the sharding authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
html_theme = "furo"
html_title = "sharding"
suppress_warnings = [
    "config.cache",  # the hook below can't be pickled
    "ref.python",  # types named as an attribute is: two of a name are no mistake
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-notebooks")
nb_execution_timeout = 300
nb_execution_raise_on_error = True

DIRECTIVE = """
```{{eval-rst}}
.. auto{kind}:: {package}::{name}
{options}
```
"""
TWICE = {("sharding.pipeline.cutting", "Cut"), ("sharding.pipeline.cutting", "cut")}
"""Names that `sharding.pipeline` has, too: documented there."""
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)|``[^`]+``")


def put(path: str, text: str) -> None:
    """Writes a page where it changed: Sphinx reads again what is newer."""
    file = SOURCE / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def entry(package: str, name: str) -> str:
    """The directive that documents one public name."""
    value = getattr(importlib.import_module(package), name)
    if inspect.ismodule(value):
        return f"\n- [{value.__name__}]({value.__name__}.md): {(inspect.getdoc(value) or '').splitlines()[0]}\n"
    if (package, name) in TWICE:
        return f"\n- `{name}`: see [sharding.pipeline](sharding.pipeline.md)\n"
    own = inspect.isclass(value) and value.__module__.startswith("sharding")
    options = ["   :members:", "   :undoc-members:"] * own
    kind = "class" if inspect.isclass(value) else "function" if inspect.isfunction(value) else "data"
    return DIRECTIVE.format(kind=kind, package=package, name=name, options="\n".join(options))


def page(package: str) -> str:
    """The reference of one package: its docstring, functions, then classes and data."""
    module = importlib.import_module(package)
    names = sorted(module.__all__, key=lambda name: (not inspect.isfunction(getattr(module, name)), name.lower()))
    head = f"# {package}\n\n```{{eval-rst}}\n.. automodule:: {package}\n   :no-members:\n```\n"
    return head + "".join(entry(package, name) for name in names)


def contents(caption: str, pages: list[str]) -> str:
    """A section of the table of contents at the side."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def escaped(paragraph: str) -> str:
    """reStructuredText of a paragraph: docstrings write `x` as Markdown does, and a star for itself."""
    parts, end = [], 0
    for found in CODE.finditer(paragraph):
        parts += [paragraph[end : found.start()].replace("*", r"\*"), f"``{found[1] or found[0].strip('`')}``\\ "]
        end = found.end()
    return "".join([*parts, paragraph[end:].replace("*", r"\*")])


def restructured(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """A docstring with its code marked as Sphinx needs it, before Napoleon reads the sections."""
    text = re.sub(
        r"^( *)Example:\n((?!\s*>>>)(?:\1 +.*\n|\n)+)",
        lambda found: f"{found[1]}Example:\n{found[1]}    ::\n\n{textwrap.indent(found[2], '    ')}",
        "\n".join(lines) + "\n",
        flags=re.MULTILINE,
    )
    blocks = re.split(r"(\n\s*\n)", text)
    literal = False
    for i, block in enumerate(blocks):
        literal = block.rstrip().endswith("::") or (literal and block[:1] in " \n")
        if not literal and ">>>" not in block:
            blocks[i] = escaped(block)
    lines[:] = "".join(blocks).split("\n")


def defining_module(app: Any, package: str, name: str) -> str:
    """Where the source of a documented name is; without this the page of sources lists `builtins`."""
    value: Any = importlib.import_module(package)
    for part in name.split("."):
        value = getattr(value, part, None)
    module = getattr(value, "__module__", None) or package
    return module if module.startswith("sharding") else package


def setup(app: Any) -> None:
    """What Sphinx calls in a configuration."""
    app.connect("viewcode-follow-imported", defining_module)
    app.connect("autodoc-process-docstring", restructured, priority=100)


for name in NOTEBOOKS:
    put(f"notebooks/{name}.ipynb", (ROOT / "notebooks" / f"{name}.ipynb").read_text())
shutil.copy2(ROOT / "notebooks" / "report.png", SOURCE / "notebooks")
for package in PACKAGES:
    put(f"reference/{package}.md", page(package))
put("CHANGELOG.md", (ROOT / "CHANGELOG.md").read_text())
put("tests/drop_in/README.md", (ROOT / "tests" / "drop_in" / "README.md").read_text())
put(
    "index.md",
    (ROOT / "README.md").read_text()
    + contents("Notebooks", [f"notebooks/{name}" for name in NOTEBOOKS])
    + contents("Reference", [f"reference/{package}" for package in PACKAGES])
    + contents("Project", ["tests/drop_in/README", "CHANGELOG"]),
)
