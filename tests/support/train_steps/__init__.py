"""Tiny train steps (forward, backward, update) of typical models, each annotated in two styles."""
