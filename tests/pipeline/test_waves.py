"""Wave synchronous parallel: staleness against the published bound, training against an emulation on one device."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding
from sharding import pipeline
from sharding.errors import ShardingError
from sharding.pipeline import Push, Waves

WIDTH, BATCH, WORDS = 3, 2, 5
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.03), "adamw": optax.adamw(0.03, weight_decay=0.1)}


def bound(concurrent, distance):
    """(D + 1)(s + 1) + s - 1."""
    local = concurrent - 1
    return (distance + 1) * (local + 1) + local - 1


@pytest.mark.parametrize("concurrent", [1, 2, 3, 4])
@pytest.mark.parametrize("distance", [0, 1, 4])
def test_missing_minibatches(concurrent, distance):
    """No worker speeds exceed the bound; some attain it."""
    chance, most = random.Random(concurrent * 10 + distance), 0
    for _ in range(6):
        waves = Waves(
            stages=1 + concurrent // 2,
            microbatches=9 * concurrent,
            concurrent=concurrent,
            speeds=[1.0, 0.05, *(chance.random() + 0.01 for _ in range(chance.randint(0, 1)))],
            clock_distance=distance,
        )
        assert waves.bound == bound(concurrent, distance)
        most = max(most, *waves.simulate().missing)
        assert most <= waves.bound
    assert most == bound(concurrent, distance)


def test_workers_of_one_speed_miss_only_what_is_under_way():
    simulation = Waves(stages=2, microbatches=8, concurrent=2, speeds=(1.0, 1.0)).simulate()
    assert simulation.missed(0) == simulation.missed(1) == (0, 1, 2, 1, 2, 1, 2, 1)
    assert simulation.pushes == tuple(Push(worker, wave) for wave in range(4) for worker in range(2))
    assert simulation.pulls == ({3: 2, 5: 4, 7: 6},) * 2


def test_the_slowest_worker_is_waited_for():
    """Faster workers wait for all but the last waves; a longer clock distance makes none slower."""
    spans = []
    for distance in (0, 1, 4):
        simulation = Waves(
            stages=2, microbatches=12, concurrent=2, speeds=(1.0, 0.25), clock_distance=distance
        ).simulate()
        alone = simulation.waves.schedule.simulate(forward=4.0, backward=8.0).makespan
        assert simulation.makespan == simulation.workers[1].makespan == alone
        spans.append(simulation.workers[0].makespan)
    assert spans == sorted(spans, reverse=True)
    assert len(set(spans)) == 3


def test_one_worker_is_its_schedule():
    waves = Waves(stages=3, microbatches=9, speeds=(2.0,), forward=[1, 2, 3], backward=[2, 3, 4], send=0.5)
    simulation = waves.simulate()
    expected = waves.schedule.simulate(forward=[0.5, 1, 1.5], backward=[1, 1.5, 2], send=0.5)
    assert simulation.workers == (expected,)
    assert simulation.pulls == ({},)
    assert simulation.missing == (0,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"speeds": ()}, r"speeds[\s\S]*one finite positive number per worker"),
        ({"speeds": (1.0, 0.0)}, r"speeds[\s\S]*0\.0"),
        ({"clock_distance": -1}, r"clock_distance[\s\S]*-1"),
        ({"microbatches": 5}, r"5 % 2 = 1[\s\S]*microbatches=6"),
        ({"concurrent": 4, "microbatches": 8}, r"at most 2 stages - 1 = 3"),
        ({"concurrent": 0}, "0"),
        ({"forward": 0.0}, "a task of zero time"),
    ],
)
def test_workers_that_cannot_be(arguments, words):
    with pytest.raises(ShardingError, match=words):
        Waves(**{"stages": 2, "microbatches": 6, "speeds": (1.0, 1.0)} | arguments)


def stage_fn(w, x):
    return x + jnp.tanh(x @ w)


def loss_fn(y, target):
    return jnp.mean((y - target) ** 2)


def chain_loss(pieces, x, target):
    for w in pieces:
        x = stage_fn(w, x)
    return loss_fn(x, target)


def first_fn(first, x):
    return x @ first


def last_fn(last, y):
    return y @ last


def ended_loss(params, x, target):
    x = first_fn(params["first"], x)
    for w in params["stages"]:
        x = stage_fn(w, x)
    return loss_fn(last_fn(params["last"], x), target)


def weights(stages):
    return drawn(0, (stages, WIDTH, WIDTH)) / 2


def data(workers, microbatches, width=WIDTH):
    return tuple(drawn(seed, (workers, microbatches, BATCH, width)) for seed in (1, 2))


def drawn(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class Emulated:
    """The paper's workers emulated on one device, step by step, with integer durations.

    A worker's weights are one tree: the global weights at its last pull, plus its own updates since.
    """

    def __init__(self, model_loss, params, optimizer, inputs, targets, *, orders, wave, distance, paces):
        self.gradient = jax.jit(jax.value_and_grad(model_loss))
        self.update = jax.jit(optimizer.update)
        self.inputs, self.targets, self.orders, self.wave, self.distance = inputs, targets, orders, wave, distance
        self.paces = paces  # per worker: time of a forward, half of a backward's
        count = len(paces)
        self.global_weights, self.pushed = params, [0] * count
        self.local, self.included = [params] * count, [[0] * count for _ in range(count)]
        self.states, self.sums = [optimizer.init(params)] * count, [None] * count
        self.done, self.met, self.losses = [0] * count, {}, {}
        self.missing = 0

    def run(self):
        stages = range(len(self.orders))
        places, free, ended = [], [], set()
        running = {}
        for _ in self.paces:
            places.append([0 for _ in stages])
            free.append([0 for _ in stages])
        moment = 0
        while any(place < len(order) for each in places for place, order in zip(each, self.orders, strict=True)):
            for (worker, stage), (task, end) in list(running.items()):
                if end == moment:
                    del running[worker, stage]
                    ended.add((worker, task.kind, task.stage, task.microbatch))
                    if task.kind == "backward" and stage == 0:
                        self.complete(worker, task.microbatch)
            for worker, pace in enumerate(self.paces):
                for stage in stages:
                    if (worker, stage) in running or places[worker][stage] == len(self.orders[stage]):
                        continue
                    task = self.orders[stage][places[worker][stage]]
                    if self.ready(worker, task, ended) and self.admitted(worker, task):
                        running[worker, stage] = task, moment + pace * (1 if task.kind == "forward" else 2)
                        places[worker][stage] += 1
            moment += 1
        for worker, task in sorted((worker, task.microbatch) for (worker, _), (task, _) in running.items()):
            self.complete(worker, task)
        return (
            self.global_weights,
            self.states,
            jnp.stack(
                [jnp.stack([self.losses[w, m] for m in range(len(self.inputs[0]))]) for w in range(len(self.paces))]
            ),
        )

    def ready(self, worker, task, ended):
        if task.kind == "forward":
            return task.stage == 0 or (worker, "forward", task.stage - 1, task.microbatch) in ended
        return (task.stage == len(self.orders) - 1 and (worker, "forward", task.stage, task.microbatch) in ended) or (
            worker,
            "backward",
            task.stage + 1,
            task.microbatch,
        ) in ended

    def admitted(self, worker, task):
        """Whether a minibatch may start, after a pull if one is needed."""
        if task.kind != "forward" or task.stage > 0:
            return True
        others = [other for other in range(len(self.paces)) if other != worker]
        needed = self.done[worker] // self.wave - self.distance
        if any(self.included[worker][other] < needed for other in others):
            if any(self.pushed[other] < needed for other in others):
                return False
            self.local[worker], self.included[worker] = self.global_weights, list(self.pushed)
        self.met[worker, task.microbatch] = self.local[worker]
        self.missing = max(
            self.missing, *(task.microbatch - self.included[worker][other] * self.wave for other in others), 0
        )
        return True

    def complete(self, worker, number):
        met = self.met.pop((worker, number))
        self.losses[worker, number], gradient = self.gradient(
            met, self.inputs[worker][number], self.targets[worker][number]
        )
        own, self.states[worker] = self.update(gradient, self.states[worker], met)
        self.local[worker] = optax.apply_updates(self.local[worker], own)
        before = self.sums[worker]
        self.sums[worker] = own if before is None else jax.tree.map(jnp.add, before, own)
        self.done[worker] += 1
        if self.done[worker] % self.wave == 0:
            self.global_weights = optax.apply_updates(self.global_weights, self.sums[worker])
            self.sums[worker] = None
            self.pushed[worker] += 1


def emulated(waves, optimizer, params, inputs, targets, model_loss=chain_loss):
    paces = [round(1 / speed) for speed in waves.speeds]
    one = Emulated(
        model_loss,
        params,
        optimizer,
        inputs,
        targets,
        orders=waves.schedule.orders,
        wave=waves.wave,
        distance=waves.clock_distance,
        paces=paces,
    )
    return (*one.run(), one.missing)


def close(found, expected, tolerance=2e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), jax.tree_util.keystr(path)


def on(waves, **others):
    count = waves.workers * waves.stages
    return sharding.mesh(**others, data=waves.workers, pipe=waves.stages, devices=jax.devices()[:count])


def trained(waves, optimizer, params, inputs, targets, **functions):
    step = pipeline.train_waves(stage_fn, loss_fn, waves, optimizer, **functions)
    with on(waves):
        return step(params, (optimizer.init(params),) * waves.workers, inputs, targets)


def check_against_emulator(waves, name):
    optimizer, params = OPTIMIZERS[name], weights(waves.stages)
    inputs, targets = data(waves.workers, waves.microbatches)
    found, states, losses = trained(waves, optimizer, params, inputs, targets)
    expected, expected_states, expected_losses, missing = emulated(waves, optimizer, params, inputs, targets)
    close(found, expected)
    close(losses, expected_losses)
    close(states, tuple(expected_states), 2e-5)
    assert missing == max(waves.simulate().missing) <= waves.bound


@pytest.mark.parametrize(
    ("stages", "concurrent", "distance", "speeds", "name"),
    [(2, 2, 1, (1.0, 0.25), "adam"), (1, 1, 0, (1.0, 0.5), "sgd")],
)
def test_training(stages, concurrent, distance, speeds, name):
    microbatches = 12 if stages > 1 else 5
    check_against_emulator(
        Waves(stages=stages, microbatches=microbatches, concurrent=concurrent, clock_distance=distance, speeds=speeds),
        name,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("distance", [0, 1, 4])
@pytest.mark.parametrize(
    ("stages", "concurrent", "speeds"),
    [(1, 1, (1.0, 0.5, 0.25)), (2, 2, (0.25, 1.0)), (2, 3, (1.0, 1 / 3, 0.5)), (4, 4, (1.0, 0.5)), (4, 2, (0.5, 1.0))],
)
def test_training_with_all_distances(stages, concurrent, speeds, distance, name):
    waves = Waves(
        stages=stages, microbatches=20 - 20 % concurrent, concurrent=concurrent, clock_distance=distance, speeds=speeds
    )
    check_against_emulator(waves, name)


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [1, 2])
def test_one_worker_trains_as_its_schedule(concurrent):
    """With one minibatch in flight this is ordinary training."""
    waves = Waves(stages=2, microbatches=6, concurrent=concurrent, speeds=(1.0,))
    optimizer, params = OPTIMIZERS["sgd"], weights(2)
    inputs, targets = data(1, 6)
    found, (state,), losses = trained(waves, optimizer, params, inputs, targets)
    step = pipeline.train_async(stage_fn, loss_fn, waves.schedule, optimizer)
    with sharding.mesh(pipe=2, devices=jax.devices()[:2]):
        expected, expected_state, expected_losses = step(params, optimizer.init(params), inputs[0], targets[0])
    close(found, expected)
    close(state, expected_state)
    close(losses[0], expected_losses)
    if concurrent == 1:
        for number in range(6):
            gradient = jax.grad(chain_loss)(params, inputs[0, number], targets[0, number])
            params = params - 0.1 * gradient
        close(found, params)


@pytest.mark.slow
def test_ends_and_another_stretch():
    waves = Waves(stages=2, microbatches=4, speeds=(1.0, 0.5), clock_distance=0)
    optimizer = OPTIMIZERS["adam"]
    params = {"stages": weights(2), "first": drawn(3, (WORDS, WIDTH)) / 2, "last": drawn(4, (WIDTH, WORDS)) / 2}
    inputs, targets = data(2, 8, WORDS)
    step = pipeline.train_waves(stage_fn, loss_fn, waves, optimizer, first_fn=first_fn, last_fn=last_fn)
    found, states, expected, expected_states = params, (optimizer.init(params),) * 2, params, None
    with on(waves):
        for part in (slice(4), slice(4, 8)):
            found, states, losses = step(found, states, inputs[:, part], targets[:, part])
    for part in (slice(4), slice(4, 8)):
        one = Emulated(
            ended_loss,
            expected,
            optimizer,
            inputs[:, part],
            targets[:, part],
            orders=waves.schedule.orders,
            wave=2,
            distance=0,
            paces=[1, 2],
        )
        one.states = expected_states or one.states
        expected, expected_states, expected_losses = one.run()
    close(found, expected)
    close(losses, expected_losses)
    close(states, tuple(expected_states), 2e-5)


@pytest.mark.slow
def test_nothing_is_left_over(monkeypatch):
    """Old weights, updates and wave sums are all freed."""
    waves = Waves(stages=2, microbatches=6, concurrent=1, clock_distance=1, speeds=(1.0, 0.2))
    runs = []
    init = pipeline.wave_training.WorkerRun.__init__
    monkeypatch.setattr(
        pipeline.wave_training.WorkerRun, "__init__", lambda self, *args: (init(self, *args), runs.append(self))[0]
    )
    trained(waves, OPTIMIZERS["sgd"], weights(2), *data(2, 6))
    for run in runs:
        assert not (run.weights or run.ends or run.sums or run.end_sums or run.buffers)
        assert not (run.local_updates or run.wave_sums)
    server = runs[0].server
    assert set(server.versions) == {(0, 12), (1, 12)}
    assert not server.pending


def refused(words, *, params=None, states=None, axes=None, shape=(2, 4), **functions):
    waves, optimizer = Waves(stages=2, microbatches=4, speeds=(1.0, 1.0)), OPTIMIZERS["sgd"]
    params = weights(2) if params is None else params
    states = (optimizer.init(params),) * 2 if states is None else states
    step = pipeline.train_waves(stage_fn, loss_fn, waves, optimizer, **functions)
    with on(waves), pytest.raises(ShardingError, match=words):
        step(params, states, *data(*shape))


def test_requests_that_cannot_be():
    refused(r"workers_axis='rows'[\s\S]*the mesh data=2, pipe=2[\s\S]*sharding\.mesh\(rows=2", workers_axis="rows")
    refused(r"opt_state[\s\S]*a tuple of 1[\s\S]*\(optimizer\.init\(params\),\) \* 2", states=((),))
    refused(r"train_waves: inputs[\s\S]*shape \[3, 4, 2, 3\][\s\S]*2, the number of workers", shape=(3, 4))
    refused(r"train_waves: inputs[\s\S]*4, the number of microbatches", shape=(2, 3))
    ends = {"stages": weights(2), "shared": jnp.ones((WIDTH, WIDTH))}
    refused(r"params/shared[\s\S]*'first'", params=ends, first_fn=lambda _, x, shared: x @ shared)
