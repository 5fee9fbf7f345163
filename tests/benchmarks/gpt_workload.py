"""The model, weights and tokens shared by the benchmarks of several libraries.

    python -m tests.benchmarks.gpt_workload gpt.npz --steps 12

`peers/torch_gpt.py` reads the file: every parameter of the flax model by its path (`blocks/0/attention/qkv`), float32,
and `tokens` [steps, B, S + 1], int32.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from tyro.conf import Positional

from sharding import paths
from sharding.models import gpt

from . import command_line

CONFIG = gpt.Config(
    vocab=1024, context=256, layers=8, features=256, heads=8, kv_heads=8, mlp_features=1024, tied=False
)  # fmt: skip
"""6.8 million parameters."""
BATCH = 16
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The output file and the number of steps."""

    file: Positional[Path]
    steps: int = 12


def model(config: gpt.Config = CONFIG, *, seed: int = 0) -> gpt.GPT:
    """The initialized model."""
    return gpt.GPT(config, rngs=nnx.Rngs(params=seed))


def tokens(config: gpt.Config = CONFIG, *, steps: int, batch: int = BATCH, seed: int = 0) -> np.ndarray:
    """Random tokens, [steps, B, S + 1], int32."""
    shape = (steps, batch, config.context + 1)
    return np.random.default_rng(seed).integers(0, config.vocab, shape, dtype=np.int32)


def weights(model: gpt.GPT) -> dict[str, np.ndarray]:
    """Path -> value of every parameter."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {paths.text(path): np.asarray(leaf) for path, leaf in leaves}


def export(path: Path, config: gpt.Config = CONFIG, *, steps: int, batch: int = BATCH, seed: int = 0) -> None:
    """Writes the initial weights and the tokens of all steps."""
    np.savez(path, **weights(model(config, seed=seed)), tokens=tokens(config, steps=steps, batch=batch, seed=seed))


def losses(config: gpt.Config = CONFIG, *, steps: int, batch: int = BATCH, seed: int = 0) -> list[float]:
    """The loss of each step on one device, before its update: the reference for all others."""
    graph, params = nnx.split(model(config, seed=seed))

    @jax.jit
    def step(params: nnx.State, moments: optax.OptState, tokens: jax.Array):
        def loss_of(params: nnx.State) -> jax.Array:
            return gpt.next_token_loss(nnx.merge(graph, params), tokens)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    found, moments = [], OPTIMIZER.init(params)
    for batch_tokens in tokens(config, steps=steps, batch=batch, seed=seed):
        params, moments, loss = step(params, moments, batch_tokens)
        found.append(float(loss))
    return found


def main(options: Options) -> None:
    """Writes the file."""
    export(options.file, steps=options.steps)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
