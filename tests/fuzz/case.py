"""A case: a program as a list of op records, with its mesh, arguments and specs.

Values are integers, unique in the program; a body sees the values of enclosing blocks. A record's text is a Python
expression in which `$0` is its first operand, `$f0` its first body and `$s` its spec.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from . import prelude

Entry = Any
"""Entry of one dim: None, "?" for unconstrained, an axis, or a tuple of axes whose last may be "..."."""
SpecData = tuple[Entry, ...]
Place = Literal["device", "pinned_host", "ref", "static"]
"""Where a value is: in a kind of memory, in a `jax.Ref`, or, as an integer, in the program itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """A value's shape and dtype; "F", "H" and "C" are the program's float, half and complex dtypes."""

    shape: tuple[int, ...]
    dtype: str
    place: Place = "device"

    @property
    def dtype_text(self) -> str:
        return self.dtype if self.dtype in ("F", "H", "C") else f'"{self.dtype}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The body of a loop, a branch or a call: parameters and results are values."""

    params: tuple[int, ...]
    records: tuple[Record, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One op: its results in terms of its operands."""

    op: str
    text: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[Type, ...]
    spec: SpecData | None = None
    bodies: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument: its value and type, its annotated spec, and its sharding when the program is called."""

    value: int
    type: Type
    spec: SpecData | None = None
    placed: SpecData | None = None
    donated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A whole program and how it is called."""

    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[Argument, ...]
    records: tuple[Record, ...]
    results: tuple[int, ...]
    exact: tuple[bool, ...]
    """Per result whether its floats are dyadic and exact in float32, so that no order of summation changes them."""
    out_specs: tuple[SpecData | None, ...] | None = None
    by: tuple[int, ...] = ()
    """Arguments to differentiate with respect to; empty: values only."""
    counted: tuple[int, ...] = ()
    """Results whose sum is differentiated."""
    coarse: bool = False
    """Whether inexact values are rounded to bfloat16."""
    out_kinds: tuple[str | None, ...] = ()
    """Per result the kind of memory that out_shardings ask for; empty: none."""
    keywords: int = 0
    """Number of arguments, the last ones, that are passed by keyword."""
    engine: str = "sharding"
    policy: str = "storage"
    explicit: bool = False
    """Whether the caller's mesh has Explicit axes."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        return _read(Case, json.loads(text))


def _read(kind: Any, data: Any) -> Any:
    """A dataclass built from nested dicts and lists."""
    parts = {"type": Type, "types": Type, "bodies": Block, "records": Record, "arguments": Argument}

    def value(name: str, x: Any) -> Any:
        if isinstance(x, dict):
            return _read(parts[name], x)
        return tuple(value(name, y) for y in x) if isinstance(x, list) else x

    return kind(**{name: value(name, x) for name, x in data.items()})


def walk(records: tuple[Record, ...]) -> Iterator[Record]:
    """All records, including those in bodies."""
    for record in records:
        yield record
        for body in record.bodies:
            yield from walk(body.records)


def spec_text(spec: SpecData | None) -> str:
    if spec is None:
        return "None"

    def entry(e: Entry) -> str:
        if isinstance(e, tuple):
            return "(" + "".join(f"{entry(x)}, " for x in e).rstrip() + ")"
        return {None: "None", "?": "P.UNCONSTRAINED", "...": "..."}.get(e, f'"{e}"')

    return f"P({', '.join(map(entry, spec))})"


def body_text(case: Case) -> str:
    """Source of the function `make(annotate, jit, put)` that returns the program."""
    lines = [
        "def make(annotate, jit, put=put_on_one_device):",
        *_function("program", [a.value for a in case.arguments], case, "    "),
    ]
    last = f"with_gradients(program, {case.by!r}, {case.counted!r})" if case.by else "program"
    return "\n".join([*lines, f"    return {last}"]) + "\n"


def _function(name: str, params: Any, block: Block | Case, indent: str) -> list[str]:
    lines = [f"{indent}def {name}({', '.join(f'v{p}' for p in params)}):"]
    for record in block.records:
        for i, body in enumerate(record.bodies):
            lines += _function(f"f{record.results[0]}_{i}", body.params, body, indent + "    ")
        names = ", ".join(f"v{r}" for r in record.results) + ("," if len(record.results) == 1 and record.bodies else "")
        lines.append(f"{indent}    {names} = {expression(record)}")
    return [*lines, f"{indent}    return ({''.join(f'v{r}, ' for r in block.results).rstrip()})"]


def expression(record: Record) -> str:
    """The right side of a record's line."""

    def fill(match: re.Match) -> str:
        word = match[1]
        if word == "s":
            return spec_text(record.spec)
        return f"f{record.results[0]}_{word[1:]}" if word[0] == "f" else f"v{record.operands[int(word)]}"

    return re.sub(r"\$(s|f?\d+)", fill, record.text)


def dtypes_text(wide: bool) -> str:
    """Definitions of F, H and C: 32-bit, or 64-bit if `wide`."""
    if wide:
        return "F, H, C = jnp.float64, jnp.float64, jnp.complex128"
    return "F, H, C = jnp.float32, jnp.bfloat16, jnp.complex64"


def arguments_text(case: Case) -> str:
    lines = []
    for i, a in enumerate(case.arguments):
        text = f"array({i}, {a.type.dtype_text}, {a.type.shape})"
        lines.append(f"        {i % 3 + 1 if a.type.place == 'static' else text},")
    return "\n".join(["def arguments():", "    return [", *lines, "    ]"]) + "\n"


def sharding_text(spec: SpecData | None, kind: str | None) -> str:
    """A spec, or a sharding in a kind of memory."""
    if spec is None or kind in (None, "device", "ref"):
        return spec_text(spec)
    return f'NamedSharding(mesh, {spec_text(spec)}, memory_kind="{kind}")'


def options_text(case: Case) -> str:
    """The arguments of `sharding.jit`; those in other memory use `mesh`."""
    options = [static_text(case)] if static_text(case) else []
    if any(a.spec is not None for a in case.arguments):
        passed = [a for a in case.arguments if a.type.place != "static"]
        specs = ", ".join(sharding_text(a.spec, a.type.place) for a in passed)
        options.append(f"in_shardings=({specs},)")
    if case.out_specs is not None:
        kinds = [*case.out_kinds, *[None] * (len(case.out_specs) - len(case.out_kinds))]
        options.append(f"out_shardings=({', '.join(map(sharding_text, case.out_specs, kinds))},)")
    donated = tuple(i for i, a in enumerate(case.arguments) if a.donated)
    options += [f"donate_argnums={donated}"] if donated else []
    options += [f'engine="{case.engine}"'] if case.engine != "sharding" else []
    return ", ".join([*options, *([f'policy="{case.policy}"'] if case.policy != "storage" else [])])


def static_text(case: Case) -> str:
    """The option of `jax.jit` for static arguments."""
    static = tuple(i for i, a in enumerate(case.arguments) if a.type.place == "static")
    return f"static_argnums={static}" if static else ""


def call_text(case: Case) -> str:
    """The arguments of a call, given the list `args`."""
    n = len(case.arguments) - case.keywords
    by_keyword = [f"v{a.value}=args[{n + k}]" for k, a in enumerate(case.arguments[n:])]
    return ", ".join([f"*args[:{n}]" if by_keyword else "*args", *by_keyword])


def mesh_text(case: Case, devices: str = "jax.devices()") -> str:
    """The mesh as a context manager."""
    sizes, axes = tuple(n for _, n in case.mesh), tuple(a for a, _ in case.mesh)
    devices = f"{devices}[:{math.prod(sizes)}]"
    if not case.explicit:
        return f"sharding.mesh({dict(case.mesh)!r}, devices={devices})"
    return f"jax.set_mesh(jax.make_mesh({sizes}, {axes}, devices={devices}))"


def placing_text(case: Case, put: str = "jax.device_put") -> list[str]:
    """Lines that place the arguments `args` on `mesh`."""
    lines = []
    for i, a in enumerate(case.arguments):
        spec = () if a.placed is None and a.spec is None and a.type.place == "pinned_host" else a.placed
        if spec is not None:
            kind = ', memory_kind="pinned_host"' if a.type.place == "pinned_host" else ""
            lines.append(f"args[{i}] = {put}(args[{i}], NamedSharding(mesh, {spec_text(spec)}{kind}))")
    return [*lines, *referring_text(case)]


def placing_alone_text(case: Case) -> list[str]:
    """Lines that place the arguments `args` for a run on one device."""
    host = [i for i, a in enumerate(case.arguments) if a.type.place == "pinned_host"]
    return [*(f"args[{i}] = on_host(args[{i}])" for i in host), *referring_text(case)]


def referring_text(case: Case) -> list[str]:
    refs = [i for i, a in enumerate(case.arguments) if a.type.place == "ref"]
    return [f"args[{i}] = jax.new_ref(args[{i}])" for i in refs]


def program_text(case: Case) -> str:
    """A Python file that runs the case on its mesh and on one device and prints the errors."""
    options, call = options_text(case), call_text(case)
    source = inspect.getsource(prelude).partition('"""\n\n')[2]
    refs = [f"args[{i}][...]" for i, a in enumerate(case.arguments) if a.type.place == "ref"]
    written = f"[{', '.join(refs)}]"
    static = f", {static_text(case)}" if static_text(case) else ""
    return "\n".join(
        [
            "from jax.sharding import NamedSharding",
            source.rstrip(),
            "",
            "",
            "import sharding",
            "from sharding import P",
            "",
            'jax.config.update("jax_platforms", "cpu")',
            'jax.config.update("jax_num_cpu_devices", 8)',
            dtypes_text(wide=False),
            "",
            "",
            body_text(case),
            "",
            arguments_text(case),
            "",
            "args = arguments()",
            *placing_alone_text(case),
            f"alone = [*jax.jit(make(plain, jax.jit){static})({call}), *{written}]",
            f"with {mesh_text(case)}:",
            "    mesh = current_mesh()",
            "    args = arguments()",
            *(f"    {line}" for line in placing_text(case)),
            "    program = make(sharding.annotate, sharding.jit, put_on(mesh))",
            f"    step = sharding.jit(program{', ' if options else ''}{options})",
            f"    print(step.complete({call}))",
            f"    ours = jax.block_until_ready(step({call}))",
            f"    ours = [*ours, *{written}]",
            "for i, (a, b) in enumerate(zip(ours, alone, strict=True)):",
            "    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):",
            "        a, b = jax.random.key_data(a), jax.random.key_data(b)",
            "    kinds = a.sharding.memory_kind, b.sharding.memory_kind",
            "    a, b = np.asarray(a), np.asarray(b)",
            "    wide = np.complex128 if np.iscomplexobj(b) else np.float64",
            "    error, norm = np.linalg.norm(a.astype(wide) - b.astype(wide)), np.linalg.norm(b.astype(wide))",
            '    print(f"result {i}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)} in {kinds}, '
            'off by {error} of {norm}")',
            "",
        ]
    )
