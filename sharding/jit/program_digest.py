"""The digest of an annotated program: programs of one digest have one completion, in every process.

It covers all that propagation and the rewriter decide by: the values, ops and annotations of the graph, the structure
and the parameters of the equations, the mesh and its links, and the versions of this library and of JAX. Not covered
are source lines and constants, which decide nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..graph import Graph, Scope
from ..spec import MeshSizes, Spec


def digest(graph: Graph, sizes: MeshSizes, mesh: Mesh | AbstractMesh, platform: str, policy: str) -> str:
    """The digest of a program that is to be completed, 64 hexadecimal digits.

    Args:
        graph: the annotated program.
        sizes: of the mesh axes, with what a byte costs along each.
        mesh: the mesh.
        platform: to lower for.
        policy: of the propagation.
    """
    found = hashlib.sha256()
    devices = sorted({device.device_kind for device in mesh.devices.flat}) if isinstance(mesh, Mesh) else []
    found.update(repr((library(), compat.versions(), policy, platform, devices)).encode())
    found.update(repr((list(sizes.items()), sorted(sizes.byte_costs.items()), mesh.axis_types)).encode())
    for part in _parts(graph):
        found.update(repr(part).encode())
    return found.hexdigest()


@cache
def library() -> str:
    """The release of this library, and the digest of its source."""
    try:
        release = version("sharding-jax")
    except PackageNotFoundError:  # run from a checkout
        release = ""
    root = Path(__file__).parent.parent
    source = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        source.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{release} {source.hexdigest()}"


def _parts(graph: Graph) -> Iterator[Any]:
    """All of a graph as numbers and texts."""
    numbers: dict[int, int] = {}
    texts = _Texts()
    for scope in graph.scopes():
        yield _scope(scope, numbers, texts)
    rules: dict[int, int] = {}
    for op in graph.ops:
        if id(op.rule) not in rules:
            rules[id(op.rule)] = len(rules)
            yield op.rule
    sites = ([numbers.get(id(eqn)) for eqn in op.site] for op in graph.ops)
    yield [
        (op.name, op.operands, op.results, rules[id(op.rule)], op.times, len(op.loops), site)
        for op, site in zip(graph.ops, sites, strict=True)
    ]
    yield graph.shapes, [*map(texts, graph.dtypes)]
    yield [(v, _spec(a.spec)) for v, a in graph.annotations.items()], [group.members for group in graph.groups]
    yield (
        _sorted(graph.manual),
        sorted(graph.divergent),
        _sorted(graph.dependencies),
        sorted(graph.memory_kinds.items()),
    )
    yield graph.output_memory_kinds, list(graph.names.items()), graph.inputs, graph.outputs
    yield sorted(graph.replicated_by_default)


def _scope(scope: Scope, numbers: dict[int, int], texts: _Texts) -> Any:
    """The structure of a scope, and its equations, which get numbers."""
    eqns = []
    for eqn in compat.open_jaxpr(scope.jaxpr).eqns:
        numbers.setdefault(id(eqn), len(numbers))
        eqns.append((eqn.primitive.name, texts.of_params(eqn.params)))
    rows = (scope.exits, scope.stacked_inputs, scope.stacked_outputs, sorted(scope.entries.items()))
    return eqns, [*scope.children], rows, sorted(scope.manual), scope.divergent, sorted(scope.opaque)


def _spec(spec: Spec) -> list[Any]:
    return [(dim.axes, dim.open, dim.priority, dim.is_stored) for dim in spec.dims]


def _sorted(sets: Mapping[int, Any]) -> list[Any]:
    return [(key, sorted(sets[key])) for key in sorted(sets)]


class _Texts:
    """Texts of the parameters of equations that are equal in all processes."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, str]] = {}
        """Id of a parameter -> the parameter, which keeps the id valid, and its text."""

    def __call__(self, x: Any) -> str:
        if id(x) not in self.known:
            self.known[id(x)] = (x, _text(x))
        return self.known[id(x)][1]

    def of_params(self, params: Mapping[str, Any]) -> list[str]:
        """The names and texts of an equation's parameters."""
        return [f"{name}={self(params[name])}" for name in sorted(params)]


def _text(x: Any) -> str:
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, np.generic, np.dtype, PartitionSpec)):
        return repr(x)
    if compat.is_jaxpr(x):  # a scope of its own
        return "jaxpr"
    if isinstance(x, enum.Enum):
        return str(x)
    if isinstance(x, (Mesh, AbstractMesh)):
        return f"{x.shape_tuple} {x.axis_types}"
    if isinstance(x, NamedSharding):
        return f"{_text(x.mesh)} {x.spec} {x.memory_kind}"
    if isinstance(x, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(value)}' for key, value in x.items()))}}}"
    if isinstance(x, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, x)))}}}"
    if isinstance(x, (tuple, list)):
        return f"{type(x).__name__}({', '.join(map(_text, x))})"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = (f"{field.name}={_text(getattr(x, field.name, None))}" for field in dataclasses.fields(x))
        return f"{type(x).__name__}({', '.join(parts)})"
    if isinstance(x, (np.ndarray, jax.Array)):
        return f"{x.dtype}{x.shape}"
    return getattr(x, "__qualname__", type(x).__qualname__)  # a function; a repr may have its address
