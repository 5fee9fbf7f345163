"""Programs as bytes.

JAX's jaxprs refer to what a process has of its own: tracebacks, devices, functions defined inside others. A pickled
program keeps of these what analyses read: source lines, mesh axes, names.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import sys
from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np
from jax.sharding import Mesh

from .. import compat
from ..errors import ShardingError
from ..graph import Annotation, Graph
from ..propagation import Assignment, Conflict, Given, Reason, complete
from ..rewrite.placed_reshards import with_placed_reshards
from ..spec import Axis, Spec


def dumps(x: Any) -> bytes:
    """Pickles an object that contains programs."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(x)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The object of `dumps`; the programs in it can be analysed, but not run."""
    return pickle.loads(data)


class _SavedSource(NamedTuple):
    """What is kept of an equation's source information in a pickled program."""

    line: str
    name_stack: Any
    traceback: None = None
    file: tuple[str, int] = ("", -1)
    """As from `compat.source_file`."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jex.Primitive):
            return _primitive, (obj.name, _places().get(id(obj)))
        if isinstance(obj, compat.SourceInfo):
            return _SavedSource, (compat.line_of(obj), obj.name_stack, None, compat.source_file(obj))
        if isinstance(obj, Mesh):
            return _same, (obj.abstract_mesh,)
        if isinstance(obj, Graph):  # without what it has computed: that refers to equations by their ids
            return _graph, ({field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init},)
        if type(obj).__name__ == "TypedNdArray":  # JAX 0.12 unpickles its constants without their type
            return _same, (np.asarray(obj),)
        if isinstance(obj, Assignment):
            found = dict(obj.reasons), obj.conflicts
            return _assignment, (obj.graph, obj.sizes, obj.specs, *found, obj.given)
        if isinstance(obj, FunctionType) and not _is_importable(obj):
            return _absent, (obj.__qualname__,)
        return NotImplemented


def _same(x: Any) -> Any:
    return x


def _graph(fields: dict[str, Any]) -> Graph:
    return Graph(**fields)


def _assignment(
    graph: Graph,
    sizes: Mapping[str, int],
    specs: tuple[Spec, ...],
    reasons: dict[tuple[int, int, Axis], Reason],
    conflicts: tuple[Conflict, ...],
    given: Given | None,
) -> Assignment:
    def with_annotations(annotations: Mapping[int, Annotation]) -> Assignment:
        if given is None:
            raise ShardingError(
                "annotate(...) of a pickled completion",
                found="another engine, which propagates in the process that traced the program",
                required='engine="sharding"',
                fix="complete the program again",
            )
        program = dataclasses.replace(graph, annotations={**given.annotations, **annotations})
        found = complete(program, sizes, policy=given.policy)
        return with_placed_reshards(found, given.platform) if given.platform else found

    return Assignment(
        graph=graph,
        sizes=sizes,
        specs=specs,
        find_reason=lambda value, dim, axis: reasons[value, dim, axis],
        with_annotations=with_annotations,
        find_conflicts=lambda: conflicts,
        given=given,
    )


@cache
def _places() -> dict[int, tuple[str, str]]:
    """id of a primitive -> module and attribute."""
    modules = [module for name, module in [*sys.modules.items()] if module is not None and "." in name]
    return {
        id(value): (module.__name__, name)
        for module in modules
        for name, value in [*vars(module).items()]
        if isinstance(value, jex.Primitive)
    }


def _primitive(name: str, place: tuple[str, str] | None) -> Any:
    if place is not None:
        found = getattr(importlib.import_module(place[0]), place[1], None)
        if isinstance(found, jex.Primitive):
            return found
    return jex.Primitive(name)


def _is_importable(f: FunctionType) -> bool:
    found: Any = sys.modules.get(f.__module__)
    for name in f.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is f


def _absent(name: str) -> Any:
    """In the place of a function that only the process that traced the program has."""

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name}: a pickled program can be analysed, but not run")

    absent.__name__ = absent.__qualname__ = name
    return absent
