"""FLOPs of each primitive on one device.

Matmuls and convolutions count 2 per multiply-add, elementwise ops 1 per element or the length of their polynomial, data
movement 0, a Fourier transform 5 n log2 n (the convention of FFTW's benchmarks), a sort n log2 n comparisons, linear
algebra the leading terms of Golub and Van Loan, Matrix Computations, 4th edition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..rules.cudnn_attention import HEADS_FIRST
from .bytes_accessed import SCATTERS, Array, Arrays, Count, Params, all_results, nothing


def _elements(arrays: Arrays) -> int:
    return sum(math.prod(array.shape) for array in arrays)


def _largest(arrays: Arrays) -> int:
    return max((math.prod(array.shape) for array in arrays), default=0)


def per_element(flops: float) -> Count:
    """FLOPs per element of the largest operand or result."""
    return lambda operands, results, params: flops * _largest([*operands, *results])


def _dot_general(operands: Arrays, results: Arrays, params: Params) -> float:
    """2 b m n k: twice the result's elements times the contracting sizes."""
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * _elements(results) * math.prod(operands[0].shape[dim] for dim in contracted)


def _ragged_dot_general(operands: Arrays, results: Arrays, params: Params) -> float:
    """Each row is multiplied with its own group's matrix; a ragged contraction sums over each row once."""
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    if set(numbers.lhs_ragged_dimensions) & set(contracted):
        return 2 * _elements(results[:1]) / operands[2].shape[-1] * _dims(operands[0], contracted)
    return 2 * _elements(results) * _dims(operands[0], contracted)


def _dims(array: Array, dims: Sequence[int]) -> int:
    return math.prod(array.shape[dim] for dim in dims)


def _scaled_matmul(operands: Arrays, results: Arrays, params: Params) -> float:
    """`b m k, b n k -> b m n`: the contracting dim is last."""
    return 2 * _elements(results) * operands[0].shape[-1]


def _conv(operands: Arrays, results: Arrays, params: Params) -> float:
    """2 per result element, kernel position and input channel; positions over the padding count too."""
    kernel = operands[1]
    out_channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    return 2 * _elements(results) * math.prod(kernel.shape) / max(out_channels, 1)


def _reduce(operands: Arrays, results: Arrays, params: Params) -> float:
    return _largest(operands) * max(len(results), 1)


def _window(operands: Arrays, results: Arrays, params: Params) -> float:
    """One per result element and window position."""
    return _elements(results) * math.prod(params["window_dimensions"])


def _window_backwards(operands: Arrays, results: Arrays, params: Params) -> float:
    """One comparison per source element and window position, and one addition."""
    return _elements(operands[:1]) * (math.prod(params["window_dimensions"]) + 1)


def _sort(operands: Arrays, results: Arrays, params: Params) -> float:
    return _n_log_n(operands[0], operands[0].shape[params["dimension"]])


def _top_k(operands: Arrays, results: Arrays, params: Params) -> float:
    """A heap of the k largest: n log2 k."""
    shape, k = operands[0].shape, params["k"]
    return math.prod(shape) * max(math.log2(max(k, 2)), 1)


def _n_log_n(array: Array, n: int) -> float:
    return math.prod(array.shape) * math.log2(max(n, 2))


def _fft(operands: Arrays, results: Arrays, params: Params) -> float:
    """5 n log2 n per transform of n complex points, half of that where one side is real."""
    lengths = params["fft_lengths"]
    larger = max(operands[0], results[0], key=lambda array: math.prod(array.shape))
    points = math.prod(lengths)
    batch = math.prod(larger.shape[: len(larger.shape) - len(lengths)])
    real = any(not str(array.dtype).startswith("complex") for array in (operands[0], results[0]))
    return 5 * batch * points * math.log2(max(points, 2)) / (2 if real else 1)


def _matrix(flops: Callable[[int, int], float]) -> Count:
    """Per matrix of the first operand, by its rows m and columns n."""

    def count(operands: Arrays, results: Arrays, params: Params) -> float:
        *batch, m, n = operands[0].shape
        return math.prod(batch) * flops(m, n)

    return count


def _lu(m: int, n: int) -> float:
    """Golub and Van Loan, section 3.4; 2/3 n^3 for a square matrix."""
    k = min(m, n)
    return 2 * (m * n * k - (m + n) * k * k / 2 + k**3 / 3)


def _qr(m: int, n: int) -> float:
    """Householder, section 5.2: 2 n^2 (m - n / 3) for m >= n."""
    short, long = min(m, n), max(m, n)
    return 2 * short * short * (long - short / 3)


def _svd(operands: Arrays, results: Arrays, params: Params) -> float:
    """Section 8.6: singular values only 4 m n^2 - 4/3 n^3, thin factors 14 m n^2 + 8 n^3."""
    *batch, rows, columns = operands[0].shape
    m, n = max(rows, columns), min(rows, columns)
    vectors = len(results) > 1
    return math.prod(batch) * (14 * m * n * n + 8 * n**3 if vectors else 4 * m * n * n - 4 * n**3 / 3)


def _eigh(operands: Arrays, results: Arrays, params: Params) -> float:
    """Section 8.3: tridiagonal 4/3 n^3, with vectors 9 n^3."""
    *batch, _, n = operands[0].shape
    return math.prod(batch) * (9 * n**3 if len(results) > 1 else 4 * n**3 / 3)


def _triangular_solve(operands: Arrays, results: Arrays, params: Params) -> float:
    """n^2 per right-hand side."""
    return _elements(results) * operands[0].shape[-1]


def _householder_product(operands: Arrays, results: Arrays, params: Params) -> float:
    """Section 5.1: 4 (m^2 r - m r^2 + r^3 / 3) for the square factor, here restricted to n columns."""
    *batch, m, n = operands[0].shape
    r = operands[1].shape[-1]
    return math.prod(batch) * 4 * (m * n * r - (m + n) * r * r / 2 + r**3 / 3)


def _ormqr(operands: Arrays, results: Arrays, params: Params) -> float:
    """r reflections of 4 m per column."""
    return 4 * _elements(results) * operands[1].shape[-1]


def _symmetric_product(operands: Arrays, results: Arrays, params: Params) -> float:
    return 2 * _elements(results) * operands[0].shape[-1]


def _scatter(operands: Arrays, results: Arrays, params: Params) -> float:
    """One per element of the updates."""
    return _elements(operands[len(results) + 1 :])


def _bits(operands: Arrays, results: Arrays, params: Params) -> float:
    """Threefry: 20 rounds of an add, a rotation (3) and an xor per two words of 32 bits (Salmon et al., SC 2011)."""
    return 50 * all_results(operands, results, params) / 4


def _attention(num_matmuls: int) -> Count:
    """cuDNN's attention: matmuls of all queries with all keys, half of them under a causal mask, or with a window."""

    def count(operands: Arrays, results: Arrays, params: Params) -> float:
        q, k = operands[0].shape, operands[1].shape
        dims = (2, 1) if getattr(params["layout"], "value", params["layout"]) == HEADS_FIRST else (1, 2)
        queries, keys, heads = q[dims[0]], k[dims[0]], q[dims[1]]
        seen = keys / 2 if "CAUSAL" in str(getattr(params["mask_type"], "name", "")) else keys
        seen = min(seen, params.get("sliding_window_length") or seen)
        return 2 * num_matmuls * q[0] * heads * queries * seen * q[3]

    return count


TRANSCENDENTAL: Mapping[str, float] = {
    **dict.fromkeys(("div", "rem", "sqrt", "rsqrt", "cbrt", "integer_pow"), 4),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "log2"), 10),
    **dict.fromkeys(("logistic", "tanh", "sin", "cos", "sinh", "cosh", "erf", "erfc"), 16),
    **dict.fromkeys(("tan", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "pow", "erf_inv"), 24),
    **dict.fromkeys(("lgamma", "digamma", "bessel_i0e", "bessel_i1e", "polygamma", "zeta"), 50),
    **dict.fromkeys(("igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "regularized_incomplete_beta"), 500),
    "random_gamma": 500,
    **dict.fromkeys(("threefry2x32", "threefry4x32", "philox2x32", "philox4x32"), 100),
}
"""FLOPs per element where it is not 1: roughly the lengths of the polynomials in math libraries."""

MATMULS = frozenset(
    "dot_general conv_general_dilated ragged_dot_general scaled_matmul scaled_matmul_wrapper scaled_dot".split()
)
"""Matmuls and convolutions."""

ATTENTION: Mapping[str, Count] = {
    "dot_product_attention_fwd_wrapper": _attention(2),
    "dot_product_attention_bwd_wrapper": _attention(5),
}

ON_MATRIX_UNIT = MATMULS | ATTENTION.keys()
"""Ops that run on the matrix unit."""

DATA_MOVEMENT = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all bitcast_convert_type broadcast_in_dim concatenate copy
    copy_p debug_callback debug_print device_put dynamic_slice dynamic_update_slice from_edtype gather iota
    iota_2x32_shape layout_constraint lu_pivots_to_permutation optimization_barrier pad pbroadcast pin ppermute preduced
    pvary ragged_all_to_all random_clone random_seed random_unwrap random_wrap real imag complex reduced_vary_cast
    reshape reshard rev slice split squeeze stack stop_gradient tile to_edtype transpose unpin unstack
    vary_unreduced_cast with_memory_space_constraint xla_metadata_value zeros_like
    """.split()
)
"""Ops without arithmetic."""

REDUCTIONS = frozenset(
    """
    approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and reduce_max reduce_min
    reduce_or reduce_precision reduce_prod reduce_scatter reduce_sum reduce_xor unreduced_reduce_scatter
    """.split()
)
"""Ops with one FLOP per element of the operand."""

_WINDOWS = ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add")
_RANDOM = ("random_bits", "random_split", "random_fold_in", "rng_bit_generator", "rng_uniform")

FLOPS: Mapping[str, Count] = {
    **dict.fromkeys(DATA_MOVEMENT, nothing),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(_WINDOWS, _window),
    **dict.fromkeys(_RANDOM, _bits),
    **ATTENTION,
    "cholesky": _matrix(lambda m, n: n**3 / 3),
    "cholesky_update": _matrix(lambda m, n: 6 * n * n),
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "eig": _matrix(lambda m, n: 25 * n**3),
    "eigh": _eigh,
    "fft": _fft,
    "geqp3": _matrix(_qr),
    "geqrf": _matrix(_qr),
    "hessenberg": _matrix(lambda m, n: 10 * n**3 / 3),
    "householder_product": _householder_product,
    "lu": _matrix(_lu),
    "ormqr": _ormqr,
    "qr": _matrix(lambda m, n: 2 * _qr(m, n)),
    "ragged_dot_general": _ragged_dot_general,
    "scaled_dot": _scaled_matmul,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "schur": _matrix(lambda m, n: 25 * n**3),
    "select_and_scatter_add": _window_backwards,
    "sort": _sort,
    "svd": _svd,
    "symmetric_product": _symmetric_product,
    "top_k": _top_k,
    "triangular_solve": _triangular_solve,
    "tridiagonal": _matrix(lambda m, n: 4 * n**3 / 3),
    "tridiagonal_solve": lambda operands, results, params: 8 * _elements(results),
}
"""FLOPs of every primitive that is not elementwise."""
