"""The parameters of a jitted function: positional, static, donated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ShardingError

Names = str | Sequence[str]
Nums = int | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters of a function, and which of them are static or donated."""

    function: str
    names: tuple[str, ...]
    variadic: str | None
    static: frozenset[int]
    donated: frozenset[int]
    signature: inspect.Signature | None

    @staticmethod
    def of(
        f: Callable[..., Any],
        static_argnums: Nums,
        static_argnames: Names,
        donate_argnums: Nums,
        donate_argnames: Names,
    ) -> Signature:
        """Reads the signature of `f`; argnums and argnames refer to the same parameters."""
        name = getattr(f, "__name__", type(f).__name__)
        try:
            signature = inspect.signature(f)
        except (TypeError, ValueError):
            signature = None
        parameters = list(signature.parameters.values()) if signature else []
        names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)

        def positions(nums: Nums, by_name: Names, what: str) -> frozenset[int]:
            nums = (nums,) if isinstance(nums, int) else tuple(nums)
            by_name = (by_name,) if isinstance(by_name, str) else tuple(by_name)
            unknown = [n for n in by_name if n not in names]
            if unknown:
                raise ShardingError(
                    f"sharding.jit({name}, {what}_argnames={list(by_name)})",
                    found=f"{name} has the parameters {', '.join(names) or '(none)'}",
                    required="names of positional parameters",
                    fix=[f"remove {n!r}" for n in unknown],
                )
            outside = [n for n in nums if not -len(names) <= n < len(names)]
            if outside and signature is not None and variadic is None:
                raise ShardingError(
                    f"sharding.jit({name}, {what}_argnums={list(nums)})",
                    found=f"{name} has {len(names)} positional parameters: {', '.join(names) or '(none)'}",
                    required="indices of positional parameters",
                    fix=[f"remove {n}" for n in outside],
                )
            return frozenset(n % len(names) if n < 0 and names else n for n in nums) | {names.index(n) for n in by_name}

        static = positions(static_argnums, static_argnames, "static")
        donated = positions(donate_argnums, donate_argnames, "donate")
        if static & donated:
            both = ", ".join(names[n] if n < len(names) else str(n) for n in sorted(static & donated))
            raise ShardingError(
                f"sharding.jit({name})",
                found=f"{both}: both static and donated",
                required="disjoint static and donated arguments: a static one has no buffer",
                fix=f"remove {both} from one of the two",
            )
        return Signature(
            function=name,
            names=names,
            variadic=variadic,
            static=static,
            donated=donated,
            signature=signature,
        )

    def positional(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, with defaults filled in up to the last keyword."""
        if not kwargs:
            return args
        if self.signature is None:
            raise ShardingError(
                f"{self.function}(..., {', '.join(kwargs)}=...)",
                found="a function without a readable signature",
                required="positional arguments",
            )
        bound = self.signature.bind(*args, **kwargs)
        if bound.kwargs:
            bound.apply_defaults()
        if bound.kwargs:
            raise ShardingError(
                f"{self.function}(..., {', '.join(bound.kwargs)}=...)",
                found="keyword-only parameters",
                required="positional parameters, which in_shardings can refer to",
                fix="functools.partial(f, ...) for static ones, or remove the `*` from the signature",
            )
        return bound.args

    def name(self, position: int) -> str:
        """The name of a positional argument."""
        if position < len(self.names):
            return self.names[position]
        return f"{self.variadic or 'args'}/{position - len(self.names)}"
