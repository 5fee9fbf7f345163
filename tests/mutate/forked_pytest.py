"""pytest in forks of a process that has imported JAX already: seconds less for each of hundreds of short runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

PRELOADED = ("jax", "jax.numpy", "jax.experimental.pallas", "numpy", "optax", "flax.nnx")
"""What nearly every test imports. None of it starts a thread or a backend, which would not survive the fork."""

WARNINGS = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")

TIMED_OUT = -1
"""Returned in place of pytest's exit code."""


def preload() -> None:
    """Imports what the tests need, but nothing of the library."""
    for name in PRELOADED:
        importlib.import_module(name)
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)


def run(root: Path, arguments: Sequence[str], *, plugins: Sequence[object] = (), seconds: float | None = None) -> int:
    """Returns pytest's exit code in a folder, or TIMED_OUT; its output is dropped."""
    child = os.fork()
    if child == 0:
        _in_child(root, arguments, plugins)
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT
        time.sleep(0.02)


def _in_child(root: Path, arguments: Sequence[str], plugins: Sequence[object]) -> None:
    code = 3  # pytest's own code for an error inside it
    try:
        os.setpgid(0, 0)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)  # of the processes that tests start
        sys.path.insert(0, str(root))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.dont_write_bytecode = True
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *WARNINGS]
        code = int(pytest.main([*options, *arguments], plugins=[*plugins]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
