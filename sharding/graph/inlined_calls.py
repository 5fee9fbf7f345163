"""The primitives that call a body once, which is inlined into the graph."""

CALLS = frozenset(
    """
    call checkpoint closed_call composite core_call custom_jvp_call custom_vjp_call custom_vmap_call eval_jaxpr jit
    linear_call pjit remat remat2 xla_metadata_call
    """.split()
)
"""Primitives whose body runs exactly once, inline."""
