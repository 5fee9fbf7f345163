"""Which steps the compiler is known to run otherwise than predicted, and why; in the order of the programs' tables."""

PARTS = "parts of one axis go their own ways"
ENTERS = "what enters a shard_map is moved by XLA on its own way"
INSIDE = "XLA moves what a loop carries once more"

Key = tuple[str, int, str]
"""(step, number of the mesh, style)."""

COLLECTIVES: dict[Key, tuple[float, str]] = {
    ("ring attention by hand", 0, "batch"): (0.03, ENTERS),
    ("ring attention by hand", 1, "batch"): (0.03, ENTERS),
    ("ring attention by hand", 1, "weights"): (0.09, ENTERS),
    ("lstm", 1, "weights"): (0.02, INSIDE),
    ("lstm", 3, "weights"): (0.12, PARTS),
    ("graph net", 3, "weights"): (0.24, PARTS),
}
"""With the newest JAX -> how far the bytes are from those compiled, and why."""

PEAKS: dict[Key, tuple[float, str]] = {
    ("gpt, 16 bits, scanned, remat", 0, "weights"): (0.13, "XLA stores more of the 16-bit floats in 32 bits"),
    ("graph net", 3, "weights"): (0.14, PARTS),
    ("lstm", 1, "weights"): (0.18, INSIDE),
}
"""With the newest JAX -> how far the prediction is from the compiled peak, and why."""
