"""`python -m tests.drop_in`: runs every feature under `jax.jit` and `sharding.jit` and writes the table."""

import argparse

import jax

from .comparison import features, verdict
from .table import FILE, text


def main() -> None:
    """Writes the table; a feature that differs from `jax.jit` raises."""
    argparse.ArgumentParser(prog="python -m tests.drop_in", description=__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    FILE.write_text(text({feature: verdict(feature) for feature in features()}))


if __name__ == "__main__":
    main()
