"""FLOPs of linear algebra against the loops of the textbook algorithms, and tables against what they say of an op."""

import math

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import compat, kernels
from sharding.cost import work
from sharding.cost.flops import ATTENTION, DATA_MOVEMENT, FLOPS, REDUCTIONS, TRANSCENDENTAL


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flops(name, operands, results, **params):
    return work(name, operands, results, params).flops


def eliminated(m, n):
    """LU without pivoting: each step divides a column and updates the block behind it."""
    return sum((m - k - 1) + 2 * (m - k - 1) * (n - k - 1) for k in range(min(m, n)))


def reflected(m, n, count):
    """Reflectors applied to the block behind each of the first columns: 4 per element."""
    return sum(4 * (m - k) * (n - k) for k in range(count))


def half_eliminated(m, n):
    """Cholesky: column k is divided, and updates the triangle behind it."""
    return sum((n - k) + (n - k) * (n - k + 1) for k in range(n))


def reduced_from_both_sides(m, n):
    """Hessenberg: each reflector meets the block behind it from the left, and all rows from the right."""
    return sum(4 * (n - k) * (n - k) + 4 * n * (n - k) for k in range(n))


def reduced_symmetrically(m, n):
    """Tridiagonal: a product with the block behind a column, and an update of rank two of its triangle."""
    return sum(2 * (n - k) ** 2 + 2 * (n - k) ** 2 for k in range(n))


TALL, WIDE, SQUARE = (700, 400), (400, 700), (500, 500)


@pytest.mark.parametrize(
    ("name", "shapes", "counted"),
    [
        ("lu", (TALL, WIDE, SQUARE), eliminated),
        ("cholesky", (SQUARE,), half_eliminated),
        ("geqrf", (TALL, WIDE, SQUARE), lambda m, n: reflected(m, n, min(m, n))),
        ("geqp3", (TALL, WIDE, SQUARE), lambda m, n: reflected(m, n, min(m, n))),
        ("qr", (TALL, WIDE, SQUARE), lambda m, n: 2 * reflected(m, n, min(m, n))),  # and the orthogonal factor
        ("hessenberg", (SQUARE,), reduced_from_both_sides),
        ("tridiagonal", (SQUARE,), reduced_symmetrically),
    ],
)
def test_factorisations_count_the_loops_of_their_algorithm(name, shapes, counted):
    for m, n in shapes:
        assert flops(name, [f32(m, n)], [f32(m, n)]) == pytest.approx(counted(m, n), rel=0.01)
        assert flops(name, [f32(2, 3, m, n)], [f32(2, 3, m, n)]) == pytest.approx(6 * counted(m, n), rel=0.01)


@pytest.mark.parametrize(("m", "n", "r"), [(700, 700, 300), (700, 400, 400), (700, 400, 100)])
def test_products_of_reflectors(m, n, r):
    assert flops("householder_product", [f32(2, m, n), f32(2, r)], [f32(2, m, n)]) == pytest.approx(
        2 * reflected(m, n, r), rel=0.01
    )
    each = 4 * m * n  # a dot product and an update of every column
    assert flops("ormqr", [f32(m, r), f32(r), f32(m, n)], [f32(m, n)]) == r * each


def test_solvers_count_per_right_hand_side():
    n, columns = 60, 7
    substituted = sum(2 * k + 1 for k in range(n))  # row k: k multiply-adds and a division
    assert flops("triangular_solve", [f32(3, n, n), f32(3, n, columns)], [f32(3, n, columns)]) == pytest.approx(
        3 * substituted * columns
    )
    thomas = 8 * n  # 3 multiplications, 3 subtractions and 2 divisions per row
    assert flops("tridiagonal_solve", [f32(n)] * 3 + [f32(n, columns)], [f32(n, columns)]) == thomas * columns


@pytest.mark.parametrize(("m", "n"), [(100, 40), (40, 100)])
def test_singular_values_and_eigenvalues_by_golub_and_van_loan(m, n):
    """Figure 8.6.1 of the 4th edition, for more rows than columns: values alone, and thin factors."""
    alone, thin = 4 * 100 * 40**2 - 4 * 40**3 / 3, 14 * 100 * 40**2 + 8 * 40**3
    assert flops("svd", [f32(2, m, n)], [f32(2, 40)]) == pytest.approx(2 * alone)
    assert flops("svd", [f32(m, n)], [f32(40), f32(m, 40), f32(40, n)]) == pytest.approx(thin)
    assert flops("eigh", [f32(2, 30, 30)], [f32(2, 30)]) == pytest.approx(2 * 4 * 30**3 / 3)
    assert flops("eigh", [f32(2, 30, 30)], [f32(2, 30), f32(2, 30, 30)]) == 2 * 9 * 30**3
    assert flops("eig", [f32(2, 30, 30)], [f32(2, 30)]) == flops("schur", [f32(2, 30, 30)], [f32(2, 30, 30)])


def test_products():
    assert flops("symmetric_product", [f32(2, 5, 7), f32(2, 5, 5)], [f32(2, 5, 5)]) == 2 * (2 * 5 * 5) * 7
    scaled = [f32(2, 4, 32), f32(2, 8, 32), f32(2, 4, 1), f32(2, 8, 1)]
    assert flops("scaled_matmul", scaled, [f32(2, 4, 8)]) == 2 * 2 * 4 * 8 * 32


def test_windows_count_each_position_once():
    window = {"window_dimensions": (1, 3, 2)}
    assert flops("reduce_window_max", [f32(2, 9, 8)], [f32(2, 7, 7)], **window) == 2 * 7 * 7 * 6
    backwards = flops("select_and_scatter_add", [f32(2, 7, 7), f32(2, 9, 8)], [f32(2, 9, 8)], **window)
    assert backwards == 2 * 7 * 7 * (6 + 1)


def test_several_results_are_reduced_one_by_one():
    assert flops("reduce", [f32(4, 6), f32(4, 6), f32(), f32()], [f32(4), f32(4)]) == 2 * 24
    assert flops("cumsum", [f32(4, 6)], [f32(4, 6)], axis=0) == 24
    assert flops("scatter-add", [f32(9, 5), f32(3, 1), f32(3, 5)], [f32(9, 5)]) == 3 * 5


@pytest.mark.parametrize(("lengths", "kind"), [((8,), "fft"), ((4, 8), "fft"), ((8,), "rfft"), ((4, 8), "irfft")])
def test_transforms_over_several_dims(lengths, kind):
    whole, half = (3, 4, 8)[-len(lengths) - 1 :], (3, 4, 5)[-len(lengths) - 1 :]
    c64 = jnp.complex64
    sides = {
        "fft": [jax.ShapeDtypeStruct(whole, c64)] * 2,
        "rfft": [f32(*whole), jax.ShapeDtypeStruct(half, c64)],
        "irfft": [jax.ShapeDtypeStruct(half, c64), f32(*whole)],
    }[kind]
    points = math.prod(lengths)
    batch = math.prod(whole) // points
    expected = 5 * batch * points * math.log2(points) / (1 if kind == "fft" else 2)
    assert flops("fft", sides[:1], sides[1:], fft_lengths=lengths) == pytest.approx(expected)


def test_sorting_costs_at_least_a_comparison_per_element():
    for n in (1, 2, 16):
        assert flops("sort", [f32(3, n)], [f32(3, n)], dimension=1) == 3 * n * max(math.log2(n), 1)
        assert flops("top_k", [f32(3, 16)], [f32(3, n)], k=n) == 3 * 16 * max(math.log2(n), 1)


def test_random_bits_cost_the_rounds_of_threefry():
    words = 6 * 4  # of 32 bits
    assert flops("random_bits", [f32(6)], [f32(6, 4)]) == words * 20 * 5 / 2


def test_an_elementwise_op_counts_its_largest_array():
    for name, each in TRANSCENDENTAL.items():
        assert flops(name, [f32(4, 6), f32()], [f32(4, 6)]) == 24 * each >= 24 * 4
        assert flops(name, [], []) == 0
    assert flops("add", [f32(4, 1), f32(4, 6)], [f32(4, 6)]) == 24
    assert not TRANSCENDENTAL.keys() & FLOPS.keys() and not DATA_MOVEMENT & REDUCTIONS
    assert all(FLOPS[name]([f32(4, 6)], [f32(4, 6)], {}) == 0 for name in DATA_MOVEMENT)


@pytest.mark.parametrize("rows_first", [True, False])
def test_a_ragged_product_multiplies_each_row_once(rows_first):
    rows, k, n, groups = 60, 8, 7, 5
    dims = 0 if rows_first else 1
    shape = (rows, k) if rows_first else (k, rows)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def numbers(contracted, of_other, ragged, group):
        return jax.lax.RaggedDotDimensionNumbers((((contracted,), (of_other,)), ((), ())), [ragged], group)

    def counted(dimension_numbers, *operands):
        f = lambda *args: jax.lax.ragged_dot_general(*args, dimension_numbers)  # noqa: E731
        (eqn,) = jax.make_jaxpr(f)(*operands, sizes).eqns
        operands, results = ([v.aval for v in found] for found in (eqn.invars, eqn.outvars))
        return work(eqn.primitive.name, operands, results, eqn.params).flops

    each = 2 * rows * k * n
    assert counted(numbers(1 - dims, 1, dims, [0]), f32(*shape), f32(groups, k, n)) == each  # a matrix per group
    assert counted(numbers(dims, 0, dims, []), f32(*shape), f32(rows, n)) == each  # summed over the rows of a group


@pytest.mark.parametrize(
    ("causal", "window", "seen"), [(False, None, 512), (True, None, 256), (True, (63, 0), 64)], ids=str
)
def test_fused_attention_counts_its_products(causal, window, seen):
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)

    def attend(q, k, v):
        return kernels.attention(q, k, v, causal=causal, window=window, implementation="cudnn")

    def found(f, *args):
        with sharding.mesh(a=1, devices="h100:1x1"):
            return sum(_flops_inside(eqn) for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns)

    product = 2 * 2 * 256 * 4 * 64 * seen
    assert found(attend, q, k, k) == 2 * product
    gradients = jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2))
    assert found(gradients, q, k, k) == (2 + 5) * product


def _flops_inside(eqn):
    if eqn.primitive.name in ATTENTION:
        operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        return work(eqn.primitive.name, operands, results, eqn.params).flops
    bodies = [body for _, _, body in compat.sub_jaxprs(eqn.params)]
    return sum(_flops_inside(one) for body in bodies for one in compat.open_jaxpr(body).eqns)
