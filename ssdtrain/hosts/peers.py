"""Profiles pass between ranks through the store that they met in.

[Note: no collective]
A rank may observe once more when its plan drifts; another one that does not would never
join a collective, and training would hang. A store is written and read by each alone.
The first plan is made at the same step everywhere, so there a rank waits for the
others, for a bounded time; later it takes what is there. Who finds nobody plans alone,
which is counted: where bytes lie never changes what is computed.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ssdtrain.plan.agree import slowest
from ssdtrain.plan.profile import PROFILE_FILE, Profile

FIRST_WAIT_S = 20.0
"""At the first plan; the slowest rank may still be pinning memory."""
LATER_WAIT_S = 0.2
"""When a plan is made again."""
NO_PROFILE = b"none"


class StorePeers:
    """Ranks that agree on one plan through a `torch.distributed.Store`."""

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        alone: Callable[[], None],
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        """alone: told of every plan that this rank made by itself."""
        self._store = store
        # The same number on all of these ranks: they attach in the same order.
        session = store.add(f"ssdtrain/{ranks[0]}/sessions/{rank}", 1)
        self._names = [f"ssdtrain/{ranks[0]}/{session}/{other}" for other in ranks]
        self._own = self._names[list(ranks).index(rank)]
        self._alone = alone
        self._published: str | None = None
        self._wait_s = first_wait_s

    def agreed(self, own: Profile | None, step: int) -> Profile | None:
        """The slowest of everybody's; one's own where somebody has none (an observation
        failed, or is not under way) or saved other tensors."""
        if self._published is not None:
            self._store.delete_key(self._published)
        self._published = f"{self._own}/{step}"
        self._store.set(self._published, packed(own))
        if own is None:
            return None
        keys = [f"{name}/{step}" for name in self._names]
        wait_s, self._wait_s = self._wait_s, LATER_WAIT_S
        try:
            self._store.wait(keys, timedelta(seconds=wait_s))
            found = [unpacked(self._store.get(key)) for key in keys]
        except RuntimeError:  # the time is over, or the store's owner is gone
            found = [None]
        complete = [profile for profile in found if profile is not None]
        merged = slowest(complete) if len(complete) == len(found) else None
        if merged is None:
            self._alone()
            return own
        return merged


def packed(profile: Profile | None) -> bytes:
    """A profile as compressed JSON."""
    if profile is None:
        return NO_PROFILE
    return zlib.compress(json.dumps(PROFILE_FILE.to_json(profile)).encode(), 1)


def unpacked(text: bytes) -> Profile | None:
    """What `packed` made."""
    if text == NO_PROFILE:
        return None
    return PROFILE_FILE.from_json(json.loads(zlib.decompress(text)))
