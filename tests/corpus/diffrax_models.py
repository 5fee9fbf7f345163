"""Diffrax: neural differential equations with each kind of adjoint, and simulations.

Shape suffixes: B batch, T time, C channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step, on_mesh

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, replicated, specs_by
from .equinox_models import equinox_step

PACKAGE = "diffrax"


class Field(eqx.Module):
    """A vector field: an MLP of the state and the time."""

    mlp: eqx.nn.MLP

    def __init__(self, inputs: int, outputs: int, width: int, depth: int, key: jax.Array) -> None:
        self.mlp = eqx.nn.MLP(inputs + 1, outputs, width, depth, jax.nn.softplus, jnp.tanh, key=key)

    def __call__(self, t: jax.Array, y: jax.Array, args: Any) -> jax.Array:
        return self.mlp(jnp.append(y, t))


COLUMNS_ROWS: Rules = (
    ("*layers/0/weight", P("model", None)),
    ("*layers/0/bias", P("model")),
    ("*layers/1/weight", P(None, "model")),
)
megatron = partial(specs_by, COLUMNS_ROWS)


def neural_ode(sizes: Sizes) -> Step:
    """Trajectories fitted with adaptive steps, common to the batch, and recursive checkpoints."""
    times = jnp.linspace(0.0, 1.0, 16)

    def loss(field: Field, trajectories_TBC: jax.Array) -> jax.Array:
        control = diffrax.PIDController(rtol=1e-3, atol=1e-6)
        term = diffrax.ODETerm(eqx.filter_vmap(field, in_axes=(None, 0, None)))
        solver, at = diffrax.Tsit5(), diffrax.SaveAt(ts=times)
        y0 = trajectories_TBC[0]
        solved = diffrax.diffeqsolve(
            term, solver, 0, 1, 0.05, y0, stepsize_controller=control, saveat=at, max_steps=256
        )
        return jnp.mean((solved.ys - trajectories_TBC) ** 2)

    step = equinox_step(partial(Field, 2048, 2048, 16384, 1), loss, (floats(16, 512, 2048),), sizes, megatron)
    return Step(run=step.run, args=step.args, specs=(step.specs[0], on_mesh(P(None, ("data", "fsdp")), sizes)))


class ControlledModel(eqx.Module):
    """A neural controlled differential equation and a linear classifier of its last state."""

    initial: eqx.nn.MLP
    field: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, channels: int, hidden: int, width: int, key: jax.Array) -> None:
        k1, k2, k3 = jax.random.split(key, 3)
        self.initial = eqx.nn.MLP(channels, hidden, width, 1, key=k1)
        self.field = eqx.nn.MLP(hidden, hidden * channels, width, 1, jax.nn.softplus, jnp.tanh, key=k2)
        self.head = eqx.nn.Linear(hidden, 100, key=k3)

    def __call__(self, times: jax.Array, coefficients: Any) -> jax.Array:
        control = diffrax.CubicInterpolation(times, coefficients)
        y0 = self.initial(control.evaluate(times[0]))

        def matrix(t: jax.Array, y: jax.Array, args: Any) -> jax.Array:
            return self.field(y).reshape(len(y), -1)

        term = diffrax.ControlTerm(matrix, control).to_ode()
        adjoint = diffrax.RecursiveCheckpointAdjoint(checkpoints=16)
        return self.head(
            diffrax.diffeqsolve(term, diffrax.Heun(), times[0], times[-1], times[1], y0, adjoint=adjoint).ys[-1]
        )


def neural_cde(sizes: Sizes) -> Step:
    """Series of 16 channels classified; each is solved by itself."""

    def loss(model: ControlledModel, series_BTC: jax.Array, label: jax.Array) -> jax.Array:
        times = jnp.linspace(0.0, 1.0, series_BTC.shape[1])
        coefficients = jax.vmap(diffrax.backward_hermite_coefficients, (None, 0))(times, series_BTC)
        logits = jax.vmap(model, (None, 0))(times, coefficients)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    make = partial(ControlledModel, 16, 128, 1024)
    return equinox_step(make, loss, (floats(512, 1024, 16), ints(512)), sizes, megatron)


def normalizing_flow(sizes: Sizes) -> Step:
    """A continuous flow with Hutchinson's estimate of the trace, solved backwards for its gradient."""

    def dynamics(t: jax.Array, y: Any, args: Any) -> Any:
        field, probe = args
        dy, pull = jax.vjp(lambda x: jax.vmap(field, (None, 0, None))(t, x, None), y[0])
        return dy, jnp.sum(pull(probe)[0] * probe, -1)

    def loss(field: Field, x: jax.Array, key: jax.Array) -> jax.Array:
        probe = jax.random.normal(key, x.shape)
        term, start = diffrax.ODETerm(dynamics), (x, jnp.zeros(len(x)))
        solver, adjoint = diffrax.Dopri5(), diffrax.BacksolveAdjoint()
        y, change = diffrax.diffeqsolve(term, solver, 0, 0.5, 0.05, start, (field, probe), adjoint=adjoint).ys
        return jnp.mean(0.5 * jnp.sum(y[0] ** 2, -1) - change[0])

    return equinox_step(partial(Field, 3072, 3072, 8192, 1), loss, (floats(1024, 3072), KEY), sizes, megatron)


def neural_sde(sizes: Sizes) -> Step:
    """A generator driven by Brownian motion, whose moments are fitted."""

    def loss(fields: tuple[Field, Field], y0: jax.Array, mean: jax.Array, key: jax.Array) -> jax.Array:
        drift, diffusion = fields

        def solve(y0: jax.Array, key: jax.Array) -> jax.Array:
            motion = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (16,), key)
            noise = diffrax.ControlTerm(lambda t, y, args: diffusion(t, y, args).reshape(-1, 16), motion)
            terms = diffrax.MultiTerm(diffrax.ODETerm(drift), noise)
            return diffrax.diffeqsolve(terms, diffrax.EulerHeun(), 0.0, 1.0, 1 / 64, y0, max_steps=64).ys[-1]

        return jnp.mean((jax.vmap(solve)(y0, jax.random.split(key, len(y0))).mean(0) - mean) ** 2)

    def make(key: jax.Array) -> tuple[Field, Field]:
        k1, k2 = jax.random.split(key)
        return Field(256, 256, 512, 2, k1), Field(256, 256 * 16, 512, 2, k2)

    step = equinox_step(make, loss, (floats(512, 256), floats(256), KEY), sizes, replicated)
    return Step(run=step.run, args=step.args, specs=(*step.specs[:2], P(), None))


def reaction_diffusion(sizes: Sizes) -> Step:
    """A simulation over a grid in three dimensions, two of them sharded, without the check of its result."""

    def change(t: jax.Array, y: Any, args: Any) -> Any:
        def laplacian(f: jax.Array) -> jax.Array:
            return sum(jnp.roll(f, shift, axis) for axis in range(3) for shift in (-1, 1)) - 6 * f

        u, v = y
        uvv = u * v * v
        return 0.16 * laplacian(u) - uvv + 0.06 * (1 - u), 0.08 * laplacian(v) + uvv - 0.122 * v

    def run(y: Any) -> Any:
        term, adjoint = diffrax.ODETerm(change), diffrax.ForwardMode()
        solved = diffrax.diffeqsolve(
            term, diffrax.Bosh3(), 0.0, 10.0, 0.5, y, adjoint=adjoint, max_steps=20, throw=False
        )
        return jax.tree.map(lambda f: f[-1], solved.ys)

    grids = floats(512, 512, 256), floats(512, 512, 256)
    return Step(run=run, args=(grids,), specs=(batch_specs(grids, sizes, P(("data", "fsdp"), "model")),))


def stiff_chemistry(sizes: Sizes) -> Step:
    """Robertson's reactions in many cells with an implicit solver."""

    def change(t: jax.Array, y: jax.Array, rates: jax.Array) -> jax.Array:
        a, b, c = rates
        first, second, third = a * y[0], c * y[1] * y[2], b * y[1] ** 2
        return jnp.stack([second - first, first - second - third, third])

    def solve(y0: jax.Array, rates: jax.Array) -> jax.Array:
        control = diffrax.PIDController(rtol=1e-5, atol=1e-8, pcoeff=0.3, icoeff=0.4)
        term, solver = diffrax.ODETerm(change), diffrax.Kvaerno5()
        return diffrax.diffeqsolve(term, solver, 0.0, 1e3, 1e-4, y0, rates, stepsize_controller=control).ys[-1]

    cells = floats(4_194_304, 3)
    spec = batch_specs(cells, sizes, P(("data", "fsdp", "model")))
    return Step(run=jax.vmap(solve), args=(cells, cells), specs=(spec, spec))


PROGRAMS: dict[str, MakeProgram] = {
    "neural ode": neural_ode,
    "neural cde": neural_cde,
    "normalizing flow": normalizing_flow,
    "neural sde": neural_sde,
    "reaction-diffusion": reaction_diffusion,
    "stiff chemistry": stiff_chemistry,
}
