import numpy as np
import pytest

from sharding import ShardingError
from sharding.launch.datasets import standard_library


@pytest.fixture(scope="module")
def stdlib() -> standard_library.Corpus:
    return standard_library.read()


def test_same_text_every_time(stdlib: standard_library.Corpus):
    again = standard_library.read()
    assert again.sha256 == stdlib.sha256
    np.testing.assert_array_equal(again.train, stdlib.train)
    np.testing.assert_array_equal(again.heldout, stdlib.heldout)


def test_the_text_says_what_it_is_of(stdlib: standard_library.Corpus, tmp_path):
    for k in range(60):
        (tmp_path / f"module_{k}.py").write_text("")
    assert str(stdlib).startswith("standard library of Python 3.")
    assert str(standard_library.read(tmp_path)).startswith("Python sources: 60 files")


def test_size_and_split(stdlib: standard_library.Corpus):
    assert stdlib.num_bytes > 5_000_000
    assert 0.01 < len(stdlib.heldout) / stdlib.num_bytes < 0.15
    assert "sha256" in str(stdlib)


def test_split_goes_by_file(tmp_path):
    names = [f"module_{i}.py" for i in range(60)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n")
    text = standard_library.read(tmp_path)
    for name in names:
        side, other = (text.heldout, text.train) if standard_library.is_heldout(name) else (text.train, text.heldout)
        assert f"# {name}\n".encode() in side.tobytes()
        assert f"# {name}\n".encode() not in other.tobytes()


def test_what_is_left_out(tmp_path):
    for folder in ("test", "site-packages", "asyncio/tests", "asyncio"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "a.py").write_text("")
    (tmp_path / "_sysconfigdata_x.py").write_text("")
    (tmp_path / "data.txt").write_text("")
    (tmp_path / "z.py").write_text("")
    found = [path.relative_to(tmp_path).as_posix() for path in standard_library.source_paths(tmp_path)]
    assert found == ["asyncio/a.py", "z.py"]


def test_the_order_does_not_depend_on_the_file_system(tmp_path):
    texts = {f"f{i}.py": f"x = {i}\n" for i in range(60)}
    for folder, names in (("a", list(texts)), ("b", list(reversed(texts)))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(texts[name])
    assert standard_library.read(tmp_path / "a").sha256 == standard_library.read(tmp_path / "b").sha256


def test_a_folder_without_sources(tmp_path):
    with pytest.raises(ShardingError, match="at least one file"):
        standard_library.read(tmp_path)


def test_a_batch_depends_on_seed_and_step_alone(stdlib: standard_library.Corpus):
    def batch(seed: int, step: int) -> np.ndarray:
        return standard_library.train_batch(stdlib, batch_size=4, length=32, seed=seed, step=step)

    np.testing.assert_array_equal(batch(1, 7), batch(1, 7))
    assert (batch(1, 7) != batch(1, 8)).any()
    assert (batch(1, 7) != batch(2, 7)).any()
    assert batch(1, 7).shape == (4, 33)
    assert batch(1, 7).dtype == np.int32
    assert 0 <= batch(1, 7).min() and batch(1, 7).max() < standard_library.NUM_TOKENS


def test_rows_are_pieces_of_the_text(stdlib: standard_library.Corpus):
    for row in standard_library.train_batch(stdlib, batch_size=3, length=32, seed=0, step=0):
        assert row.astype(np.uint8).tobytes() in stdlib.train.tobytes()


def test_heldout_batches_reach_from_end_to_end(stdlib: standard_library.Corpus):
    batches = standard_library.heldout_batches(stdlib, batch_size=4, length=32, num_batches=3)
    assert [rows.shape for rows in batches] == [(4, 33)] * 3
    np.testing.assert_array_equal(batches[0][0], stdlib.heldout[:33])
    np.testing.assert_array_equal(batches[-1][-1], stdlib.heldout[-33:])
