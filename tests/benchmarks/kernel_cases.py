"""The operations that are timed: their arguments, of a GPT's sizes and tiny ones, and their implementations."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from sharding import kernels

AUTO = "auto"

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operation at some sizes."""

    name: str
    module: str
    """That of `sharding.kernels` which lists its implementations."""
    call: Callable[..., Any]
    """(*arrays, implementation=...) -> results."""
    make: Callable[..., tuple[Any, ...]]
    """(*sizes) -> arrays."""
    sizes: Sizes
    tiny: Sizes
    """Those of a smoke test."""
    wrt: tuple[int, ...] = (0,)
    """The arguments that have gradients."""
    flops: Callable[[tuple[Any, ...]], float] = lambda args: 0
    """Of the forward pass; 0 where memory is the limit."""
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Other libraries' functions of the same arrays."""

    @property
    def directions(self) -> tuple[bool, ...]:
        """Whether gradients are computed: without and, if any argument has some, with."""
        return (False, True) if self.wrt else (False,)

    def args(self, is_tiny: bool) -> tuple[Any, ...]:
        """The arguments."""
        return self.make(*(self.tiny if is_tiny else self.sizes))

    def implementations(self) -> dict[str, Callable[..., Any]]:
        """Name -> function of the arguments."""
        listed = importlib.import_module(f"sharding.kernels.{self.module}").IMPLEMENTATIONS
        names = [AUTO, "xla", *(one.name for one in listed)]
        return {name: functools.partial(self.call, implementation=name) for name in names} | dict(self.peers)


def normal(seed: int, shape: Sizes, dtype: str = "bfloat16") -> jax.Array:
    """Random numbers of unit variance."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _heads(batch: int, length: int, heads: int, features: int) -> tuple[jax.Array, ...]:
    return tuple(normal(seed, (batch, length, heads, features)) for seed in range(3))


def _causal_flops(args: tuple[Any, ...]) -> float:
    batch, length, heads, features = args[0].shape
    return 2 * batch * heads * length * length * features


def _tokens(tokens: int, features: int, vocabulary: int) -> tuple[jax.Array, ...]:
    labels = jax.random.randint(jax.random.key(2), (tokens,), 0, vocabulary)
    return normal(0, (tokens, features)), normal(1, (vocabulary, features)) / features**0.5, labels


def _attention_peers(*, causal: bool = True) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    }
    if importlib.util.find_spec("tokamax") is not None:
        tokamax = importlib.import_module("tokamax")
        found["tokamax"] = lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=causal)
    return found


CASES = [
    Case(
        name="attention, GPT-2 124M",
        module="dot_product_attention",
        call=functools.partial(kernels.attention, causal=True),
        make=_heads,
        sizes=(16, 1024, 12, 64),
        tiny=(1, 128, 2, 64),
        wrt=(0, 1, 2),
        flops=_causal_flops,
        peers=_attention_peers(),
    ),
    Case(
        name="attention, 8,192 tokens",
        module="dot_product_attention",
        call=functools.partial(kernels.attention, causal=True),
        make=_heads,
        sizes=(2, 8192, 16, 128),
        tiny=(1, 256, 1, 128),
        wrt=(0, 1, 2),
        flops=_causal_flops,
        peers=_attention_peers(),
    ),
    Case(
        name="attention, ViT-B/16",
        module="dot_product_attention",
        call=kernels.attention,
        make=_heads,
        sizes=(128, 197, 12, 64),
        tiny=(1, 127, 2, 64),
        wrt=(0, 1, 2),
        flops=lambda args: 2 * _causal_flops(args),
        peers=_attention_peers(causal=False),
    ),
    Case(
        name="RMS norm",
        module="rms_norm",
        call=kernels.rms_norm,
        make=lambda rows, features: (normal(0, (rows, features)), jnp.ones(features)),
        sizes=(16_384, 4096),
        tiny=(16, 128),
        wrt=(0, 1),
    ),
    Case(
        name="RMS norm that keeps its output",
        module="rms_norm",
        call=functools.partial(kernels.rms_norm, keep="output"),
        make=lambda rows, features: (normal(0, (rows, features)), jnp.ones(features)),
        sizes=(16_384, 4096),
        tiny=(16, 128),
        wrt=(0, 1),
    ),
    Case(
        name="rotary embedding",
        module="rotary",
        call=kernels.rotary,
        make=lambda *sizes: (normal(0, sizes),),
        sizes=(8, 2048, 32, 128),
        tiny=(1, 64, 1, 128),
    ),
    Case(
        name="GELU, GPT-2 124M",
        module="gelu",
        call=kernels.gelu,
        make=lambda *sizes: (normal(0, sizes),),
        sizes=(16_384, 3072),
        tiny=(16, 128),
    ),
    Case(
        name="bias, GELU and dropout",
        module="bias_gelu_dropout",
        call=functools.partial(kernels.bias_gelu_dropout, rate=0.1),
        make=lambda rows, features: (normal(0, (rows, features)), jnp.zeros(features), jax.random.key(0)),
        sizes=(16_384, 8192),
        tiny=(16, 128),
        wrt=(0, 1),
    ),
    Case(
        name="layer norm",
        module="layer_norm",
        call=kernels.layer_norm,
        make=lambda rows, features: (normal(0, (rows, features)), jnp.ones(features), jnp.zeros(features)),
        sizes=(16_384, 4096),
        tiny=(16, 128),
        wrt=(0, 1, 2),
    ),
    Case(
        name="scaled softmax",
        module="scaled_softmax",
        call=kernels.scaled_softmax,
        make=lambda rows, scores: (normal(0, (rows, scores)),),
        sizes=(65_536, 2048),
        tiny=(16, 128),
    ),
    Case(
        name="linear cross entropy, GPT-2 124M",
        module="linear_cross_entropy",
        call=functools.partial(kernels.linear_cross_entropy, transposed=True),
        make=_tokens,
        sizes=(16_384, 768, 50_304),
        tiny=(64, 128, 256),
        wrt=(0, 1),
        flops=lambda args: 2 * args[0].shape[0] * args[1].shape[0] * args[1].shape[1],
    ),
]
