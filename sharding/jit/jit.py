"""`sharding.jit`: trace a function, infer its shardings, constrain it, and dispatch through `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import graph, paths, propagation
from ..completion import Completion
from ..cost.topology import byte_costs, known_topology
from ..errors import ShardingError, raise_together
from ..graph.garbage_collection import no_collection
from ..hardware import Platform
from ..mesh import current, described, tracing_context
from ..propagation import Assignment, Policy, shardy
from ..rewrite.host_memory import resharded_on_device
from ..rewrite.reshard_placement import placed
from ..spec import MeshSizes
from . import argument_shardings, tracing
from .cache_key import CacheKey, cache_key, changed_parts, context_key
from .donation import outputs_reusing_donated
from .executable import ArgumentMismatch, Executable
from .fast_dispatch import FastPath
from .signature import Names, Nums, Signature
from .simplification import simplify
from .strict_checks import refuse_gathers, refuse_uneven, report_unused_axis_rules

Engine = Literal["sharding", "shardy", "xla"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

_log = logging.getLogger("sharding")


def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Nums = (),
    static_argnames: Names = (),
    donate_argnums: Nums = (),
    donate_argnames: Names = (),
    engine: Engine = "sharding",
    policy: Policy = "storage",
    strict: bool = False,
    max_implicit_bytes: int | None = None,
) -> Any:
    """Compiles `f` over the current mesh, with the sharding of every value inferred from the annotations.

    Args:
        f: a function of pytrees of arrays; without it, `jit` returns a decorator with these options.
        in_shardings: per non-static argument a PartitionSpec, a pytree prefix of them, or None for all dims open.
        out_shardings: likewise for the result.
        static_argnums: arguments treated as compile-time constants.
        static_argnames: the same by name.
        donate_argnums: arguments whose buffers the result may reuse. A subtree of the result with the structure and
            shapes of a donated argument gets that argument's sharding, so that it fits the next call.
        donate_argnames: the same by name.
        engine: `"sharding"` is this library's propagation; `"shardy"` is XLA's, as a second opinion; `"xla"` applies
            the annotations alone and leaves the rest to XLA, for bisecting.
        policy: which spec takes a mesh axis that several claim. `"storage"`: the batch does, and a parameter whose spec
            claims it, too, is stored that way and gathered for its use, as in FSDP; `"shardy"`: Shardy's order, in
            which the larger operand wins. Other engines than `"sharding"` have Shardy's.
        strict: whether an annotation that does not divide its dim is an error, not a warning.
        max_implicit_bytes: limit on implicit all-gathers, in bytes of the gathered array per device. A larger one is
            an error that names the source line, before anything compiles; so are sharded operands of an op that
            decides by itself what it gathers.

    Returns:
        A function with `.complete`, `.trace`, `.lower` and `.eval_shape`, which also accept ShapeDtypeStructs.

    Where `in_shardings` is None, the sharding of a committed array is an annotation. An array replicated over the mesh
    counts as uncommitted, since that is how JAX creates arrays under a mesh: to require replication, pass `P()`, or an
    array whose spec names its dims, `P(None, None)`. Arguments with another sharding than the program takes are
    transferred first, so that a training loop compiles once; an array that is passed again is transferred once.

    Example:
        >>> import jax
        >>> import sharding
        >>> from sharding import P
        >>> @sharding.jit(in_shardings=(P(None, "tensor"), P("data")))
        ... def dense(w, x):
        ...     return x @ w
        >>> with sharding.mesh(data=2, tensor=4):
        ...     y = dense(jax.numpy.ones((16, 64)), jax.numpy.ones((32, 16)))
        >>> y.sharding.spec
        P('data', 'tensor')
    """
    if f is None:
        return functools.partial(
            jit,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            engine=engine,
            policy=policy,
            strict=strict,
            max_implicit_bytes=max_implicit_bytes,
        )
    if engine not in ENGINES:
        raise ShardingError(
            f"sharding.jit(engine={engine!r})", required="a known engine", fix=[f"engine={e!r}" for e in ENGINES]
        )
    if policy not in propagation.POLICIES:
        raise ShardingError(
            f"sharding.jit(policy={policy!r})",
            required="a known policy",
            fix=[f"policy={p!r}" for p in propagation.POLICIES],
        )
    if max_implicit_bytes is not None and (engine == "xla" or max_implicit_bytes < 0):
        raise ShardingError(
            f"sharding.jit(engine={engine!r}, max_implicit_bytes={max_implicit_bytes})",
            required="max_implicit_bytes >= 0, and an engine whose reshards are known before compilation",
            fix="max_implicit_bytes=None" if engine == "xla" else "max_implicit_bytes=0",
        )
    signature = Signature.of(f, static_argnums, static_argnames, donate_argnums, donate_argnames)
    return Jitted(f, signature, in_shardings, out_shardings, engine, policy, strict, max_implicit_bytes)


class Jitted:
    """A function compiled over the current mesh; it caches one executable per cache key."""

    def __init__(
        self,
        f: Callable[..., Any],
        signature: Signature,
        in_shardings: Any,
        out_shardings: Any,
        engine: str,
        policy: Policy,
        strict: bool,
        max_implicit_bytes: int | None,
    ):
        functools.update_wrapper(self, f)
        self._f, self._signature = f, signature
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._engine = engine
        self._policy: Policy = policy
        self._strict, self._max_implicit_bytes = strict, max_implicit_bytes
        self._executables: dict[CacheKey, Executable] = {}
        self._fast_path: FastPath | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._fast_path is not None and not kwargs:
            try:  # not contextlib.suppress, which costs as much as comparing ten arrays
                return self._fast_path(args)
            except ArgumentMismatch:
                pass
        call = self._call(args, kwargs)
        executable = self._executable(call)
        misplaced = executable.misplaced(call.leaves)
        self._fast_path = self._new_fast_path(call, executable, misplaced)
        with no_collection():  # the first run traces and lowers
            return executable.run(call.leaves, misplaced)

    def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """The inferred sharding of every value, for arguments of these shapes, without compiling."""
        return self._executable(self._call(args, kwargs)).completion

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the constrained program, as `jax.jit(f).trace`."""
        call = self._call(args, kwargs)
        executable = self._executable(call)
        # Not the arrays: their shardings may differ from the in_shardings, as a call transfers them first.
        avals = tracing.abstract_leaves(call.leaves, self._names(call), executable.function)
        avals = tracing.in_memory(avals, executable.in_shardings)
        return executable.pytree_jit.trace(*jax.tree.unflatten(call.tree, avals))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the constrained program, as `jax.jit(f).lower`; over described devices, for their platform."""
        traced = self.trace(*args, **kwargs)
        mesh = current()
        with tracing_context():  # some primitives lower by tracing a function
            return traced.lower() if isinstance(mesh, Mesh) else traced.lower(lowering_platforms=(_platform(mesh),))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes, dtypes and shardings; no sharding where XLA chooses it."""
        executable = self._executable(self._call(args, kwargs))
        leaves = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
            for a, sharding in zip(executable.traced.out_avals, executable.out_shardings, strict=True)
        ]
        return jax.tree.unflatten(executable.traced.out_tree, leaves)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        args = self._signature.positional(args, kwargs)
        static = self._signature.static
        dynamic = tuple(a for i, a in enumerate(args) if i not in static) if static else args
        statics = tuple((type(a), a) for i, a in enumerate(args) if i in static) if static else ()  # 1 is not True
        leaves, tree = jax.tree.flatten(dynamic)
        mesh = current()
        if mesh is None:
            raise ShardingError(
                f"{self._signature.function}(...)",
                found="no mesh",
                required="a mesh context around the call",
                fix="with sharding.mesh(data=-1): ...",
            )
        if AxisType.Explicit in mesh.axis_types:
            raise ShardingError(
                f"{self._signature.function}(...)",
                found=f"a mesh whose axes are {', '.join(f'{n}: {t}' for n, t in _axis_types(mesh).items())}",
                required="Auto axes, where the inferred shardings are constraints that XLA meets by resharding",
                fix=f"with sharding.mesh({', '.join(f'{n}={s}' for n, s in mesh.shape.items())}): ...",
            )
        return _Call(len(args), dynamic, statics, leaves, tree, mesh)

    def _executable(self, call: _Call) -> Executable:
        try:
            key = cache_key(call.mesh, call.tree, call.statics, call.leaves)
            entry = self._executables.get(key)
        except TypeError:
            self._refuse(call)
            raise
        if entry is None:
            entry = self._fitting(key, call)
            if entry is None:
                self._log_miss(key, call)
                with no_collection():
                    entry = self._build(call)
            if not entry.traced.closes_over_tracers:
                self._executables[key] = entry
        return entry

    def _new_fast_path(self, call: _Call, executable: Executable, misplaced: tuple[int, ...]) -> FastPath | None:
        if call.statics or not isinstance(call.mesh, Mesh) or executable.traced.closes_over_tracers:
            return None
        return FastPath(executable, call.mesh, call.tree, context_key(), misplaced)

    def _refuse(self, call: _Call) -> None:
        """Raises for leaves that are not arrays, and for static arguments that are not hashable."""
        function = self._signature.function
        tracing.abstract_leaves(call.leaves, self._names(call), function)
        failures = [
            ShardingError(
                f"{function}({self._signature.name(i)})",
                found=f"{value!r:.60}, of type {kind.__name__}",
                required="a hashable static argument: it is part of the cache key",
                fix="a tuple or a frozen dataclass",
            )
            for i, (kind, value) in zip(sorted(self._signature.static), call.statics, strict=False)
            if not _hashable(value)
        ]
        raise_together(f"{function}: static arguments", failures)

    def _fitting(self, key: CacheKey, call: _Call) -> Executable | None:
        """An executable for the same shapes that accepts these shardings: the second step of a loop."""
        for other, entry in self._executables.items():
            if other[:-1] == key[:-1] and all(a[:3] == b[:3] for a, b in zip(other.leaves, key.leaves, strict=True)):
                if entry.accepts(call.leaves):
                    return entry
        return None

    def _log_miss(self, key: CacheKey, call: _Call) -> None:
        if self._executables and _log.isEnabledFor(logging.DEBUG):
            last = next(reversed(self._executables))
            parts = changed_parts(key, last, self._names(call), self._dynamic_names(call))
            _log.debug("%s: cache miss: %s changed", self._signature.function, "; ".join(parts))

    def _names(self, call: _Call) -> list[str]:
        names = self._dynamic_names(call)
        return [n for name, a in zip(names, call.dynamic, strict=True) for n in paths.of_tree(a, name)]

    def _dynamic_names(self, call: _Call) -> list[str]:
        return [self._signature.name(i) for i in range(call.num_args) if i not in self._signature.static]

    def _build(self, call: _Call) -> Executable:
        function, names, mesh = self._signature.function, self._names(call), call.mesh
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual:
            raise ShardingError(
                f"{function}(...)",
                found=f"the body of a shard_map over {', '.join(map(repr, manual))}",
                required="a call where all axes are Auto",
                fix="sharding.jit outside the shard_map, and sharding.annotate inside",
            )
        avals = tracing.abstract_leaves(call.leaves, names, function)
        specs = argument_shardings.broadcast_specs(self._in_shardings, call.dynamic, "in_shardings", function)
        requested = argument_shardings.leaf_annotations(
            specs, avals, names, mesh, what="in_shardings", function=function
        )
        kinds = argument_shardings.memory_kinds(specs, call.leaves, names, function)
        in_annotations = argument_shardings.with_committed_shardings(call.leaves, requested, names, mesh, function)
        statics = dict(zip(sorted(self._signature.static), [value for _, value in call.statics], strict=False))
        placed_avals = tracing.in_memory(avals, [NamedSharding(mesh, P(), memory_kind=kind) for kind in kinds])
        as_written = tracing.trace(self._f, placed_avals, call.tree, statics, self._dynamic_names(call), function)
        traced = dataclasses.replace(as_written, jaxpr=simplify(as_written.jaxpr, _platform(mesh)))
        result = jax.tree.unflatten(traced.out_tree, traced.out_avals)
        out_names = paths.of_tree(result, "out")
        specs = argument_shardings.broadcast_specs(self._out_shardings, [result], "out_shardings", function)
        out_annotations = argument_shardings.leaf_annotations(
            specs, traced.out_avals, out_names, mesh, what="out_shardings", function=function
        )
        donated = self._donated(call)
        built = graph.build(
            traced.jaxpr,
            sizes=dict(mesh.shape),
            in_names=names,
            out_names=out_names,
            in_annotations=in_annotations,
            out_annotations=out_annotations,
            in_memory_kinds=kinds,
            out_memory_kinds=[*map(argument_shardings.memory_kind, specs)],
            ties=outputs_reusing_donated(
                traced, avals, call.tree, donated, [annotation is not None for annotation in out_annotations]
            ),
        )
        built.replicated_by_default = argument_shardings.replicated_by_default(built, call.leaves, mesh)
        if not any(argument_shardings.committed_sharding(leaf, mesh) is not None for leaf in call.leaves):
            report_unused_axis_rules(built, function, strict=self._strict)
        if self._strict:
            refuse_uneven(built, dict(mesh.shape), function)
        assignment = self._assignment(built, traced, mesh)
        completion = Completion(
            assignment,
            name=function,
            in_trees=call.tree.children(),
            out_tree=traced.out_tree,
            donated=donated,
            platform=cast(Platform, _platform(mesh).replace("cuda", "gpu")),
            devices=on.devices if (on := known_topology(mesh)) is not None else None,
        )
        if self._max_implicit_bytes is not None:
            refuse_gathers(completion.communication(), self._max_implicit_bytes, function)
        executable = Executable(
            function=function,
            mesh=mesh,
            traced=as_written if self._engine == "xla" else traced,
            completion=completion,
            in_tree=call.tree,
            donated=donated,
            constrained=self._engine != "xla",
        )
        executable.reuse_argument_shardings(call.leaves)
        return executable

    def _assignment(self, built: graph.Graph, traced: tracing.Traced, mesh: Mesh | AbstractMesh) -> Assignment:
        sizes = MeshSizes(dict(mesh.shape), byte_costs(known_topology(mesh)))
        if self._engine == "sharding":
            return resharded_on_device(placed(propagation.complete(built, sizes, policy=self._policy)))
        if self._engine == "xla":
            return propagation.unannotated(built, sizes)
        abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        found = shardy.complete(built, sizes, program=traced.jaxpr, mesh=abstract, platform=_platform(mesh))
        return resharded_on_device(found)

    def _donated(self, call: _Call) -> tuple[int, ...]:
        """Indices of the donated arguments among the non-static ones."""
        positions = [i for i in range(call.num_args) if i not in self._signature.static]
        return tuple(k for k, i in enumerate(positions) if i in self._signature.donated)


@dataclass(slots=True)
class _Call:
    num_args: int
    dynamic: tuple[Any, ...]
    statics: tuple[tuple[type, Any], ...]
    leaves: list[Any]
    tree: Any
    mesh: Mesh | AbstractMesh


def _platform(mesh: Mesh | AbstractMesh | None) -> str:
    """The platform to lower for: that of the real or described devices."""
    devices = described()
    platform = jax.default_backend() if devices is None else devices.chip.platform
    if isinstance(mesh, Mesh):
        platform = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def _axis_types(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    return {name: kind.name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
