"""A digest of a tensor's elements, by torch operators, on the tensor's own device.

[Note: digest]
The elements are read once, in memory order, as 64-bit words laid out in rows of
`ROW_WORDS`; the rows are added up, and the columns are weighted with odd random
numbers and added up (all modulo 2^64). So:
- one wrong word, whatever its bits, always changes the digest: its difference is not
  zero, and an odd factor cannot make it zero;
- independent wrong words cancel out with probability 2^-64;
- a rearrangement is missed only if every word moves by a multiple of `ROW_WORDS`
  words. Their number is odd, so no rearrangement of disk blocks (4 KiB and up) that
  spans less than `ROW_WORDS` blocks is of that kind: 64 MiB.
It is not a signature: it catches faults and not an adversary.
A tensor with gaps between equal runs (a slice of a fused query, key and value) has
rows of its own: `PERIOD` of them, a prime, are told apart. Any other tensor with gaps
is made dense, `CHUNK_BYTES` at a time. Nothing waits for the device, and no other
memory is taken than sums of rows.
(tests/ssdtrain/cache/test_digest.py)
"""

import math

import torch
from torch import Tensor

ROW_WORDS = 16383
PERIOD = 31
CHUNK_BYTES = 64 * 1024 * 1024
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
CHUNK_FACTOR = 0x5851F42D4C957F2D


class Digests:
    """Digests on one device; two tensors compare only under the same `word_bytes`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator("cpu").manual_seed(0)
        weights = torch.randint(
            -(2**62),
            2**62,
            (ROW_WORDS,),
            generator=generator,
            dtype=torch.int64,
            device="cpu",
        )
        self._weights = (2 * weights + 1).to(device)

    def of(self, tensor: Tensor, word_bytes: int) -> Tensor:
        """The digest of a plain strided tensor.

        Args:
            tensor: any shape, stride and dtype.
            word_bytes: what `word_bytes` gave when the tensor was saved.

        Returns:
            int64, 0-D, on the tensor's device.
        """
        with torch.no_grad():
            if tensor.numel() == 0:
                return self._weights.new_zeros(())
            packed = elements(tensor)
            if packed.is_contiguous():
                return self._of_words(packed.reshape(-1).view(WORDS[word_bytes]))
            rows = as_rows(packed)
            if rows is not None:
                return self._of_rows(rows.view(WORDS[word_bytes]))
            total = self._weights.new_zeros(())
            for chunk in chunks(packed):
                # A copy of its own: a chunk without gaps may lie at an odd address.
                dense = chunk.clone(memory_format=torch.contiguous_format)
                part = self._of_words(dense.reshape(-1).view(WORDS[word_bytes]))
                total = total * CHUNK_FACTOR + part
            return total

    def _of_rows(self, rows: Tensor) -> Tensor:
        num_periods = rows.shape[0] // PERIOD
        end = num_periods * PERIOD
        periods = rows[:end].view(num_periods, PERIOD, rows.shape[1])
        sums = periods.sum(0, dtype=torch.int64)
        sums[: rows.shape[0] - end] += rows[end:]
        return self._of_words(sums.view(-1))

    def _of_words(self, words: Tensor) -> Tensor:
        num_rows = words.numel() // ROW_WORDS
        if num_rows == 0:
            return (words * self._weights[: words.numel()]).sum()
        end = num_rows * ROW_WORDS
        sums = words[:end].view(num_rows, ROW_WORDS).sum(0, dtype=torch.int64)
        if end < words.numel():
            sums[: words.numel() - end] += words[end:]
        return sums.mul_(self._weights).sum()


def word_bytes(tensor: Tensor) -> int:
    """The widest word that divides the tensor's bytes where they lie now.

    A copy made by the cache lies as well as the original, modulo 16 bytes.
    """
    packed = elements(tensor)
    size, offset = packed.itemsize, packed.storage_offset() * packed.itemsize
    if packed.is_contiguous():
        return math.gcd(8, offset, packed.data_ptr(), packed.nbytes)
    rows = as_rows(packed)
    if rows is None:
        return math.gcd(8, packed.nbytes // packed.shape[0])
    run, step = size * rows.shape[1], size * rows.stride(0)
    return math.gcd(8, offset, packed.data_ptr(), run, step)


def elements(tensor: Tensor) -> Tensor:
    """The physical elements: each once, outermost dimension first as memory has them.

    What repeats (stride 0) is read once, so a broadcast is never materialised; conj
    and neg bits are off, because they belong to the view and not to the bytes.
    """
    packed = tensor.detach()
    if packed.is_conj():
        packed = packed.conj()
    if packed.is_neg():
        packed = torch._neg_view(packed)
    for dim in reversed(range(packed.dim())):
        repeats = packed.stride(dim) == 0 and packed.shape[dim] > 0
        if repeats or packed.shape[dim] == 1:
            packed = packed.select(dim, 0)
    strides = packed.stride()
    order = sorted(range(packed.dim()), key=lambda dim: -strides[dim])
    return packed.permute(order)


def as_rows(packed: Tensor) -> Tensor | None:
    """Equal runs at equal distances as a 2-D view, if that is what it is."""
    shape: list[int] = []
    strides: list[int] = []
    for size, stride in zip(packed.shape, packed.stride(), strict=True):
        if shape and strides[-1] == size * stride:
            shape[-1], strides[-1] = shape[-1] * size, stride
        else:
            shape.append(size)
            strides.append(stride)
    if len(shape) != 2 or strides[1] != 1 or strides[0] < shape[1]:
        return None
    if shape[0] < 4 * PERIOD:
        return None
    return packed.as_strided(shape, strides, packed.storage_offset())


def chunks(packed: Tensor, limit_bytes: int = CHUNK_BYTES) -> list[Tensor]:
    """Cut along the outermost dimension, at most `limit_bytes` each if that can be."""
    if packed.dim() == 0 or packed.numel() == 0:
        return [packed]
    row_bytes = packed.nbytes // packed.shape[0]
    num_rows = max(1, limit_bytes // max(1, row_bytes))
    return list(torch.split(packed, num_rows))
