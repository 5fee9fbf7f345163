"""`sharding.jit`: trace a function, infer its shardings, constrain it, and dispatch through `jax.jit`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from .. import compat
from ..completion import Completion
from ..errors import ShardingError
from ..graph.garbage_collection import no_collection
from ..propagation import POLICIES, Policy
from . import tracing
from .arguments import Arguments
from .construction import ENGINES, Engine, Options, Planned, executable, lowering_platform
from .current_mesh import AnyMesh, entered
from .executable import ArgumentMismatch, Executable
from .executable_cache import ExecutableCache
from .fast_dispatch import FastPaths
from .signature import Names, Nums, Signature


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
    mutable: bool | Names | Nums = False,
    engine: Engine = "sharding",
    policy: Policy = "storage",
    strict: bool = False,
    max_implicit_bytes: int | None = None,
    plan: Planned | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles `f` over the current mesh, with the sharding of every value inferred from the annotations.

    Args:
        f: a function of pytrees of arrays; without it, `jit` returns a decorator with these options.
        in_shardings: per non-static argument a PartitionSpec, a pytree prefix of them, or None for all dims open;
            `sharding.layout` gives the specs of a model by their paths; `sharding.prioritized` specs wait for others.
            A NamedSharding also names a kind of memory, and a
            `jax.experimental.layout.Format` a layout, to which arguments are transferred. Keyword-only arguments are
            open.
        out_shardings: likewise for the result.
        static_argnums: arguments treated as compile-time constants.
        static_argnames: the same by name.
        donate_argnums: arguments whose buffers the result may reuse. A subtree of the result with the structure and
            shapes of a donated argument gets that argument's sharding, so that it fits the next call.
        donate_argnames: the same by name.
        mutable: whether, or which, arguments are changed in place by giving new values to their `nnx.Variable`s or
            static attributes, as a model, an optimizer or metrics: the caller's objects get these values after the
            call, as with `nnx.jit`.
        engine: `"sharding"` is this library's propagation; `"shardy"` is XLA's, as a second opinion; `"xla"` applies
            the annotations alone and leaves the rest to XLA, for bisecting.
        policy: which spec takes a mesh axis that several claim. `"storage"`: the batch does, and a parameter whose spec
            claims it, too, is stored that way and gathered for its use, as in FSDP; `"shardy"`: Shardy's order, in
            which the larger operand wins. Other engines than `"sharding"` have Shardy's.
        strict: whether an annotation that does not divide its dim is an error, not a warning.
        max_implicit_bytes: limit on implicit all-gathers, in bytes of the gathered array per device. A larger one is
            an error that names the source line, before anything compiles; so are sharded operands of an op that
            decides by itself what it gathers.
        plan: annotations found by `sharding.plan`, added to those of the program; calls are under `plan.mesh()`.
        keep_unused: as for `jax.jit`: whether arguments that the program does not use are kept.
        inline: as for `jax.jit`: whether a call inside another traced function is inlined into it.
        compiler_options: as for `jax.jit`: options of XLA. Collectives overlap with compute without any: XLA:GPU and
            XLA:TPU start them asynchronously by default.

    Returns:
        A function with `.complete`, `.trace`, `.lower` and `.eval_shape`, which also accept ShapeDtypeStructs, and
        `.clear_cache`.

    Where `in_shardings` is None, the sharding of a committed array is an annotation. An array replicated over the mesh
    counts as uncommitted, since that is how JAX creates arrays under a mesh: to require replication, pass `P()`, or an
    array whose spec names its dims, `P(None, None)`. Arguments with another sharding than the program takes are
    transferred first, so that a training loop compiles once; an array that is passed again is transferred once.
    Under a mesh with Explicit axes (`jax.make_mesh`) the function is traced and completed with Auto ones. One that
    names shardings of results (`out_sharding=`, `jax.sharding.reshard`) is traced with Explicit ones, under any mesh,
    and what its types say are annotations.

    With JAX's persistent compilation cache (`jax_compilation_cache_dir`) completions are kept beside it: in another
    process the same program, mesh, annotations and versions are traced, but not completed again.

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
        given = {name: value for name, value in locals().items() if name != "f"}
        return functools.partial(jit, **given)
    if engine not in ENGINES:
        raise ShardingError(
            f"sharding.jit(engine={engine!r})", required="a known engine", fix=[f"engine={e!r}" for e in ENGINES]
        )
    if policy not in POLICIES:
        raise ShardingError(
            f"sharding.jit(policy={policy!r})",
            required="a known policy",
            fix=[f"policy={p!r}" for p in POLICIES],
        )
    if max_implicit_bytes is not None and (engine == "xla" or max_implicit_bytes < 0):
        raise ShardingError(
            f"sharding.jit(engine={engine!r}, max_implicit_bytes={max_implicit_bytes})",
            required="max_implicit_bytes >= 0, and an engine whose reshards are known before compilation",
            fix="max_implicit_bytes=None" if engine == "xla" else "max_implicit_bytes=0",
        )
    signature = Signature.of(f, static_argnums, static_argnames, donate_argnums, donate_argnames, mutable)
    of_jax = {"keep_unused": keep_unused, "inline": inline, "compiler_options": compiler_options}
    options = Options(
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        engine=engine,
        policy=policy,
        strict=strict,
        max_implicit_bytes=max_implicit_bytes,
        plan=plan,
        of_jax={name: value for name, value in of_jax.items() if value},
    )
    return Jitted(f, signature, options)


class Jitted:
    """A function compiled over the current mesh; it caches one executable per cache key."""

    def __init__(self, f: Callable[..., Any], signature: Signature, options: Options):
        functools.update_wrapper(self, f)
        self._f, self._signature, self._options = f, signature, options
        self._fast_paths = FastPaths(signature)
        self._cache = ExecutableCache(signature.function, on_clear=self._fast_paths.clear)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:  # not contextlib.suppress, which costs as much as comparing ten arrays
            return self._fast_paths.run(args, kwargs)
        except ArgumentMismatch:
            pass
        if compat.is_jit_disabled():
            return self._f(*args, **kwargs)
        call = Arguments.of(self._signature, args, kwargs)
        with entered(self._signature.function) as mesh:
            found = self._executable(call, mesh)
            misplaced = found.misplaced(call.leaves)
            if self._cache.keeps(found):
                self._fast_paths.add(call, found, misplaced, mesh)
            return found.run(call, misplaced)

    def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """The inferred sharding of every value, for arguments of these shapes, without compiling."""
        call = Arguments.of(self._signature, args, kwargs)
        with entered(self._signature.function) as mesh:
            return self._executable(call, mesh).completion

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the constrained program, as `jax.jit(f).trace`."""
        call = Arguments.of(self._signature, args, kwargs)
        with entered(self._signature.function) as mesh:
            return self._executable(call, mesh).stage(call)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the constrained program, as `jax.jit(f).lower`; over described devices, for their platform.

        `.compile()` of the result is the program that a call with these arguments runs.
        """
        call = Arguments.of(self._signature, args, kwargs)
        with entered(self._signature.function) as mesh:
            traced = self._executable(call, mesh).stage(call)
            platforms = {} if isinstance(mesh, Mesh) else {"lowering_platforms": (lowering_platform(mesh),)}
            with tracing.tracing_context():  # some primitives lower by tracing a function
                return traced.lower(**platforms)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes, dtypes and shardings; no sharding where XLA chooses it."""
        call = Arguments.of(self._signature, args, kwargs)
        with entered(self._signature.function) as mesh:
            return self._executable(call, mesh).result_shapes

    def clear_cache(self) -> None:
        """Forgets all traced and compiled programs of this function, as does `jax.clear_caches()`."""
        self._cache.cache_clear()

    def with_empty_cache(self) -> Jitted:
        """The same function, which has traced and compiled nothing: for trials that are to leave no programs behind."""
        return Jitted(self._f, self._signature, self._options)

    def with_plan(self, plan: Planned) -> Jitted:
        """The same function with a plan, as `sharding.jit(f, plan=plan)` with the other options."""
        return Jitted(self._f, self._signature, dataclasses.replace(self._options, plan=plan))

    def _cache_size(self) -> int:
        """The number of programs in the cache, by the name that tests of `jax.jit` use."""
        return len({*map(id, self._cache.executables.values())})

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def _executable(self, call: Arguments, mesh: AnyMesh) -> Executable:
        try:
            found = self._cache.get(call, mesh)
        except TypeError:
            tracing.abstract_leaves(call.leaves, call.leaf_names, self._signature.function)
            call.refuse_unhashable()
            raise
        if found is None:
            found = self._cache.made(call, mesh, lambda: self._made(call, mesh))
        return found

    @no_collection()
    def _made(self, call: Arguments, mesh: AnyMesh) -> Executable:
        plan = self._options.plan
        with contextlib.nullcontext() if plan is None else plan.tracing():
            return executable(self._f, self._options, call, mesh)


class BoundMethod:
    """A jitted function as the method of an object."""

    def __init__(self, jitted: Jitted, instance: Any):
        functools.update_wrapper(self, jitted)
        self.__self__, self.__func__ = instance, jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def with_empty_cache(self) -> BoundMethod:
        """As `Jitted.with_empty_cache`, of the same object."""
        return BoundMethod(self.__func__.with_empty_cache(), self.__self__)

    def with_plan(self, plan: Planned) -> BoundMethod:
        """As `Jitted.with_plan`, of the same object."""
        return BoundMethod(self.__func__.with_plan(plan), self.__self__)

    def __getattr__(self, name: str) -> Any:
        """`complete`, `trace`, `lower` and `eval_shape` for this object."""
        attribute = getattr(self.__func__, name)
        return functools.partial(attribute, self.__self__) if name in _TAKES_ARGUMENTS else attribute


_TAKES_ARGUMENTS = frozenset({"complete", "trace", "lower", "eval_shape"})
