"""`sharding.jit`: trace, complete, constrain, `jax.jit`."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import arguments, compat, graph, paths, propagation
from .arguments import Names, Nums, Signature
from .completion import Completion
from .constrain import constrain
from .errors import ShardingError, raise_together
from .mesh import current, described
from .spec import indivisible, to_partition_spec

Engine = Literal["sharding", "xla"]
ENGINES = ("sharding", "xla")

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
        engine: `"sharding"`, our pass; `"xla"` completes nothing and leaves the rest to XLA, for bisecting.
        strict: an annotation that doesn't divide its dim is an error, not a warning.

    Returns:
        A function with `.complete`, `.trace`, `.lower` and `.eval_shape`, which also take ShapeDtypeStructs.
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
        )
    if engine not in ENGINES:
        raise ShardingError(
            f"sharding.jit(engine={engine!r})", must="a known engine", fix=[f"engine={e!r}" for e in ENGINES]
        )
    signature = Signature.of(f, static_argnums, static_argnames, donate_argnums, donate_argnames)
    return Jitted(f, signature, in_shardings, out_shardings, engine, strict)


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
    ):
        functools.update_wrapper(self, f)
        self._f, self._signature = f, signature
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._engine, self._strict = engine, strict
        self._entries: dict[Any, _Entry] = {}
        self._last: tuple[Any, _Entry] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call(args, kwargs)
        looks = _looks(call)
        last = self._last
        if last is not None and looks is not None and looks == last[0]:
            return last[1].run_arrays(call.leaves)
        entry = self._entry(call)
        if looks is not None:
            self._last = looks, entry
        return entry.run(call.leaves)

    def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """How every value is split, for arguments of these shapes; nothing compiles."""
        return self._entry(self._call(args, kwargs)).completion

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The constrained program, as `jax.jit(f).trace`."""
        call = self._call(args, kwargs)
        return self._entry(call).structured.trace(*call.dynamic)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The constrained program lowered, as `jax.jit(f).lower`; over described devices for their platform."""
        traced = self.trace(*args, **kwargs)
        return traced.lower() if isinstance(current(), Mesh) else traced.lower(lowering_platforms=(_platform(),))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes, dtypes and shardings; no sharding where XLA is to choose it."""
        entry = self._entry(self._call(args, kwargs))
        leaves = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
            for a, sharding in zip(entry.out_avals, entry.flat["out_shardings"], strict=True)
        ]
        return jax.tree.unflatten(entry.out_tree, leaves)

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

    def _entry(self, call: _Call) -> _Entry:
        try:
            leaves = tuple([_leaf_key(x) for x in call.leaves])
            key = (call.mesh, call.tree, call.statics, compat.trace_context(), leaves)
            entry = self._entries.get(key)
        except TypeError:
            self._refuse(call)
            raise
        if entry is None:
            entry = self._fitting(key, call)
            if entry is None:
                self._log_miss(key, call)
                entry = self._build(call)
            self._entries[key] = entry
        return entry

    def _refuse(self, call: _Call) -> None:
        """Raises for leaves that are no arrays and statics that can't be a key."""
        function = self._signature.function
        _avals(call.leaves, self._names(call), function)
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

    def _fitting(self, key: Any, call: _Call) -> _Entry | None:
        """An entry for the same shapes whose arguments already lie where it wants them: the second step of a loop."""
        for (*program, leaves), entry in self._entries.items():
            if (*program,) == key[:-1] and all(a[:3] == b[:3] for a, b in zip(leaves, key[-1], strict=True)):
                if entry.accepts(call.leaves):
                    return entry
        return None

    def _log_miss(self, key: Any, call: _Call) -> None:
        if self._entries and _log.isEnabledFor(logging.DEBUG):
            last = next(reversed(self._entries))
            parts = [what for i, what in ((0, "mesh"), (2, "statics"), (3, "JAX's configuration")) if key[i] != last[i]]
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

    def _build(self, call: _Call) -> _Entry:
        function, names = self._signature.function, self._names(call)
        avals = _avals(call.leaves, names, function)
        mesh = call.mesh
        asked = arguments.per_leaf(self._in_shardings, call.dynamic, "in_shardings", function)
        in_pins = arguments.pins(asked, avals, names, mesh, what="in_shardings", function=function)
        in_pins = arguments.committed(call.leaves, in_pins, names, mesh, function)
        traced = self._trace(call, avals)
        out_names = paths.of_tree(jax.tree.unflatten(traced.out_tree, traced.out_avals), "out")
        result = jax.tree.unflatten(traced.out_tree, [0] * traced.out_tree.num_leaves)
        asked = arguments.per_leaf(self._out_shardings, [result], "out_shardings", function)
        out_pins = arguments.pins(asked, traced.out_avals, out_names, mesh, what="out_shardings", function=function)
        ties = self._ties(call, avals, traced, out_pins)
        built = graph.build(
            traced.jaxpr,
            sizes=dict(mesh.shape),
            in_names=names,
            out_names=out_names,
            in_pins=in_pins,
            out_pins=out_pins,
            ties=ties,
        )
        if self._strict:
            _refuse_uneven(built, dict(mesh.shape), function)
        finish = propagation.complete if self._engine == "sharding" else propagation.unannotated
        completion = Completion(
            finish(built, dict(mesh.shape)),
            name=function,
            in_trees=[jax.tree.structure(a) for a in call.dynamic],
            out_tree=traced.out_tree,
        )
        return _Entry(
            function=function,
            mesh=mesh,
            jaxpr=traced.jaxpr,
            completion=completion,
            in_tree=call.tree,
            out_tree=traced.out_tree,
            out_avals=traced.out_avals,
            donated=self._donated_leaves(call),
            constrained=self._engine == "sharding",
        )

    def _donated_leaves(self, call: _Call) -> tuple[int, ...]:
        return tuple(i for start, stop in self._donated_ranges(call) for i in range(start, stop))

    def _donated_ranges(self, call: _Call) -> list[tuple[int, int]]:
        ranges, at = [], 0
        positions = [i for i in range(call.num_args) if i not in self._signature.static]
        for i, arg in zip(positions, call.dynamic, strict=True):
            size = jax.tree.structure(arg).num_leaves
            if i in self._signature.donated:
                ranges.append((at, at + size))
            at += size
        return ranges

    def _ties(self, call: _Call, avals: Sequence[Any], traced: _Traced, out_pins: Sequence[Any]) -> dict[int, int]:
        """Result leaf -> argument leaf, for parts of the result that have the tree and shapes of a donated argument."""
        result = jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))
        parts = list(_parts(result))
        shapes = [(a.shape, a.dtype) for a in avals]
        out_shapes = [(a.shape, a.dtype) for a in traced.out_avals]
        trees = {start: jax.tree.structure(arg) for start, arg in zip(_starts(call.dynamic), call.dynamic, strict=True)}
        ties: dict[int, int] = {}
        for start, stop in self._donated_ranges(call):
            for tree, leaves in parts:
                fresh = not any(o in ties or out_pins[o] is not None for o in leaves)
                if fresh and tree == trees[start] and [out_shapes[o] for o in leaves] == shapes[start:stop]:
                    ties.update(zip(leaves, range(start, stop), strict=True))
                    break
        return ties

    def _trace(self, call: _Call, avals: Sequence[Any]) -> _Traced:
        function, static = self._signature.function, sorted(self._signature.static)
        out_tree = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_tree
            args = list(jax.tree.unflatten(call.tree, leaves))
            dynamic = tuple(args)
            for i, (_, value) in zip(static, call.statics, strict=False):
                args.insert(i, value)
            out_leaves, out_tree = jax.tree.flatten(self._f(*args))
            _refuse_mutation(leaves, call.tree, dynamic, out_leaves, self._dynamic_names(call), function)
            return out_leaves

        flat.__name__ = flat.__qualname__ = function
        traced = jax.jit(flat).trace(*avals)
        assert out_tree is not None
        return _Traced(jaxpr=traced.jaxpr, out_tree=out_tree, out_avals=jax.tree.leaves(traced.out_info))


@dataclass(slots=True)
class _Call:
    num_args: int
    dynamic: tuple[Any, ...]
    statics: tuple[tuple[type, Any], ...]
    leaves: list[Any]
    tree: Any
    mesh: Mesh | AbstractMesh


@dataclass(frozen=True, slots=True)
class _Traced:
    jaxpr: Any
    out_tree: Any
    out_avals: list[Any]


@dataclass(eq=False)
class _Entry:
    """One completed program and its compiled forms."""

    function: str
    mesh: Mesh | AbstractMesh
    jaxpr: Any
    completion: Completion
    in_tree: Any
    out_tree: Any
    out_avals: list[Any]
    donated: tuple[int, ...]
    constrained: bool

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether placed arrays lie exactly as this program takes its arguments."""
        placed = [arguments.placed(x) for x in leaves]
        wanted = self.flat["in_shardings"]
        return all(
            have is None or (want is not None and have.is_equivalent_to(want, len(leaf.shape)))
            for have, want, leaf in zip(placed, wanted, leaves, strict=True)
        )

    def run(self, leaves: list[Any]) -> Any:
        if any(isinstance(x, compat.Tracer) for x in leaves):
            return jax.tree.unflatten(self.out_tree, self.nested(*leaves))
        if isinstance(self.mesh, AbstractMesh):
            if compat.in_trace():  # constants in traced code, where JAX shows no real mesh
                return jax.tree.unflatten(self.out_tree, self.nested(*leaves))
            raise ShardingError(
                f"{self.function}(...)",
                there="a mesh over described devices",
                must="a program runs on real devices",
                fix=[f"{self.function}.complete(...)", f"{self.function}.lower(...)"],
            )
        try:
            return self.run_arrays(leaves)
        except TypeError:
            self.refuse_abstract(leaves)
            raise

    def run_arrays(self, leaves: list[Any]) -> Any:
        """The result for arrays on real devices."""
        return jax.tree.unflatten(self.out_tree, self.compiled(*leaves))

    def refuse_abstract(self, leaves: Sequence[Any]) -> None:
        """Raises for ShapeDtypeStructs among the leaves of a call."""
        names = list(self.completion.assignment.graph.names)
        abstract = [n for n, x in zip(names, leaves, strict=False) if isinstance(x, jax.ShapeDtypeStruct)]
        if abstract:
            raise ShardingError(
                f"{self.function}(...)",
                there=[f"{name} is a ShapeDtypeStruct" for name in abstract[:8]],
                must="a program runs on arrays",
                fix=[f"{self.function}.complete(...)", f"{self.function}.lower(...)"],
            )

    @cached_property
    def out_specs(self) -> list[P]:
        return [self.completion.boundary(v) for v in self.completion.assignment.graph.outputs]

    @cached_property
    def in_specs(self) -> list[P]:
        return [self.completion.boundary(v) for v in self.completion.assignment.graph.inputs]

    def shardings(self, values: Sequence[int], specs: Sequence[P]) -> list[NamedSharding | None]:
        """The shardings for `jax.jit`; what XLA is to choose stays None."""
        free = {v for v in values if self.completion.assignment.specs[v].is_open and not self.constrained}
        return [None if v in free else NamedSharding(self.mesh, s) for v, s in zip(values, specs, strict=True)]

    @cached_property
    def flat(self) -> dict[str, Any]:
        of = self.completion.assignment.graph
        return {
            "in_shardings": tuple(self.shardings(of.inputs, self.in_specs)),
            "out_shardings": self.shardings(of.outputs, self.out_specs),
        }

    def program(self, *, inside: bool = False) -> Callable[..., Any]:
        """The program as a function of flat arrays; `inside` another one, its arguments are constrained too."""
        jaxpr = self.jaxpr
        if self.constrained:
            abstract = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
            jaxpr = constrain(jaxpr, self.completion.assignment, abstract, inputs=inside)
        evaluate = compat.jaxpr_fun(jaxpr)

        def run(*leaves: Any) -> list[Any]:
            return evaluate(*leaves)

        run.__name__ = run.__qualname__ = self.function
        return run

    @cached_property
    def compiled(self) -> Callable[..., list[Any]]:
        return jax.jit(self.program(), donate_argnums=self.donated, **self.flat)

    @cached_property
    def nested(self) -> Callable[..., list[Any]]:
        return jax.jit(self.program(inside=True))

    @cached_property
    def structured(self) -> Any:
        """The program on the user's own pytrees, for `trace` and `lower`."""
        run = self.program()

        def whole(*args: Any) -> Any:
            return jax.tree.unflatten(self.out_tree, run(*jax.tree.leaves(args)))

        whole.__name__ = whole.__qualname__ = self.function
        starts = _starts(jax.tree.unflatten(self.in_tree, range(self.in_tree.num_leaves)))
        donated = tuple(i for i, start in enumerate(starts) if start in self.donated)
        in_shardings = jax.tree.unflatten(self.in_tree, self.flat["in_shardings"])
        out_shardings = jax.tree.unflatten(self.out_tree, self.flat["out_shardings"])
        return jax.jit(whole, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donated)


def _platform() -> str:
    """What to lower for where no real device says it: the platform of the described devices."""
    devices = described()
    platform = jax.default_backend() if devices is None else devices.chip.platform
    return "cuda" if platform == "gpu" else platform


def _axis_types(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    return {name: kind.name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


_FACTS = operator.attrgetter("aval", "sharding", "committed")


def _looks(call: _Call) -> Any:
    """What equals that of the call before where the cache key does; None unless all leaves are arrays on real devices.

    A loop passes what came back, whose avals and shardings are the very objects of the step before: comparing those
    takes a fraction of hashing a key per leaf.
    """
    if not isinstance(call.mesh, Mesh):
        return None
    for kind in set(map(type, call.leaves)):
        if not issubclass(kind, jax.Array) or issubclass(kind, compat.Tracer):
            return None
    return call.mesh, call.tree, call.statics, compat.trace_context(), list(map(_FACTS, call.leaves))


def _leaf_key(x: Any) -> Any:
    if isinstance(x, jax.Array):
        sharding = None if isinstance(x, compat.Tracer) or not x.committed else x.sharding
        return x.shape, x.dtype, getattr(x, "weak_type", False), sharding  # arrays of keys have no weak type
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.weak_type, x.sharding
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type, None


def _avals(leaves: Sequence[Any], names: Sequence[str], function: str) -> list[Any]:
    avals, failures = [], []
    for leaf, name in zip(leaves, names, strict=True):
        try:
            shape, dtype, weak_type, _ = _leaf_key(leaf)
            avals.append(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type))
        except TypeError:
            failures.append(
                ShardingError(
                    f"{function}({name})",
                    there=f"{leaf!r:.60}, of type {type(leaf).__name__}",
                    must="every leaf of an argument that is not static is an array or a number",
                    fix="static_argnames for what is compiled in",
                )
            )
    raise_together(f"{function}: arguments", failures)
    return avals


def _starts(dynamic: Sequence[Any]) -> list[int]:
    starts, at = [], 0
    for arg in dynamic:
        starts.append(at)
        at += jax.tree.structure(arg).num_leaves
    return starts


def _parts(result: Any):
    """(tree, leaf indices) of the result and of each child of its outermost containers."""
    yield jax.tree.structure(result), jax.tree.leaves(result)
    if isinstance(result, (tuple, list)):
        for item in result:
            yield from (
                _parts(item) if isinstance(item, (tuple, list)) else [(jax.tree.structure(item), jax.tree.leaves(item))]
            )
    elif isinstance(result, dict):
        for key in sorted(result):
            yield jax.tree.structure(result[key]), jax.tree.leaves(result[key])


def _refuse_mutation(
    before: Sequence[Any], tree: Any, args: Any, out: Sequence[Any], names: Sequence[str], function: str
) -> None:
    """An argument changed in place inside a traced function: an error, unless what it became is returned."""
    returned = {id(x) for x in out}
    changed, at = [], 0
    for name, was, arg in zip(names, tree.children(), args, strict=True):
        old, (new, now) = before[at : at + was.num_leaves], jax.tree.flatten(arg)
        at += was.num_leaves
        if now != was:
            lost = any(id(x) not in returned for x in new)
            changed += [f"{name}: its pytree was changed in place (entries added or taken away)"] if lost else []
            continue
        kept = [a is b or id(b) in returned for a, b in zip(old, new, strict=True)]
        changed += [f"{n} was changed in place" for n, ok in zip(paths.of_tree(arg, name), kept, strict=True) if not ok]
    if changed:
        raise ShardingError(
            f"{function}(...)",
            there=[*changed[:8], "what it became is not returned"],
            must="a compiled function has no side effects: what it changes, it returns",
            fix="return the changed object from the function and use what comes back, or change a copy of it",
        )


def _refuse_uneven(built: graph.Graph, sizes: dict[str, int], function: str) -> None:
    failures = [
        ShardingError(
            f"{pin.origin}: {to_partition_spec(pin.spec)}",
            there=[f"an array of shape {built.shapes[v]}", *faults],
            must="under strict=True the axes' sizes divide the dim",
            fix="a size that divides, fewer axes, or strict=False to have it padded",
        )
        for v, pin in built.pins.items()
        if (faults := indivisible(pin.spec, built.shapes[v], sizes))
    ]
    raise_together(function, failures)
