import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sharding import ShardingError
from sharding.launch import text
from sharding.launch.text import tokenizer
from sharding.launch.text.text_batches import shuffled


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prose")
    rng = np.random.default_rng(0)
    words = ["\u00fcber", "the", "of", "sharded", "array", "mesh", "axis", "a", "split", "device"]
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(words, 300)) + f"\n{number}\n")
    return folder


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenized(request, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> text.TokenizedText:
    cache = tmp_path_factory.mktemp("cache")
    return text.prepare(text.scan([prose]), request.param, vocab=300, folder=cache)


def source(tokenized: text.TokenizedText, **changes) -> text.TextSource:
    fields = {"text": tokenized, "batch_size": 8, "length": 16, "seed": 0}
    return text.TextSource(**(fields | changes))


def test_the_splits_contain_all_of_the_text(tokenized: text.TokenizedText, prose: Path):
    sides = list(text.scan([prose]).with_split())
    for side, stream in ((False, tokenized.train), (True, tokenized.heldout)):
        whole = stream.windows([0], len(stream))[0]
        wanted = "".join(document + "\n" for document, is_heldout in sides if is_heldout == side)
        assert tokenized.tokenizer.decode(whole) == wanted
    assert tokenized.train_bytes == sum(len(document.encode()) + 1 for document, is_heldout in sides if not is_heldout)


def test_a_text_in_words(tokenized: text.TokenizedText):
    count = len(tokenized.train) + len(tokenized.heldout)
    size = f"{tokenized.num_bytes / 1e6:.2f} MB, {count:,} tokens (vocabulary {tokenized.vocab:,})"
    assert str(tokenized) == f"60 files, {size}, sha256 {tokenized.sha256[:16]}"
    assert str(dataclasses.replace(tokenized, num_files=1)).startswith("1 file, ")


def test_an_epoch_sees_every_window_once(tokenized: text.TokenizedText):
    data = source(tokenized)
    steps = math.ceil(data.num_windows / 8)
    rows = np.concatenate([data.train_batch(step) for step in range(steps)])[: data.num_windows]
    wanted = tokenized.train.windows(np.arange(data.num_windows) * 16, 17)
    assert sorted(row.tobytes() for row in rows) == sorted(row.tobytes() for row in wanted)


def test_every_epoch_has_an_order_of_its_own(tokenized: text.TokenizedText):
    data = source(tokenized, batch_size=source(tokenized).num_windows)
    epochs = [data.train_batch(step) for step in range(3)]
    for one, other in itertools.combinations(epochs, 2):
        assert sorted(row.tobytes() for row in one) == sorted(row.tobytes() for row in other)
        assert (one != other).any()


def test_the_order_stays_the_same_between_releases():
    # A run resumed with a newer release of this library or Grain gets the same batches.
    found = shuffled(range(1000), seed=0)
    assert [found[position] for position in range(8)] == [134, 133, 624, 287, 938, 69, 95, 876]
    assert found[1_000_000_007] == 446


def test_a_batch_depends_on_seed_and_step_alone(tokenized: text.TokenizedText):
    batch = source(tokenized).train_batch(7)
    assert batch.shape == (8, 17) and batch.dtype == np.int32
    np.testing.assert_array_equal(source(tokenized).train_batch(7), batch)
    assert (source(tokenized).train_batch(8) != batch).any()
    assert (source(tokenized, seed=1).train_batch(7) != batch).any()


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_the_rows_of_all_processes_are_the_batch(num_processes: int, tokenized: text.TokenizedText):
    data = source(tokenized)
    for step in (0, 3, 10_000):
        parts = [data.train_batch(step, rows) for rows in np.split(np.arange(8), num_processes)]
        np.testing.assert_array_equal(np.concatenate(parts), data.train_batch(step))


def test_bytes_are_counted_exactly(tokenized: text.TokenizedText):
    data = source(tokenized)
    rows = np.concatenate(data.heldout_batches())
    texts = [tokenized.tokenizer.num_bytes[row[1:]].sum() for row in rows]
    assert data.heldout_size() == (len(rows) * 16, sum(texts))
    if len(tokenized.tokenizer.num_bytes) == 256:
        assert data.heldout_size()[0] == data.heldout_size()[1]


def test_a_figure_per_byte_does_not_depend_on_the_tokenizer(tokenized: text.TokenizedText):
    # A uniform model: 8 bits for each byte of a token.
    from sharding.launch.config.optimizer_config import Optimization
    from sharding.launch.workloads import gpt_text
    from sharding.models.gpt import PRESETS

    config = dataclasses.replace(text.resize_vocab(PRESETS["gpt-tiny"], tokenized), context=16)
    workload = gpt_text.FAMILY.build("gpt-tiny", config, Optimization(), steps=1, seed=0)
    workload = text.use_text(workload, tokenized, batch_size=8, seed=0)
    lengths = tokenized.tokenizer.num_bytes
    outputs = [
        {"nats": 8 * math.log(2) * lengths[rows[:, 1:]].mean()} for rows in workload.source(8, 0).heldout_batches()
    ]
    assert workload.score(outputs)["heldout_bits_per_byte"] == pytest.approx(8, rel=1e-12)
    mean_bytes = tokenized.train_bytes / len(tokenized.train)
    assert workload.loss.scale * 8 * math.log(2) * mean_bytes == pytest.approx(8, rel=1e-12)
    assert config.vocab % 128 == 0 and config.vocab >= tokenized.vocab


def test_too_little_text_for_a_window(tokenized: text.TokenizedText):
    with pytest.raises(
        ShardingError, match=r"one window and its last target in each split: 5000000 \+ 1 tokens"
    ) as caught:
        source(tokenized, length=5_000_000)
    assert len(caught.value.found) == 2


def prepared(folder: Path, cache: Path, vocab: int = 300) -> text.TokenizedText:
    return text.prepare(text.scan([folder]), "bpe", vocab=vocab, folder=cache)


def test_tokenization_is_cached(prose: Path, tmp_path: Path, monkeypatch):
    first = prepared(prose, tmp_path)
    (home,) = tmp_path.iterdir()
    written = {path: path.stat().st_mtime_ns for path in home.iterdir()}
    again = prepared(prose, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in home.iterdir()} == written
    assert again.sha256 == first.sha256
    index = json.loads((home / "index.json").read_text())
    assert (index["dtype"], index["vocab"]) == ("<u2", 300)
    assert prepared(prose, tmp_path, vocab=290).sha256 != first.sha256
    monkeypatch.setattr(tokenizer, "version", lambda: "another")
    prepared(prose, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.bin", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_cache_is_made_again(name: str, damage: str, prose: Path, tmp_path: Path):
    first = prepared(prose, tmp_path)
    (home,) = tmp_path.iterdir()
    before = (home / name).read_bytes()
    (home / name).unlink() if damage == "gone" else (home / name).write_bytes(before[:-1])
    again = prepared(prose, tmp_path)
    assert again.sha256 == first.sha256
    assert (home / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [home.name]


def test_a_cache_that_cannot_be_written(prose: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardingError, match="--cache with another folder"):
        prepared(prose, tmp_path / "file")


def test_without_the_package(prose: Path, tmp_path: Path, monkeypatch):
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ShardingError, match=r"pip install 'sharding-jax\[data\]'"):
        prepared(prose, tmp_path)
    bytes_need_none = text.prepare(text.scan([prose]), "bytes", vocab=0, folder=tmp_path)
    assert bytes_need_none.vocab == 256
    with pytest.raises(ShardingError, match="the package grain is not installed"):
        source(bytes_need_none)


def test_the_cache_of_the_user(monkeypatch, tmp_path: Path):
    from sharding.launch.text import token_cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert token_cache.default_folder() == tmp_path / "sharding"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_cache.default_folder() == tmp_path / ".cache" / "sharding"
