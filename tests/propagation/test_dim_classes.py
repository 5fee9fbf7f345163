"""Classes of dims, compared with what a reader ties by hand."""

import jax
import jax.numpy as jnp
from support.annotated_programs import propagate

import sharding
from sharding.propagation.dim_classes import DimClasses


def classes_of(f, *shapes):
    """One letter per class for the dims of each argument, in order of first use: `["ab", "bc"]`."""
    graph = propagate(f, *[(shape, None) for shape in shapes]).graph
    classes, letters = DimClasses(graph), {}
    return [
        "".join(letters.setdefault(classes.of((v, d)), "abcdefgh"[len(letters)]) for d in range(len(graph.shapes[v])))
        for v in graph.inputs
    ]


def test_a_product_ties_what_it_contracts_and_keeps_the_rest_apart():
    assert classes_of(lambda x, w: x @ w, (8, 4), (4, 16)) == ["ab", "bc"]


def test_a_residual_ties_the_features_of_all_layers():
    def layers(x, up, down):
        return x + jnp.tanh(x @ up) @ down

    assert classes_of(layers, (8, 4), (4, 16), (16, 4)) == ["ab", "bc", "cb"]


def test_a_reshape_ties_the_major_factor():
    assert classes_of(lambda x, w: x.reshape(8, 2, 4) + w, (8, 8), (8, 2, 4)) == ["ab", "abc"]


def test_dims_of_size_1_tie_nothing():
    assert classes_of(lambda x, w: (x + w).sum(), (8, 4), (1, 4)) == ["ab", "cb"]


def test_loops_tie_what_they_carry():
    def scanned(x, ws):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    assert classes_of(scanned, (8, 4), (3, 4, 4)) == ["ab", "cbb"]


def test_members_of_a_group_are_tied():
    def both(x, y):
        x, y = sharding.same(x, y)
        return x * 2.0, y * 3.0

    assert classes_of(both, (8, 4), (8, 4)) == ["ab", "ab"]
