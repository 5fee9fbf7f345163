"""JAX APIs that are private or differ between releases, from JAX 0.10.2 on; the only file that uses `jax._src`."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import array as _array
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import effects as _effects
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source
from jax._src import util as _util
from jax._src import xla_bridge as _bridge
from jax._src.clusters import ClusterEnv as _ClusterEnv
from jax._src.core import InternalMutableArrayEffect as _InternalRef
from jax._src.core import NamedAxisEffect as _NamedAxisEffect
from jax._src.core import Ref as _Ref
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.interpreters import pxla as _pxla
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax._src.random import prng as _prng
from jax._src.source_info_util import SourceInfo as SourceInfo
from jax._src.state import discharge as discharge
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.core import Tracer as Tracer
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval as _partial_eval
from jaxlib._jax import ArrayCopySemantics as _ArrayCopySemantics
from jaxlib._jax import CompileOnlyPyClient as _CompileOnlyPyClient
from jaxlib.mlir.dialects import sdy as _sdy

_ROOT = os.path.dirname(__file__) + os.sep
_source.register_exclusion(_ROOT)  # our own frames never count as the user's line
for _name in ("launch", "models"):  # these do: an installation has them in this folder, a checkout beside it
    _source.register_inclusion(_ROOT + _name + os.sep)
checks_manual_axes: Any = _config._check_vma  # a context: whether values say along which manual axes they vary

_VERSION = tuple(map(int, jax.__version__.split(".")[:2]))
CLAMPS_MERGED_SLICES = _VERSION >= (0, 12)
"""Whether XLA clamps a dynamic slice right whose result it slices further."""
MULTIPLIES_16_BITS = HAS_MOSAIC_GPU = _VERSION >= (0, 11)
"""Whether XLA:CPU's library multiplies matrices of bfloat16 as they are; whether Pallas has today's GPU kernels."""


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr atom is a literal constant rather than a variable."""
    return isinstance(atom, jex.Literal)


def is_compile_only(device: Any) -> bool:
    """Whether a device can be compiled for but not run on."""
    return isinstance(device.client, _CompileOnlyPyClient)


def is_drop(var: Any) -> bool:
    """Whether a variable is the `_` for an unused result of an equation."""
    return isinstance(var, jex.DropVar)


def new_literal(value: Any, aval: Any) -> Any:
    """A literal of the given abstract value: a number or an array."""
    return jex.Literal(np.asarray(value, aval.dtype)[()], aval)


def new_eqn(like: Any, invars: Sequence[Any], outvars: Sequence[Any], primitive: Any, params: dict[str, Any]) -> Any:
    """An effect-free equation with the source line, name stack and context of the equation `like`, if any."""
    info, ctx = (like.source_info, like.ctx) if like is not None else (None, None)
    return jex.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, set(), info, ctx)


def renamed(eqn: Any, names: dict[Any, Any]) -> Any:
    """An equation with operands as in `names`, and with new results, which are added to it."""
    results = [v if is_drop(v) else jex.Var(v.aval) for v in eqn.outvars]
    operands = [v if is_literal(v) else names.get(v, v) for v in eqn.invars]
    names.update(zip(eqn.outvars, results, strict=True))
    return eqn.replace(invars=operands, outvars=results)


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return hasattr(x, "eqns") and hasattr(x, "outvars")


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr with `invars`, `constvars`, `eqns` and `outvars` as attributes, whether `jaxpr` is closed or open."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def rebuild(jaxpr: Any, *, eqns: Sequence[Any], outvars: Sequence[Any], invars: Sequence[Any] | None = None) -> Any:
    """`jaxpr` with other equations and results, but the same constants, effects and names (with its own arguments)."""
    inner = open_jaxpr(jaxpr)
    new = inner.replace(eqns=list(eqns), outvars=list(outvars))
    if invars is not None:
        new = new.replace(invars=list(invars), debug_info=inner.debug_info.with_unknown_names())
    if isinstance(jaxpr, jex.ClosedJaxpr) and not isinstance(new, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(new, jaxpr.consts)
    return new


def constants(jaxpr: Any) -> Sequence[Any]:
    """The values of a closed jaxpr's `constvars`; an open one has none."""
    return jaxpr.consts if isinstance(jaxpr, jex.ClosedJaxpr) else ()


def jaxpr_fun(closed: Any) -> Any:
    """A function of flat arrays that evaluates a closed jaxpr."""
    return jex.jaxpr_as_fun(closed)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Binds an equation's primitive to other operands, keeping its name stack, and its source line if it has one."""
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback if line_of(eqn.source_info) else None
    with _source.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def implementation(eqn: Any) -> Any:
    """A function of arrays that computes what another package's primitive does; None for JAX's and this package's.

    JAX 0.12 has primitives of a higher level, which it replaces while it lowers; those have one, too.
    """
    primitive = eqn.primitive
    if getattr(primitive, "is_high", None) and primitive.is_high(*(v.aval for v in eqn.invars), **eqn.params):
        return primitive.to_lojax
    package = (getattr(primitive.impl, "__module__", None) or "functools").partition(".")[0]
    return None if package in ("functools", "jax", "jaxlib", __package__) else primitive.impl


def has_side_effects(eqn: Any) -> bool:
    """Whether an equation does more than compute its results; naming a mesh axis does not count."""
    return any(not isinstance(effect, _NamedAxisEffect) for effect in eqn.effects)


def is_on_host(aval: Any) -> bool:
    """Whether arrays of an abstract value are in the memory of the host."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


@contextlib.contextmanager
def beside(eqn: Any) -> Iterator[None]:
    """A context in which new equations have the source line of `eqn`, and the mesh if it is in a `shard_map`."""
    mesh: Any = contextlib.nullcontext()
    if eqn.ctx is not None and eqn.ctx.cur_abstract_mesh.manual_axes:
        mesh = eqn.ctx.manager
    with _source.user_context(eqn.source_info.traceback), mesh:
        yield


def inputs_used(jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """For each input of a jaxpr, whether any of the selected outputs depends on it."""
    return _partial_eval.dce_jaxpr(open_jaxpr(jaxpr), list(outputs))[1]


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and carried values of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_constants(primitive: str, params: dict[str, Any], number: int) -> dict[str, Any]:
    """The parameters of a `scan` or `while` whose body has this many more constants than it had."""
    if primitive == "while":
        return params | {"body_nconsts": params["body_nconsts"] + number}
    if "num_consts" in params:
        return params | {"num_consts": params["num_consts"] + number}
    flat = importlib.import_module("jax._src.flattree")
    consts, *others = params["ft_in"].unpack()
    return params | {"ft_in": flat.FTTuple(flat.FTTuple(*[flat.FTSingleton(None)] * (len(consts) + number)), *others)}


def is_recomputed(eqn: Any) -> bool:
    """Whether an equation recomputes values for the backward pass, behind a barrier, so that XLA merges none."""
    return bool(eqn.params.get("differentiated")) and any(np.atleast_1d(eqn.params.get("prevent_cse", False)))


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """The axes that become manual in the body of a `shard_map` equation."""
    return frozenset(params["newly_manual_axes"])


def has_free_shardings(eqn: Any) -> bool:
    """Whether a `jit` inside the program leaves the shardings of its arguments and results open; other calls do."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(isinstance(one, _UnspecifiedValue) for one in given)


def sub_jaxprs(params: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """(parameter, position, jaxpr) for every jaxpr among an equation's parameters."""
    for key, value in params.items():
        if is_jaxpr(value):
            yield key, 0, value
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                if is_jaxpr(item):
                    yield key, i, item


def equations(eqn: Any) -> Iterator[Any]:
    """An equation, and those in its bodies."""
    yield eqn
    for _, _, body in sub_jaxprs(eqn.params):
        for inner in open_jaxpr(body).eqns:
            yield from equations(inner)


def with_jaxpr(params: dict[str, Any], key: str, pos: int, jaxpr: Any) -> dict[str, Any]:
    """An equation's parameters with the jaxpr found by `sub_jaxprs` replaced; a namedtuple of jaxprs stays one."""
    value = params[key]
    if isinstance(value, (tuple, list)):
        make = getattr(type(value), "_make", tuple)
        jaxpr = make((*value[:pos], jaxpr, *value[pos + 1 :]))
    return {**params, key: jaxpr}


def source_line(eqn: Any) -> str:
    """`file.py:line (function)`, the user's source line of an equation; empty if JAX has none."""
    return line_of(eqn.source_info)


def line_of(info: Any) -> str:
    """The same for source information."""
    if hasattr(info, "line"):  # saved with a pickled program
        return info.line
    frame = _source.user_frame(info.traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})" if frame else ""


def source_file(info: Any) -> tuple[str, int]:
    """The path of the user's file and the number of the line; ("", -1) if JAX has none."""
    if hasattr(info, "file"):
        return info.file
    frame = _source.user_frame(info.traceback)
    return (frame.file_name, frame.start_line) if frame else ("", -1)


def name_stack(eqn: Any) -> str:
    """The name stack of an equation, such as `transpose(jvp(loss))/attention`."""
    return str(eqn.source_info.name_stack)


def in_trace() -> bool:
    """Whether a JAX transformation (`jit`, `grad`, `vmap`, ...) is tracing the caller."""
    try:  # the public API for this: in traced code get_mesh raises
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def trace_context() -> Any:
    """The part of JAX's trace cache key beside the arguments: x64, matmul precision, names of vmapped axes, ..."""
    return _config.trace_context()


def is_committed(x: Any) -> bool:
    """Whether `x` is a committed array (from `device_put`, or the result of a jitted function)."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and bool(x.committed)


def are_committed(leaves: Sequence[Any]) -> bool:
    """Whether all leaves are committed arrays and none a tracer; takes half the time of `is_committed` on each."""
    committed = [x._committed for x in leaves] if {*map(type, leaves)} <= _ARRAYS else [False]
    return all(committed)


_ARRAYS = frozenset((_array.ArrayImpl, _prng.PRNGKeyArray))


def device_put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """`jax.device_put`; takes two thirds of the time for numpy arrays in one process, as calls of `jax.jit` do."""
    is_plain = all(isinstance(s, jax.sharding.Sharding) and s.is_fully_addressable for s in shardings)  # no Format
    if not is_plain or any(type(x) is not np.ndarray for x in leaves):
        return jax.device_put(leaves, shardings)
    copies = [_ArrayCopySemantics.REUSE_INPUT] * len(leaves)
    return list(_pxla.shard_args(shardings, [None] * len(leaves), copies, leaves))


def is_extended(dtype: Any) -> bool:
    """Whether a dtype is an extended dtype, such as that of random keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def is_threefry(dtype: Any) -> bool:
    """Whether a dtype is that of threefry keys."""
    return is_extended(dtype) and getattr(dtype._impl, "name", "") in ("fry", "threefry2x32")


def wrapped_key(key_data: Any, dtype: Any) -> Any:
    """Random keys of this dtype from their key data."""
    return jax.random.wrap_key_data(key_data, impl=dtype._impl)


def mlir_passes() -> tuple[Any, Any]:
    """The modules `ir` and `passmanager` of jaxlib's MLIR. Raises ImportError if jaxlib lacks them."""
    from jaxlib.mlir import ir, passmanager

    return ir, passmanager


def versions() -> str:
    """The versions of jax and jaxlib, as text."""
    return f"jax {jax.__version__}, jaxlib {version('jaxlib')}"


def lower_sharding_group(ctx: Any, xs: Sequence[Any]) -> None:
    """Puts the values of a lowering rule into one Shardy sharding group; does nothing if Shardy is disabled."""
    if _config.use_shardy_partitioner.value:
        number = ctx.module_context.new_channel()  # unlike a global counter, deterministic per program
        for x in xs:
            _sdy.sharding_group(x, number)


def lower_barrier(x: Any, allowed: str) -> Any:
    """A value of a lowering rule behind Shardy's propagation barrier; unchanged if Shardy is disabled."""
    if not _config.use_shardy_partitioner.value:
        return x
    return _sdy.PropagationBarrierOp(x, _sdy.PropagationDirection[allowed.upper()]).result


def distributed() -> Any:
    """The global state of `jax.distributed`: `client`, `process_id`, `num_processes`."""
    return _distributed.global_state


def set_gloo_address(address: str) -> None:
    """Makes the CPU backend, once initialized, advertise `address` to the Gloo peers in other processes.

    By default it advertises what this host's name resolves to, on many systems 127.0.1.1, which other hosts cannot
    reach.
    """

    def start() -> Any:
        if _config.cpu_collectives_implementation.value != "gloo":
            return _bridge.make_cpu_client()
        make = importlib.import_module("jaxlib._jax").make_gloo_tcp_collectives
        return _bridge.make_cpu_client(make(distributed_client=_distributed.global_state.client, hostname=address))

    _bridge._backend_factories["cpu"].factory = start


def detected_cluster() -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Coordinator, number of processes, process index and local devices as JAX detects them; None without a cluster."""
    try:
        return _ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 60)
    except (ValueError, KeyError):  # a cluster environment with variables missing
        return None, None, None, None


def register_cache(cache: Any) -> None:
    """Has `jax.clear_caches()` call `cache.cache_clear()`, for as long as the cache lives."""
    _util.register_cache(cache, type(cache).__name__)


def ordered_on_one_device(jaxpr: Any) -> list[str]:
    """The effects of a program that JAX orders on one device only, by name."""
    ordered, shardable = _effects.ordered_effects, _effects.shardable_ordered_effects
    return sorted({type(e).__name__ for e in jaxpr.effects if ordered.contains(e) and not shardable.contains(e)})


def mesh_of_with_statement() -> Any:
    """The mesh of `with Mesh(...):`, JAX's old way to set it; None outside of such a block."""
    m = _mesh.thread_resources.env.physical_mesh
    return None if m.empty else m


def assume_cudnn() -> None:
    """Has JAX trace cuDNN's attention where no cuDNN is installed: for described GPUs."""
    if vars(_cudnn)["cuda_versions"] is None:
        _cudnn.check_cudnn_version = lambda: 91200


def is_jit_disabled() -> bool:
    """Whether functions run op by op, under `jax.disable_jit`."""
    return _config.disable_jit.value


def is_ref(x: Any) -> bool:
    """Whether `x` is a `jax.Ref`, a tracer of one, or the abstract value of one."""
    return isinstance(x, (_Ref, _AbstractRef)) or (isinstance(x, Tracer) and isinstance(x.aval, _AbstractRef))


def makes_refs(x: Any) -> bool:
    """Whether a jaxpr or an equation makes `Ref`s of its own."""
    return any(isinstance(effect, _InternalRef) for effect in x.effects)
