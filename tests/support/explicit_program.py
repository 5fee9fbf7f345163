"""A program with Explicit axes: its jaxpr evaluated with every sharding that `Completion.explicit` says is missing."""

from collections import defaultdict
from functools import partial

import jax
import numpy as np
from jax import lax

from sharding import compat
from sharding.explain.explicit_shardings import bound, named
from sharding.graph import CALLS


class ExplicitProgram:
    """The flat function of a completion's program, to be traced with Explicit axes."""

    def __init__(self, completion):
        self.scope = completion.assignment.graph.scope
        self.named = defaultdict(dict)
        for scope, one in named(completion.assignment):
            self.named[id(scope), id(one.eqn)][one.place, one.index] = one.spec

    def __call__(self, *args):
        return self.run(self.scope, args)

    def run(self, scope, args, consts=()):
        jaxpr = scope.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom):
            return np.asarray(atom.val, atom.aval.dtype)[()] if compat.is_literal(atom) else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            to_name = self.named[id(scope), id(eqn)]
            ins = [resharded(x, to_name, "entry", k) for k, x in enumerate(map(read, eqn.invars))]
            ins = [resharded(x, to_name, "operand", k) for k, x in enumerate(ins)]
            outs = self.equation(scope, i, eqn, ins, to_name)
            outs = [resharded(x, to_name, "result", k) for k, x in enumerate(outs)]
            env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if not compat.is_drop(v))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, scope, i, eqn, ins, to_name):
        name, p = eqn.primitive.name, eqn.params
        if name in ("annotate", "sharding_constraint"):
            return ins
        if name in CALLS:
            key, pos, jaxpr = next(compat.sub_jaxprs(p))
            return self.run(scope.children[i, key, pos], ins, compat.constants(jaxpr))
        if name == "scan":
            return self.scan(scope.children[i, "jaxpr", 0], p, ins, to_name)
        if name == "while":
            return self.while_loop(scope, i, p, ins, to_name)
        if name == "cond":
            branches = [self.body(scope.children[i, "branches", k], to_name) for k in range(len(p["branches"]))]
            return lax.switch(ins[0], branches, *ins[1:])
        spec = to_name.get(("result", 0))
        if name in ("gather", "scatter", "scatter-add") and spec is not None:
            return [jax.sharding.auto_axes(partial(bound, eqn), out_sharding=spec)(ins)]
        sharding = None if spec is None else jax.NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        found = bound(eqn, ins, sharding)
        return found if eqn.primitive.multiple_results else [found]

    def body(self, child, to_name):
        def run(*args):
            args = [resharded(x, to_name, "slice", k) for k, x in enumerate(args)]
            return [resharded(x, to_name, "exit", k) for k, x in enumerate(self.run(child, args))]

        return run

    def scan(self, child, p, ins, to_name):
        num_consts, num_carry = compat.scan_parts(p)
        consts, carry, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        body = self.body(child, to_name)

        def step(carry, xs):
            outs = body(*consts, *carry, *xs)
            return outs[:num_carry], outs[num_carry:]

        carry, ys = lax.scan(step, carry, xs, p["length"], p["reverse"])
        return [*carry, *ys]

    def while_loop(self, scope, i, p, ins, to_name):
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        condition, body = (scope.children[i, key, 0] for key in ("cond_jaxpr", "body_jaxpr"))
        run = self.body(body, to_name)
        return lax.while_loop(
            lambda carry: self.run(condition, [*ins[:n], *carry])[0],
            lambda carry: run(*ins[n:m], *carry),
            ins[m:],
        )


def resharded(x, to_name, place, index):
    spec = to_name.get((place, index))
    return x if spec is None or jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)
