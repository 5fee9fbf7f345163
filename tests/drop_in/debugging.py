"""Debugging, callbacks and errors."""

import contextlib
import io
import logging
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def disable_jit(jit):
    """`jax.disable_jit`"""
    seen = []
    with jax.disable_jit():
        y = jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or split(x) * 2)(jnp.asarray(X))
    return y, seen


def debug_nans(jit):
    """`jax_debug_nans` and `jax_debug_infs`"""
    f = jit(lambda x: jnp.log(split(x)))
    with jax.debug_nans(True):
        nan = raised(lambda: f(-np.abs(X) - 1)), f(np.abs(X) + 1)
    with jax.debug_infs(True):
        return nan, raised(lambda: f(np.zeros_like(X)))


def debug_print(jit):
    """`jax.debug.print`, also ordered and in loops"""

    def f(x):
        jax.debug.print("sum {s:.2f} {n}", s=split(x).sum(), n="end", ordered=False)
        jax.lax.fori_loop(0, 2, lambda i, _: jax.debug.print("i {}", i), None)
        return split(x) * 2

    with contextlib.redirect_stdout(io.StringIO()) as out:
        y = jit(f)(X)
        jax.effects_barrier()
    return y, sorted(out.getvalue().splitlines())


def ordered_debug_print(jit):
    """`jax.debug.print(ordered=True)`"""

    def f(x):
        jax.debug.print("a", ordered=True)
        jax.debug.print("b", ordered=True)
        return split(x) * 2

    with contextlib.redirect_stdout(io.StringIO()) as out:
        y = jit(f)(X)
        jax.effects_barrier()
    return y, out.getvalue().splitlines()


def debug_callback(jit):
    """`jax.debug.callback`"""
    seen = []

    def f(x):
        jax.debug.callback(lambda s: seen.append(round(float(s), 3)), split(x).sum())
        return split(x) * 2

    y = jit(f)(X)
    jax.effects_barrier()
    return y, seen


def pure_callback(jit):
    """`pure_callback`, also under `vmap`"""

    def f(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), split(x), vmap_method="expand_dims")

    return jit(f)(X), jit(jax.vmap(f))(X)


def unordered_io_callback(jit):
    """`io_callback`"""
    seen = []

    def f(x):
        return io_callback(lambda s: seen.append(s.shape) or s, jax.ShapeDtypeStruct((), x.dtype), split(x).sum())

    y = jit(f)(X)
    jax.effects_barrier()
    return y, len(seen)


def ordered_io_callback(jit):
    """`io_callback(ordered=True)`"""
    seen = []

    def f(x):
        for i in range(2):
            io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
        return split(x) * 2

    y = jit(f)(X)
    jax.effects_barrier()
    return y, seen


def named_scope(jit):
    """`named_scope` and `named_call` in the compiled program"""

    def f(x):
        with jax.named_scope("layer_one"):
            return jnp.sin(split(x)) + jax.named_call(jnp.cos, name="layer_two")(x)

    text = jit(f).lower(X).compile().as_text()
    return jit(f)(X), "layer_one" in text, "layer_two" in text


def checkified(jit):
    """`checkify` around a jitted function, and inside"""

    def f(x):
        checkify.check(jnp.all(x > 0), "negative {m}", m=x.min())
        return jnp.log(split(x))

    around = checkify.checkify(jit(f))
    inside = jit(checkify.checkify(f))
    found = [(error.get(), y) for g in (around, inside) for x in (np.abs(X) + 1, -X - 2) for error, y in [g(x)]]
    return [("" if m is None else m.split("(")[0], y) for m, y in found], raised(lambda: inside(-X - 2)[0].throw())


def checkified_nans(jit):
    """`checkify` with NaN, index and division checks"""
    checks = checkify.float_checks | checkify.index_checks
    f = checkify.checkify(jit(lambda x, i: jnp.log(split(x))[i]), errors=checks)
    return [f(x, i)[0].get() is None for x, i in ((np.abs(X) + 1, 1), (-np.abs(X) - 1, 1), (np.abs(X) + 1, 20))]


def errors_of_the_function(jit):
    """Exceptions of the function, with its line in the traceback"""

    def fails(x):
        raise KeyError("mine")

    try:
        jit(fails)(X)
    except KeyError as error:
        return str(error), traceback.extract_tb(error.__traceback__)[-1].name
    return "nothing"


def shape_errors(jit):
    """JAX's shape and dtype errors"""
    return raised(lambda: jit(lambda x: x @ x[:3])(X)), raised(lambda: jit(lambda x: x + x[:3])(X))


def tracer_errors(jit):
    """Concretization errors name the argument"""
    try:
        jit(lambda x, flag: x if flag else -x)(X, True)
    except jax.errors.TracerBoolConversionError as error:
        return "argument flag" in str(error)
    return False


def log_compiles(jit):
    """`jax_log_compiles` names the function"""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())

    def named_step(x):
        return split(x) * 2

    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.log_compiles(True):
            jit(named_step)(X)
    finally:
        logging.getLogger("jax").removeHandler(handler)
    return any("named_step" in text and "ompil" in text for text in seen)


def inspect_sharding(jit):
    """`jax.debug.inspect_array_sharding` and `visualize_array_sharding`"""
    seen = []

    def f(x):
        jax.debug.inspect_array_sharding(split(x), callback=seen.append)
        return split(x) * 2

    return jit(f)(X), len(seen)


def profiler(jit):
    """`jax.profiler.annotate_function`, trace annotations and `StepTraceAnnotation`"""
    f = jax.profiler.annotate_function(jit(lambda x: split(x) * 2), name="step")
    with jax.profiler.StepTraceAnnotation("train", step_num=1):
        return f(X)


def leak_checker(jit):
    """`jax.checking_leaks`"""
    with jax.checking_leaks():
        return jit(lambda x: split(x) * 2)(X)


def key_reuse(jit):
    """`jax_debug_key_reuse`"""
    with jax.debug_key_reuse(True):
        good = jit(lambda key: jax.random.normal(key, (8, 8)))(jax.random.key(0))
        return good, raised(lambda: jit(lambda k: jax.random.normal(k) + jax.random.normal(k))(jax.random.key(0)))
