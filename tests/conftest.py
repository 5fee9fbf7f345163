"""Eight virtual CPU devices and strict JAX settings for every test."""

import os

# Without this every xdist worker starts as many XLA threads as the machine has cores. XLA reads it when it starts, so
# this comes before JAX.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("NPROC", "2")

import jax
import pytest
from support import quick_compile

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        quick_compile.set_flags()
    jax.devices()  # initialises the backend, so that no test can change the number of devices


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
