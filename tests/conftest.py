"""Eight virtual CPU devices and strict JAX settings for every test."""

import os
import zlib
from pathlib import Path

# Without this every xdist worker starts as many XLA threads as the machine has cores. XLA reads it when it starts, so
# this comes before JAX.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("NPROC", "2")

import jax
import pytest
from support import quick_compile

INDEPENDENT_OF_JAX = (
    "benchmarks/",
    "launch/",
    "planner/",
    "test_notebooks.py",
)
"""Searches for plans, runs and their supervision, the commands of benchmarks, and what notebooks say."""

QUICK_TESTS, QUICK_CASES = 2, 4
"""On the oldest JAX: of as many tests of a file, and cases of a test, about one is quick."""
QUICK_CASES_OF_ROOM = dict.fromkeys(("benchmarks", "kernels"), 3) | dict.fromkeys(
    ("expert", "explain", "jit", "models", "pipeline", "remat", "rewrite", "sequence", "zero"), 2
)
"""On newer ones: of as many cases of a test in a room that compiles much, about one is quick."""

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        quick_compile.set_flags()
    jax.devices()  # initialises the backend, so that no test can change the number of devices


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves some tests and cases to the slow ones; on the oldest JAX, also all but a test of what hardly depends on
    JAX. The first test of a file and the first case of a test stay quick."""
    is_oldest = jax.__version_info__ < (0, 11)
    files, tests = set[str](), dict[tuple[str, str], bool]()
    for item in items:
        path, name = item.path.relative_to(Path(__file__).parent).as_posix(), item.name.partition("[")[0]
        if (path, name) in tests:  # by a hash: cases in turn would be of one value of a parameter that varies first
            apart = QUICK_CASES if is_oldest else QUICK_CASES_OF_ROOM.get(path.partition("/")[0], 1)
            is_left_out = tests[path, name] or zlib.crc32(item.name.encode()) % apart
        else:
            is_late = path.startswith(INDEPENDENT_OF_JAX) or zlib.crc32(name.encode()) % QUICK_TESTS
            is_left_out = tests[path, name] = bool(is_oldest and path in files and is_late)
        if is_left_out:
            item.add_marker(pytest.mark.slow)
        files.add(path)


@pytest.fixture
def compiles():
    """The durations of XLA's compilations since the test began."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
