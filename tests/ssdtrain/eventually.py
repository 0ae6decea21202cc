"""What other threads and processes do at some time, and which of ours there are."""

import threading
import time
from collections.abc import Callable

from tests.ranks import LONGEST_S

PAUSE_S = 0.001


def until(is_so: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    """Call `act` again and again until something is so, which may take long."""
    end = time.monotonic() + LONGEST_S
    while not is_so():
        assert time.monotonic() < end
        act()
        time.sleep(PAUSE_S)


def session_threads() -> set[threading.Thread]:
    """Those of all sessions that are open, or were never closed."""
    return {each for each in threading.enumerate() if each.name.startswith("ssdtrain")}
