"""Searches beside training: a step that waits for them depends on no machine."""

import time
from collections.abc import Sequence

import ssdtrain
from ssdtrain.plan.search import Search
from tests.ranks import LONGEST_S


def await_what_runs_beside(
    searches: Sequence[Search], *sessions: ssdtrain.Session
) -> None:
    """Wait for all answers, and for the pinned memory of what was answered before."""
    end = time.monotonic() + LONGEST_S
    for search in searches:
        answer = search.folder / "0.json"
        while not (search.is_over or answer.exists()):
            assert time.monotonic() < end
            time.sleep(0.01)
    for session in sessions:
        while not session.cache.offloader.pool.is_prepared:
            assert time.monotonic() < end
            time.sleep(0.001)
