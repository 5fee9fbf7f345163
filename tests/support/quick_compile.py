"""XLA flags of the quick tests: LLVM optimisations off, since they run after everything that the tests inspect.

Code generation would take most of the time. Slow tests compile with default flags.
"""

import os

import jax

OPTIONS: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
"""For `compile(compiler_options=...)`."""
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


def set_flags() -> None:
    """Sets the flags for this process and its children; call it before JAX initialises a backend."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
