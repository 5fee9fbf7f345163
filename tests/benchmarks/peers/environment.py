"""A separate Python environment for peer libraries in benchmarks."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PYTHONS = (*([sys.executable] if sys.version_info[:2] == (3, 11) else []), "python3.11")
TORCH = "2.13.0"
# PyTorch's own imports, all small. Where pip finds a CPU build, plain `pip install torch` would do the same. Most
# indexes serve a CUDA build on Linux: it requires several GB of further packages, and does not import without them.
# So PyTorch is installed with --no-deps, and these after it.
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools", "numpy")
AUTO_SHARDING = ("jax==0.10.0", "jaxlib==0.10.0", "libtpu==0.0.37")
"""The last libtpu with XLA's auto-sharding, and the JAX that it was released for, which can ask for it."""
CUDA = re.compile(r"(nvidia|cuda|triton)\b(?!.*extra ==)")
LONG_SECONDS = 1800
"""Timeout of one command, with room for downloads."""


class _Failed(Exception):
    """The reason in one sentence."""


def torch_python(cache: Path, *, pythons: Sequence[str] = PYTHONS, say: Callable[[str], object] = print) -> Path | None:
    """The Python of an environment under `cache` with PyTorch for CPU; created by the first call.

    Uses only pip, as configured on this machine. Returns None, after passing the reason to `say`, if there is no Python
    3.11, or if pip finds no such PyTorch or only a CUDA build, which is not downloaded.
    """
    folder = cache / f"torch-{TORCH}"

    def install(python: Path) -> None:
        _lean(python)
        _pip(python, "install", "--no-deps", f"torch=={TORCH}")
        _pip(python, "install", *TORCH_NEEDS)

    return _environment(folder, f"PyTorch {TORCH}", "numpy, torch.distributed.pipelining", install, pythons, say)


def auto_sharding_python(
    cache: Path, *, pythons: Sequence[str] = PYTHONS, say: Callable[[str], object] = print
) -> Path | None:
    """The Python of an environment under `cache` whose libtpu has XLA's auto-sharding; created by the first call.

    Returns None, after passing the reason to `say`, if there is no Python 3.11, or if pip finds no such releases.
    """
    folder = cache / AUTO_SHARDING[-1].replace("==", "-")

    def install(python: Path) -> None:
        _pip(python, "install", *AUTO_SHARDING)

    return _environment(folder, " with ".join(AUTO_SHARDING), "jax._src.sharding_impls, libtpu", install, pythons, say)


def _environment(
    folder: Path,
    name: str,
    modules: str,
    install: Callable[[Path], object],
    pythons: Sequence[str],
    say: Callable[[str], object],
) -> Path | None:
    """The Python of an environment that imports some modules, which is created if it doesn't."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    try:
        if not _imports(python, modules):
            _venv(folder, name, pythons)
            install(python)
        if not _imports(python, modules):
            raise _Failed(f"{name} was installed in {folder} but does not import there.")
    except _Failed as failed:
        say(str(failed))
        return None
    return python


def _imports(python: Path, modules: str) -> bool:
    return python.exists() and _run(python, "-c", f"import {modules}").returncode == 0


def _venv(folder: Path, name: str, pythons: Sequence[str]) -> None:
    """Creates an empty environment with the first Python that can."""
    found = [path for path in map(shutil.which, pythons) if path is not None]
    for path in found:
        if _run(path, "-m", "venv", "--clear", folder).returncode == 0:
            return
    if not found:
        raise _Failed(f"{name.partition(' ')[0]} needs {' or '.join(pythons)}, which is not installed on this machine.")
    raise _Failed(f"{' and '.join(found)} could not create a virtual environment in {folder}.")


def _lean(python: Path) -> None:
    """Fails if pip would install a CUDA build of PyTorch, judging by its metadata, before the download."""
    report = json.loads(_pip(python, "install", "--dry-run", "--report", "-", "--no-deps", f"torch=={TORCH}"))
    needs = report["install"][0]["metadata"].get("requires_dist", [])
    if sys.platform == "linux" and any(map(CUDA.match, needs)):
        raise _Failed(
            f"pip finds only a CUDA build of PyTorch {TORCH}; set PIP_EXTRA_INDEX_URL to an index of CPU builds."
        )


def _pip(python: Path, *arguments: str) -> str:
    """Runs pip and returns its output."""
    done = _run(python, "-m", "pip", *arguments, "--quiet", "--no-input", "--disable-pip-version-check")
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        command = " ".join(name for name in arguments if not name.startswith("-"))
        raise _Failed(f"pip {command} failed: {errors[-1] if errors else 'no reason given'}.")
    return done.stdout


def _run(program: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=LONG_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess([str(program)], 1, "", f"ERROR: {error}")


if __name__ == "__main__":
    if (found := torch_python(Path(sys.argv[1]))) is not None:
        print(found)
