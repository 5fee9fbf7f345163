import numpy as np
import pytest

from sharding.launch.text import token_files, tokenizer

TEXTS = [
    "def f(x):\n    return x\n" * 20,
    "na\u00efve \u20ac 100 \U0001f600\t<|endoftext|> x\r\n",
    "",
    "  def  def g(yy):\n" * 9,
]


@pytest.fixture(scope="module")
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe(TEXTS, vocab=300, num_bytes=1000)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_any_text_comes_back(kind: str, bpe: tokenizer.Tokenizer):
    one = bpe if kind == "bpe" else tokenizer.Bytes()
    for text, found in zip(TEXTS, one.encode(TEXTS), strict=True):
        assert tokenizer.END not in found
        assert one.decode(np.array(found, np.int32)) == text
        assert one.num_bytes[np.array(found, int)].sum() == len(text.encode())
    joined = np.concatenate([*(np.append(each, tokenizer.END) for each in one.encode(TEXTS[:2]))])
    assert one.decode(joined.astype(np.int32)) == TEXTS[0] + "\n" + TEXTS[1] + "\n"


def test_byte_pairs_are_fewer_and_always_the_same(bpe: tokenizer.Tokenizer, tmp_path):
    assert len(bpe.num_bytes) == 300
    assert len(bpe.encode(TEXTS)[0]) < 0.5 * len(TEXTS[0])
    again = tokenizer.train_bpe(iter(TEXTS), vocab=300, num_bytes=1000)
    for number, each in enumerate((bpe, again)):
        tokenizer.save(each, tmp_path / str(number))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    loaded = tokenizer.load(tmp_path / "0")
    assert loaded.encode(TEXTS) == bpe.encode(TEXTS)
    assert loaded.decode(np.array([299, 300, 5000])) == bpe.decode(np.array([299]))


@pytest.mark.parametrize(("vocab", "kind"), [(256, "<u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_tokens_over_several_files(vocab: int, kind: str, tmp_path):
    rng = np.random.default_rng(0)
    assert token_files.dtype(vocab).str == np.dtype(kind).str
    parts = [rng.integers(0, vocab, size) for size in (0, 7, 25, 1, 30)]
    with token_files.TokenWriter(tmp_path, "x", token_files.dtype(vocab), shard_tokens=10) as writer:
        for part in parts:
            writer.write(part)
    assert writer.counts == [10, 10, 10, 10, 10, 10, 3]
    whole = np.concatenate(parts)
    tokens = token_files.open_tokens(tmp_path, "x", token_files.dtype(vocab), writer.counts)
    assert len(tokens) == 63
    starts = [0, 5, 9, 10, 38, 42]
    np.testing.assert_array_equal(tokens.windows(starts, 21), [whole[start : start + 21] for start in starts])
    assert token_files.are_complete(tmp_path, "x", token_files.dtype(vocab), writer.counts)
    (tmp_path / "x-00002.bin").write_bytes(b"")
    assert not token_files.are_complete(tmp_path, "x", token_files.dtype(vocab), writer.counts)
