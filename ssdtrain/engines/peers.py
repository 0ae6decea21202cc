"""Ranks agree through the store that they met in.

[Note: no collective]
A rank may be late, or gone; another one that waits in a collective would hang with it.
A store is written and read by each alone, and every wait on it is bounded. The first
rank collects what the others wrote and writes down the conclusion, so that all read the
same one. Who finds none goes on alone, which is counted: where bytes lie never changes
what is computed. A wait is as long as a rank may be late (it pins memory, or measures
copies), and short once one did not come. A rank whose plan drifts asks all of them to
observe: alone it would slow the others, who wait for it in every layer.

[Note: one step for all]
The first rank decides what all do, follow another plan, observe or leave more room: at
one look for the next one, which no rank may reach before. A plan is followed when all
have what it needs; the next one leaves the room that is lacking where most is. A region
that runs again may run collectives, and ranks that run other regions again would meet
one another's: they hang or, worse, compute with what another layer sent. Where that may
be (`communicates`), a rank waits for a decision as long as a collective would wait for
the rank, and who did not agree changes nothing any more.
(tests/ssdtrain/plan/test_agree.py, tests/ssdtrain/engines/test_meshes.py)
"""

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from torch import distributed

from ssdtrain.plan.agree import Peers, slowest
from ssdtrain.plan.profile import PROFILE_FILE, Profile

WAIT_S = 20.0
"""For the others' part of a conclusion; the slowest may still be pinning memory."""
LATER_WAIT_S = 0.2
"""The same, once one of them did not come."""
MEETING_WAIT_S = 600.0
"""The same, where regions that run again wait for the same ranks anyway: torch's own
limit for a collective."""
POLL_S, LONGEST_POLL_S = 1e-3, 2e-2
"""Between two looks for what is waited for; each is longer than the one before. Torch's
own `wait` would keep its other threads from the store, and warns when it is over."""
LOOK_EVERY = 2
"""Steps between two decisions of the first rank."""
KEPT_STEPS = 64
"""Decisions are forgotten so many steps later."""
NOTHING = b"none"
MISSING = b"missing"
"""A rank has no profile, and says so."""

Merge = Callable[[list[bytes]], bytes]


class Decision(Enum):
    """What all ranks do at a look."""

    GO_ON = "go on"
    ADOPT = "adopt"
    OBSERVE = "observe"
    LEAVE_ROOM = "leave room"


class StorePeers(Peers):
    """Ranks that agree on one plan through a `torch.distributed.Store`."""

    is_alone = False

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        alone: Callable[[], None],
        wait_s: float = WAIT_S,
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
        self._wait_s = wait_s
        self._meets = False
        """Whether regions that run again wait for the other ranks."""
        self._common: int | None = None
        """Step of the profile that all of them plan from; None: planned alone."""
        self._round: int | None = None
        """Step of the last profile that was told; None: none was."""
        self._num_offers = 0
        """Plans offered, or taken, since then."""
        self._num_ready = 0
        """Of these: said to be ready for."""
        self._is_asked = False
        """Whether this rank has asked all to observe, since then."""
        self._num_adopted = 0
        """Of the first rank: offers whose plan all were told to follow."""
        self._num_left = self._num_leaving = 0
        """How often all left more room since then, and how often they were told to."""
        self._has_exceeded = False
        """Whether this rank has asked for more room, since they did last."""
        self._looked = -1
        """Step of the last look."""
        self._unread: list[int] = []
        """Looks whose decision this rank does not know yet."""
        self._now = self._following = Decision.GO_ON
        """Of the last look, and what the first rank decided for the next one."""

    # -- one conclusion for all -----------------------------------------------------

    def _concluded(
        self, topic: str, step: int, own: bytes, merge: Merge
    ) -> bytes | None:
        """What the first rank made of everybody's; None if it has not in time."""
        self._write(topic, f"{self._own}/{topic}/{step}", own)
        wait_s = MEETING_WAIT_S if self._meets else self._wait_s
        result = f"{self._group}/{topic}/{step}"
        if self._is_first:
            keys = [f"{name}/{topic}/{step}" for name in self._names]
            found = self._read(keys, wait_s, merge)
            self._write(f"all {topic}", result, NOTHING if found is None else found)
        else:
            # The first one may wait as long for somebody else.
            found = self._read([result], 1.5 * wait_s, lambda texts: texts[0])
        if found is None:
            self._wait_s = min(self._wait_s, LATER_WAIT_S)
        return found

    def _read(self, keys: list[str], wait_s: float, merge: Merge) -> bytes | None:
        end, pause_s = time.monotonic() + wait_s, POLL_S
        try:
            while not self._store.check(keys):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return None
                time.sleep(min(pause_s, left_s))
                pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
            return merge([self._store.get(key) for key in keys])
        except RuntimeError:  # the store's owner is gone
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

    def agreed(
        self, own: Profile | None, step: int, *, is_last: bool
    ) -> Profile | None:
        """The slowest of everybody's; one's own if somebody saved other tensors, or did
        not come. None: somebody's observation failed, and there is another one."""
        self._meets |= own is not None and own.communicates
        found = self._concluded("profile", step, packed(own), _slowest)
        merged = None if found is None else unpacked(found)
        self._common, self._round = None if merged is None else step, step
        self._num_left = self._num_leaving = 0
        self._forget_offers()
        self._is_asked = False
        self._unread.clear()
        self._now = self._following = Decision.GO_ON
        if merged is not None:
            self._meets = merged.communicates
            return merged
        if found == MISSING and not is_last:
            return None
        if own is not None:
            self._alone()
        return own

    def _forget_offers(self) -> None:
        self._num_offers = self._num_ready = self._num_adopted = 0
        self._has_exceeded = False

    @property
    def agree(self) -> bool:
        """Whether plans are made from what all ranks observed."""
        return self._common is not None

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

    def offered(self) -> str | None:
        """The next answer that the leading rank has offered, if any."""
        if self._common is None:
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
        return f"{self._group}/plan/{self._common}/{self._num_left}/{self._num_offers}"

    # -- what all do at one step: [Note: one step for all] ---------------------------

    def adopts(self, is_ready: bool, step: int) -> bool:
        """Whether all ranks follow the plan taken last from this step on."""
        if self._common is None:
            return is_ready
        if is_ready and self._num_ready < self._num_offers:
            self._num_ready = self._num_offers
            self._put(lambda: self._store.add(self._ready, 1))
        self._look(step)
        if self._now is not Decision.ADOPT or not is_ready:
            return False
        self._now = Decision.GO_ON
        return True

    def observes(self, wanted: bool, step: int) -> bool:
        """Whether all ranks observe this step, because one of them wants to.

        wanted: this one does.
        """
        if self._round is None:
            return wanted
        if wanted and not self._is_asked:
            self._is_asked = True
            self._put(lambda: self._store.add(f"{self._looks}/asked", 1))
        self._look(step)
        return self._now is Decision.OBSERVE

    def exceeded(self, own_bytes: int, step: int) -> int:
        """How much more room the next plan is to leave on all ranks; what was offered
        until then is not followed.

        own_bytes: by which this rank's step went beyond the memory limit.
        """
        if self._common is None:
            return own_bytes
        if own_bytes and not self._has_exceeded:
            self._has_exceeded = True
            text = str(own_bytes).encode()
            self._put(lambda: self._store.set(f"{self._own}/{self._over}", text))
            self._put(lambda: self._store.add(f"{self._group}/{self._over}", 1))
        self._look(step)
        if self._now is not Decision.LEAVE_ROOM:
            return 0
        found = self._read([f"{self._group}/most {self._over}"], 0.0, _most)
        self._now = Decision.GO_ON
        self._num_left += 1
        self._forget_offers()
        return 0 if found is None else int(found)

    @property
    def _over(self) -> str:
        return f"over/{self._common}/{self._num_left}"

    @property
    def _looks(self) -> str:
        return f"{self._group}/look/{self._round}"

    @property
    def _ready(self) -> str:
        return f"{self._group}/ready/{self._common}/{self._num_left}/{self._num_offers}"

    def _look(self, step: int) -> None:
        """In the first call of a look: learn its decision, and decide for the next."""
        if step % LOOK_EVERY or step == self._looked:
            return
        self._looked, following = step, step + LOOK_EVERY
        if not self._is_first:
            self._read_decisions()
            self._unread.append(following)
            return
        self._now, self._following = self._following, self._decided()
        text = self._following.value.encode()
        self._put(lambda: self._store.set(f"{self._looks}/{following}", text))
        old = f"{self._looks}/{following - KEPT_STEPS}"
        self._put(lambda: self._store.delete_key(old))

    def _read_decisions(self) -> None:
        """Read those that are there, up to one that is something to do."""
        self._now = Decision.GO_ON
        for look in self._unread[:]:
            wait_s = MEETING_WAIT_S if self._meets else 0.0
            key = f"{self._looks}/{look}"
            text = self._read([key], wait_s, lambda found: found[0])
            if text is not None:
                self._unread.remove(look)
                self._now = Decision(text.decode())
            if self._now is not Decision.GO_ON:
                return
        del self._unread[: -KEPT_STEPS // LOOK_EVERY]

    def _decided(self) -> Decision:
        """Decide what all ranks do at the next look."""
        if self._num_leaving > self._num_left:
            return Decision.GO_ON  # what is offered is of before
        try:
            if self._store.add(f"{self._group}/{self._over}", 0):
                return self._leave_room()
            if self._num_adopted < self._num_offers == self._num_ready:
                # Whoever adds nothing learns how many have said that they are ready.
                if self._store.add(self._ready, 0) == len(self._names):
                    self._num_adopted = self._num_offers
                    return Decision.ADOPT
            asked = self._store.add(f"{self._looks}/asked", 0)
        except RuntimeError:  # the store's owner is gone
            return Decision.GO_ON
        return Decision.OBSERVE if asked else Decision.GO_ON

    def _leave_room(self) -> Decision:
        keys = [f"{name}/{self._over}" for name in self._names]
        told = [key for key in keys if self._store.check([key])]
        most = _most([self._store.get(key) for key in told])
        self._store.set(f"{self._group}/most {self._over}", most)
        self._num_leaving += 1
        return Decision.LEAVE_ROOM


def peers_of(ranks: Sequence[int], alone: Callable[[], None]) -> Peers:
    """The peers of a set of ranks that wait for each other.

    Args:
        ranks: global ones.
        alone: told of every plan that this rank made by itself.
    """
    if len(ranks) < 2 or not distributed.is_initialized():
        return Peers()
    if distributed.get_rank() not in ranks:  # trained by others; here it only exists
        return Peers()
    # What init_process_group met in; torch has no public name for it (2.11 to 2.13).
    store = distributed.distributed_c10d._get_default_store()
    return StorePeers(store, ranks, distributed.get_rank(), alone)


def _slowest(found: list[bytes]) -> bytes:
    profiles = [unpacked(text) for text in found]
    complete = [profile for profile in profiles if profile is not None]
    return MISSING if len(complete) < len(found) else packed(slowest(complete))


def _longest(found: list[bytes]) -> bytes:
    columns = zip(*(json.loads(text) for text in found), strict=True)
    return json.dumps([max(column) for column in columns]).encode()


def _most(found: list[bytes]) -> bytes:
    return max(found, key=int)


def packed(profile: Profile | None) -> bytes:
    """A profile as compressed JSON."""
    if profile is None:
        return NOTHING
    return zlib.compress(json.dumps(PROFILE_FILE.to_json(profile)).encode(), 1)


def unpacked(text: bytes) -> Profile | None:
    """What `packed` made; None of what is no profile."""
    if text in (NOTHING, MISSING):
        return None
    return PROFILE_FILE.from_json(json.loads(zlib.decompress(text)))
