"""e3nn: equivariant message passing over atoms, with Flax's layers, trained on energies and forces.

Shape suffixes: N atoms, E edges, G molecules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, floats, ints, specs, training

PACKAGE = "e3nn-jax"
CUTOFF = 5.0


class Interaction(nn.Module):
    """Messages are products of neighbours with spherical harmonics, weighted by a net of the distance."""

    irreps: str
    degree: int

    @nn.compact
    def __call__(
        self, features: e3nn.IrrepsArray, vectors: e3nn.IrrepsArray, senders: jax.Array, receivers: jax.Array
    ) -> e3nn.IrrepsArray:
        irreps = e3nn.Irreps(self.irreps)
        linear = partial(e3nn.flax.Linear, force_irreps_out=True)
        kept = linear(irreps, name="skip")(features)
        harmonics = e3nn.spherical_harmonics(range(1, self.degree + 1), vectors, True)
        sent = linear(features.irreps, name="up")(features)[senders]
        messages = e3nn.concatenate(
            [sent, e3nn.tensor_product(sent, harmonics, filter_ir_out=[ir for _, ir in irreps])]
        ).regroup()
        lengths = e3nn.norm(vectors).array
        radial = e3nn.bessel(lengths[:, 0], 8, CUTOFF) * e3nn.poly_envelope(5, 2, CUTOFF)(lengths)
        mix = e3nn.flax.MultiLayerPerceptron((64, 64, messages.irreps.num_irreps), nn.silu, output_activation=False)
        received = e3nn.scatter_sum(messages * mix(radial), dst=receivers, output_size=features.shape[0]) / 4
        gates = e3nn.Irreps(f"{irreps.filter(drop='0e + 0o').num_irreps}x0e")
        hidden = linear((irreps + gates).regroup(), name="down")(received)
        return kept + linear(irreps, name="mix")(e3nn.gate(hidden))


class Potential(nn.Module):
    """The energy of each molecule."""

    irreps: str
    layers: int
    degree: int

    @nn.compact
    def __call__(
        self,
        positions: jax.Array,
        species: jax.Array,
        senders: jax.Array,
        receivers: jax.Array,
        molecule: jax.Array,
    ) -> jax.Array:
        vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        channels = e3nn.Irreps(self.irreps).count("0e")
        features = e3nn.as_irreps_array(nn.Embed(100, channels)(species))
        for _ in range(self.layers):
            features = Interaction(self.irreps, self.degree)(features, vectors, senders, receivers)
        energies = e3nn.flax.Linear("0e", name="readout")(features).array[:, 0]
        return jax.ops.segment_sum(energies, molecule, num_segments=MOLECULES)


MOLECULES = 128


def force_step(sizes: Sizes, *, irreps: str, layers: int, degree: int, atoms: int, weights: Rules) -> Step:
    """The train step on energies and on forces, the gradient of the energy."""
    model = Potential(irreps, layers, degree)
    inputs = floats(atoms, 3), ints(atoms), ints(16 * atoms), ints(16 * atoms), ints(atoms)
    params = jax.eval_shape(model.init, KEY, *inputs)

    def loss(params: Any, positions: jax.Array, energy: jax.Array, force: jax.Array, *rest: jax.Array) -> jax.Array:
        def total(positions: jax.Array) -> Any:
            energies = model.apply(params, positions, *rest)
            return energies.sum(), energies

        gradient, predicted = jax.grad(total, has_aux=True)(positions)
        return jnp.mean((predicted - energy) ** 2) + 10 * jnp.mean((gradient + force) ** 2)

    batch = floats(atoms, 3), floats(MOLECULES), floats(atoms, 3), *inputs[1:]
    return training(loss, params, batch, sizes, weights=specs(params, weights, sizes))


CHANNELS: Rules = (("*/down/*", P("model", None)), ("*/up/*", P(None, "model")))

PROGRAMS: dict[str, MakeProgram] = {
    "potential": partial(
        force_step, irreps="64x0e + 64x1o + 32x2e", layers=3, degree=2, atoms=4096, weights=(("*", P()),)
    ),
    "potential, high degree": partial(
        force_step,
        irreps="128x0e + 128x0o + 64x1o + 64x1e + 32x2e + 32x2o",
        layers=2,
        degree=3,
        atoms=4096,
        weights=CHANNELS,
    ),
}
