"""JAX MD: particles simulated in the energy's and in the canonical ensemble, and a cell's relaxation, in scans."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax_md import energy, minimize, quantity, simulate, space
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, batch_specs, floats

PACKAGE = "jax-md"
ALL = P(("data", "fsdp", "model"))


def box(particles: int) -> float:
    """The side of a box with unit density."""
    return particles ** (1 / 3)


def stepped(apply: Any, steps: int) -> Any:
    """State -> the state after some steps."""

    def run(state: Any) -> Any:
        return jax.lax.scan(lambda state, _: (apply(state), None), state, length=steps)[0]

    return run


def lennard_jones(sizes: Sizes, *, particles: int) -> Step:
    """Steps of velocity Verlet with all pairs of particles, and the energies between."""
    displacement, shift = space.periodic(box(particles))
    potential = energy.lennard_jones_pair(displacement)
    init, apply = simulate.nve(potential, shift, 1e-3)

    def run(state: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            state = stepped(apply, 10)(state)
            return state, potential(state.position) + quantity.kinetic_energy(momentum=state.momentum)

        return jax.lax.scan(body, state, length=4)

    state = jax.eval_shape(lambda key, position: init(key, position, kT=1.0), KEY, floats(particles, 3))
    return Step(run=run, args=(state,), specs=(batch_specs(state, sizes, ALL),))


def thermostat(sizes: Sizes, *, replicas: int, particles: int) -> Step:
    """Langevin steps of many small systems at several temperatures, with Morse potentials."""
    displacement, shift = space.periodic(box(particles))
    init, apply = simulate.nvt_langevin(energy.morse_pair(displacement, alpha=4.0), shift, 1e-3, 1.0, gamma=0.5)

    def run(states: Any, temperatures: jax.Array) -> Any:
        return jax.vmap(lambda state, kT: stepped(partial(apply, kT=kT), 20)(state))(states, temperatures)

    keys = jax.eval_shape(lambda key: jax.random.split(key, replicas), KEY)
    states = jax.eval_shape(jax.vmap(init), keys, floats(replicas, particles, 3))
    temperatures = floats(replicas)
    return Step(
        run=run,
        args=(states, temperatures),
        specs=(batch_specs(states, sizes), batch_specs(temperatures, sizes)),
    )


def relaxed(sizes: Sizes, *, particles: int) -> Step:
    """Steps of FIRE on soft spheres of two kinds."""
    displacement, shift = space.periodic(box(particles))
    species = jnp.arange(particles) % 2
    sigma = jnp.array([[1.0, 1.2], [1.2, 1.4]])
    init, apply = minimize.fire_descent(energy.soft_sphere_pair(displacement, species=species, sigma=sigma), shift)
    state = jax.eval_shape(init, floats(particles, 3))
    return Step(run=stepped(apply, 20), args=(state,), specs=(batch_specs(state, sizes, ALL),))


PROGRAMS: dict[str, MakeProgram] = {
    "lennard-jones, all pairs": partial(lennard_jones, particles=16_384),
    "langevin, many replicas": partial(thermostat, replicas=512, particles=512),
    "soft spheres, relaxed": partial(relaxed, particles=8_192),
}
