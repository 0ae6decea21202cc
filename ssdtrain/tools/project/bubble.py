"""Pipeline bubbles and micro-batches in flight."""

from ssdtrain.errors import ConfigError


def _check(stages: int, micro_batches: float, chunks: int) -> None:
    if stages < 1 or micro_batches <= 0 or chunks < 1:
        raise ConfigError(
            "a pipeline expects stages >= 1, micro_batches > 0 and chunks >= 1, got "
            f"{stages}, {micro_batches}, {chunks}"
        )


def bubble_fraction(stages: int, micro_batches: float, chunks: int = 1) -> float:
    """Idle part of a step of p stages, m micro-batches, v chunks: (p - 1) / (v m + p -
    1)."""
    _check(stages, micro_batches, chunks)
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def bubble_over_ideal(stages: int, micro_batches: float, chunks: int = 1) -> float:
    """Idle time over busy time: (p - 1) / (v m), as Narayanan et al. 2021 count it."""
    _check(stages, micro_batches, chunks)
    return (stages - 1) / (chunks * micro_batches)


def layers_in_flight(layers: int, stages: int, chunks: int = 1) -> float:
    """Layers of activations that the first stage holds at most: L, and interleaved L (1
    + (p - 1) / (p v)) (Korthikanti et al. 2022, section 4.2.3)."""
    _check(stages, 1, chunks)
    if chunks == 1:
        return float(layers)
    return layers * (1 + (stages - 1) / (stages * chunks))
