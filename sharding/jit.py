"""`sharding.jit`: trace, complete, constrain, `jax.jit`."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from . import arguments, graph, logical, paths, propagation, tracing
from .arguments import Names, Nums, Signature
from .completion import Completion
from .cost import topology
from .errors import ShardingError, raise_together
from .hardware import Devices, Platform
from .mesh import current, described
from .program import OtherArguments, Program
from .propagation import Assignment, shardy
from .refusal import refuse_gathers, refuse_uneven
from .repeat import Repeat

Engine = Literal["sharding", "shardy", "xla"]
ENGINES = ("sharding", "shardy", "xla")

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
    strict: bool = False,
    max_implicit_bytes: int | None = None,
) -> Any:
    """`f`, compiled over the mesh in force with every value's split completed from the annotations.

    Args:
        f: a function of pytrees of arrays; left out, `jit` is a decorator with options.
        in_shardings: per argument that is not static a PartitionSpec, a pytree prefix of them, or None: all open.
        out_shardings: likewise for the result.
        static_argnums: arguments that are compiled in.
        static_argnames: the same by name.
        donate_argnums: arguments whose memory the result may take. A part of the result with the tree and shapes of a
            donated argument is split as that argument, so that it fits the next call.
        donate_argnames: the same by name.
        engine: `"sharding"`, our pass; `"shardy"`, XLA's own, as a second opinion; `"xla"` completes nothing and leaves
            the rest to XLA, for bisecting.
        strict: an annotation that doesn't divide its dim is an error, not a warning.
        max_implicit_bytes: an array that nobody asked to gather, of more than so many bytes on one device once it is
            gathered, is an error that names the line, before anything compiles.

    Returns:
        A function with `.complete`, `.trace`, `.lower` and `.eval_shape`, which also take ShapeDtypeStructs.

    Where `in_shardings` is silent, the sharding of a placed array is an annotation. An array that is whole on every
    device of the mesh counts as not placed, since that is how JAX makes arrays under a mesh: to ask for it, say `P()`.
    What is not where the program wants it is moved there first, so that a loop compiles once.
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
            strict=strict,
            max_implicit_bytes=max_implicit_bytes,
        )
    if engine not in ENGINES:
        raise ShardingError(
            f"sharding.jit(engine={engine!r})", must="a known engine", fix=[f"engine={e!r}" for e in ENGINES]
        )
    if max_implicit_bytes is not None and (engine == "xla" or max_implicit_bytes < 0):
        raise ShardingError(
            f"sharding.jit(engine={engine!r}, max_implicit_bytes={max_implicit_bytes})",
            must="what moves is known, as it is not where XLA completes the program; and a limit is 0 or more",
            fix="max_implicit_bytes=None" if engine == "xla" else "max_implicit_bytes=0",
        )
    signature = Signature.of(f, static_argnums, static_argnames, donate_argnums, donate_argnames)
    return Jitted(f, signature, in_shardings, out_shardings, engine, strict, max_implicit_bytes)


class Jitted:
    """A function that completes, compiles and runs over the mesh in force; one entry per cache key."""

    def __init__(
        self,
        f: Callable[..., Any],
        signature: Signature,
        in_shardings: Any,
        out_shardings: Any,
        engine: str,
        strict: bool,
        max_implicit_bytes: int | None,
    ):
        functools.update_wrapper(self, f)
        self._f, self._signature = f, signature
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._engine, self._strict, self._max_implicit_bytes = engine, strict, max_implicit_bytes
        self._programs: dict[Any, Program] = {}
        self._repeat: Repeat | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._repeat is not None and not kwargs:
            try:  # not contextlib.suppress, which costs as much as comparing ten arrays
                return self._repeat(args)
            except OtherArguments:
                pass
        call = self._call(args, kwargs)
        program = self._program(call)
        unplaced = program.unplaced(call.leaves)
        self._repeat = self._repeatable(call, program, unplaced)
        with _no_collection():  # the first run traces and lowers
            return program.run(call.leaves, unplaced)

    def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """How every value is split, for arguments of these shapes; nothing compiles."""
        return self._program(self._call(args, kwargs)).completion

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The constrained program, as `jax.jit(f).trace`."""
        call = self._call(args, kwargs)
        program = self._program(call)
        # Not the arrays: where one lies need not be where the program takes it, as a call moves it first.
        avals = tracing.abstract(call.leaves, self._names(call), program.function)
        return program.structured.trace(*jax.tree.unflatten(call.tree, avals))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The constrained program lowered, as `jax.jit(f).lower`; over described devices for their platform."""
        traced = self.trace(*args, **kwargs)
        mesh = current()
        return traced.lower() if isinstance(mesh, Mesh) else traced.lower(lowering_platforms=(_platform(mesh),))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes, dtypes and shardings; no sharding where XLA is to choose it."""
        program = self._program(self._call(args, kwargs))
        leaves = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
            for a, sharding in zip(program.traced.out_avals, program.out_shardings, strict=True)
        ]
        return jax.tree.unflatten(program.traced.out_tree, leaves)

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
                there="no mesh is in force",
                must="a function made by sharding.jit is called under a mesh",
                fix="with sharding.mesh(data=-1): ...",
            )
        if AxisType.Explicit in mesh.axis_types:
            raise ShardingError(
                f"{self._signature.function}(...)",
                there=f"a mesh whose axes are {', '.join(f'{n}: {t}' for n, t in _axis_types(mesh).items())}",
                must="the axes are Auto, so that a completed split is a wish that XLA meets by moving data",
                fix=f"with sharding.mesh({', '.join(f'{n}={s}' for n, s in mesh.shape.items())}): ...",
            )
        return _Call(len(args), dynamic, statics, leaves, tree, mesh)

    def _program(self, call: _Call) -> Program:
        try:
            leaves = tuple([tracing.facts(x) for x in call.leaves])
            key = (call.mesh, call.tree, call.statics, logical.in_force(), tracing.context(), leaves)
            entry = self._programs.get(key)
        except TypeError:
            self._refuse(call)
            raise
        if entry is None:
            entry = self._fitting(key, call)
            if entry is None:
                self._log_miss(key, call)
                with _no_collection():
                    entry = self._build(call)
            if not entry.traced.closes_over_tracers:
                self._programs[key] = entry
        return entry

    def _repeatable(self, call: _Call, program: Program, unplaced: tuple[int, ...]) -> Repeat | None:
        if call.statics or not isinstance(call.mesh, Mesh) or program.traced.closes_over_tracers:
            return None
        return Repeat(program, call.mesh, call.tree, tracing.context(), unplaced)

    def _refuse(self, call: _Call) -> None:
        """Raises for leaves that are no arrays and statics that can't be a key."""
        function = self._signature.function
        tracing.abstract(call.leaves, self._names(call), function)
        failures = [
            ShardingError(
                f"{function}({self._signature.name(i)})",
                there=f"{value!r:.60}, of type {kind.__name__}",
                must="a static argument can be hashed: the compiled program is found by it",
                fix="a tuple or a frozen dataclass",
            )
            for i, (kind, value) in zip(sorted(self._signature.static), call.statics, strict=False)
            if not _hashable(value)
        ]
        raise_together(f"{function}: static arguments", failures)

    def _fitting(self, key: Any, call: _Call) -> Program | None:
        """An entry for the same shapes whose arguments already lie where it wants them: the second step of a loop."""
        for (*program, leaves), entry in self._programs.items():
            if (*program,) == key[:-1] and all(a[:3] == b[:3] for a, b in zip(leaves, key[-1], strict=True)):
                if entry.accepts(call.leaves):
                    return entry
        return None

    def _log_miss(self, key: Any, call: _Call) -> None:
        if self._programs and _log.isEnabledFor(logging.DEBUG):
            last = next(reversed(self._programs))
            whats = {0: "mesh", 2: "statics", 3: "axis rules"}
            parts = [what for i, what in whats.items() if key[i] != last[i]]
            parts += ["JAX's configuration"] if key[4] != last[4] and not parts else []
            if key[1] == last[1]:
                names = self._names(call)
                parts += [f"{n}: {b} -> {a}" for n, a, b in zip(names, key[-1], last[-1], strict=True) if a != b]
            else:
                names, before = self._dynamic_names(call), last[1].children()
                pairs = zip(names, key[1].children(), before, strict=False)
                parts += [f"{n}: its tree" for n, new, old in pairs if new != old]
                parts += ["the number of arguments"] if len(names) != len(before) else []
            _log.debug("%s completes anew: %s changed", self._signature.function, "; ".join(parts))

    def _names(self, call: _Call) -> list[str]:
        names = self._dynamic_names(call)
        return [n for name, a in zip(names, call.dynamic, strict=True) for n in paths.of_tree(a, name)]

    def _dynamic_names(self, call: _Call) -> list[str]:
        return [self._signature.name(i) for i in range(call.num_args) if i not in self._signature.static]

    def _build(self, call: _Call) -> Program:
        function, names, mesh = self._signature.function, self._names(call), call.mesh
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual:
            raise ShardingError(
                f"{function}(...)",
                there=f"the body of a shard_map over {', '.join(map(repr, manual))}",
                must="a function made by sharding.jit is called where all axes are Auto",
                fix="sharding.jit around the shard_map, and sharding.annotate inside it",
            )
        avals = tracing.abstract(call.leaves, names, function)
        asked = arguments.per_leaf(self._in_shardings, call.dynamic, "in_shardings", function)
        in_pins = arguments.pins(asked, avals, names, mesh, what="in_shardings", function=function)
        in_pins = arguments.committed(call.leaves, in_pins, names, mesh, function)
        statics = dict(zip(sorted(self._signature.static), [value for _, value in call.statics], strict=False))
        traced = tracing.trace(self._f, avals, call.tree, statics, self._dynamic_names(call), function)
        result = jax.tree.unflatten(traced.out_tree, traced.out_avals)
        out_names = paths.of_tree(result, "out")
        asked = arguments.per_leaf(self._out_shardings, [result], "out_shardings", function)
        out_pins = arguments.pins(asked, traced.out_avals, out_names, mesh, what="out_shardings", function=function)
        donated = self._donated(call)
        built = graph.build(
            traced.jaxpr,
            sizes=dict(mesh.shape),
            in_names=names,
            out_names=out_names,
            in_pins=in_pins,
            out_pins=out_pins,
            ties=tracing.ties(traced, avals, call.tree, donated, [pin is not None for pin in out_pins]),
        )
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
            devices=_devices(mesh),
        )
        if self._max_implicit_bytes is not None:
            refuse_gathers(completion.communication(), self._max_implicit_bytes, function)
        program = Program(
            function=function,
            mesh=mesh,
            traced=traced,
            completion=completion,
            in_tree=call.tree,
            donated=donated,
            constrained=self._engine != "xla",
        )
        program.adopt(call.leaves)
        return program

    def _assignment(self, built: graph.Graph, traced: tracing.Traced, mesh: Mesh | AbstractMesh) -> Assignment:
        sizes = dict(mesh.shape)
        if self._engine == "sharding":
            return propagation.complete(built, sizes)
        if self._engine == "xla":
            return propagation.unannotated(built, sizes)
        abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        return shardy.complete(built, sizes, program=traced.jaxpr, mesh=abstract, platform=_platform(mesh))

    def _donated(self, call: _Call) -> tuple[int, ...]:
        """The donated ones among the arguments that are not static."""
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's cycle collector at rest: a trace and its graph are many small objects that all stay.

    Walking them again and again took a quarter of the time that a 12-layer GPT step needs to complete.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _platform(mesh: Mesh | AbstractMesh | None) -> str:
    """What to lower for: the platform of the real devices or of the described ones."""
    devices = described()
    platform = jax.default_backend() if devices is None else devices.chip.platform
    if isinstance(mesh, Mesh):
        platform = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def _devices(mesh: Mesh | AbstractMesh) -> Devices | None:
    """What the devices of a mesh are, where that is known."""
    try:
        return topology(mesh).devices
    except ShardingError:
        return None


def _axis_types(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    return {name: kind.name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
