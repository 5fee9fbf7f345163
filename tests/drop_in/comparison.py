"""Running a feature under both, and comparing what it saw."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import sharding
from sharding import P, ShardingError

Jit = Callable[..., Any]
TOPICS = {
    "options": "Options of `jax.jit`",
    "calls": "Functions and their calls",
    "arguments": "Kinds of arguments and results",
    "stages": "Staged compilation and export",
    "transformations": "Transformations around and inside",
    "control_flow": "Control flow and derivative rules inside",
    "debugging": "Debugging and callbacks",
    "state": "Refs, donation and memory kinds",
    "meshes": "Meshes, explicit sharding and shard_map",
    "modules": "Model libraries",
    "configuration": "JAX's configuration",
    "topics": "Programs on the topics of JAX's documentation",
}
"""Module -> heading."""


class Feature(NamedTuple):
    """One row of the table."""

    topic: str
    name: str
    program: Callable[[Jit], Any]

    @property
    def text(self) -> str:
        return (inspect.getdoc(self.program) or self.name).splitlines()[0].rstrip(".")

    @property
    def difference(self) -> str | None:
        """How it is known to differ, from the docstring."""
        _, _, after = (inspect.getdoc(self.program) or "").partition("Differs: ")
        return after.splitlines()[0].rstrip(".") if after else None


def features() -> list[Feature]:
    """All features, in the order of the table."""
    found = []
    for topic in TOPICS:
        module = importlib.import_module(f"{__package__}.{topic}")
        own = [(n, f) for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        found += [Feature(topic, name, f) for name, f in own if name[0] != "_"]
    return found


def verdict(feature: Feature) -> str:
    """Runs a feature under both: `works`, or what the error requires; raises AssertionError where they differ."""
    expected = feature.program(jax.jit)
    try:
        with sharding.mesh(data=2, tensor=4):
            found = feature.program(sharding.jit)
    except ShardingError as error:
        return f"refused: *required: {error.required}; fix: {error.fix[0]}*"
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            return f"refused: *TypeError: {error}*"
        raise
    try:
        assert_same(found, expected)
    except AssertionError:
        if feature.difference is None:
            raise
        return f"differs: {feature.difference}"
    return "works"


def assert_same(found: Any, expected: Any) -> None:
    """Raises unless two pytrees have the same structure, types, and numbers to a tolerance."""
    ours, theirs = jax.tree.structure(found), jax.tree.structure(expected)
    assert ours == theirs, f"{ours} is not {theirs}"
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        at = jax.tree_util.keystr(path)
        if not isinstance(a, (jax.Array, np.ndarray)):
            assert a == b, f"{at}: {a!r} is not {b!r}"
            continue
        assert isinstance(b, type(a)) or isinstance(a, jax.Array) and isinstance(b, jax.Array), at
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{at}: {a.shape} {a.dtype} is not {b.shape} {b.dtype}"
        if isinstance(a, jax.Array):
            assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False), f"{at}: weak type"
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = (np.asarray(x) for x in (a, b))
        if a.dtype.kind in "fc" or a.dtype.kind == "V" and a.dtype != jax.dtypes.float0:
            a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5, err_msg=at)
        else:
            np.testing.assert_array_equal(a, b, err_msg=at)


def split(x: Any, *entries: Any) -> Any:
    """An array sharded over the mesh, where there is one."""
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    return sharding.annotate(x, P(*(entries or ("data",)))) if has_mesh else x


def raised(call: Callable[[], Any]) -> str:
    """The kind of the exception of a call; TypeErrors and ValueErrors are one kind, that of bad requests."""
    try:
        with warnings.catch_warnings():
            call()
    except Exception as error:
        if type(error).__name__ in vars(jax.errors):
            return type(error).__name__
        is_used = isinstance(error, RuntimeError) and "deleted" in str(error)
        return "a bad request" if is_used or isinstance(error, (TypeError, ValueError)) else type(error).__name__
    return "nothing"
