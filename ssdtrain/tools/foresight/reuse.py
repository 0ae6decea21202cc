"""How often rows of a table are read again, in bins (Lin 2023, section 5.4). Bin i
holds the share of look-ups that go to rows read between 2**i and 2**(i + 1) - 1 times;
the last one takes the rest. One number cannot tell how popular rows are."""

from collections.abc import Sequence

import torch

from ssdtrain.errors import ConfigError

BINS = 17
_SUM = 1e-3


def reuse_factors(index: torch.Tensor) -> tuple[float, ...]:
    """Return the shares of `BINS` bins for the row numbers of one batch, any shape."""
    if index.numel() == 0:
        return (1.0, *(0.0 for _ in range(BINS - 1)))
    counts = index.unique(return_counts=True)[1]
    bins = counts.double().log2().floor().long().clamp(max=BINS - 1)
    shares = torch.zeros(BINS, dtype=torch.float64, device=index.device)
    shares.index_add_(0, bins, counts.double() / index.numel())
    return tuple(shares.tolist())


def distinct_share(factors: Sequence[float]) -> float:
    """Return different rows over look-ups, by the middle of each bin. Raises
    ConfigError: not `BINS` shares of 0 or more whose sum is 1."""
    wrong = len(factors) != BINS or any(not share >= 0 for share in factors)
    if wrong or abs(sum(factors) - 1.0) > _SUM:
        raise ConfigError(
            f"reuse factors: expects {BINS} shares of 0 or more whose sum is 1, got "
            f"{len(factors)} with the sum {sum(factors):.3f}"
        )
    return sum(share / _middle(i) for i, share in enumerate(factors))


def _middle(bin_: int) -> float:
    """Reads of a row in a bin, where a count is as likely as 1 / count**2."""
    counts = range(1 << bin_, 1 << (bin_ + 1))
    if bin_ > 10:  # the sums are their integrals by then
        return (1 << bin_) * 1.3862943611198906
    return sum(1 / n for n in counts) / sum(1 / n**2 for n in counts)
