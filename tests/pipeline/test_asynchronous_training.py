"""Asynchronous training against a single device that keeps all weight versions and uses the papers' ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding
from sharding import pipeline
from sharding.errors import ShardingError
from sharding.pipeline import Schedule, Task, schedules
from sharding.pipeline.asynchronous_training import AsyncTraining, StashingRun, optimizer_states
from sharding.pipeline.executors.pipelined_model import Model
from sharding.pipeline.executors.stage_meshes import StageMeshes
from sharding.pipeline.stage_optimizer import check_independent_updates

WIDTH, BATCH, WORDS = 3, 2, 5
OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(optax.linear_schedule(0.05, 0.01, 20), weight_decay=0.1),
}


def stage_fn(w, x):
    return x + jnp.tanh(x @ w["kernel"] + w["bias"][None])


def loss_fn(y, target):
    return jnp.mean((y - target) ** 2)


def first_fn(first, x):
    return x @ first["in"]


def last_fn(last, y):
    return y @ last["out"]


def tied_first(first, x, shared):
    return x @ shared + first["in"][None]


def tied_last(last, y, shared):
    return y @ shared.T + last["out"][None]


def weights(stages, seed=0):
    return {"kernel": drawn(seed, (stages, WIDTH, WIDTH)) / 2, "bias": drawn(seed + 1, (stages, WIDTH)) / 2}


def data(microbatches, width=WIDTH, seed=10):
    return tuple(drawn(each, (microbatches, BATCH, width)) for each in (seed, seed + 1))


def drawn(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def emulated(model_loss, pieces, optimizer, inputs, targets, *, version, per_update=1, states=None):
    """Training on one device with `version(stage, microbatch)` of each stage's parameters, from a list of all versions.

    `model_loss(pieces, input, target)` is the loss of the model from each stage's parameters.
    """
    gradient = jax.jit(jax.value_and_grad(model_loss))
    versions = [[piece] for piece in pieces]
    states = states or [optimizer.init(piece) for piece in pieces]
    losses, sums = [], None
    for number, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        met = [versions[stage][version(stage, number)] for stage in range(len(pieces))]
        loss, found = gradient(met, x, target)
        losses.append(loss)
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
        if (number + 1) % per_update == 0:
            for stage, total in enumerate(sums):
                mean = jax.tree.map(lambda leaf: leaf / per_update, total)
                updates, states[stage] = optimizer.update(mean, states[stage], versions[stage][-1])
                versions[stage].append(optax.apply_updates(versions[stage][-1], updates))
            sums = None
    return [own[-1] for own in versions], states, jnp.stack(losses)


def chain_loss(pieces, x, target):
    for w in pieces:
        x = stage_fn(w, x)
    return loss_fn(x, target)


def ended_loss(pieces, x, target):
    """With a first and a last function, whose parameters belong to their stages."""
    x = first_fn(pieces[0]["first"], x)
    for piece in pieces:
        x = stage_fn(piece["stages"], x)
    return loss_fn(last_fn(pieces[-1]["last"], x), target)


def rows(tree, stages):
    return [jax.tree.map(lambda leaf, row=row: leaf[row], tree) for row in range(stages)]


def stacked(pieces):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pieces)


def close(found, expected, tolerance=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), jax.tree_util.keystr(path)


def pipedream(stages, microbatches=20):
    """SOSP 2019, section 3.3: stage i of n (from 1) uses w(t - n + i)."""
    schedule = schedules.pipedream(stages=stages, microbatches=microbatches)
    return schedule, lambda stage, t: max(0, t - stages + stage + 1)


def vertical_sync(stages, microbatches=20):
    """All stages use w(t - n + 1)."""
    schedule = schedules.pipedream(stages=stages, microbatches=microbatches, vertical_sync=True)
    return schedule, lambda stage, t: max(0, t - stages + 1)


def two_buffers(stages, microbatches=None, factor=1):
    """2006.09503, section 3.1: W(t + 1) = W(t) - v grad f(W(t - 1))."""
    accumulate = factor * stages
    count = 20 * accumulate if microbatches is None else microbatches
    schedule = schedules.pipedream_2bw(stages=stages, microbatches=count, accumulate=accumulate)
    return schedule, lambda stage, t: max(0, t // accumulate - 1)


def one_worker(stages, microbatches=20, concurrent=None):
    """HetPipe, section 4: the weights lack the updates of minibatch p - (concurrent - 1) and later."""
    concurrent = stages if concurrent is None else concurrent
    schedule = schedules.hetpipe(stages=stages, microbatches=microbatches, concurrent=concurrent)
    return schedule, lambda stage, t: max(0, t - (concurrent - 1))


def wanted(schedule, version, optimizer, w, inputs, targets):
    pieces, states, losses = emulated(
        chain_loss,
        rows(w, schedule.stages),
        optimizer,
        inputs,
        targets,
        version=version,
        per_update=schedule.microbatches_per_update,
    )
    return stacked(pieces), states, losses


def trained(schedule, optimizer, params, inputs, targets, **functions):
    step = pipeline.train_async(stage_fn, loss_fn, schedule, optimizer, **functions)
    with on(schedule.devices):
        return step(params, optimizer.init(params), inputs, targets)


def on(devices, **others):
    count = devices * int(np.prod(list(others.values()), dtype=int))
    return sharding.mesh(**others, pipe=devices, devices=jax.devices()[:count])


def check_against_emulator(made, name, tolerance=2e-6):
    schedule, version = made
    optimizer, w = OPTIMIZERS[name], weights(schedule.stages)
    inputs, targets = data(schedule.microbatches)
    params, state, losses = trained(schedule, optimizer, w, inputs, targets)
    expected, states, expected_losses = wanted(schedule, version, optimizer, w, inputs, targets)
    close(params, expected, tolerance)
    close(losses, expected_losses, tolerance)
    count = schedule.microbatches // schedule.microbatches_per_update
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        own = [dict(jax.tree_util.tree_leaves_with_path(each))[path] for each in states]
        close(leaf, jnp.asarray(count) if leaf.ndim == 0 else jnp.stack(own), 10 * tolerance)


@pytest.mark.parametrize(
    ("made", "stages", "name"),
    [(pipedream, 3, "adam"), (vertical_sync, 2, "sgd"), (two_buffers, 2, "momentum")],
)
def test_parameters_state_and_losses(made, stages, name):
    check_against_emulator(made(stages), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("made", [pipedream, vertical_sync, two_buffers, one_worker])
def test_every_schedule(made, stages, name):
    check_against_emulator(made(stages), name)


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_minibatches_under_way(concurrent):
    check_against_emulator(one_worker(2, concurrent=concurrent), "momentum")


@pytest.mark.slow
def test_more_microbatches_than_stages_for_an_update():
    check_against_emulator(two_buffers(2, microbatches=24, factor=3), "adam")


def test_versions_matter():
    """The emulators of two papers differ clearly."""
    optimizer, w = OPTIMIZERS["sgd"], weights(2)
    inputs, targets = data(20)
    (a, _, _), (b, _, _) = (wanted(*made(2), optimizer, w, inputs, targets) for made in (pipedream, vertical_sync))
    assert jnp.abs(a["kernel"] - b["kernel"]).max() > 1e-2


def test_one_stage_is_plain_training():
    schedule, _ = pipedream(1, microbatches=5)
    optimizer, params = OPTIMIZERS["adam"], weights(1)
    inputs, targets = data(5)
    found, found_state, losses = trained(schedule, optimizer, params, inputs, targets)
    state = optimizer.init(params)
    for number in range(5):
        loss, gradient = jax.value_and_grad(
            lambda params, number=number: chain_loss(rows(params, 1), inputs[number], targets[number])
        )(params)
        close(losses[number], loss)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    close(found, params)
    close(found_state, state)


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b(stages=2, microbatches=4)])
def test_a_synchronous_schedule_is_the_plain_step(schedule):
    optimizer, params = optax.sgd(0.5), weights(schedule.stages)
    inputs, targets = data(schedule.microbatches)
    step = pipeline.value_and_grad(stage_fn, loss_fn, schedule, executor="mpmd")
    with on(schedule.devices):
        loss, gradient = step(params, inputs, targets)
    found, _, losses = trained(schedule, optimizer, params, inputs, targets)
    close(found, jax.tree.map(lambda w, g: w - 0.5 * g, params, jax.device_get(gradient)))
    close(losses.mean(), loss)


@pytest.mark.slow
def test_backwards_in_two_parts_and_several_stages_on_a_device():
    for schedule in (schedules.zb_v(stages=2, microbatches=3), pipedream(2, 6)[0].split_backward()):
        optimizer, params = OPTIMIZERS["adam"], weights(schedule.stages)
        inputs, targets = data(schedule.microbatches)
        found, _, losses = trained(schedule, optimizer, params, inputs, targets)
        synchronous = schedule.microbatches_per_update > 1
        version = (lambda stage, t: 0) if synchronous else (lambda stage, t: max(0, t - 1 + stage))
        expected, _, expected_losses = wanted(schedule, version, optimizer, params, inputs, targets)
        close(found, expected)
        close(losses, expected_losses)


def test_a_stretch_after_another():
    """Continues from the returned state; arguments are not donated; nothing recompiles."""
    schedule, version = pipedream(2, microbatches=4)
    optimizer, w = OPTIMIZERS["adam"], weights(2)
    inputs, targets = data(8)
    traces = []

    def counted(w, x):
        traces.append(1)
        return stage_fn(w, x)

    step = pipeline.train_async(counted, loss_fn, schedule, optimizer)
    with on(2) as mesh:
        placed = jax.device_put(w, jax.sharding.NamedSharding(mesh, sharding.P("pipe")))
        params, state = placed, optimizer.init(placed)
        for part in (slice(4), slice(4, 8)):
            params, state, _ = step(params, state, inputs[part], targets[part])
            before = len(traces)
        for leaf, first in zip(jax.tree.leaves(placed), jax.tree.leaves(w), strict=True):
            np.testing.assert_array_equal(leaf, first)
        step(params, state, inputs[:4], targets[:4])
    assert len(traces) == before
    pieces, states = rows(w, 2), None
    for part in (slice(4), slice(4, 8)):
        pieces, states, _ = emulated(
            chain_loss, pieces, optimizer, inputs[part], targets[part], version=version, states=states
        )
    close(params, stacked(pieces))


@pytest.mark.slow
def test_another_axis_splits_the_microbatches():
    """One stage: XLA:CPU does not allow concurrent programs with collectives on several groups of devices."""
    schedule, version = pipedream(1, microbatches=6)
    optimizer, w = OPTIMIZERS["adam"], weights(1)
    inputs, targets = data(6)
    step = pipeline.train_async(stage_fn, loss_fn, schedule, optimizer)
    with on(1, data=2) as mesh:
        split = jax.sharding.NamedSharding(mesh, sharding.P(None, "data"))
        params, state, losses = step(w, optimizer.init(w), *jax.device_put((inputs, targets), split))
    assert state[0].mu["bias"].sharding.device_set == set(mesh.devices.flat)
    expected, _, expected_losses = wanted(schedule, version, optimizer, w, inputs, targets)
    close(params, expected)
    close(losses, expected_losses)


def ended(stages, shared=False):
    end, other = drawn(20, (WORDS, WIDTH)) / 2, drawn(21, (WIDTH, WORDS)) / 2
    if shared:
        return {"stages": weights(stages), "shared": end, "first": {"in": other[:, 0]}, "last": {"out": other[0]}}
    return {"stages": weights(stages), "first": {"in": end}, "last": {"out": other}}


@pytest.mark.parametrize(("made", "stages"), [(pipedream, 2), pytest.param(two_buffers, 1, marks=pytest.mark.slow)])
def test_ends_are_updated_with_their_stages(made, stages):
    schedule, version = made(stages, microbatches=12)
    optimizer, params = OPTIMIZERS["adam"], ended(stages)
    inputs, targets = data(12, WORDS)
    found, state, losses = trained(schedule, optimizer, params, inputs, targets, first_fn=first_fn, last_fn=last_fn)
    pieces = [{"stages": row} for row in rows(params["stages"], stages)]
    pieces[0]["first"], pieces[-1]["last"] = params["first"], params["last"]
    pieces, states, expected_losses = emulated(
        ended_loss, pieces, optimizer, inputs, targets, version=version, per_update=schedule.microbatches_per_update
    )
    expected = {
        "stages": stacked([piece["stages"] for piece in pieces]),
        "first": pieces[0]["first"],
        "last": pieces[-1]["last"],
    }
    close(found, expected)
    close(losses, expected_losses)
    close(state[0].mu["first"], states[0][0].mu["first"], 2e-5)
    close(state[0].nu["last"], states[-1][0].nu["last"], 2e-5)


def deferred(stages, microbatches):
    """A plain step, whose last stage completes its weights' gradients after the first stage."""
    return schedules.zb_h1(stages=stages, microbatches=microbatches), lambda stage, t: 0


@pytest.mark.parametrize(
    ("made", "stages"),
    [(vertical_sync, 2), (deferred, 3), *(pytest.param(two_buffers, n, marks=pytest.mark.slow) for n in (1, 4))],
)
def test_what_both_ends_share_gets_both_gradients(made, stages):
    schedule, version = made(stages, microbatches=12)
    optimizer, params = OPTIMIZERS["adam"], ended(stages, shared=True)
    inputs, targets = data(12, WORDS)
    functions = {"first_fn": tied_first, "last_fn": tied_last}
    found, _, losses = trained(schedule, optimizer, params, inputs, targets, **functions)

    def whole(pieces, x, target):
        params = pieces[0]
        x = tied_first(params["first"], x, params["shared"])
        for row in rows(params["stages"], stages):
            x = stage_fn(row, x)
        return loss_fn(tied_last(params["last"], x, params["shared"]), target)

    per_update = schedule.microbatches_per_update
    [expected], _, expected_losses = emulated(
        whole, [params], optimizer, inputs, targets, version=lambda _, t: version(0, t), per_update=per_update
    )
    close(found, expected)
    close(losses, expected_losses)


class Counted(StashingRun):
    """Counts the versions of each stage's weights after every task."""

    most: dict

    def dispatch(self, located):
        super().dispatch(located)
        for stage in range(self.schedule.stages):
            live = {key for key in self.weights if key[0] == stage}
            assert {key for key in self.ends if key[0] == stage} == live
            self.most[stage] = max(self.most.get(stage, 0), len(live))


@pytest.mark.parametrize("made", [pipedream, vertical_sync, two_buffers, one_worker])
def test_as_many_versions_are_held_as_the_schedule_says(made):
    schedule, _ = made(3, microbatches=9)
    optimizer, params = optax.sgd(0.1), weights(3)
    inputs, targets = data(9)
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn)
    with on(3) as mesh:
        states = optimizer_states("", model, schedule, optimizer, params, optimizer.init(params))
        stage_meshes = StageMeshes(mesh=mesh, axis="pipe", schedule=schedule, rows=(0, 1, 2))
        training = AsyncTraining(model, stage_meshes, optimizer, states, params, inputs)
        run = Counted(training, params, optimizer.init(params), inputs, targets)
        run.most = {}
        for located in training.order:
            run.dispatch(located)
    assert tuple(run.most.values()) == schedule.simulate().weight_versions
    assert not run.sums
    assert not run.end_sums
    assert not run.buffers


def refused(words, schedule, optimizer=OPTIMIZERS["sgd"], *, params=None, state=None, devices=None, **functions):
    params = weights(schedule.stages) if params is None else params
    with on(schedule.devices if devices is None else devices), pytest.raises(ShardingError, match=words):
        step = pipeline.train_async(stage_fn, loss_fn, schedule, optimizer, **functions)
        step(params, optimizer.init(params) if state is None else state, *data(schedule.microbatches))


MIXING = {
    "by-norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "in-state": optax.apply_if_finite(optax.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", MIXING)
def test_an_optimizer_that_mixes_arrays(name):
    refused(
        r"train_async\(optimizer\)[\s\S]*gradient of another[\s\S]*independent updates per array",
        pipedream(2, 4)[0],
        MIXING[name],
    )


SEPARATE = {
    "every-two": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "masked": optax.masked(optax.adam(0.1), {"kernel": True, "bias": False}),
    "block-wise": optax.lamb(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params)),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_optimizers_that_do_not(name):
    """Step counters, masked parameters, norms of single arrays."""
    params = {"kernel": jnp.ones((1, 3, 3)), "bias": jnp.ones((1, 3))}
    check_independent_updates("", SEPARATE[name], params)


def test_a_state_without_rows():
    optimizer = optax.GradientTransformation(
        lambda params: {"norm": jnp.zeros((7, len(jax.tree.leaves(params)[0])))}, lambda g, s, p=None: (g, s)
    )
    refused(r"opt_state/norm[\s\S]*shape \[7, 2\] for all stages[\s\S]*\[7, 1\] for one", pipedream(2, 4)[0], optimizer)


def test_another_optimizers_state():
    params = weights(2)
    state = optax.adam(0.1).init(params)
    refused(r"opt_state[\s\S]*optimizer\.init\(params\)", pipedream(2, 4)[0], params=params, state=state)


def test_a_state_of_other_shapes():
    optimizer = OPTIMIZERS["momentum"]
    refused(
        r"opt_state/0/trace/bias[\s\S]*shape \[3, 3\]", pipedream(2, 4)[0], optimizer, state=optimizer.init(weights(3))
    )


def test_ends_that_share_other_versions():
    words = r"params/shared[\s\S]*microbatch 1 uses version 0 at stage 0 and 1 at stage 1[\s\S]*vertical_sync"
    functions = {"first_fn": tied_first, "last_fn": tied_last}
    schedule, params = pipedream(2, 4)[0], ended(2, shared=True)
    inputs, targets = data(4, WORDS)
    with pytest.raises(ShardingError, match=words):
        trained(schedule, optax.sgd(0.1), params, inputs, targets, **functions)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (schedules.chimera(stages=2, microbatches=2), "stage 0 is on 2 devices"),
        (schedules.terapipe(stages=2, microbatches=2, slices=2), "2 slices"),
        (
            Schedule(
                name="uneven",
                orders=[
                    [Task("forward", 0, 0), Task("forward", 1, 0), Task("backward", 1, 0), Task("backward", 0, 0)],
                    [Task("forward", 2, 0), Task("backward", 2, 0)],
                ],
                stages=3,
                microbatches=1,
            ),
            "3 stages % 2 devices = 1",
        ),
        (
            Schedule(
                name="rest",
                orders=[[Task(kind, 0, number) for number in range(3) for kind in ("forward", "backward")]],
                stages=1,
                microbatches=3,
                microbatches_per_update=2,
            ),
            r"3 % 2 = 1 microbatches after the last update",
        ),
        (
            Schedule(
                name="unstashed",
                orders=[
                    [Task("forward", 0, 0), Task("backward", 0, 0), Task("forward", 0, 1), Task("backward", 0, 1, 0, 1)]
                ],
                stages=1,
                microbatches=2,
                microbatches_per_update=1,
            ),
            r"version 0: forward of microbatch 1[\s\S]*version 1: backward[\s\S]*the same weight version "
            r"in the forward and backward of a microbatch",
        ),
    ],
    ids=["replicated", "sliced", "uneven", "rest", "unstashed"],
)
def test_schedules_that_cannot_train(schedule, words):
    refused(words, schedule)


def test_requests_that_cannot_be():
    schedule, _ = pipedream(2, 4)
    refused(r"train_async\(axis='p'\)[\s\S]*an axis of the mesh", schedule, axis="p")
    refused(r"an axis of the size of the schedule's number of devices", schedule, devices=4)
    refused(r"train_async: stages/kernel[\s\S]*shape \[3, 3, 3\]", schedule, params=weights(3))
    refused(r"train_async: params[\s\S]*'stages'", schedule, first_fn=first_fn)


def test_not_inside_a_trace():
    schedule, _ = pipedream(2, 4)
    optimizer, params = OPTIMIZERS["sgd"], weights(2)
    step = pipeline.train_async(stage_fn, loss_fn, schedule, optimizer)
    with on(2), pytest.raises(ShardingError, match=r"train_async[\s\S]*inside a trace"):
        jax.jit(step)(params, optimizer.init(params), *data(4))


def test_not_over_described_devices():
    schedule, _ = pipedream(2, 4)
    optimizer, params = OPTIMIZERS["sgd"], weights(2)
    step = pipeline.train_async(stage_fn, loss_fn, schedule, optimizer)
    with sharding.mesh(pipe=2, devices=2), pytest.raises(ShardingError, match=r"train_async[\s\S]*described devices"):
        step(params, optimizer.init(params), *data(4))
