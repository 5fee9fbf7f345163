"""Tracing, lowering, compiling, exporting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def _f(state, x, n=1):
    return {"w": state["w"] * split(x) * n}, x.sum()


def _info(tree):
    return jax.tree.map(lambda x: [*x.shape, str(x.dtype)], tree)


def trace(jit):
    """`trace`: `jaxpr`, `out_info`, `in_tree`, `fun_name`"""
    traced = jit(_f).trace({"w": SHAPE}, SHAPE)
    return _info(traced.out_info), str(traced.in_tree), traced.fun_name, len(traced.jaxpr.in_avals)


def lower(jit):
    """`lower`: `in_tree`, `out_info`, `args_info`, `donate_argnums`, `as_text`, `compiler_ir`"""
    lowered = jit(_f, donate_argnums=0).lower({"w": SHAPE}, SHAPE)
    text = lowered.as_text()
    donated = [info.donated for info in jax.tree.leaves(lowered.args_info, is_leaf=lambda x: hasattr(x, "donated"))]
    names = [dialect for dialect in ("stablehlo", "hlo") if lowered.compiler_ir(dialect) is not None]
    return str(lowered.in_tree), _info(lowered.out_info), donated, "module @jit__f" in text, names


def compile(jit):
    """`compile`: the call, `in_tree`, `cost_analysis`, `memory_analysis`, `as_text`, `input_shardings`"""
    compiled = jit(_f).lower({"w": X}, X).compile()
    args = jax.tree.map(lambda x, s: jax.device_put(x, s), ({"w": X}, X), compiled.input_shardings[0])
    known = compiled.cost_analysis()["flops"] > 0, compiled.memory_analysis().argument_size_in_bytes > 0
    return compiled(*args), str(compiled.in_tree), known, "HloModule" in compiled.as_text()


def compile_with_options(jit):
    """`compile(compiler_options=)`"""
    compiled = jit(lambda x: split(x) * 2).lower(SHAPE).compile(compiler_options={"xla_embed_ir_in_executable": True})
    return compiled(jax.device_put(X, compiled.input_shardings[0][0]))


def compiled_refuses(jit):
    """A compiled program refuses other shapes, dtypes and structures, and transformations"""
    compiled = jit(lambda x: x * 2).lower(X).compile()
    return (
        raised(lambda: compiled(X[:4])),
        raised(lambda: compiled(X.astype(np.int32))),
        raised(lambda: compiled({"x": X})),
        raised(lambda: jax.vmap(compiled)(X)),
    )


def static_stages(jit):
    """Stages of functions with static and keyword arguments"""
    compiled = jit(_f, static_argnames="n").lower({"w": X}, x=X, n=3).compile()
    where = jax.tree.leaves(compiled.input_shardings)
    return compiled({"w": jax.device_put(X, where[0])}, x=jax.device_put(X, where[-1]))


def eval_shape(jit):
    """`eval_shape` of a jitted function, with arrays and ShapeDtypeStructs"""
    f = jit(_f, static_argnames="n")
    return _info(f.eval_shape({"w": SHAPE}, X, n=2)), _info(jax.eval_shape(f, {"w": X}, SHAPE))


def lower_from_arrays(jit):
    """Lowering for arrays, numbers and weak types, as a call with them"""
    f = jit(lambda x, s: split(x) * s)
    compiled = f.lower(X, 2.0).compile()
    return compiled(jax.device_put(X, compiled.input_shardings[0][0]), 2.0), f(X, 2.0)


def lower_for_platforms(jit):
    """`trace(...).lower(lowering_platforms=)` for other platforms"""
    text = jit(lambda x: split(x) * 2).trace(SHAPE).lower(lowering_platforms=("tpu",)).as_text()
    return "stablehlo.multiply" in text


def exported(jit):
    """`jax.export` and `serialize`, `deserialize`, called inside and outside"""
    out = export.export(jit(lambda x: split(x) @ split(x, None, "tensor")))(SHAPE)
    pytest.importorskip("flatbuffers", reason="which jax.export serializes by")
    again = export.deserialize(out.serialize())
    call = jax.jit(again.call)
    args = [jax.device_put(X, s) for s in again.in_shardings_jax(_mesh())] if again.nr_devices > 1 else [jnp.asarray(X)]
    return call(*args), [*again.in_avals[0].shape], again.fun_name


def _mesh():
    from sharding.mesh import current

    return current()


def exported_gradient(jit):
    """Exporting with gradients: `vjp_order=1`"""
    out = export.export(jit(lambda x: jnp.sin(split(x)).sum()))(SHAPE)
    pytest.importorskip("flatbuffers", reason="which jax.export serializes by")
    again = export.deserialize(out.serialize(vjp_order=1))
    x = jax.device_put(X, again.in_shardings_jax(_mesh())[0]) if again.nr_devices > 1 else jnp.asarray(X)
    return jax.grad(lambda x: jax.jit(again.call)(x))(x)


def symbolic_shapes(jit):
    """Exporting with symbolic shapes"""
    (batch,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((2 * batch, 8), jnp.float32)
    out = export.export(jit(lambda x: split(x) * 2))(shape)
    call = jax.jit(out.call)
    return [
        call(jax.device_put(x, jax.sharding.PartitionSpec("data")) if out.nr_devices > 1 else x) for x in (X, X[:4])
    ]


def serialized_executable(jit):
    """`serialize_executable`: saving and loading a compiled program"""
    compiled = jit(lambda x: {"y": split(x) * 2}).lower(X).compile()
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled),
        execution_devices=[*compiled._executable.xla_executable.local_devices()],
    )
    return loaded(jax.device_put(X, compiled.input_shardings[0][0]))


def make_jaxpr(jit):
    """`jax.make_jaxpr` of a jitted function"""
    jaxpr, shape = jax.make_jaxpr(jit(_f), return_shape=True)({"w": X}, X)
    return len(jaxpr.in_avals), _info(shape)


def live_arrays(jit):
    """Results freed when dropped: `jax.live_arrays`"""
    y = jit(lambda x: split(x) * 2)(np.ones((3 * 8, 5), np.float32))
    before = sum(a.shape == (24, 5) for a in jax.live_arrays())
    del y
    return before - sum(a.shape == (24, 5) for a in jax.live_arrays())


def closed_call(jit):
    """`jax.closure_convert` and `jax.extend.core.jaxpr_as_fun` of a jitted function"""
    converted, constants = jax.closure_convert(jit(lambda x: split(x) * 2), X)
    jaxpr = jax.make_jaxpr(jit(lambda x: split(x) * 2))(X)
    return converted(X, *constants), jax.extend.core.jaxpr_as_fun(jaxpr)(X)[0]
