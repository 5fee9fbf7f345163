"""What users annotate values with, and how the annotations of one value become one."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The spec that a user annotated a value with."""

    spec: Spec
    origin: str
    """Where the annotation is: `in_shardings`, `annotate at train.py:12 (step)`, ..."""

    def origin_of(self, dim: int) -> str:
        """Returns the origin of one dim's annotation, with its logical axis name if it has one."""
        via = self.spec.dims[dim].via
        return f"{self.origin}: {via}" if via else self.origin


def merged(a: Spec, b: Spec) -> Spec | None:
    """Returns the union of two specs if each dim is given by one of them or by both identically, else None."""
    dims = []
    for x, y in zip(a.dims, b.dims, strict=True):
        if x == y:
            dims.append(x if x.via else y)
        elif y.open and not y.axes:
            dims.append(x)
        elif x.open and not x.axes:
            dims.append(y)
        else:
            return None
    used = [axis for d in dims for axis in d.axes]
    return Spec(dims=tuple(dims)) if len(set(used)) == len(used) else None


def joined(have: Annotation, annotation: Annotation) -> Annotation | None:
    """Returns two annotations of one value as one with both origins, or None if they conflict."""
    both = merged(have.spec, annotation.spec)
    if both is None:
        return None
    adds = have.spec != both or any(a.via != b.via for a, b in zip(have.spec.dims, both.dims, strict=True))
    origins = [*have.origin.split("; "), *([annotation.origin] if adds else [])]
    return Annotation(spec=both, origin="; ".join(dict.fromkeys(origins)))
