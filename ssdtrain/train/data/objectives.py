"""What a model learns from windows of text: next token, masked tokens, lost spans.
Shapes are fixed, and draws come from the given generator alone."""

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from ssdtrain.errors import ConfigError
from ssdtrain.train.data.batches import Batch, Objective
from ssdtrain.train.data.vocabulary import NUM_SENTINELS, Vocabulary
from ssdtrain.train.models.base import IGNORED_LABEL
from ssdtrain.train.settings import Family

Ids = NDArray[np.int64]


class CausalObjective:
    """Next-token prediction (GPT)."""

    def __init__(self, sequence_length: int) -> None:
        self.window = sequence_length + 1

    def batch(self, windows: Ids, random: Generator) -> Batch:
        """Inputs: (ids,); the label of a token is the one after it."""
        tokens = torch.from_numpy(windows)
        return Batch((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous())


class MaskedObjective:
    """Masked tokens (BERT, Devlin et al. 2019, section 3.1 and appendix A.2).

    15 % of the tokens are predicted; of these 80 % become the mask, 10 % a random
    token, 10 % stay. One sequence in ten is shorter and padded.
    """

    predicted = 0.15
    masked = 0.8
    randomized = 0.1
    shortened = 0.1

    def __init__(self, sequence_length: int, vocabulary: Vocabulary) -> None:
        self.window = sequence_length
        self._vocabulary = vocabulary

    def batch(self, windows: Ids, random: Generator) -> Batch:
        """Inputs: (ids, mask), mask 1 at text; labels: tokens to be predicted."""
        size, length = windows.shape
        full = np.full(size, length)
        short = random.integers(2, length, size, endpoint=True)
        lengths = np.where(random.random(size) < self.shortened, short, full)
        text = np.arange(length) < lengths[:, None]
        chosen = text & (random.random(windows.shape) < self.predicted)
        chosen[:, 0] |= ~chosen.any(axis=1)  # at least one to learn from
        labels = np.where(chosen, windows, IGNORED_LABEL)
        fate = random.random(windows.shape)
        other = random.integers(0, self._vocabulary.encoder.num_ids, windows.shape)
        ids = np.where(chosen & (fate < self.masked), self._vocabulary.mask_id, windows)
        swapped = chosen & (fate >= self.masked)
        swapped &= fate < self.masked + self.randomized
        ids = np.where(swapped, other, ids)
        ids = np.where(text, ids, self._vocabulary.pad_id)
        return Batch((_tensor(ids), _tensor(text)), _tensor(labels))


class SpanObjective:
    """Span corruption (T5, Raffel et al. 2020, section 3.1.4).

    15 % of the tokens, in spans of three on average, are replaced by one sentinel
    each; the target lists every sentinel with what it stands for.
    """

    noise = 0.15
    mean_span = 3.0

    def __init__(self, sequence_length: int, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._length = sequence_length
        self.window = 2
        if self._kept(self.window) > sequence_length:
            raise ConfigError(
                f"model.sequence_length={sequence_length} leaves no room for a span, "
                f"its sentinel and the end; set {self._kept(self.window)} or more."
            )
        # The longest window whose corrupted text still fits (it shrinks as it is
        # corrupted); the end marker takes one place.
        while self._kept(self.window + 1) <= sequence_length:
            self.window += 1
        self.target_length = self._noisy(self.window) + self._spans(self.window) + 1

    def _noisy(self, window: int) -> int:
        return min(max(round(window * self.noise), 1), window - 1)

    def _spans(self, window: int) -> int:
        noisy = self._noisy(window)
        most = min(NUM_SENTINELS, noisy, window - noisy)
        return min(max(round(noisy / self.mean_span), 1), most)

    def _kept(self, window: int) -> int:
        return window - self._noisy(window) + self._spans(window) + 1

    def batch(self, windows: Ids, random: Generator) -> Batch:
        """Inputs: (source [batch, sequence], shifted targets); labels: [batch,
        target_length]."""
        rows = [self._corrupt(window, random) for window in windows]
        source = np.full((len(rows), self._length), self._pad)
        for row, (ids, _) in zip(source, rows, strict=True):
            row[: len(ids)] = ids
        target = np.stack([r[1] for r in rows])
        shifted = np.roll(target, 1, axis=1)
        shifted[:, 0] = self._pad  # T5 starts decoding from the padding id
        return Batch((_tensor(source), _tensor(shifted)), _tensor(target))

    @property
    def _pad(self) -> int:
        return self._vocabulary.pad_id

    def _corrupt(self, window: Ids, random: Generator) -> tuple[Ids, Ids]:
        noisy, spans = self._noisy(self.window), self._spans(self.window)
        lost = _partition(noisy, spans, random)
        kept = _partition(len(window) - noisy, spans, random)
        end = np.array([self._vocabulary.end_id])
        source, target, at = [], [], 0
        for number in range(spans):
            sentinel = np.array([self._vocabulary.first_sentinel_id + number])
            hole = at + kept[number]
            source += [window[at:hole], sentinel]
            target += [sentinel, window[hole : hole + lost[number]]]
            at = hole + lost[number]
        return np.concatenate([*source, end]), np.concatenate([*target, end])


def _partition(total: int, parts: int, random: Generator) -> Ids:
    """`parts` positive lengths that sum to `total`, uniformly at random."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    edges = np.concatenate([[0], cuts, [total]])
    return np.diff(edges).astype(np.int64)


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def objective_of(
    family: Family, sequence_length: int, vocabulary: Vocabulary
) -> Objective:
    """Return the objective that a family is pre-trained with."""
    if family is Family.BERT:
        return MaskedObjective(sequence_length, vocabulary)
    if family is Family.T5:
        return SpanObjective(sequence_length, vocabulary)
    return CausalObjective(sequence_length)
