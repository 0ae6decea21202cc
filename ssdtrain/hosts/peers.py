"""Ranks agree through the store that they met in.

[Note: no collective]
A rank may be late, or gone; another one that waits in a collective would hang with it.
A store is written and read by each alone, and every wait on it is bounded. The first of
the ranks collects what the others wrote and writes down the conclusion, so that all of
them read the same one. Who finds none goes on alone, which is counted: where bytes lie
never changes what is computed.

A rank whose plan drifts does not observe by itself: the others wait for it in every
layer, and would see its slow step as their own. It asks all of them to observe, at a
step that none of them has begun yet.
(tests/ssdtrain/plan/test_agree.py, tests/ssdtrain/hosts/test_meshes.py)
"""

import contextlib
import json
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from ssdtrain.plan.agree import Alone, Peers, slowest
from ssdtrain.plan.profile import PROFILE_FILE, Profile

FIRST_WAIT_S = 20.0
"""At the first conclusion; the slowest rank may still be pinning memory."""
LATER_WAIT_S = 0.2
"""At all others."""
LOOK_EVERY = 4
"""Steps between two looks for what another rank wants."""
NOTHING = b"none"

Merge = Callable[[list[bytes]], bytes]


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
        group = f"ssdtrain/{zlib.crc32(json.dumps(list(ranks)).encode()):x}"
        # The same number on all of these ranks: they attach in the same order.
        session = store.add(f"{group}/sessions/{rank}", 1)
        self._group = f"{group}/{session}"
        self._names = [f"{self._group}/{other}" for other in ranks]
        self._own = self._names[list(ranks).index(rank)]
        self._is_first = ranks[0] == rank
        self._alone = alone
        self._written: dict[str, str] = {}
        """By topic: the key written last."""
        self._wait_s = first_wait_s
        self._common: int | None = None
        """Step of the profile that all of them plan from; None: planned alone."""
        self._num_offers = 0
        """Plans offered, or taken, since then."""
        self._asked = -1

    # -- one conclusion for all -----------------------------------------------------

    def _concluded(
        self, topic: str, step: int, own: bytes, merge: Merge
    ) -> bytes | None:
        """What the first rank made of everybody's; None if it has not in time."""
        self._write(topic, f"{self._own}/{topic}/{step}", own)
        wait_s, self._wait_s = self._wait_s, LATER_WAIT_S
        result = f"{self._group}/{topic}/{step}"
        if not self._is_first:
            # The first one may wait as long for somebody else.
            return self._read([result], 1.5 * wait_s, lambda found: found[0])
        keys = [f"{name}/{topic}/{step}" for name in self._names]
        found = self._read(keys, wait_s, merge)
        self._write(f"all {topic}", result, NOTHING if found is None else found)
        return found

    def _read(self, keys: list[str], wait_s: float, merge: Merge) -> bytes | None:
        try:
            self._store.wait(keys, timedelta(seconds=wait_s))
            return merge([self._store.get(key) for key in keys])
        except RuntimeError:  # the time is over, or the store's owner is gone
            return None

    def _write(self, topic: str, key: str, text: bytes) -> None:
        before = self._written.get(topic)
        if before is not None:
            self._put(lambda: self._store.delete_key(before))
        self._written[topic] = key
        self._put(lambda: self._store.set(key, text))

    def _put(self, write: Callable[[], Any]) -> None:
        # The store's owner may be gone; who reads finds nothing, and goes on alone.
        with contextlib.suppress(RuntimeError):
            write()

    # -- what is agreed on ----------------------------------------------------------

    def agreed(self, own: Profile | None, step: int) -> Profile | None:
        """The slowest of everybody's; one's own where somebody has none (an observation
        failed, or is not under way) or saved other tensors."""
        found = self._concluded("profile", step, packed(own), _slowest)
        merged = None if found is None else unpacked(found)
        self._common, self._num_offers = None if merged is None else step, 0
        if own is not None and merged is None:
            self._alone()
        return own if merged is None or own is None else merged

    def all_agree(self, own: bool, topic: str, step: int) -> bool:
        """Whether everybody says yes."""
        if self._common is None:
            return own
        found = self._concluded(topic, step, b"1" if own else b"0", min)
        return found == b"1"

    def longest(self, own: Sequence[float], topic: str, step: int) -> tuple[float, ...]:
        """The longest of everybody's times, one by one; one's own if none are told."""
        if self._common is None:
            return tuple(own)
        found = self._concluded(topic, step, json.dumps(list(own)).encode(), _longest)
        if found is None or found == NOTHING:
            self._common = None
            self._alone()
            return tuple(own)
        return tuple(json.loads(found))

    @property
    def leads(self) -> bool:
        """Whether this rank searches, for all or for itself alone."""
        return self._is_first or self._common is None

    def offer(self, answer: str) -> None:
        """The others are to take this answer, too."""
        if self._common is not None:
            text = zlib.compress(answer.encode(), 1)
            self._put(lambda: self._store.set(self._next_offer(), text))
            self._num_offers += 1

    def offered(self, step: int) -> str | None:
        """The next answer that the leading rank has offered, if any."""
        if self._common is None or step % LOOK_EVERY:
            return None
        key = self._next_offer()
        try:
            if not self._store.check([key]):
                return None
            text = self._store.get(key)
        except RuntimeError:  # the store's owner is gone
            return None
        self._num_offers += 1
        return zlib.decompress(text).decode()

    def _next_offer(self) -> str:
        return f"{self._group}/plan/{self._common}/{self._num_offers}"

    def observes(self, wanted: bool, step: int) -> bool:
        """Whether to observe this step, because a rank wants to.

        wanted: this one does.
        """
        if self._common is None:
            return wanted
        turn = step // LOOK_EVERY
        if wanted and self._asked <= turn:
            # Not the next look: another rank may be past it.
            self._asked = turn + 2
            key = f"{self._group}/observe/{self._asked}"
            self._put(lambda: self._store.set(key, b"1"))
        if step % LOOK_EVERY:
            return False
        try:
            return bool(self._store.check([f"{self._group}/observe/{turn}"]))
        except RuntimeError:  # the store's owner is gone
            return wanted


def peers_of(ranks: Sequence[int], alone: Callable[[], None]) -> Peers:
    """The peers of a set of ranks that wait for each other.

    Args:
        ranks: global ones.
        alone: told of every plan that this rank made by itself.
    """
    if len(ranks) < 2 or not distributed.is_initialized():
        return Alone()
    if distributed.get_rank() not in ranks:  # trained by others; here it only exists
        return Alone()
    # What init_process_group met in; torch has no public name for it (2.11 to 2.13).
    store = distributed.distributed_c10d._get_default_store()
    return StorePeers(store, ranks, distributed.get_rank(), alone)


def _slowest(found: list[bytes]) -> bytes:
    profiles = [unpacked(text) for text in found]
    complete = [profile for profile in profiles if profile is not None]
    return packed(slowest(complete) if len(complete) == len(found) else None)


def _longest(found: list[bytes]) -> bytes:
    columns = zip(*(json.loads(text) for text in found), strict=True)
    return json.dumps([max(column) for column in columns]).encode()


def packed(profile: Profile | None) -> bytes:
    """A profile as compressed JSON."""
    if profile is None:
        return NOTHING
    return zlib.compress(json.dumps(PROFILE_FILE.to_json(profile)).encode(), 1)


def unpacked(text: bytes) -> Profile | None:
    """What `packed` made."""
    if text == NOTHING:
        return None
    return PROFILE_FILE.from_json(json.loads(zlib.decompress(text)))
