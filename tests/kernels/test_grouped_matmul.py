"""Grouped matmul: values and gradients of `ragged_dot`, for all sizes of groups, and sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compilers, kernel_checks
from support.kernel_checks import MESHES, SIZES

from sharding import P, ShardingError, kernels
from sharding.kernels.grouped_matmul import reference

RNG = np.random.default_rng(0)
MEGABLOX = functools.partial(kernels.grouped_matmul, implementation="megablox")


def arrays(rows, sizes, features=(32, 16), dtype="float32"):
    m, f = features
    x, w = RNG.standard_normal((rows, m)), RNG.standard_normal((len(sizes), m, f))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


@pytest.mark.parametrize(
    "rows, sizes",
    [(10, (3, 7)), (300, (100, 0, 150, 50)), (200, (0, 0, 129)), (7, (7,)), (130, (0, 0))],
    ids=str,
)
def test_values_and_gradients(rows, sizes):
    kernel_checks.check(MEGABLOX, reference, arrays(rows, sizes), (0, 1))


def test_bfloat16():
    kernel_checks.check(MEGABLOX, reference, arrays(140, (60, 70), (40, 130), "bfloat16"), (0, 1))


@pytest.mark.parametrize("implementation", ["megablox", "xla"])
def test_rows_beyond_the_groups_are_zero(implementation):
    x, w, sizes = arrays(20, (4, 5))
    found, (of_x, _) = kernel_checks.with_gradients(
        functools.partial(kernels.grouped_matmul, implementation=implementation), (0, 1)
    )(x, w, sizes)
    assert not found[9:].any()
    assert not of_x[9:].any()
    assert found[:9].any(1).all()


@pytest.mark.parametrize(
    "specs, most",
    [
        ((P(), P(None, None, ("data", "tensor")), P()), {"all-reduce": 2}),
        ((P(None, "tensor"), P(None, "tensor", "data"), P()), {"all-reduce": 3}),
    ],
    ids=["columns", "both"],
)
def test_features_stay_sharded(specs, most):
    args = arrays(64, (20, 0, 40))
    kernel_checks.check_sharded(MEGABLOX, reference, args, (0, 1), specs, MESHES[0], most)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_sharded(sizes, seed):
    args = arrays(64, (20, 0, 40, 4))
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = {"all-gather": 9, "all-to-all": 9, "all-reduce": 4, "reduce-scatter": 2}
    kernel_checks.check_sharded(MEGABLOX, reference, args, (0, 1), specs, sizes, most)


@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"]])
def test_compiles(platform, described):
    like = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1024, 512), (8, 512, 1024))]
    args = (*like, jax.ShapeDtypeStruct((8,), "int32"))
    specs = P(), P(None, None, "tensor"), P()
    kernel_checks.check_ahead_of_time(
        platform, described, kernels.grouped_matmul, args, (0, 1), specs, {"all-reduce": 2}
    )


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda x, w, n: (x[:, :3], w, n), r"x \[T, M\], w \[E, M, F\]"),
        (lambda x, w, n: (x.astype("bfloat16"), w, n), "of one dtype"),
        (lambda x, w, n: (x, w, n[:1]), r"integer group_sizes \[E\]"),
        (lambda x, w, n: (x, w, n.astype("float32")), r"integer group_sizes \[E\]"),
    ],
)
def test_errors(change, complaint):
    with pytest.raises(ShardingError, match=complaint):
        kernels.grouped_matmul(*change(*arrays(8, (3, 5))))
