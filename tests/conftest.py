"""Eight virtual CPU devices, and the strictness that every test runs under."""

import os

# Under xdist every worker would otherwise start as many XLA threads as the machine has cores. XLA reads it when it
# starts, so this comes before JAX.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("NPROC", "2")

import jax
import pytest
import quick

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        quick.set_flags()
    jax.devices()  # starts the backend: from here on nothing that a test runs can ask for another number of devices
