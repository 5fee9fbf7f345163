"""Whose line an equation has: the user's, also of a model of this package, wherever it is installed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import compat

LIBRARY = Path(sharding.__file__).parent


def called_from(file: Path):
    """What the function `apply(f, x)` of a file returns as the line of an equation that `f` makes."""
    code = compile("def apply(f, x):\n    return jax.numpy.sin(f(x))\n", str(file), "exec")
    names = {"jax": jax}
    exec(code, names)
    return compat.source_line(jax.make_jaxpr(lambda x: names["apply"](lambda x: x, x))(jnp.ones(2)).eqns[0])


@pytest.mark.parametrize(
    ("file", "is_shown"),
    [
        (LIBRARY / "models" / "gpt.py", True),  # as installed
        (LIBRARY / "launch" / "datasets" / "digits.py", True),
        (LIBRARY.parent / "models" / "gpt.py", True),  # as in a checkout
        (LIBRARY.parent / "sharding_experiments" / "train.py", True),
        (LIBRARY.parent / "sharding.py", True),
        (LIBRARY / "kernels" / "models.py", False),
        (LIBRARY / "models.py", False),
        (LIBRARY / "mesh.py", False),
    ],
    ids=str,
)
def test_the_line_is_of_the_user_or_of_a_model(file: Path, is_shown: bool):
    line = called_from(file)
    assert line == f"{file.name}:2 (apply)" if is_shown else line.startswith("test_compat.py:")
