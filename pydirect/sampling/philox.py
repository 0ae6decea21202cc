"""Random numbers that depend on what they are for, and on nothing else.

[Note: Keyed draws] Number ``draw`` of node ``node`` in relation ``relation`` of a
batch is Philox4x32-10 (Salmon et al., SC 2011) of the counter (node, draw / 2,
relation) under a key made of seed and batch. So a sample repeats whatever the device,
the number of threads and the batches before it. The kernels in sample.cu compute the
same.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def key_of(seed: int, batch: int) -> int:
    """64 bits from both: two rounds of splitmix64."""
    state = seed & (1 << 64) - 1
    for value in (batch, 0x5851F42D4C957F2D):
        state = (state + value + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return state


def philox(counter: tuple[torch.Tensor, ...], key: int) -> tuple[torch.Tensor, ...]:
    """Four 32-bit numbers for each counter.

    Args:
        counter: four int64 tensors of one shape, values below 2**32.
        key: 64 bits.

    Returns:
        Four int64 tensors of that shape, values below 2**32.
    """
    first, second, third, fourth = counter
    low, high = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        # Products wrap around at 64 bits, and the shift copies the sign: masked off.
        one, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (other >> 32 & _MASK) ^ second ^ low,
            other & _MASK,
            (one >> 32 & _MASK) ^ fourth ^ high,
            one & _MASK,
        )
        low, high = low + _WEYL[0] & _MASK, high + _WEYL[1] & _MASK
    return first, second, third, fourth


def uniform(
    nodes: torch.Tensor, first: int, num: int, *, key: int, relation: int
) -> torch.Tensor:
    """Numbers from 0 to below 1, of 53 bits each.

    Args:
        nodes: int64, shape (num_nodes,).
        first: number of the first draw, even.
        num: draws a node.
        key: of `key_of`.
        relation: 0 to 2**32 - 1.

    Returns:
        float64, shape (num_nodes, num).
    """
    pairs = torch.arange(first // 2, first // 2 + -(-num // 2), device=nodes.device)
    shape = (len(nodes), len(pairs))
    counter = (
        (nodes & _MASK)[:, None].expand(shape),
        (nodes >> 32)[:, None].expand(shape),
        pairs.expand(shape),
        torch.tensor(relation, device=nodes.device).expand(shape),
    )
    words = philox(counter, key)
    both = [words[i] << 21 | words[i + 1] >> 11 for i in (0, 2)]
    return torch.stack(both, dim=2).flatten(1)[:, :num].double() * 2.0**-53
