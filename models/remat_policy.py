"""What rematerialised layers save for their backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Policy = Callable[..., Any]
"""A policy of `jax.checkpoint`."""
Remat = bool | tuple[Policy, ...]
"""Whether layers are rematerialised, except their attention output; or the policies of consecutive layers, in turn."""

NAMES = ("block_input", "qkv", "attention_output", "attention_logsumexp", "attention_out", "mlp_hidden")
"""The values of a layer that policies choose by; two of them are those of attention kernels."""

REMAT_POLICY = jax.checkpoint_policies.save_only_these_names("attention_out")
"""Save the attention output only; the layers name it with `checkpoint_name`."""


def policies(remat: Remat) -> tuple[Policy, ...]:
    """The policies of consecutive layers, in turn; none where layers are not rematerialised."""
    if isinstance(remat, tuple):
        return remat
    return (REMAT_POLICY,) if remat else ()


def rematerialised(call: Callable[..., Any], remat: Remat, *, scan: bool) -> Sequence[Callable[..., Any]]:
    """The calls of consecutive layers, in turn."""
    # Inside a scan the loop already prevents CSE of the two computations.
    found = [jax.checkpoint(call, policy=policy, prevent_cse=not scan) for policy in policies(remat)]
    return found or [call]


def scan_layers(calls: Sequence[Callable[[Any, Any], tuple[Any, Any]]], carry: Any, layers_L: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` over stacked layers, where each iteration runs one layer per call.

    Args:
        calls: (carry, layer) -> (carry, output), of consecutive layers, in turn; their number divides L.
        carry: the first carry.
        layers_L: arrays [L, ...].
    """
    if len(calls) == 1:
        return jax.lax.scan(calls[0], carry, layers_L)

    def several(carry: Any, layers: Any) -> tuple[Any, Any]:
        outputs = []
        for i, call in enumerate(calls):
            carry, output = call(carry, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
            outputs.append(output)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, len(calls), *leaf.shape[1:]), layers_L)
    carry, outputs = jax.lax.scan(several, carry, grouped)
    return carry, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
