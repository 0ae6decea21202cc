"""A profile, indexed once for many simulations."""

from collections.abc import Container, Sequence
from typing import NamedTuple

from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.plan import Order
from ssdtrain.plan.profile import Item, Phase, Profile, RegionRun

NEVER = -1


class Residency(NamedTuple):
    """Marks between which items are on the device; NEVER: nobody asks for the item."""

    first: list[int]
    last: list[int]
    ended: set[int]
    """Items that are gone already when the operator after their last mark runs."""


class Stored(NamedTuple):
    """Results of attention that a region's re-run takes from where they are stored."""

    items: list[int]
    ms: float
    """Device time that this saves."""
    num_bytes: int


class PlacedItems(NamedTuple):
    """What follows from placements alone; whoever simulates and schedules asks for the
    same ones again and again."""

    placed: list[Placement]
    """By item."""
    residency: Residency
    is_saved: list[bool]
    """Whether each item is saved at all."""
    run_marks: dict[int, int]
    """Of region calls that run again: at which mark."""


class Timeline:
    """Where in the step each item is packed and asked for.

    Items of all lanes are numbered through: item i of lane n is `first_id[n] + i`.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.first_id: list[int] = []
        self.items: list[Item] = []
        self.lane_of: list[int] = []
        for lane in range(len(profile.lanes)):
            self.first_id.append(len(self.items))
            own = profile.items_of(lane)
            self.items.extend(own)
            self.lane_of.extend([lane] * len(own))
        count = len(self.items)
        self.pack_mark = [NEVER] * count
        self.uses: list[list[int]] = [[] for _ in range(count)]
        self.lane_uses: list[list[int]] = [[] for _ in profile.lanes]
        """Marks of each lane's uses, in order: what `Order.load_at` counts."""
        self.item_of_mark: list[int] = []
        self.is_pack: list[bool] = []
        for at, mark in enumerate(profile.marks):
            item = self.first_id[mark.lane] + mark.item
            packs = mark.phase is Phase.FORWARD
            self.item_of_mark.append(item)
            self.is_pack.append(packs)
            if packs:
                self.pack_mark[item] = at
            else:
                self.uses[item].append(at)
                self.lane_uses[mark.lane].append(at)
        self.node_end = list(range(len(profile.marks)))
        """For each mark the last one of the operator that asks there."""
        for at in reversed(range(len(profile.marks) - 1)):
            if profile.marks[at].goes_on:
                self.node_end[at] = self.node_end[at + 1]
        # What holds for all placements but those that rebuild or run again.
        self._first_use = [min(uses) if uses else NEVER for uses in self.uses]
        self._last_end = [self.node_end[max(u)] if u else NEVER for u in self.uses]
        self.own_bytes = [0 if item.held else item.num_bytes for item in self.items]
        """On the device, of a saved tensor: none of what its owner holds anyway."""
        self.length_ms = [mark.ms for mark in profile.marks]
        self.other_bytes = [mark.other_bytes for mark in profile.marks]
        self.host_ms = [mark.host_ms for mark in profile.marks]
        self.num_handles = [mark.num_handles for mark in profile.marks]
        out, into = profile.links.ways
        self.copy_out_ms = self._times(out.seconds)
        self.copy_in_ms = self._times(into.seconds)
        self.runs: list[RegionRun] = []
        """Region calls of all lanes, numbered through."""
        self.run_of: list[int] = []
        """The region call of each item; NEVER: none."""
        self.members: list[list[int]] = []
        """Items of each region call."""
        self.read_by: list[list[int]] = []
        """Items that each region call reads."""
        self._parts: list[list[tuple[list[int], float]]] = []
        """Items and times of the parts of each region call."""
        self._serving: list[tuple[int, int, int]] = []
        """Items that are there for a region call or for another item, and these;
        NEVER: none."""
        self._number_regions()
        self.saved_in = self._saved_in()
        """The region call in which each item is saved where nothing runs again; NEVER:
        in none."""
        self.run_of_mark = [self.saved_in[item] for item in self.item_of_mark]
        """The same of each mark."""
        self.ends_of_backward = {
            self.run_of_mark[mark]
            for uses in self.lane_uses
            for mark in (*uses[:1], *uses[-1:])
        }
        """Region calls in which a lane's backward begins or ends."""
        self.first_pack = [
            min((self.pack_mark[item] for item in own), default=NEVER)
            for own in self.members
        ]
        """The mark at which each region call saves its first item."""
        self.forward_end = [
            1 + max((self.pack_mark[item] for item in own), default=NEVER)
            for own in self.members
        ]
        """The mark after the last item that each region call saves."""
        self._with_inputs = [
            (base, base + number)
            for base, kind in zip(self.first_id, profile.lanes, strict=True)
            for number in _consumers_first(profile.kinds[kind])
            if profile.kinds[kind][number].inputs
        ]
        """Items whose recipes read others, consumers first, and where their lane
        begins."""
        self.made = [n for n, item in enumerate(self.items) if item.made_ms]
        """Items that forward makes for a recipe's sake."""
        self._has_small = any(run.small_bytes for run in self.runs)
        self._resting: dict[tuple[str, int, Placement], Order] = {}
        self._layout: PlacedItems | None = None
        """Of the placements that were asked for last."""

    @property
    def num_marks(self) -> int:
        """Marks of the step."""
        return len(self.length_ms)

    def _number_regions(self) -> None:
        for lane, kind in enumerate(self.profile.lanes):
            base, first = self.first_id[lane], len(self.runs)
            runs = self.profile.regions.get(kind, ())
            self.runs.extend(runs)
            self.read_by.extend([base + each for each in run.inputs] for run in runs)
            self.members.extend([] for _ in runs)
            self._parts.extend(
                [([base + each for each in part.items], part.ms) for part in run.parts]
                for run in runs
            )
            for number, item in enumerate(self.profile.kinds[kind]):
                run = NEVER if item.region < 0 else first + item.region
                self.run_of.append(run)
                if run != NEVER:
                    self.members[run].append(base + number)
                if item.serves >= 0:
                    self._serving.append((base + number, first + item.serves, NEVER))
                elif item.owner >= 0:
                    self._serving.append((base + number, NEVER, base + item.owner))

    def _saved_in(self) -> list[int]:
        found = self.run_of.copy()
        for run, inputs in enumerate(self.read_by):
            for item in inputs:
                if self.items[item].floats and found[item] == NEVER:
                    found[item] = run
        return found

    def stored_parts(self, run: int, placed: Sequence[Placement]) -> Stored:
        """Return what a region call takes in its re-run instead of computing it."""
        items: list[int] = []
        saved_ms = 0.0
        for own, ms in self._parts[run]:
            if not any(placed[item] is Placement.RERUN for item in own):
                items += own
                saved_ms += ms
        num_bytes = sum(self.items[item].num_bytes for item in items)
        return Stored(items, min(saved_ms, self.runs[run].ms), num_bytes)

    def resting_order(self, kind: str, number: int, placement: Placement) -> Order:
        """Return the order of an item that neither leaves nor comes back at a mark."""
        key = kind, number, placement
        order = self._resting.get(key)
        if order is None:
            item = self.profile.kinds[kind][number]
            order = self._resting[key] = Order(
                name=item.name,
                num_bytes=item.num_bytes,
                placement=placement,
                owner=item.owner,
                region=item.region,
                serves=item.serves,
                floats=item.floats,
            )
        return order

    def layout(self, placed: Sequence[Placement]) -> PlacedItems:
        """Return what follows from these placements; not to be changed."""
        placed = list(placed)
        known = self._layout
        if known is None or known.placed != placed:
            run_marks = self._run_marks(placed)
            known = self._layout = PlacedItems(
                placed,
                self._residency(placed, run_marks),
                self._are_saved(placed),
                run_marks,
            )
        return known

    def other_with_small(self, run_marks: Container[int]) -> list[int]:
        """Return `other_bytes` with what region calls that do not run again keep
        besides their items.

        Args:
            run_marks: the calls that do.
        """
        if not self._has_small:
            return self.other_bytes
        found = self.other_bytes.copy()
        for run, call in enumerate(self.runs):
            firsts = [self._first_use[item] for item in self.members[run]]
            uses = [mark for mark in firsts if mark != NEVER]
            if call.small_bytes and run not in run_marks and uses:
                for mark in range(self.forward_end[run], min(uses)):
                    found[mark] += call.small_bytes
        return found

    def _run_marks(self, placed: Sequence[Placement]) -> dict[int, int]:
        found: dict[int, int] = {}
        for run, members in enumerate(self.members):
            uses = [
                self._first_use[item]
                for item in members
                if placed[item] is Placement.RERUN and self._first_use[item] != NEVER
            ]
            if uses:
                found[run] = min(uses)
        return found

    def _times(self, seconds: object) -> list[float]:
        known: dict[int, float] = {}
        for item in self.items:
            if item.num_bytes not in known:
                known[item.num_bytes] = seconds(item.num_bytes) * 1e3  # type: ignore[operator]
        return [known[item.num_bytes] for item in self.items]

    def placements_by_id(self, placements: Placements) -> list[Placement]:
        """Return the placement of every item of the step."""
        flat: list[Placement] = []
        for kind in self.profile.lanes:
            flat.extend(placements[kind])
        return flat

    def _residency(
        self, placed: Sequence[Placement], run_marks: dict[int, int]
    ) -> Residency:
        """Return when each item must be on the device in backward.

        An item goes when the operator that asked last has ended. A recipe needs its
        inputs when its own item is first asked for. An input that nobody asks for later
        goes as soon as the recipe has run, unless it is kept: then the recipe's item
        holds it to its own end.
        """
        first, last = self._first_use.copy(), self._last_end.copy()
        ended: set[int] = set()
        for run, at in run_marks.items():
            self._read_again(run, at, placed, first, last, ended)
        for base, item in self._with_inputs:
            if placed[item] is not Placement.RECOMPUTE or first[item] == NEVER:
                continue
            at = first[item]
            for needed in self.items[item].inputs:
                source = base + needed
                if first[source] == NEVER or at < first[source]:
                    first[source] = at
                stays = placed[source] is Placement.KEEP
                until = last[item] if stays else at
                if until > last[source]:
                    last[source] = until
                    ended.discard(source)
                    if not stays:
                        ended.add(source)
        return Residency(first, last, ended)

    def _read_again(
        self,
        run: int,
        at: int,
        placed: Sequence[Placement],
        first: list[int],
        last: list[int],
        ended: set[int],
    ) -> None:
        """Mark a region's items and inputs as resident when its call runs again."""
        until = at
        for item in self.members[run]:
            if placed[item] is Placement.RERUN and first[item] != NEVER:
                first[item] = at
                until = max(until, last[item])
        for item in self.stored_parts(run, placed).items:
            if first[item] == NEVER or at < first[item]:
                first[item] = at
            last[item] = max(last[item], at)
        for item in self.read_by[run]:
            if first[item] == NEVER or at < first[item]:
                first[item] = at
            # The call holds what stays until its last tensor is gone.
            stays = placed[item] is Placement.KEEP
            end = until if stays else at
            if end > last[item]:
                last[item] = end
                if not stays:
                    ended.add(item)

    def _are_saved(self, placed: Sequence[Placement]) -> list[bool]:
        """Return whether each item is saved at all: one that serves a recipe or a
        region may not be."""
        reruns = [
            any(placed[item] is Placement.RERUN for item in members)
            for members in self.members
        ]
        found = [True] * len(self.items)
        for item, run, owner in self._serving:
            of_recipe = placed[owner] is Placement.RECOMPUTE
            found[item] = of_recipe if run == NEVER else reruns[run]
        return found


def _consumers_first(items: Sequence[Item]) -> list[int]:
    """Return an order in which every recipe's item comes before the recipe's inputs."""

    def rank(number: int) -> tuple[int, bool]:
        owner = items[number].owner
        return (number, True) if owner < 0 else (owner, False)

    return sorted(range(len(items)), key=rank, reverse=True)
