"""Text to token file to batches."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.errors import ConfigError
from ssdtrain.train.data import sources
from ssdtrain.train.data.batches import Batches
from ssdtrain.train.data.objectives import CausalObjective
from ssdtrain.train.data.sources import source_files
from ssdtrain.train.data.tokens import token_file
from ssdtrain.train.data.vocabulary import NUM_SENTINELS, Vocabulary
from ssdtrain.train.settings import DataSettings


def bytes_vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(None)


def from_files(tmp_path: Path, *files: Path, **more: object) -> DataSettings:
    return DataSettings(
        files=tuple(map(str, files)), cache_directory=str(tmp_path / "cache"), **more
    )


def test_tokens_are_the_bytes_and_an_end_for_every_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hé")
    lines = [json.dumps({"text": "x"}), "", json.dumps({"text": "yz"})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    vocabulary = bytes_vocabulary()
    files = from_files(tmp_path, tmp_path / "a.txt", tmp_path / "b.jsonl")
    end = [vocabulary.end_id]
    expected = [*"hé".encode(), *end, *b"x", *end, *b"yz", *end]
    assert token_file(files, vocabulary).tolist() == expected


def test_made_once_and_again_when_the_text_changes(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    data = from_files(tmp_path, text)
    token_file(data, bytes_vocabulary())
    [made] = (tmp_path / "cache").glob("*.u32")
    stamp = made.stat().st_mtime_ns
    token_file(data, bytes_vocabulary())
    assert made.stat().st_mtime_ns == stamp
    text.write_text("two")
    os.utime(text, ns=(1, 1))
    assert token_file(data, bytes_vocabulary()).tolist()[:3] == list(b"two")
    assert len(list((tmp_path / "cache").glob("*.u32"))) == 2
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_max_bytes_stops_in_the_middle(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    data = from_files(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt", max_bytes=13)
    tokens = token_file(data, bytes_vocabulary())
    assert bytes(int(t) for t in tokens if t < 256) == b"a" * 10 + b"b" * 3


def test_standard_library_is_the_default(tmp_path: Path) -> None:
    data = DataSettings(cache_directory=str(tmp_path), max_bytes=100_000)
    tokens = token_file(data, bytes_vocabulary())
    assert len(tokens) >= 100_000
    assert b"import" in bytes(int(t) for t in tokens[:50_000] if t < 256)


def test_directories_and_patterns_in_stable_order(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("2", "1"):
        (tmp_path / "d" / f"{name}.txt").write_text(name)
    vocabulary = bytes_vocabulary()
    whole = token_file(from_files(tmp_path, tmp_path / "d"), vocabulary)
    pattern = token_file(from_files(tmp_path, tmp_path / "d" / "*.txt"), vocabulary)
    assert whole.tolist() == pattern.tolist() == [49, 256, 50, 256]


def test_a_bad_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "x"}\n{"body": "y"}\n')
    with pytest.raises(ConfigError, match=r"b.jsonl:2 expects .* 'text'"):
        token_file(from_files(tmp_path, path), bytes_vocabulary())
    assert not list((tmp_path / "cache").glob("*.u32"))


def test_no_file_and_no_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches no file"):
        token_file(from_files(tmp_path, tmp_path / "none*"), bytes_vocabulary())
    with pytest.raises(ConfigError, match=r"data\.tokenizer expects"):
        Vocabulary.from_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_wrong_directory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(5):
        (many / f"{number}.txt").write_text("x")
    monkeypatch.setattr(sources, "MOST_FILES", 4)
    for place in (many, many / "*.txt"):
        with pytest.raises(ConfigError, match="expects at most 4 files"):
            source_files(from_files(tmp_path, place))
    (many / "4.txt").unlink()
    (many / "3.txt").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(ConfigError, match=r"3\.txt expects UTF-8 text, got NUL"):
        source_files(from_files(tmp_path, many))
    assert len(source_files(from_files(tmp_path, many / "[0-2].txt"))) == 3


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[U]": 0, "big": 1, "cat": 2}, unk_token="[U]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.from_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("big big cat dog")
    tokens = token_file(from_files(tmp_path, tmp_path / "a.txt"), vocabulary)
    assert tokens.tolist() == [1, 1, 2, 0, 3]
    assert vocabulary.num_rows == 128


def test_special_ids_fit_the_rows() -> None:
    vocabulary = bytes_vocabulary()
    assert vocabulary.first_sentinel_id + NUM_SENTINELS <= vocabulary.num_rows
    assert vocabulary.num_rows % 128 == 0


@settings(deadline=None, max_examples=50)
@given(
    num_tokens=st.integers(20, 300),
    sequence_length=st.integers(2, 19),
    size=st.integers(1, 4),
    key=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)),
)
def test_causal_batches(
    num_tokens: int, sequence_length: int, size: int, key: tuple[int, int, int]
) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint32)
    batches = Batches(tokens, CausalObjective(sequence_length), size, seed=3)
    batch = batches.batch(*key)
    (ids,) = batch.inputs
    assert ids.shape == batch.labels.shape == (size, sequence_length)
    assert torch.equal(batch.labels, ids + 1)  # the text counts up by one
    assert int(batch.labels.max()) < num_tokens
    again = batches.batch(*key)
    assert torch.equal(again.inputs[0], ids)


def test_every_number_changes_the_batch() -> None:
    batches = Batches(np.arange(9999, dtype=np.uint32), CausalObjective(4), 8, seed=0)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    seen = {tuple(batches.batch(*key).inputs[0].flatten().tolist()) for key in keys}
    assert len(seen) == len(keys)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 5 tokens, one sequence needs 9"):
        Batches(np.zeros(5, np.uint32), CausalObjective(8), 1, 0)
