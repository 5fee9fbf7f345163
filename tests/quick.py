"""How the quick tests have XLA compile: without LLVM's optimisations, which come after all that they look at.

Code generation is most of what they would take. The slow ones compile as users do.
"""

import os

import jax

OPTIONS: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
"""For `compile(compiler_options=...)`."""
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


def set_flags() -> None:
    """The same for all that this process and those that it starts compile; before JAX has started a backend."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
