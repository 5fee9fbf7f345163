"""Runs many cases: progress, statistics, and minimising a failure."""

from __future__ import annotations

import json
import platform
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable

import jax
import jaxlib

from .case import Case, program_text
from .check import Mismatch, Rejected, check, ops_of
from .check_prediction import check_prediction
from .generate import numbered
from .results import add, revision
from .shrink import shrink

EVERY = 100


def run(args: Namespace) -> int:
    """Runs cases until the budget or the time limit is reached, or one fails."""
    budget = args.budget if args.budget is not None else (1000 if args.minutes is None else 10**9)
    started, counts = time.monotonic(), Counter()
    ops, meshes, rejected = Counter(), Counter(), Counter()
    checked = checker(args)
    failures: list[tuple[int, str]] = []
    for number in range(args.first, args.first + budget):
        seconds = time.monotonic() - started
        if args.minutes is not None and seconds > 60 * args.minutes:
            break
        case = numbered(args.seed, number)
        try:
            counts.update(checked(case, number))
            counts.update(programs=1, with_gradients=bool(case.by))
            ops.update(set(ops_of(case)))
            meshes[", ".join(f"{k}={n}" for k, n in case.mesh)] += 1
        except Rejected as e:
            rejected[str(e)[:80]] += 1
        except Exception as e:
            print(f"program {number} of seed {args.seed}: {signature(e)}", flush=True)
            if not args.keep_going:
                return report(case, e, args, number)
            failures.append((number, signature(e)))
            counts.update(programs=isinstance(e, Mismatch))
        if (number + 1 - args.first) % EVERY == 0:
            jax.clear_caches()
            done, seconds = number + 1 - args.first, time.monotonic() - started
            print(f"{done} programs, {seconds / done:.2f} s each, {len(failures)} failures", flush=True)
    found = {
        **({"compiler": args.compiler} if args.predictions else {}),
        "seed": args.seed,
        "first": args.first,
        **counts,
        "rejected_by_jax": dict(rejected.most_common()),
        "failures": len(failures),
        "seconds": round(time.monotonic() - started),
        "ops": dict(sorted(ops.items())),
        "meshes": dict(sorted(meshes.items())),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "revision": revision(),
    }
    if args.results is not None:
        add(args.results, found)
    print(json.dumps({k: v for k, v in found.items() if k not in ("ops", "meshes")}, indent=1))
    for number, text in failures:
        print(f"  {number}: {text}")
    return 1 if failures else 0


def checker(args: Namespace) -> Callable[[Case, int], dict[str, int]]:
    """The check that is asked for: (case, its number) -> what to count of it."""

    def predicted(case: Case, number: int) -> dict[str, int]:
        del number
        found = check_prediction(case, args.compiler)
        return {"values": found.values, "conflicts": found.conflicts, "with_collectives": bool(found.compiled)}

    def computed(case: Case, number: int) -> dict[str, int]:
        found = check(case, twice=number % 4 == 0)
        return {"values": found.values, "conflicts": found.conflicts, "by_float64": found.arbitrated}

    return predicted if args.predictions else computed


def signature(error: Exception) -> str:
    """Kind of a failure, which minimised cases must share."""
    kind = type(error).__name__
    if isinstance(error, Mismatch):
        numbers = "is exact" in str(error) or "is off by" in str(error)
        return f"{kind}: {str(error) if not numbers else 'wrong numbers: ' + str(error)}"
    return f"{kind}: {(str(error).splitlines() or [''])[0]}"


def alike(a: str, b: str) -> bool:
    """Whether two failures are of the same kind: equal messages up to numbers."""

    def words(text: str) -> str:
        text = text.partition("wrong numbers")[0] + "wrong numbers" if "wrong numbers" in text else text
        return "".join(c for c in text if c.isalpha())[:60]

    return words(a) == words(b)


def failure(case: Case, args: Namespace) -> str | None:
    """Signature of a case's failure; None if it passes."""
    try:
        checker(args)(case, 0)
    except Rejected:
        return None
    except Exception as e:
        return signature(e)
    return None


def failing_like(first: str, args: Namespace) -> Callable[[Case], bool]:
    def fails(case: Case) -> bool:
        text = failure(case, args)
        return text is not None and alike(text, first)

    return fails


def report(case: Case, error: Exception, args: Namespace, number: int) -> int:
    """Minimises a failing case, prints it and writes it to files."""
    traceback.print_exception(error)
    print("minimising ...", flush=True)
    small = shrink(case, failing_like(signature(error), args))
    text, name = program_text(small), f"fuzz-failure-{args.seed}-{number}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.py").write_text(text)
    (args.out / f"{name}.json").write_text(small.to_json() + "\n")
    print(text)
    print(
        f"{failure(small, args)}\nwritten to {args.out / name}.py; python -m tests.fuzz --replay {args.out / name}.json"
    )
    return 1


def replay(args: Namespace) -> int:
    """Runs a stored case again."""
    case = Case.from_json(args.replay.read_text())
    print(program_text(case))
    found = failure(case, args)
    print(found or "no failure")
    return 1 if found else 0
