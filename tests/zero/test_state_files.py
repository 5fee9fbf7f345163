"""Files that hold one of two whole generations, whatever happens in between."""

import json

import numpy as np
import pytest
from support.faulty_disk import flip_bit, limit_file_size, small_disk

from sharding import ShardingError
from sharding.zero.state_files import RECORD, Entry, StateFiles, tile_rows

ENTRY = Entry(
    shape=(5, 3),
    tiles=((((2, 3), "float32"), ((2, 3), "float32"), ((), "int32")), (((3, 3), "bfloat16"), ((3,), "bool"))),
)


def tiles(seed):
    generator = np.random.default_rng(seed)
    return [[generator.normal(size=shape).astype(dtype) for shape, dtype in tile] for tile in ENTRY.tiles]


def write(files, seed):
    for k, arrays in enumerate(tiles(seed)):
        files.write("w", k, arrays)


def made(folder):
    files = StateFiles(folder)
    files.add("w", ENTRY)
    write(files, 0)
    files.commit()
    return files


def check(files, seed):
    for k, arrays in enumerate(tiles(seed)):
        for found, expected in zip(files.read("w", k), arrays, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_what_is_committed_is_read_and_nothing_else(tmp_path):
    files = made(tmp_path)
    for step in range(1, 5):
        write(files, step)
        check(files, step - 1)
        check(StateFiles(tmp_path), step - 1)
        files.commit()
        assert files.step == StateFiles(tmp_path).step == step
        check(StateFiles(tmp_path), step)
    np.testing.assert_array_equal(files.read("w", 0, slice(2, 3))[0], tiles(4)[0][2])


def test_tiles():
    assert tile_rows(10, 4, 12) == [3, 3, 3, 1] and tile_rows(10, 400, 12) == [1] * 10
    assert tile_rows(0, 4, 12) == [0] and tile_rows(2, 0, 12) == [2]
    assert ENTRY.rows == [(0, 2), (2, 5)] and ENTRY.num_bytes == 24 + 24 + 4 + 18 + 3
    assert ENTRY.offset(1, 1) == ENTRY.num_bytes - 3


def test_a_tile_that_is_missing_is_not_committed(tmp_path):
    files = made(tmp_path)
    files.write("w", 0, tiles(1)[0])
    with pytest.raises(ShardingError, match="not written: w, tile 1"):
        files.commit()
    check(StateFiles(tmp_path), 0)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found(tmp_path, damage):
    made(tmp_path)
    path = tmp_path / "000000.0"
    if damage == "flip":
        flip_bit(path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:20])
    else:
        path.unlink()
    with pytest.raises(
        ShardingError,
        match=f"000000.0, tile . {'another checksum' if damage == 'flip' else 'cut off'}".replace(". ", r"\d: "),
    ):
        check(StateFiles(tmp_path), 0)


@pytest.mark.parametrize("text", ["", "{}", "other"])
def test_a_damaged_record_is_an_error(tmp_path, text):
    made(tmp_path)
    record = tmp_path / RECORD
    record.write_text(text if text != "other" else json.dumps(json.loads(record.read_text()) | {"crc32": 1}))
    with pytest.raises(ShardingError, match=RECORD):
        StateFiles(tmp_path)


def test_no_room_is_an_error_before_the_first_step(tmp_path):
    files = StateFiles(tmp_path)
    with (
        limit_file_size(40),
        pytest.raises(ShardingError, match=r"(?s)make room for w, 2 x 73 bytes.*nothing yet.*free space"),
    ):
        files.add("w", ENTRY)


def test_a_disk_that_is_full_later_loses_nothing(tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        files = made(tmp_path / "disk" / "state")
        disk.fill()
        write(files, 1)  # has its room already
        with pytest.raises(ShardingError, match=r"(?s)commit step 1.*No space left.*step 0, which is intact"):
            files.commit()
        check(files, 0)
        check(StateFiles(files.directory), 0)
        disk.free()
        files.commit()
        check(StateFiles(files.directory), 1)
