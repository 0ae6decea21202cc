"""Who hears that device memory is short."""

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.transfer.allocator import Observer, Shortages


def test_one_observer_asks_who_still_listens() -> None:
    attached: list[Observer] = []
    shortages = Shortages(attached.append)
    heard: list[tuple[str, int]] = []
    assert not attached  # until somebody wants to hear

    def fails(asked: int) -> None:
        raise ConfigError(f"{asked} bytes are short")

    end_first = shortages.listen(0, lambda asked: heard.append(("first", asked)))
    end_other = shortages.listen(1, lambda asked: heard.append(("other", asked)))
    (observer,) = attached
    observer(0, 20, 100, 5)
    observer(1, 30, 100, 5)
    assert heard == [("first", 20), ("other", 30)]
    for _ in range(2):
        end_first()
    observer(0, 40, 100, 5)
    assert len(heard) == 2
    shortages.listen(1, fails)
    with pytest.raises(ConfigError, match="50 bytes"):
        observer(1, 50, 100, 5)
    assert heard[2:] == [("other", 50)] and len(attached) == 1
    end_other()
