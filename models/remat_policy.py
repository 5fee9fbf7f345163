"""What a rematerialised transformer layer saves for its backward pass."""

import jax

REMAT_POLICY = jax.checkpoint_policies.save_only_these_names("attention_out")
"""Save the attention output only; the layers name it with `checkpoint_name`."""
