"""Eight virtual CPU devices and strict JAX settings for every test."""

import os
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

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        quick_compile.set_flags()
    jax.devices()  # initialises the backend, so that no test can change the number of devices


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the oldest JAX, what hardly depends on JAX is a slow test, but for the first test of each file."""
    if jax.__version_info__ >= (0, 11):
        return
    seen: set[str] = set()
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path in seen and path.startswith(INDEPENDENT_OF_JAX):
            item.add_marker(pytest.mark.slow)
        seen.add(path)


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
