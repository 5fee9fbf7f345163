"""Train steps with known prediction errors, and their causes, in the order of the programs' tables."""

SUB_AXES = "XLA reshards sub-axes separately"
SHARD_MAP_INPUT = "XLA chooses its own reshard of shard_map inputs"
LOOP_CARRY = "XLA reshards a loop carry once more"

Key = tuple[str, int, str]
"""(step, index of the mesh, style)."""

COLLECTIVES: dict[Key, tuple[float, str]] = {
    ("ring attention by hand", 0, "batch"): (0.03, SHARD_MAP_INPUT),
    ("ring attention by hand", 1, "batch"): (0.03, SHARD_MAP_INPUT),
    ("ring attention by hand", 1, "weights"): (0.0931, SHARD_MAP_INPUT),
    ("graph net", 3, "weights"): (0.15, SUB_AXES),
}
"""Relative error of the predicted collective bytes with the newest JAX, and its cause."""

PEAKS: dict[Key, tuple[float, str]] = {
    ("gpt, 16 bits, scanned, remat", 0, "weights"): (0.13, "XLA stores more bfloat16 values as float32"),
    ("graph net", 3, "weights"): (0.14, SUB_AXES),
    ("lstm", 1, "weights"): (0.18, LOOP_CARRY),
}
"""Relative error of the predicted peak memory with the newest JAX, and its cause."""
