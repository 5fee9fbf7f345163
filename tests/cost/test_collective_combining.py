"""Combined collectives by hand, and against a slow reference."""

import random

import pytest

from sharding.cost.collective_combining import combined_collectives, first_ready


def combined(reads, groups, *, ends=None, sizes=None, most=float("inf"), refills=False):
    """The batches of a program: op -> the ops that it reads."""
    names = list(reads)
    place = {name: k for k, name in enumerate(names)}
    units = combined_collectives(
        [[place[x] for x in reads[name]] for name in names],
        {place[name]: group for name, group in groups.items()},
        [place[x] for x in ends or names[-1:]],
        {place[name]: n for name, n in (sizes or dict.fromkeys(reads, 0)).items()},
        most,
        refills=refills,
    )
    return [frozenset(names[k] for k in unit) for unit in units]


def sets(*units):
    return [frozenset(unit.split()) for unit in units]


def test_collectives_of_one_group_are_combined_unless_one_depends_on_another():
    reads = {"x": "", "a": "x", "b": "x", "o": "x", "c": "a", "end": "bco"}
    found = combined(reads, {"a": 1, "b": 1, "o": 2, "c": 1})
    assert found == sets("x", "a b", "o", "c", "end")


def test_a_collective_that_depends_on_another_begins_the_next_batch():
    # Each gradient's norm is reduced too, before the next gradient.
    reads = {"x": "", "a": "x", "b": "x", "c": "x", "A": "a", "B": "b", "C": "c", "end": "ABC"}
    assert combined(reads, dict.fromkeys("abcABC", 1)) == sets("x", "a", "A b", "B c", "C", "end")


def test_combining_never_makes_a_cycle():
    # A and B depend on collectives of the other group: combining both pairs would make a cycle.
    reads = {"x": "", "a": "x", "b": "x", "B": "a", "A": "b", "end": "AB"}
    found = combined(reads, {"a": 1, "A": 1, "b": 2, "B": 2})
    done = set()
    for unit in found:
        assert {r for name in unit for r in reads[name]} <= done
        done |= unit
    assert len(found) == 5


def postorder(reads, ends, partner):
    """The batches, operands first."""
    order = {}

    def visit(batch):
        if batch not in order:
            for x in [x for name in batch for x in reads[name]]:
                if partner[x] != batch:
                    visit(partner[x])
            order[batch] = None

    for end in [*ends, *reads]:
        visit(partner[end])
    return list(order)


def slowly_combined(reads, groups, ends, sizes=None, most=float("inf"), refills=False):
    """The batches, visiting every op again after each combination."""
    partner = {name: (name,) for name in reads}
    sizes = sizes or dict.fromkeys(reads, 0)
    done = {name for name in reads if sizes[name] > most}
    while True:
        order = postorder(reads, ends, partner)
        first = next((b for b in order if b[0] in groups and not done & {*b}), None)
        if first is None:
            return {frozenset(b) for b in order}
        joined, behind = list(first), {first}
        for batch in order[order.index(first) + 1 :]:
            depends = behind & {partner[x] for name in batch for x in reads[name]}
            is_same_group = groups.get(batch[0]) == groups[first[0]] and not done & {*batch}
            is_full = sum(sizes[name] for name in (*joined, *batch)) > most
            if is_same_group and (depends or is_full) and not refills:
                break
            if depends:
                behind.add(batch)
            elif is_same_group and not is_full:
                joined += batch
                behind.add(batch)
        done |= {*joined}
        partner |= dict.fromkeys(joined, tuple(joined))


def random_program(seed, kinds):
    rng = random.Random(seed)
    reads, groups = {}, {}
    for k in range(rng.randint(5, 30)):
        reads[k] = rng.sample([*reads], min(len(reads), rng.randint(0, 3)))
        group = rng.choice([None, *kinds])
        if group and reads[k]:
            groups[k] = group
    return reads, groups, rng.sample([*reads], 2)


@pytest.mark.parametrize("seed", range(30))
def test_combining_agrees_with_the_reference(seed):
    reads, groups, ends = random_program(seed, ["data"])
    assert {*combined(reads, groups, ends=ends)} == slowly_combined(reads, groups, ends)


@pytest.mark.parametrize("refills", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_batches_of_limited_size_agree_with_the_reference(seed, refills):
    reads, groups, ends = random_program(seed, ["data"])
    rng = random.Random(seed)
    sizes, most = {k: rng.randint(1, 8) for k in reads}, rng.randint(4, 16)
    found = combined(reads, groups, ends=ends, sizes=sizes, most=most, refills=refills)
    assert {*found} == slowly_combined(reads, groups, ends, sizes, most, refills)
    assert all(len(unit) == 1 or sum(sizes[k] for k in unit) <= most for unit in found)


@pytest.mark.parametrize("seed", range(30))
def test_every_op_runs_once_after_what_it_reads(seed):
    reads, groups, ends = random_program(seed, ["data", "tensor"])
    done = set()
    for unit in combined(reads, groups, ends=ends):
        assert len({groups.get(k) for k in unit}) == 1 and not unit & done
        assert {x for k in unit for x in reads[k]} <= done
        done |= unit
    assert done == {*reads}


def test_a_small_collective_fills_an_earlier_batch_up():
    reads = {"x": "", "a": "x", "b": "x", "c": "x", "end": "abc"}
    options = {"sizes": {"x": 0, "a": 6, "b": 5, "c": 2, "end": 0}, "most": 8}
    assert combined(reads, dict.fromkeys("abc", 1), **options) == sets("x", "a", "b c", "end")
    assert combined(reads, dict.fromkeys("abc", 1), **options, refills=True) == sets("x", "a c", "b", "end")


@pytest.mark.parametrize("seed", range(30))
def test_nodes_are_ordered_by_their_keys_once_they_are_ready(seed):
    rng = random.Random(seed)
    operands = [rng.sample(range(k), min(k, rng.randint(0, 3))) for k in range(20)]
    keys = [rng.randrange(50) for _ in operands]
    order = first_ready(keys, operands)
    assert sorted(order) == [*range(20)]
    for at, node in enumerate(order):
        ready = [k for k in order[at:] if {*operands[k]} <= {*order[:at]}]
        assert node in ready and keys[node] == min(keys[k] for k in ready)
