"""Train steps whose predicted peak memory is known to be off, and why, in the order of the programs' tables."""

SUB_AXES = "XLA reshards sub-axes separately"
LOOP_CARRY = "XLA reshards a loop carry once more"

Key = tuple[str, int, str]
"""(step, index of the mesh, style)."""

HALF_DOTS = "XLA:CPU runs some bfloat16 dots in 16 bits"
PEAKS: dict[Key, tuple[float, str]] = {
    ("gpt, 16 bits", 1, "weights"): (0.16, HALF_DOTS),
    ("ring attention", 0, "weights"): (0.20, "not understood"),
    ("graph net", 3, "weights"): (0.14, SUB_AXES),
    ("lstm", 1, "weights"): (0.18, LOOP_CARRY),
}
"""Relative error of the predicted peak memory with the newest JAX, and its cause."""
