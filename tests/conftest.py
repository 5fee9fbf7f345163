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
    "launch/commands/test_plan_command.py",
    "launch/hosts/",
    "planner/",
    "test_notebooks.py",
)
"""Searches for plans, the supervision of processes, the commands of benchmarks, and what notebooks say."""

QUICK_CASES, QUICK_KERNEL_CASES = 4, 2
"""Of as many cases of a test, about one is quick: on the oldest JAX, and of interpreted kernels on newer ones."""

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        quick_compile.set_flags()
    jax.devices()  # initialises the backend, so that no test can change the number of devices


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves some cases to the slow tests; on the oldest JAX, also all but a test of what hardly depends on JAX."""
    is_oldest = jax.__version_info__ < (0, 11)
    files, tests = set[str](), set[tuple[str, str]]()
    for item in items:
        path, name = item.path.relative_to(Path(__file__).parent).as_posix(), item.name.partition("[")[0]
        is_late = is_oldest and path in files and path.startswith(INDEPENDENT_OF_JAX)
        apart = QUICK_CASES if is_oldest else QUICK_KERNEL_CASES if path.startswith("kernels/") else 1
        # By a hash of its parameters: cases in turn would be of one value of a parameter that varies first.
        is_left_out = (path, name) in tests and zlib.crc32(item.name.encode()) % apart
        if is_late or is_left_out:
            item.add_marker(pytest.mark.slow)
        files.add(path)
        tests.add((path, name))


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
