"""The documentation: examples of every public name, the README's size, map and links, and the site."""

import doctest
import functools
import html.parser
import http.server
import importlib
import inspect
import json
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import browser

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PACKAGES = """
sharding sharding.checkpoint sharding.cost sharding.expert sharding.explain sharding.hardware sharding.kernels
sharding.pipeline sharding.pipeline.cutting sharding.pipeline.schedules sharding.planner sharding.remat sharding.rules
sharding.sequence sharding.tensor sharding.zero
""".split()
README_LINES = 150
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"`([^`]+)`")


class Public(NamedTuple):
    """A class or function in the `__all__` of a public package."""

    package: str
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def texts(self) -> Iterator[str]:
        """Its docstring, and those of its public methods."""
        yield inspect.getdoc(self.value) or ""
        if inspect.isclass(self.value):
            yield from (inspect.getdoc(value) or "" for name, value in vars(self.value).items() if name[0] != "_")

    @property
    def annotations(self) -> str:
        """The types of its arguments, results, fields and methods."""
        members = [self.value]
        if inspect.isclass(self.value):
            members += [getattr(member, "fget", member) for member in vars(self.value).values()]
        return " ".join(str(getattr(member, "__annotations__", "")) for member in members)


def public() -> list[Public]:
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        found += [Public(package, name, getattr(module, name)) for name in module.__all__]
    return [one for one in found if inspect.isclass(one.value) or inspect.isfunction(one.value)]


@functools.cache
def notebook_text(path: Path, kind: str) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)


def examples(text: str) -> str:
    """The doctests and `Example:` sections of a docstring."""
    sections = re.findall(r"^( *)Examples?:\n((?:\1 +.*\n|\s*\n)+)", text + "\n", re.MULTILINE)
    return "\n".join([body for _, body in sections] + re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE))


def listed(bad: list) -> str:
    return "\n" + "\n".join(map(str, bad))


def test_every_public_name_has_a_docstring():
    # A dataclass without a docstring gets its signature for one.
    bad = [one for one in public() if not one.value.__doc__ or one.value.__doc__.startswith(f"{one.name}(")]
    assert not bad, listed(bad)


def test_every_public_name_has_an_example():
    """In a docstring or a notebook; a class also by a name with an example that takes, has or returns it."""
    everything = public()
    modules = [inspect.getdoc(importlib.import_module(package)) or "" for package in PACKAGES]
    code = "\n".join(
        [*(examples(text) for one in everything for text in one.texts), *map(examples, modules)]
        + [notebook_text(path, "code") for path in NOTEBOOKS]
    )
    shown = {
        one
        for one in everything
        if any(examples(text) for text in one.texts)
        or re.search(rf"\b{one.package.rpartition('.')[2]}\.{one.name}\b", code)
    }
    while more := {
        one
        for one in everything
        if one not in shown
        and inspect.isclass(one.value)
        and any(re.search(rf"\b{one.name}\b", other.annotations) for other in shown)
    }:
        shown |= more
    bad = [one for one in everything if one not in shown]
    assert not bad, listed(bad)


def with_doctests() -> list[str]:
    files = [path for path in (ROOT / "sharding").rglob("*.py") if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.mark.parametrize("name", with_doctests())
def test_doctests(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= README_LINES


def test_readme_example_prints_what_it_shows(tmp_path):
    """Except for the number of values and ops, which depends on the release of JAX."""
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", README.read_text(), re.DOTALL)[:2]
    (tmp_path / "ex.py").write_text(code)
    done = subprocess.run([sys.executable, "ex.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count = re.compile(r"\d+ values, \d+ ops")
    assert count.sub("", done.stdout) == count.sub("", shown)


def map_rows() -> dict[str, str]:
    """Folder -> the rest of its row in the README's map."""
    lines = README.read_text().partition("## The map")[2].splitlines()
    cells = [line.split("|", 2)[1:] for line in lines if line.startswith("| `")]
    return {CODE.findall(folder)[0].rstrip("/"): rest for folder, rest in cells}


def test_the_map_has_every_folder():
    rooms = ("sharding", "models", "launch")
    folders = {str(path.parent.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.py")}
    assert sorted(map_rows()) == sorted(folders | {"tests", "notebooks"})


def test_the_map_names_files_that_exist():
    """Every path in a row is relative to its folder: one with a slash or a suffix."""
    paths = [
        (folder, path)
        for folder, rest in map_rows().items()
        for path in CODE.findall(rest)
        if re.fullmatch(r"[\w./-]+\.(py|txt|ipynb|js|html|css)|[\w./-]+/", path)
    ]
    assert len(paths) >= 25
    bad = [f"{folder}/{path}" for folder, path in paths if not (ROOT / folder / path).exists()]
    assert not bad, listed(bad)


@pytest.mark.parametrize("path", [README, *NOTEBOOKS], ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    text = path.read_text() if path == README else notebook_text(path, "markdown")
    targets = [target for target in LINK.findall(text) if "://" not in target]
    bad = [target for target in targets if not (path.parent / target.partition("#")[0]).exists()]
    assert not bad, listed(bad)


def test_notebooks_are_in_the_readme():
    assert not [path for path in NOTEBOOKS if f"notebooks/{path.name}" not in README.read_text()]


class Page(html.parser.HTMLParser):
    """The links of a page of the site and the ids that links may name."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found["id"]} if found.get("id") else set()
        self.links |= {link for name in ("href", "src") if (link := found.get(name))}


def broken_links(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    bad = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            missing = not target.exists()
            missing |= bool(parts.fragment) and target in pages and parts.fragment not in pages[target].ids
            bad += [f"{path.relative_to(site.resolve())}: {link}"] * missing
    return bad


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, notebooks without their outputs."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    (ROOT / "build" / "docs-source").mkdir(parents=True, exist_ok=True)
    options = ["-W", "--keep-going", "-q", "-E", "-c", ".ci/docs", "-D", "nb_execution_mode=off"]
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *options,
        "-d",
        str(out / "doctrees"),
        "build/docs-source",
        str(out / "html"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.slow
def test_site_has_every_public_name(site):
    pages = {package: Page(site / "reference" / f"{package}.html") for package in PACKAGES}
    everywhere = set().union(*(page.ids for page in pages.values()))
    bad = [one for one in public() if str(one) not in everywhere | pages[one.package].ids]
    # A name of two packages is indexed under one of them.
    assert not [one for one in bad if one.name not in ("Cut", "cut")], listed(bad)


@pytest.mark.slow
def test_site_has_no_broken_link(site):
    bad = broken_links(site)
    assert not bad, listed(bad)


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.missing_programs()), reason=browser.missing_programs())
def test_site_in_a_browser(site):
    """Pages load everything that they ask for, and the search finds a name."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser.chromium() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for page in [
            site / "index.html",
            *sorted(site.glob("reference/*.html")),
            *sorted(site.glob("notebooks/*.html")),
        ]:
            driver.get(f"{address}/{page.relative_to(site)}")
            errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
            errors = [error for error in errors if "/favicon.ico" not in error]  # which no page names
            assert not errors, listed(errors)
        driver.get(f"{address}/search.html?q=zb_h1")
        driver.implicitly_wait(20)
        assert driver.find_element("css selector", "#search-results li a").get_attribute("href")
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Files of the site, without a log."""

    def log_message(self, format: str, *args: object) -> None:
        pass
