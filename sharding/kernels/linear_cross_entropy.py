"""Cross entropy of a linear layer, whose logits [tokens, vocabulary] are never stored.

Blocks of the vocabulary are taken one by one, forward and backward; the backward pass computes logits again from x, w
and the kept logsumexp of each token (Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models,
arXiv:2411.09009, section 4). Where the vocabulary is sharded, each device takes its own blocks, and the devices'
logsumexps and label logits, two numbers per token, are combined (Shoeybi et al., Megatron-LM, arXiv:1909.08053,
section 3). Nothing is gathered; gradients of x are summed over shards of the vocabulary, those of w over shards of the
tokens.

Shape suffixes: T tokens, M features, V vocabulary, N parts of the vocabulary, 1 a dim of size 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from ..mesh import current
from . import cross_entropy_block, cross_entropy_gpu, cross_entropy_scan, cross_entropy_tpu
from .cross_entropy_block import Cotangents, Softmax
from .implementation import XLA, Candidate, backend, choose
from .with_rule import with_rule

SCAN = "xla_chunked"
"""A scan over blocks of the vocabulary in plain JAX, on each device's shards."""

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_tpu",
        platforms=frozenset({"tpu"}),
        obstacle=cross_entropy_tpu.obstacle,
        why="tiles of logits stay in VMEM",
    ),
    Candidate(
        name="mosaic_gpu",
        platforms=frozenset({"gpu"}),
        obstacle=cross_entropy_gpu.obstacle,
        why="tiles of logits stay in registers",
    ),
    Candidate(
        name=SCAN,
        platforms=frozenset({"cpu", "gpu", "tpu"}),
        obstacle=lambda *_, **__: "",
        why="blocks of logits in plain JAX, on each device's shards",
    ),
)

MOST_PARTS = 512
"""Of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a call, static."""

    softcap: float | None
    is_transposed: bool
    implementation: str
    num_parts: int


def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    transposed: bool = False,
    return_stats: bool = False,
    implementation: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Cross entropy in nats of each token, with logits `x @ w + bias`, accumulated in float32.

    x and w are multiplied in their common dtype. Beside them, a logsumexp per token is kept for the backward pass.

    Args:
        x: [..., M], of a floating-point dtype.
        w: [M, V]; with `transposed`, [V, M], such as a tied embedding.
        labels: integers [...], less than V. Loss, logsumexp and gradients of a token with a negative label are 0.
        bias: [V].
        softcap: bounds logits to `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
        transposed: whether w is [V, M].
        return_stats: whether to return each token's logsumexp, too, as for a z-loss.
        implementation: `"mosaic_tpu"`; `"mosaic_gpu"`; `"xla_chunked"`, a scan over blocks in plain JAX; `"xla"`, plain
            JAX with whole logits; or `"auto"`, the kernel of the current mesh's platform if it can take these arrays,
            else the scan.

    Returns:
        Losses [...] in float32; with `return_stats`, losses and logsumexps.

    Raises:
        ShardingError: mismatched shapes or dtypes; the implementation is unknown or can't take these arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> x, w, labels = jnp.ones((2, 4)), jnp.zeros((4, 8)), jnp.array([3, -1])
        >>> kernels.linear_cross_entropy(x, w, labels).round(3)  # log 8
        Array([2.079, 0.   ], dtype=float32)
    """
    _check(x, w, labels, bias, softcap, transposed)
    dtype = jnp.result_type(x, w)
    x, w = x.astype(dtype), w.astype(dtype)
    parts = num_parts(w.shape[0 if transposed else 1])
    static = {"transposed": transposed, "num_parts": parts}
    chosen = choose("linear_cross_entropy", IMPLEMENTATIONS, implementation, x, w, **static)
    if chosen == XLA:
        losses, logsumexp = reference(x, w, labels, bias=bias, softcap=softcap, transposed=transposed)
    else:
        options = Options(
            softcap=softcap,
            is_transposed=transposed,
            implementation=chosen,
            num_parts=parts,
        )
        found: Any = _losses(x, w, bias, labels.astype(jnp.int32), options)
        losses, logsumexp = found
    return (losses, logsumexp) if return_stats else losses


def reference(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Losses and logsumexps in plain JAX, from whole logits."""
    dims = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
    logits = jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + bias.shape)
    z = cross_entropy_block.capped(logits, None, softcap)
    is_label = jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == labels[..., None]
    logsumexp = jnp.where(labels < 0, 0.0, jax.nn.logsumexp(z, axis=-1))
    return logsumexp - jnp.sum(jnp.where(is_label, z, 0.0), axis=-1), logsumexp


def num_parts(vocabulary: int) -> int:
    """N: whatever mesh axes the vocabulary is sharded over, their size divides N."""
    mesh = current()
    common = math.gcd(vocabulary, 1 if mesh is None else mesh.size)
    return max(n for n in range(1, min(common, MOST_PARTS) + 1) if common % n == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _losses(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, labels: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    return _counted(labels, *_softmax(x, w, bias, labels, options))


def _counted(labels: jax.Array, logsumexp: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Losses and logsumexps, 0 where the label is negative."""
    is_counted = labels >= 0
    return jnp.where(is_counted, logsumexp - target, 0.0), jnp.where(is_counted, logsumexp, 0.0)


def _softmax(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, labels: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Logsumexp of each token, and the logit of its label or 0."""
    run = _on_shards(x.ndim - 1, bias is not None, options)
    logsumexp_N, target_N = run(x, w, labels, _starts(w, options), *([] if bias is None else [bias]))
    return jax.nn.logsumexp(logsumexp_N, axis=-1), jnp.sum(target_N, axis=-1)


@functools.cache
def _on_shards(num_rows: int, has_bias: bool, options: Options) -> Callable[..., Any]:
    def linear_cross_entropy(x: Any, w: Any, labels: Any, starts_N: Any, *bias: Any) -> tuple[jax.Array, jax.Array]:
        found = _forward(x, w, labels - starts_N[0], bias, options)
        # Of its parts of the vocabulary, a device has results in the first one.
        others = [(0, 0)] * labels.ndim + [(0, len(starts_N) - 1)]
        per_part = [y.reshape(*labels.shape, 1) for y in (found.logsumexp_T1, found.target_T1)]
        return jnp.pad(per_part[0], others, constant_values=-jnp.inf), jnp.pad(per_part[1], others)

    rows, of_w, operands = _names(num_rows, has_bias, options)
    rule = f"{rows} m, {of_w}, {rows}, {', '.join(['n', *operands])} -> {rows} n, {rows} n"
    return with_rule(linear_cross_entropy, rule, need_replication=["m", "k"])


def _keep(x: jax.Array, w: jax.Array, bias: jax.Array | None, labels: jax.Array, options: Options) -> Any:
    logsumexp, target = _softmax(x, w, bias, labels, options)
    return _counted(labels, logsumexp, target), (x, w, bias, labels, logsumexp)


def _gradients(options: Options, kept: Any, cts: Any) -> Any:
    x, w, bias, labels, logsumexp = kept
    of_loss, of_logsumexp = (jnp.where(labels < 0, 0.0, ct) for ct in cts)
    run = _gradients_on_shards(x.ndim - 1, bias is not None, options)
    biases = [] if bias is None else [bias]
    of_x, of_w, *of_biases = run(
        x, w, labels, logsumexp, of_loss + of_logsumexp, -of_loss, _starts(w, options), *biases
    )
    return of_x, of_w, of_biases[0] if of_biases else None, None


@functools.cache
def _gradients_on_shards(num_rows: int, has_bias: bool, options: Options) -> Callable[..., Any]:
    def linear_cross_entropy_gradients(
        x: Any, w: Any, labels: Any, logsumexp: Any, of_softmax: Any, of_target: Any, starts_N: Any, *bias: Any
    ) -> list[jax.Array]:
        tokens = (labels - starts_N[0], logsumexp, of_softmax, of_target)
        found = _backward(x, w, Cotangents(*(y.reshape(-1, 1) for y in tokens)), bias, options)
        return [found[0].reshape(x.shape), *found[1:]]

    rows, of_w, of_bias = _names(num_rows, has_bias, options)
    operands = [f"{rows} m", of_w, *[rows] * 4, "n", *of_bias]
    rule = f"{', '.join(operands)} -> {', '.join([f'{rows} m', of_w, *of_bias])}"
    reduction = [*rows.split(), "n"]
    return with_rule(linear_cross_entropy_gradients, rule, reduction=reduction, need_replication=["m", "k"])


_losses.defvjp(_keep, _gradients)


def _names(num_rows: int, has_bias: bool, options: Options) -> tuple[str, str, list[str]]:
    """In the notation of rules: the dims of the tokens, w, and bias if any."""
    rows = " ".join(f"r{i}" for i in range(num_rows))
    return rows, "(n k) m" if options.is_transposed else "m (n k)", ["(n k)"] if has_bias else []


def _starts(w: jax.Array, options: Options) -> jax.Array:
    """The first column of each part, [N], sharded as the vocabulary: so a device knows which part it has."""
    vocabulary = w.shape[0 if options.is_transposed else 1]
    return jnp.arange(options.num_parts, dtype=jnp.int32) * (vocabulary // options.num_parts)


def _forward(x: Any, w: Any, labels: Any, bias: Sequence[Any], options: Options) -> Softmax:
    static = {"softcap": options.softcap, "is_transposed": options.is_transposed}
    args = x.reshape(-1, x.shape[-1]), w, bias[0] if bias else None, labels.reshape(-1, 1)
    if options.implementation == SCAN:
        return cross_entropy_scan.forward(*args, **static)
    compiler = backend(options.implementation)
    forward = cross_entropy_tpu.forward if compiler.target == "tpu" else cross_entropy_gpu.forward
    return forward(*args, **static, interpret=compiler.interpret)


def _backward(x: Any, w: Any, cts: Cotangents, bias: Sequence[Any], options: Options) -> list[jax.Array]:
    static = {"softcap": options.softcap, "is_transposed": options.is_transposed}
    args = x.reshape(-1, x.shape[-1]), w, bias[0] if bias else None, cts
    if options.implementation == SCAN:
        found = cross_entropy_scan.backward(*args, **static)
    else:
        compiler = backend(options.implementation)
        gradients = cross_entropy_tpu.backward if compiler.target == "tpu" else cross_entropy_gpu.backward
        found = gradients(*args, **static, interpret=compiler.interpret)
    return [y for y in found if y is not None]


def _check(x: Any, w: Any, labels: Any, bias: Any, softcap: Any, transposed: bool) -> None:
    required = []
    features, vocabulary = reversed(w.shape) if transposed and w.ndim == 2 else w.shape[:2] if w.ndim == 2 else (0, 0)
    layout = "[V, M]" if transposed else "[M, V]"
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != features:
        required.append(f"x of [..., M] and w of {layout}")
    if labels.shape != x.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        required.append("integer labels of the leading dims of x")
    if bias is not None and bias.shape != (vocabulary,):
        required.append("bias of [V]")
    if not all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x, w, *([] if bias is None else [bias]))):
        required.append("x, w and bias of floating-point dtypes")
    if softcap is not None and not softcap > 0:
        required.append("softcap > 0")
    if required:
        arrays = {"x": x, "w": w, "labels": labels} | ({} if bias is None else {"bias": bias})
        found = [f"{name}: {y.dtype}{list(y.shape)}" for name, y in arrays.items()]
        call = f"kernels.linear_cross_entropy(..., softcap={softcap}, transposed={transposed})"
        raise ShardingError(call, found=found, required="; ".join(required))
