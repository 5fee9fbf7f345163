"""JAX's primitive harness: every primitive gives the same numbers on a mesh as on one device.

The cases are those of JAX's export tests: several per group, about one group per primitive. Each case shards its
arguments over random dims with a seed of its own.
"""

import functools
import zlib
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P

harness = pytest.importorskip("jax._src.internal_test_util.test_harnesses")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"data": 2, "tensor": 4}
PER_GROUP = 6
QUICK = [
    "dot_general",
    "gather",
    "fft",
    "cholesky",
    "sort",
    "conv_general_dilated",
    "custom_linear_solve",
    "scatter_add",
]


@functools.cache
def groups():
    found = defaultdict(list)
    for case in harness.all_harnesses:
        if case.filter("cpu"):
            found[case.group_name].append(case)
    return found


def chosen(group, count=PER_GROUP):
    cases = groups()[group]
    picked = np.random.default_rng(zlib.crc32(group.encode())).choice(len(cases), min(count, len(cases)), replace=False)
    return [cases[i] for i in sorted(picked)]


def random_spec(x, rng):
    entries = [None] * np.ndim(x)
    for axis, size in SIZES.items():
        dims = [d for d, n in enumerate(np.shape(x)) if entries[d] is None and n and n % size == 0]
        if dims and rng.random() < 0.7:
            entries[rng.choice(dims)] = axis
    return P(*entries)


def as_numpy(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def compare(found, expected, case):
    for a, b in zip(map(as_numpy, jax.tree.leaves(found)), map(as_numpy, jax.tree.leaves(expected)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), case
        if b.dtype.kind not in "fcV":
            np.testing.assert_array_equal(a, b, err_msg=case)
            continue
        wide = np.complex128 if b.dtype.kind == "c" else np.float64
        tight = 2e-2 if b.dtype.itemsize <= 2 else 1e-4
        b = b.astype(wide)
        scale = np.abs(b[np.isfinite(b)]).max(initial=1e-3)
        np.testing.assert_allclose(a.astype(wide), b, rtol=tight, atol=tight * scale, err_msg=case)


def check(case):
    """Compares a case on a mesh with one device; False if plain JAX cannot run it on this backend."""
    args = case.dyn_args_maker(np.random.RandomState(0))
    try:
        expected = jax.block_until_ready(jax.jit(case.dyn_fun)(*args))
    except Exception:  # not supported by this backend
        return False
    rng = np.random.default_rng(zlib.crc32(case.fullname.encode()))
    with sharding.mesh(SIZES) as mesh:
        placed = [
            jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, random_spec(x, rng))), arg) for arg in args
        ]
        f = sharding.jit(case.dyn_fun)
        assert not f.complete(*placed).unknown, case.fullname
        found = jax.block_until_ready(f(*placed))
    compare(found, expected, case.fullname)
    return True


@pytest.mark.parametrize("group", QUICK)
def test_one_case(group):
    assert any(check(case) for case in chosen(group, 1))


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(groups()))
def test_group(group):
    ran = [check(case) for case in chosen(group)]
    jax.clear_caches()
    if not any(ran):
        pytest.skip("no case runs on this backend")
