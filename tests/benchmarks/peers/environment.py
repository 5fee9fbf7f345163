"""A Python environment beside ours for libraries that we only measure against."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PYTHONS = (*([sys.executable] if sys.version_info[:2] == (3, 11) else []), "python3.11")
TORCH = "2.13.0"
# What PyTorch imports, all of it small. Where pip finds a CPU build, `pip install torch` would come to the same. Most
# indexes have a build for CUDA on Linux: it asks for several GB of packages besides, and does not import without them.
# So PyTorch is installed without what it asks for, and these after it.
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools", "numpy")
CUDA = re.compile(r"(nvidia|cuda|triton)\b(?!.*extra ==)")
LONG_SECONDS = 1800
"""Nothing here takes longer, even where all is downloaded."""


class _Failed(Exception):
    """Says why in one sentence."""


def torch_python(cache: Path, *, pythons: Sequence[str] = PYTHONS, say: Callable[[str], object] = print) -> Path | None:
    """The Python of an environment under `cache` that imports PyTorch for CPU; made there at the first call.

    Nothing but pip is asked, as it is configured on this machine. What comes back is None, after `say` got one sentence
    why, where there is no Python 3.11, where pip finds no such PyTorch, or only one for CUDA, which isn't downloaded.
    """
    folder = cache / f"torch-{TORCH}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    try:
        if not _imports(python):
            _venv(folder, pythons)
            _lean(python)
            _pip(python, "install", "--no-deps", f"torch=={TORCH}")
            _pip(python, "install", *TORCH_NEEDS)
        if not _imports(python):
            raise _Failed(f"PyTorch {TORCH} was installed in {folder} but does not import there.")
    except _Failed as failed:
        say(str(failed))
        return None
    return python


def _imports(python: Path) -> bool:
    return python.exists() and _run(python, "-c", "import numpy, torch.distributed.pipelining").returncode == 0


def _venv(folder: Path, pythons: Sequence[str]) -> None:
    """An empty environment, by the first of the Pythons that can make one."""
    found = [path for path in map(shutil.which, pythons) if path is not None]
    for path in found:
        if _run(path, "-m", "venv", "--clear", folder).returncode == 0:
            return
    if not found:
        raise _Failed(f"There is no {' or '.join(pythons)} on this machine to make an environment for PyTorch with.")
    raise _Failed(f"{' and '.join(found)} could not make a virtual environment in {folder}.")


def _lean(python: Path) -> None:
    """Fails if the PyTorch that pip would install is built for CUDA; its metadata say so before it is downloaded."""
    report = json.loads(_pip(python, "install", "--dry-run", "--report", "-", "--no-deps", f"torch=={TORCH}"))
    needs = report["install"][0]["metadata"].get("requires_dist", [])
    if sys.platform == "linux" and any(map(CUDA.match, needs)):
        raise _Failed(
            f"pip finds PyTorch {TORCH} only as a build for CUDA; give it an index of CPU builds (PIP_EXTRA_INDEX_URL)."
        )


def _pip(python: Path, *arguments: str) -> str:
    """What pip prints."""
    done = _run(python, "-m", "pip", *arguments, "--quiet", "--no-input", "--disable-pip-version-check")
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        wanted = " ".join(name for name in arguments if not name.startswith("-"))
        raise _Failed(f"pip could not {wanted}: {errors[-1] if errors else 'it gave no reason'}.")
    return done.stdout


def _run(program: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=LONG_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess([str(program)], 1, "", f"ERROR: {error}")


if __name__ == "__main__":
    if (found := torch_python(Path(sys.argv[1]))) is not None:
        print(found)
