"""Propagation by the book, for comparison: every op is visited at every turn, nothing is remembered or interned.

After Shardy (openxla/shardy, `docs/propagation.md`): user priorities outside, five op priorities inside, and within an
op the aggressive strategy. Axes are lists of prime parts, such as `("data", 0)`, `("data", 1)`.
"""

import math

from sharding.rules import Flow, Kind

FORWARD, BACKWARD = "operands to results", "results to operands"
BOTH, NEITHER = {FORWARD, BACKWARD}, set()


def parts_of(mesh):
    """Each prime part of the mesh axes, with its size: an axis of 12 is 2 x 2 x 3."""
    found = {}
    for name, size in mesh.items():
        k, p = 0, 2
        while size > 1:
            if size % p:
                p += 1
                continue
            found[name, k] = p
            size, k = size // p, k + 1
    return found


def parts(axes, sizes):
    """The parts of axes and of sub-axes (name, pre, size)."""
    found = []
    for axis in axes:
        name, pre, size = (axis, 1, math.inf) if isinstance(axis, str) else axis
        at = 1
        for (own, k), p in sizes.items():
            if own == name:
                if pre <= at < pre * size:
                    found.append((own, k))
                at *= p
    return found


def directions(op, factor, level, uses):
    """Where a factor of an op may propagate at a level."""
    rule, kind = op.rule, op.rule.kinds[factor]
    if factor in rule.blocked:
        return NEITHER
    if rule.flow in (Flow.FORWARD, Flow.BACKWARD):
        return {FORWARD} if rule.flow is Flow.FORWARD else {BACKWARD}
    if level == 4:
        return BOTH
    if level == 3:
        return {BACKWARD} if rule.flow is Flow.BROADCAST else BOTH
    early = NEITHER
    is_tie = op.name == "optimization_barrier" or (op.name == "edge" and op.site)
    if level > 0 or is_tie or all(uses[v] == 1 for v in op.operands):
        early = {Flow.ELEMENTWISE: BOTH, Flow.MOVE: BOTH, Flow.SLICE: {FORWARD}}.get(rule.flow, NEITHER)
    if level == 2 and kind is Kind.PASS:
        return early | ({BACKWARD} if rule.flow is Flow.BROADCAST else BOTH)
    return early


class Slow:
    """A graph whose values are sharded step by step."""

    def __init__(self, graph, mesh, annotations):
        self.graph, self.sizes = graph, parts_of(mesh)
        self.home = graph.representatives
        self.annotations = annotations
        self.axes = [[[] for _ in shape] for shape in graph.shapes]
        self.closed = [[False] * len(shape) for shape in graph.shapes]
        self.reserved = [set() for _ in graph.shapes]
        self.ops = [op for op in graph.ops if op.rule is not None and not op.rule.is_opaque]
        used = [v for op in graph.ops for v in op.operands] + [v for g in graph.groups for v in g.members]
        self.uses = [used.count(v) if shape else 1 for v, shape in enumerate(graph.shapes)]

    def run(self):
        for v, names in self.graph.manual.items():
            self.reserved[self.home[v]] |= set(parts(names, self.sizes))
        priorities = sorted({d.priority for a in self.annotations.values() for d in a.spec.dims} | {0})
        for v, annotation in self.annotations.items():
            for d, dim in enumerate(annotation.spec.dims):
                if dim.priority and (dim.axes or not dim.open):
                    self.closed[self.home[v]][d] = True
                    self.reserved[self.home[v]] |= set(parts(dim.axes, self.sizes))
        for priority in priorities:
            for v, annotation in self.annotations.items():
                for d, dim in enumerate(annotation.spec.dims):
                    if dim.priority == priority and (dim.axes or not dim.open):
                        self.axes[self.home[v]][d] = parts(dim.axes, self.sizes)
                        self.closed[self.home[v]][d] = not dim.open
                        if priority:
                            self.reserved[self.home[v]] -= set(parts(dim.axes, self.sizes))
            for level in range(5):
                while self.sweep(level):
                    pass
        return [[tuple(axes) for axes in self.axes[self.home[v]]] for v in range(len(self.axes))]

    def arrays(self, i):
        return [self.home[v] for v in (*self.ops[i].operands, *self.ops[i].results)]

    def neighbours(self, v):
        """The ops that make a value, first to last, then its users, last to first and once per operand."""
        made = [i for i, op in enumerate(self.ops) for u in op.results if self.home[u] == v]
        read = [i for i, op in enumerate(self.ops) for u in op.operands if self.home[u] == v]
        return made + read[::-1]

    def sweep(self, level):
        """Visits all ops in program order; after a change first the earlier ops next to it, the latest first."""
        changed_any, waiting, stack, at = False, set(range(len(self.ops))), [], -1
        while stack or waiting and max(waiting) > at:
            if stack:
                i = stack.pop()
            else:
                i = at = min(k for k in waiting if k > at)
            waiting.discard(i)
            for v in self.visit(i, level):
                changed_any = True
                enters_loop = self.is_tie(i) and v == self.arrays(i)[-1]
                for j in self.neighbours(v):
                    if j != i and j not in waiting and not (enters_loop and j < i):
                        waiting.add(j)
                        if j <= at:
                            stack.append(j)
        return changed_any

    def is_tie(self, i):
        op = self.ops[i]
        return op.name == "optimization_barrier" or (op.name == "edge" and bool(op.site))

    # One op

    def factors(self, v, dims, sizes):
        """The axes of each factor of an array; with those that fit no factor, and the factors that can't grow."""
        found, stuck, closed = {}, set(), set()
        for d, dim in enumerate(dims):
            left, is_stuck = list(self.axes[v][d]), False
            for f in dim:
                if self.closed[v][d] or is_stuck:
                    closed.add(f)
                room, own = sizes[f], []
                while left and not is_stuck and (f == dim[-1] or room % self.sizes[left[0]] == 0):
                    room //= self.sizes[left[0]]
                    own.append(left.pop(0))
                found[f] = own
                if f != dim[-1] and left and room > 1 and not is_stuck:
                    stuck |= set(left)
                    closed.add(f)
                    left, is_stuck = [], True
        return found, stuck, closed

    def visit(self, i, level):
        """Propagates once through an op; returns the values that changed."""
        op = self.ops[i]
        rule, arrays, n = op.rule, self.arrays(i), len(op.operands)
        shapes = (*rule.operands, *rule.results)
        seen = [self.factors(v, dims, rule.sizes) for v, dims in zip(arrays, shapes, strict=True)]
        agreed = {}
        for f in range(len(rule.sizes)):
            axes = self.agreed_axes([one[0].get(f) for one in seen], n, directions(op, f, level, self.uses))
            if axes:
                agreed[f] = axes
        total = [math.prod(rule.sizes[f] for f in one[0]) for one in seen]

        def rank(f):
            """Larger sources first, then for elementwise ops more shards, then earlier arrays and factors."""
            own = [a for a, one in enumerate(seen) if one[0].get(f, [])[: len(agreed[f])] == agreed[f]]
            source = max(own, key=lambda a: (total[a], -a))
            shards = math.prod(self.sizes[part] for part in agreed[f]) if rule.flow is Flow.ELEMENTWISE else 1
            return -total[source], -shards, source, f

        order = sorted(agreed, key=rank)
        grown = {}
        for a in [*range(n, len(arrays)), *range(n)]:
            for f in order:
                new = self.taken(agreed[f], f, arrays[a], shapes[a], seen[a], rule.sizes)
                if a < n and rule.flow is Flow.ELEMENTWISE:
                    for one, _, _ in seen[n:]:
                        if f in one and new[: len(one[f])] == one[f]:
                            new = one[f]
                if f in seen[a][0] and self.is_longer(new, seen[a][0][f]):
                    seen[a][0][f] = new
                    grown.setdefault(a, []).append(f)
        return [arrays[a] for a in sorted(grown) if self.apply(arrays[a], grown[a], shapes[a], seen[a], rule.sizes)]

    @staticmethod
    def is_longer(new, old):
        return len(new) > len(old) and new[: len(old)] == old

    def agreed_axes(self, found, n, where):
        """The longest axes that all arrays with a factor agree on; only sources give axes."""
        if not where:
            return []
        sides = [found[:n], found[n:]] if FORWARD in where else [found[n:], found[:n]]
        axes, may_grow = [], True
        for side, own in enumerate(sides):
            if side == 1 and where != BOTH:
                may_grow = False
            for new in own:
                if new is None:
                    continue
                k = next((k for k, (x, y) in enumerate(zip(axes, new, strict=False)) if x != y), None)
                if k is not None:
                    axes, may_grow = axes[:k], False
                elif may_grow and len(new) > len(axes):
                    axes = new
        return axes

    def taken(self, axes, f, v, dims, seen, sizes):
        """As many of the axes as an array can take for a factor."""
        own, stuck, closed = seen
        if f not in own or own[f] != axes[: len(own[f])]:
            return own.get(f, [])
        elsewhere = stuck | {part for g, other in own.items() if g != f for part in other}
        is_minor = any(dim[-1] == f for dim in dims)
        taken, room = [], sizes[f]
        for k, part in enumerate(axes):
            divides = room % self.sizes[part] == 0
            may = k < len(own[f]) or (f not in closed and (is_minor or divides))
            if not may or part in self.reserved[v] or part in elsewhere:
                break
            room = room // self.sizes[part] if divides else 0
            taken.append(part)
        return taken

    def apply(self, v, grown, dims, seen, sizes):
        """Writes the factors of a value back to its dims; whether one grew."""
        own, stuck, _ = seen
        changed = False
        for d, dim in enumerate(dims):
            if stuck or not set(dim) & set(grown):
                continue
            new = []
            for f in dim:
                new += own[f]
                if math.prod(self.sizes[part] for part in own[f]) < sizes[f]:
                    break
            if self.is_longer(new, self.axes[v][d]):
                self.axes[v][d], changed = new, True
        return changed


def propagated(graph, mesh, annotations):
    """The parts of each dim of each value."""
    return Slow(graph, mesh, annotations).run()
