"""Masked tokens and lost spans, checked against what the papers say they are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.errors import ConfigError
from ssdtrain.train.data.objectives import MaskedObjective, SpanObjective
from ssdtrain.train.data.vocabulary import Vocabulary
from ssdtrain.train.models.base import IGNORED_LABEL

VOCABULARY = Vocabulary.from_tokenizer(None)


def windows(size: int, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, length))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(2, 60), st.integers(0, 99))
def test_masked_batches(size: int, length: int, seed: int) -> None:
    text = windows(size, length, seed)
    objective = MaskedObjective(length, VOCABULARY)
    batch = objective.batch(text, np.random.default_rng(seed))
    ids, mask = batch.inputs
    original = torch.from_numpy(text)
    predicted = batch.labels != IGNORED_LABEL
    assert predicted.any(dim=1).all()  # every row teaches something
    assert torch.equal(batch.labels[predicted], original[predicted])
    assert (mask[predicted] == 1).all()
    assert (ids[mask == 0] == VOCABULARY.pad_id).all()
    untouched = (mask == 1) & ~predicted
    assert torch.equal(ids[untouched], original[untouched])
    assert (mask.diff(dim=1) <= 0).all()  # padding is at the end


def rebuilt(source: list[int], target: list[int]) -> list[int]:
    """Put every span of the target back where its sentinel stands."""
    first = VOCABULARY.first_sentinel_id
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token >= first:
            spans[token] = []
        else:
            spans[max(spans)].append(token)
    text: list[int] = []
    for token in source[: source.index(VOCABULARY.end_id)]:
        text += spans.pop(token) if token >= first else [token]
    assert not spans
    return text


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 300), st.integers(0, 999))
def test_spans_put_back_give_the_text(length: int, seed: int) -> None:
    objective = SpanObjective(length, VOCABULARY)
    text = windows(2, objective.window, seed)
    batch = objective.batch(text, np.random.default_rng(seed))
    source, shifted = batch.inputs
    assert source.shape == (2, length)
    assert shifted.shape == batch.labels.shape == (2, objective.target_length)
    assert torch.equal(shifted[:, 1:], batch.labels[:, :-1])
    assert (shifted[:, 0] == VOCABULARY.pad_id).all()
    for row in range(2):
        again = rebuilt(source[row].tolist(), batch.labels[row].tolist())
        assert again == text[row].tolist()


def test_no_room_for_a_span_is_refused() -> None:
    with pytest.raises(ConfigError, match="set 3 or more"):
        SpanObjective(2, VOCABULARY)
