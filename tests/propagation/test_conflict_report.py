"""What a conflict says: both claims, what decided, and which annotation to change."""

import pytest

from sharding.propagation.conflict_report import NO_ANNOTATION, Claim, Conflict


def claim(name="x", value=1, dim=0, axes=("a",), origin="annotation of x"):
    return Claim(name=name, value=value, dim=dim, axes=axes, origin=origin)


def conflict(kept, lost, source="model.py:3 (f)"):
    return Conflict(op="add", source=source, kept=kept, lost=lost, rule="because", bytes_lost=64)


def test_a_conflict_as_text():
    found = conflict(claim(axes=()), claim("y", 2, 1, ("a", ("b", 1, 2)), "annotation of y"))
    assert str(found) == (
        "add at model.py:3 (f): kept x dim 0: (replicated) from annotation of x, "
        "rejected y dim 1: (a,b:(1)2) from annotation of y: because (64 bytes)"
    )
    assert str(conflict(claim(), claim(), source="")).startswith("add: kept x")


WAITS = ", or let one of them wait (priority 1)"
Y = {"name": "y", "value": 2, "origin": "annotation of y"}


@pytest.mark.parametrize(
    ("kept", "lost", "cure"),
    [
        (claim(), claim(axes=("b",), origin="another"), "remove one of two annotations: annotation of x, or another"),
        (
            claim(axes=("a", "b")),
            claim(**Y, dim=1, axes=("c", "b")),
            "keep b on one of dim 0 of x (annotation of x) and dim 1 of y (annotation of y)" + WAITS,
        ),
        (
            claim(dim=1),
            claim(axes=("a",), origin="another"),  # another dim of the same value
            "keep a on one of dim 1 of x (annotation of x) and dim 0 of x (another)" + WAITS,
        ),
        (claim(axes=(), origin=NO_ANNOTATION), claim(**Y, axes=("a", "b")), "annotate x with (a, b) on dim 0"),
        (claim(axes=()), claim(**Y), "leave dim 0 of x open with P.UNCONSTRAINED (annotation of x)"),
        (
            claim(axes=("a", ("b", 2, 2)), dim=1),
            claim(**Y, axes=("c",)),
            "shard dim 0 of y over (a, b:(2)2) too (annotation of y), or dim 1 of x over (c) (annotation of x)" + WAITS,
        ),
        (
            claim(),
            claim(**Y, axes=()),
            "shard dim 0 of y over (a) too (annotation of y), or dim 0 of x over (nothing) (annotation of x)" + WAITS,
        ),
    ],
)
def test_cures(kept, lost, cure):
    assert conflict(kept, lost).cure == cure
