"""The tree is the architecture: imports go one way, rooms stay small, and `import sharding` stays light."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# Ground first. A room imports only from floors below its own and stands right above the highest of them; rooms on one
# floor don't import each other.
FLOORS = [
    ["compat", "errors"],
    ["hardware", "paths", "rules", "spec"],
    ["display", "mesh"],
    ["annotations", "kernels"],
    ["distributed", "expert", "graph", "sequence", "tensor", "xla"],
    ["checkpoint", "cost", "models", "propagation", "zero"],
    ["rewrite"],
    ["memory", "pipeline"],
    ["explain"],
    ["completion"],
    ["comparison", "jit", "remat"],
    ["planner"],
    ["sharding"],  # the face, sharding/__init__.py
    ["launch"],
]
MOST_FILES, MOST_FOLDERS, MOST_FLOORS, MOST_LINES = 10, 25, 14, 400
"""Files and folders directly in sharding/, floors, lines of a file."""
HEIGHTS = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
PACKAGES = {"sharding": "sharding", "sharding.models": "models", "sharding.launch": "launch"}
HEAVY = ["flax", "orbax", "scipy", "rich"]


class Import(NamedTuple):
    """One name that a file imports, however deep inside a function."""

    importer: str
    target: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.importer} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "sharding" else ("sharding", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for folder in PACKAGES.values() for path in sorted((ROOT / folder).rglob("*.py"))}


def room(module: str) -> str:
    """The room of a module: a folder or loose file of `sharding/`, models or launch. The face is a room of its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "sharding"


def counted(path: Path) -> Iterator[ast.AST]:
    """All nodes of a file, except the lazy imports of the face."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        yield node
        lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__" and path == MODULES["sharding"]
        nodes.extend(() if lazy else ast.iter_child_nodes(node))


def written(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names in a file's import statements, with their lines."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in counted(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def imports(module: str) -> Iterator[Import]:
    """What a module imports from this project; `from sharding.rules import x` is the module x if there is one."""
    path = MODULES[module]
    for name, line in written(module, path):
        if name.split(".")[0] == "sharding":
            target = name if name in MODULES or name.count(".") == 0 else name.rpartition(".")[0]
            yield Import(module, target, path, line)


IMPORTS = [one for module in MODULES for one in imports(module)]


def listed(bad: list) -> str:
    return "\n" + "\n".join(map(str, bad))


def heights() -> dict[str, int]:
    """The floor of each room by what it imports."""
    below: dict[str, set[str]] = {room(module): set() for module in MODULES}
    for one in IMPORTS:
        if room(one.importer) != room(one.target):
            below[room(one.importer)].add(room(one.target))
    found: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        found[name] = max((found[lower] + 1 for lower in below[name]), default=0)
    return found


def test_floors_are_those_of_the_imports():
    assert heights() == HEIGHTS
    assert len(FLOORS) <= MOST_FLOORS


def test_few_files_and_folders_in_sharding():
    entries = [path for path in (ROOT / "sharding").iterdir() if path.name != "__pycache__"]
    assert sum(path.is_file() for path in entries) <= MOST_FILES
    assert sum(path.is_dir() for path in entries) <= MOST_FOLDERS


def test_no_file_is_long():
    bad = [path for path in MODULES.values() if len(path.read_text().splitlines()) > MOST_LINES]
    assert not bad, listed(bad)


def test_one_file_name_once():
    named: dict[str, list[Path]] = {}
    for path in MODULES.values():
        if not path.name.startswith("__"):
            named.setdefault(path.name, []).append(path.relative_to(ROOT))
    bad = [paths for paths in named.values() if len(paths) > 1]
    assert not bad, listed(bad)


def test_tests_mirror_the_tree():
    """Beside what tests share, each folder of tests is named after the folder that it tests."""
    ours = {"benchmarks", "corpus", "drop_in", "fuzz", "mutate", "support"}
    rooms = {module_name(path).removeprefix("sharding").strip(".").replace(".", "/") for path in MODULES.values()}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    bad = [
        folder for folder in folders if folder.parts[:1] and folder.parts[0] not in ours and str(folder) not in rooms
    ]
    assert not bad, listed(bad)


def test_imports_run_one_way():
    bad = [
        one
        for one in IMPORTS
        if room(one.importer) != room(one.target) and not HEIGHTS[room(one.target)] < HEIGHTS[room(one.importer)]
    ]
    assert not bad, listed(bad)


def test_nothing_in_a_circle():
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in IMPORTS:
        if one.importer != one.target:
            graph[one.importer].add(one.target)
    graphlib.TopologicalSorter(graph).prepare()


def test_one_module_has_one_name():
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for module, path in MODULES.items()
        for name, line in written(module, path)
        if name.split(".")[0] in ("models", "launch")
    ]
    assert not bad, listed(bad)


def test_models_never_see_a_mesh_or_a_spec():
    rooms, names = (
        {"mesh", "spec", "annotations"},
        {"P", "mesh", "annotate", "same", "barrier", "axis_rules"},
    )
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for module, path in MODULES.items()
        if room(module) == "models" and module != "sharding.models.layouts"
        for name, line in written(module, path)
        if name.startswith("jax.sharding")
        or (name.split(".")[0] == "sharding" and {*name.split(".")[1:2]} & (rooms | names))
    ]
    assert not bad, listed(bad)


def test_private_jax_only_in_compat():
    private = re.compile(r"\bjax\._src\b|\bjaxlib\._\w")
    bad = [
        path for path in MODULES.values() if path != ROOT / "sharding/compat.py" and private.search(path.read_text())
    ]
    assert not bad, listed(bad)


def test_import_is_light():
    # Compared with a bare `import jax`: what JAX itself loads does not count.
    program = "import sys, jax; before = set(sys.modules); import sharding; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    packages = {name.split(".")[0] for name in loaded.stdout.split()}
    assert not packages & set(HEAVY)


def test_face_is_complete():
    import sharding

    assert [name for name in sharding.__all__ if not hasattr(sharding, name)] == []
    assert sorted(set(sharding.__all__)) == sorted(sharding.__all__)
    loaded_late = {name: getattr(sharding, name).__name__ for name in ("planner", "zero", "checkpoint")}
    assert loaded_late == {name: f"sharding.{name}" for name in loaded_late}
    assert sharding.plan.__name__ == "plan" and not hasattr(sharding, "plane")


def test_every_package_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    packages = set(project["packages"])
    assert project["package-dir"] == PACKAGES
    assert packages == found, f"[tool.setuptools] packages: add {found - packages}, drop {packages - found}"


def texts() -> Iterator[Path]:
    """The project's own text files."""
    folders = ["sharding", "models", "launch", "tests", "notebooks", ".ci"]
    suffixes = {"", ".py", ".md", ".toml", ".ipynb", ".txt", ".json", ".yaml", ".yml", ".sh", ".cfg"}
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".git")]
    yield from (path for path in [*found, *tops] if path.is_file() and path.suffix in suffixes)


def test_no_paths_of_one_machine():
    folder = re.compile(r"(?<![\w.:/-])/(" + "|".join(["work", "root", "home", "Users"]) + r")/\w")
    bad = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if folder.search(line)
    ]
    assert not bad, listed(bad)


def test_python_is_ascii():
    bad = [path for path in texts() if path.suffix == ".py" and not path.read_text().isascii()]
    assert not bad, listed(bad)


def test_heavy_subpackages_are_imported_on_first_access():
    program = "import sharding; print(sharding.zero.__name__, sharding.planner.__name__, sharding.plan.__name__)"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["sharding.zero", "sharding.planner", "plan"]
    program = "import sharding; sharding.elsewhere"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "has no attribute 'elsewhere'" in found.stderr
