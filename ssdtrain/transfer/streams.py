"""Small contexts around calls on CUDA streams.

They stand in for `torch.cuda.stream` and for generators at every copy and every wait:
there the host's time counts, because a GPU with small layers runs dry behind it.
"""

import torch

Timed = tuple[torch.cuda.Event, torch.cuda.Event]


class OnStream:
    """Makes a stream current, as `torch.cuda.stream` does at several times the cost.

    `set_stream` makes the stream's device current as well. Both are put back, also
    where the caller's current device is another one.
    """

    __slots__ = ("_before", "_here", "_index", "_stream")

    def __init__(self, stream: torch.cuda.Stream, index: int) -> None:
        self._stream = stream
        self._index = index

    def __enter__(self) -> None:
        self._before = self._here = torch.cuda.current_stream(self._index)
        if torch.cuda.current_device() != self._index:
            self._here = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._here is not self._before:
            torch.cuda.set_stream(self._here)


class Stall:
    """Two timed events on a stream, around what may leave it idle."""

    __slots__ = ("_before", "_stalls", "_stream")

    def __init__(self, stream: torch.cuda.Stream, stalls: "Stalls") -> None:
        self._stream = stream
        self._stalls = stalls

    def __enter__(self) -> None:
        self._before = torch.cuda.Event(enable_timing=True)
        self._before.record(self._stream)

    def __exit__(self, *error: object) -> None:
        behind = torch.cuda.Event(enable_timing=True)
        behind.record(self._stream)
        self._stalls.pairs.append((self._before, behind))


class Stalls:
    """The account that stalls of any thread go to."""

    def __init__(self) -> None:
        self.pairs: list[Timed] = []

    def cut(self) -> list[Timed]:
        """The account so far; a new one begins."""
        pairs, self.pairs = self.pairs, []
        return pairs
