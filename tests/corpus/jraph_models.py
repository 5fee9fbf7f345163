"""Jraph: graph networks over large graphs and batches of small ones, with Haiku's layers.

Shape suffixes: N nodes, E edges, G graphs, M features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, floats, ints, largest_dim, replicated, specs, training

PACKAGE = "jraph"


def graph(nodes: int, edges: int, graphs: int, features: int, edge_features: int | None = None) -> jraph.GraphsTuple:
    """The shapes of padded graphs."""
    return jraph.GraphsTuple(
        nodes=floats(nodes, features),
        edges=None if edge_features is None else floats(edges, edge_features),
        receivers=ints(edges),
        senders=ints(edges),
        globals=None if edge_features is None else floats(graphs, edge_features),
        n_node=ints(graphs),
        n_edge=ints(graphs),
    )


def mlp(width: int, depth: int = 2) -> Callable[[jax.Array], jax.Array]:
    """An MLP with a layer norm."""
    return hk.Sequential([hk.nets.MLP([width] * depth), hk.LayerNorm(-1, True, True)])


def simulator(g: jraph.GraphsTuple, width: int, steps: int) -> jax.Array:
    """Encode, process with residual graph networks, decode: an acceleration of each node."""
    g = jraph.GraphMapFeatures(mlp(width), mlp(width), mlp(width))(g)
    for _ in range(steps):
        update_edge, update_node, update_global = (jraph.concatenated_args(mlp(width)) for _ in range(3))
        new = jraph.GraphNetwork(update_edge, update_node, update_global)(g)
        g = new._replace(nodes=g.nodes + new.nodes, edges=g.edges + new.edges, globals=g.globals + new.globals)
    return hk.nets.MLP([width, 3])(g.nodes)


def interaction(g: jraph.GraphsTuple, width: int) -> jax.Array:
    """A logit of each graph from an interaction network and the mean of its nodes."""
    g = jraph.GraphMapFeatures(hk.Linear(width), hk.Linear(width))(g)
    update_edge = jraph.concatenated_args(mlp(width))
    g = jraph.InteractionNetwork(
        update_edge, jraph.concatenated_args(mlp(width)), include_sent_messages_in_node_update=True
    )(g)
    graphs = len(g.n_node)
    owner = jnp.repeat(jnp.arange(graphs), g.n_node, total_repeat_length=len(g.nodes))
    return hk.nets.MLP([width, 1])(jraph.segment_mean(g.nodes, owner, graphs))


def convolutional(g: jraph.GraphsTuple, width: int, classes: int) -> jax.Array:
    """Logits of each node from three symmetrically normalized graph convolutions."""
    for outputs in (width, width, classes):
        g = jraph.GraphConvolution(hk.Linear(outputs), add_self_edges=True)(g._replace(nodes=jax.nn.relu(g.nodes)))
    return g.nodes


def attentive(g: jraph.GraphsTuple, width: int, heads: int, classes: int) -> jax.Array:
    """Logits of each node from graph attention, whose softmax is over the edges that a node receives."""

    def logits(sent: jax.Array, received: jax.Array, edges: Any) -> jax.Array:
        return jax.nn.leaky_relu(hk.Linear(1)(jnp.concatenate([sent, received], -1)))

    for _ in range(2):
        out = [jraph.GAT(hk.Linear(width), logits, jax.nn.elu)(g).nodes for _ in range(heads)]
        g = g._replace(nodes=jnp.concatenate(out, -1))
    return hk.Linear(classes)(g.nodes)


def node_classes(logits: jax.Array, _: Any, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of the nodes."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def graph_classes(logits: jax.Array, _: Any, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of the graphs' bits."""
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def motion(acceleration: jax.Array, _: Any, target: jax.Array) -> jax.Array:
    """The mean squared error."""
    return jnp.mean((acceleration - target) ** 2)


def graph_step(
    forward: Any, loss: Any, g: jraph.GraphsTuple, target: Any, sizes: Sizes, *, weights: Any, rows: P
) -> Step:
    """The train step of a network over graphs; nodes and edges have the same spec."""
    net = hk.without_apply_rng(hk.transform(forward))
    params = jax.eval_shape(net.init, KEY, g)

    def mean(params: Any, g: jraph.GraphsTuple, target: jax.Array) -> jax.Array:
        return loss(net.apply(params, g), g, target)

    return training(mean, params, (g, target), sizes, weights=weights(params, sizes), rows=rows)


HIDDEN: Rules = (("*mlp/*linear_0/w", P(None, "model")), ("*mlp/*linear_1/w", P("model", None)))
DATA, ALL = P(("data", "fsdp")), P(("data", "fsdp", "model"))


def hidden(params: Any, sizes: Sizes) -> Any:
    """Tensor parallelism of each MLP."""
    return specs(params, HIDDEN, sizes)


PROGRAMS: dict[str, MakeProgram] = {
    "graph network": partial(
        graph_step,
        partial(simulator, width=512, steps=6),
        motion,
        graph(65_536, 524_288, 8, 64, 16),
        floats(65_536, 3),
        weights=replicated,
        rows=ALL,
    ),
    "graph network, tensor parallel": partial(
        graph_step,
        partial(simulator, width=2048, steps=4),
        motion,
        graph(8_192, 32_768, 8, 64, 16),
        floats(8_192, 3),
        weights=hidden,
        rows=DATA,
    ),
    "interaction network": partial(
        graph_step,
        partial(interaction, width=1024),
        graph_classes,
        graph(131_072, 262_144, 4_096, 128, 32),
        floats(4_096, 1),
        weights=largest_dim,
        rows=DATA,
    ),
    "graph convolution": partial(
        graph_step,
        partial(convolutional, width=256, classes=48),
        node_classes,
        graph(1_048_576, 8_388_608, 1, 100),
        ints(1_048_576),
        weights=replicated,
        rows=ALL,
    ),
    "graph attention": partial(
        graph_step,
        partial(attentive, width=64, heads=4, classes=40),
        node_classes,
        graph(262_144, 2_097_152, 1, 128),
        ints(262_144),
        weights=replicated,
        rows=DATA,
    ),
}
