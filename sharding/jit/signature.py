"""The parameters of a jitted function: positional, static, donated, mutable."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ShardingError

Names = str | Iterable[str] | None
Nums = int | Sequence[int] | None
Label = int | str
"""An argument: the position of its parameter, or the keyword of a keyword-only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters of a function, and which of them are static, donated or mutable."""

    function: str
    names: tuple[str, ...]
    variadic: str | None
    static: frozenset[Label]
    donated: frozenset[Label]
    mutable: frozenset[Label] | None
    """None if all are."""
    signature: inspect.Signature | None

    @staticmethod
    def of(
        f: Callable[..., Any],
        static_argnums: Nums = (),
        static_argnames: Names = (),
        donate_argnums: Nums = (),
        donate_argnames: Names = (),
        mutable: bool | Names | Nums = False,
    ) -> Signature:
        """Reads the signature of `f`; argnums and argnames refer to the same parameters."""
        name = getattr(f, "__name__", type(f).__name__)
        try:
            signature = inspect.signature(f)
        except (TypeError, ValueError):
            signature = None
        parameters = _Parameters.of(signature)
        static = parameters.labels(f"{name}, static", static_argnums, static_argnames)
        donated = parameters.labels(f"{name}, donate", donate_argnums, donate_argnames)
        if static & donated:
            both = ", ".join(sorted(map(parameters.name, static & donated)))
            raise ShardingError(
                f"sharding.jit({name})",
                found=f"{both}: both static and donated",
                required="disjoint static and donated arguments: a static one has no buffer",
                fix=f"remove {both} from one of the two",
            )
        return Signature(
            function=name,
            names=parameters.names,
            variadic=parameters.variadic,
            static=static,
            donated=donated,
            mutable=parameters.mutable(name, mutable),
            signature=signature,
        )

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Label, ...], tuple[Any, ...]]:
        """Labels and values of the arguments of a call: by position, then those by keyword, sorted by name.

        By keyword are keyword-only ones, and those behind a parameter that is left at its default.

        Raises:
            TypeError: the function does not take such arguments, as Python raises it.
        """
        if not kwargs:
            return tuple(range(len(args))), args
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        names = sorted(kwargs)  # the order of JAX's pytrees
        return (*range(len(args)), *map(self.label, names)), (*args, *(kwargs[name] for name in names))

    def call(self, f: Callable[..., Any], arguments: Mapping[Label, Any]) -> Any:
        """Calls `f` with labelled arguments."""
        args: list[Any] = []
        while len(args) in arguments:
            args.append(arguments[len(args)])
        others = {label: value for label, value in arguments.items() if isinstance(label, str) or label >= len(args)}
        return f(*args, **{self.name(label): value for label, value in others.items()})

    def label(self, name: str) -> Label:
        """The label of an argument passed by keyword."""
        return self.names.index(name) if name in self.names else name

    def name(self, label: Label) -> str:
        """The name of an argument."""
        if isinstance(label, str):
            return label
        if label < len(self.names):
            return self.names[label]
        return f"{self.variadic or 'args'}/{label - len(self.names)}"

    def is_mutable(self, label: Label) -> bool:
        """Whether the caller's object gets the values that the function gives to its variables."""
        return self.mutable is None or label in self.mutable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """The parameters of a function by kind."""

    names: tuple[str, ...]
    keyword_only: tuple[str, ...]
    variadic: str | None
    takes_any_keyword: bool
    is_known: bool

    @staticmethod
    def of(signature: inspect.Signature | None) -> _Parameters:
        parameters = list(signature.parameters.values()) if signature else []
        return _Parameters(
            names=tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            keyword_only=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
            variadic=next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None),
            takes_any_keyword=signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters),
            is_known=signature is not None,
        )

    def name(self, label: Label) -> str:
        return self.names[label] if isinstance(label, int) and label < len(self.names) else str(label)

    def labels(self, what: str, nums: Nums, by_name: Names) -> frozenset[Label]:
        """The labels of parameters given by number or name; `what` is the function and `static`, `donate`."""
        nums = (nums,) if isinstance(nums, int) else tuple(nums or ())
        by_name = (by_name,) if isinstance(by_name, str) else tuple(by_name or ())
        known = self.names + self.keyword_only
        unknown = [] if self.takes_any_keyword else [n for n in by_name if n not in known]
        if unknown:
            raise ShardingError(
                f"sharding.jit({what}_argnames={list(by_name)})",
                found=f"the parameters {', '.join(known) or '(none)'}",
                required="names of parameters",
                fix=[f"remove {n!r}" for n in unknown],
            )
        outside = [n for n in nums if not -len(self.names) <= n < len(self.names)]
        if outside and self.is_known and self.variadic is None:
            raise ShardingError(
                f"sharding.jit({what}_argnums={list(nums)})",
                found=f"{len(self.names)} positional parameters: {', '.join(self.names) or '(none)'}",
                required="indices of positional parameters",
                fix=[f"remove {n}" for n in outside],
            )
        numbers = {n % len(self.names) if n < 0 and self.names else n for n in nums}
        return frozenset(numbers | {self.names.index(n) if n in self.names else n for n in by_name})

    def mutable(self, function: str, mutable: bool | Names | Nums) -> frozenset[Label] | None:
        """The labels of the mutable arguments; None for all."""
        if isinstance(mutable, bool) or mutable is None:
            return None if mutable else frozenset()
        given = (mutable,) if isinstance(mutable, (str, int)) else tuple(mutable)
        nums = [n for n in given if isinstance(n, int)]
        return self.labels(f"{function}, mutable", nums, [n for n in given if isinstance(n, str)])


def signature_of(paths: Sequence[str]) -> inspect.Signature:
    """The signature of a function of the arrays with these paths, by which JAX names them in a lowered program."""
    found: dict[str, None] = {}
    for i, path in enumerate(paths):
        name = re.sub(r"\W+", "_", path).strip("_")
        found[
            name if name.isidentifier() and not keyword.iskeyword(name) and name not in found else f"argument_{i}"
        ] = None
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in found])
