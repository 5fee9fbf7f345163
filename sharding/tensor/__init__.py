"""Layers whose weights an axis splits, and a vocabulary that it splits, with no array gathered (Megatron-LM).

Example:
    def loss(params, tokens, targets):
        x = tensor.embed(params["table"], tokens)
        h = tensor.column_parallel(x, params["w1"], params["b1"])
        x = x + tensor.row_parallel(jax.nn.gelu(h), params["w2"], params["b2"])
        return tensor.cross_entropy(tensor.logits(x, params["table"]), targets)
"""

from .layers import column_parallel, row_parallel
from .length import gathered, scattered
from .loss import cross_entropy, losses
from .specs import specs, split
from .vocabulary import embed, logits, padded_vocabulary

__all__ = [
    "column_parallel",
    "cross_entropy",
    "embed",
    "gathered",
    "logits",
    "losses",
    "padded_vocabulary",
    "row_parallel",
    "scattered",
    "specs",
    "split",
]
