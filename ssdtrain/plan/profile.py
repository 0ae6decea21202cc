"""What one training step was seen to do: the planner's only input.

[Note: marks]
A step is a sequence of marks: one where a saved tensor is packed for the first time
(forward), one where autograd asks for a saved tensor (backward). Between two marks an
operator runs; its time (without waits and rebuilds) and the most memory it needed
besides the saved tensors do not depend on where those are. So a profile taken under one
plan prices every other. Marks are also the only moments at which the cache acts, so a
plan names its releases and loads by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ssdtrain.curves import Links
from ssdtrain.jsonfile import Duration, Format, Index, Natural, Unfit

ESTIMATED = "estimated"
"""The note of a profile of which no step was observed: what gave its times."""


class Phase(str, Enum):
    """Which half of a lane's life a mark belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One distinct saved tensor of a lane: a record, or what a recipe rebuilds."""

    name: str
    """Producer and shape, such as `GeluBackward0 [16x1024x32768]`."""
    num_bytes: Natural
    module: str = ""
    """Path of the module in whose forward it was saved; empty if unknown."""
    recipe: str | None = None
    """The recipe that can rebuild it, if one was admitted."""
    recipe_ms: Duration = 0.0
    """Device time of one rebuild."""
    recipe_host_ms: Duration = 0.0
    """Host time of one rebuild; 0: as `HostCosts.rebuild` says."""
    recipe_other_bytes: Natural = 0
    """Most device memory during a rebuild, above the step's start and besides the saved
    tensors that were alive before: the tensor, what its chain passes, gradients."""
    inputs: tuple[Natural, ...] = ()
    """Items of the same lane that the recipe reads."""
    made_ms: Duration = 0.0
    """Device time of making it in forward, where it is a copy in a smaller dtype that
    its owner's recipe stores: no operator of the model makes it."""
    owner: Index = -1
    """The item for whose recipe alone this one is stored; -1: it is autograd's own."""
    region: Index = -1
    """The region call (index into the kind's `Profile.regions`) in whose forward it is
    saved, and whose re-run makes it again; -1: none."""
    serves: Index = -1
    """The region call for whose re-run alone it is stored; -1: it is autograd's own."""
    floats: bool = False
    """An input of a region that autograd saves as well: where its region does not run
    again, it is saved later."""
    held: bool = False
    """Its owner holds it until the end of backward: moving it frees nothing."""
    frame_marks: Natural = 0
    """Marks from its own to the one by which the model's forward has let go of it:
    nothing frees it earlier."""


@dataclass(frozen=True, kw_only=True)
class AttentionPart:
    """An attention inside a region. Where all its results are stored, a re-run takes
    them instead of computing it."""

    items: tuple[Natural, ...]
    """Its results among the items of the lane."""
    ms: Duration
    """Device time that a re-run then saves."""


@dataclass(frozen=True, kw_only=True)
class RegionRun:
    """One call of a region's forward, as it ran again in the observed step."""

    module: str = ""
    """Path of the module."""
    inputs: tuple[Natural, ...] = ()
    """Items of the same lane that it reads."""
    ms: Duration = 0.0
    """Device time."""
    host_ms: Duration = 0.0
    """Host time (0: unknown)."""
    other_bytes: Natural = 0
    """Most device memory meanwhile, above the step's start and besides the saved
    tensors that were alive before: what it saves, temporaries and gradients."""
    small_bytes: Natural = 0
    """Saved by it in tensors that are no items: on the device from its forward to its
    backward where it does not run again. `other_bytes`, also of marks, has them."""
    parts: tuple[AttentionPart, ...] = ()
    """What it need not compute again."""
    communicates: bool = False
    """Whether it runs collectives, and so waits for the same call of other ranks."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """See [Note: marks]. `ms` and `other_bytes` are of the operators up to the next."""

    lane: Natural
    """Index into `Profile.lanes`."""
    phase: Phase
    item: Natural
    """Index into the items of that lane's kind."""
    ms: Duration
    """Compute time from this mark to the next, waits and rebuilds excluded."""
    other_bytes: Natural = 0
    """Most device memory allocated meanwhile, above the step's start, that was not a
    saved tensor: gradients, temporaries, weights gathered (0 where unknown)."""
    goes_on: bool = False
    """The operator that asked for this tensor asks for the next mark's, too, and holds
    both till it ends."""
    host_ms: Duration = 0.0
    """Host time from this mark to the next, outside of the hooks (0: unknown)."""
    num_handles: Natural = 0
    """Calls of the hooks meanwhile that are no marks: parameters, small tensors, other
    handles of the same bytes."""


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """Host time of the hooks for one saved tensor, in ms."""

    pack_ms: Duration = 0.0
    use_ms: Duration = 0.0
    load_ms: Duration = 0.0
    """Of starting its load, wherever that happens."""

    def times(self, factor: float) -> "HostCost":
        """Return so many times as much."""
        return HostCost(
            pack_ms=self.pack_ms * factor,
            use_ms=self.use_ms * factor,
            load_ms=self.load_ms * factor,
        )


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """What each action costs the host; measured, by `observe/hosttime.py`."""

    keep: HostCost = HostCost()
    """A tensor that stays, or a parameter."""
    host: HostCost = HostCost()
    """A move to pinned host memory."""
    ssd: HostCost = HostCost()
    """A move to the SSD."""
    rebuild: HostCost = HostCost()
    """A rebuild; its kernels' launches as well."""
    region_ms: Duration = 0.0
    """Of the call of a region in forward that will run again, besides its tensors."""

    def times(self, factor: float) -> "HostCosts":
        """Return so many times as much."""
        return HostCosts(
            keep=self.keep.times(factor),
            host=self.host.times(factor),
            ssd=self.ssd.times(factor),
            rebuild=self.rebuild.times(factor),
            region_ms=self.region_ms * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One observed training step of one rank."""

    lanes: tuple[str, ...]
    """Kind of each micro-batch, in the order of their forwards."""
    kinds: Mapping[str, tuple[Item, ...]]
    """Items of each kind of lane, in pack order."""
    regions: Mapping[str, tuple[RegionRun, ...]] = field(default_factory=dict)
    """Region calls of each kind of lane, in order; none where none ran again."""
    marks: tuple[Mark, ...]
    """In the order of the compute stream."""
    links: Links
    head_ms: Duration = 0.0
    """From the start of the first forward to the first mark."""
    tail_ms: Duration = 0.0
    """Of the step, after the last mark's operators: the optimizer, and so on."""
    base_bytes: Natural = 0
    """Device memory in use when the step starts: weights, optimizer, and so on."""
    rest_bytes: Natural = 0
    """Most above that after the last mark: gradients and the optimizer's own."""
    head_host_ms: Duration = 0.0
    """Host time of `head_ms`."""
    tail_host_ms: Duration = 0.0
    """Of the host, from the end of backward on host and device to the step's end."""
    host_lead_ms: Duration = 0.0
    """By how much the host is ahead of the device when a step starts."""
    host_costs: HostCosts = HostCosts()
    """Of ssdtrain's own work."""
    has_quiet_calls: bool = True
    """Whether calls of layers in which a plan does nothing run without hooks, as where
    all batches are of one size."""
    host_bytes: Natural | None = None
    """Cap of pinned host memory; None: as much as it takes."""
    device: str = ""
    """Where it was measured."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Anything the reader should know (model, batch, versions)."""

    def items_of(self, lane: int) -> tuple[Item, ...]:
        """Return the items of a lane."""
        return self.kinds[self.lanes[lane]]

    @property
    def compute_ms(self) -> float:
        """The step without any wait, copy or rebuild."""
        return self.head_ms + self.tail_ms + sum(mark.ms for mark in self.marks)

    @property
    def forward_ms(self) -> float:
        """Compute time of all forwards."""
        return self.head_ms + sum(
            mark.ms for mark in self.marks if mark.phase is Phase.FORWARD
        )

    @property
    def host_ms(self) -> float:
        """The host's time of the step without ssdtrain; 0 where it is unknown."""
        return self.head_host_ms + sum(mark.host_ms for mark in self.marks)

    @property
    def communicates(self) -> bool:
        """Whether a region that runs again waits for other ranks."""
        return any(run.communicates for runs in self.regions.values() for run in runs)

    @property
    def saved_bytes(self) -> int:
        """All that autograd saved in the step."""
        return sum(
            item.num_bytes
            for lane in range(len(self.lanes))
            for item in self.items_of(lane)
            if item.owner < 0 and item.serves < 0
        )

    def signature(self) -> tuple[Any, ...]:
        """Return what must be equal for a plan of one profile to fit another: a module
        may have become, or have ceased to be, a region."""
        kinds = tuple(
            (
                kind,
                len(self.regions.get(kind, ())),
                tuple((i.name, i.num_bytes, i.region, i.serves) for i in items),
            )
            for kind, items in sorted(self.kinds.items())
        )
        return self.lanes, kinds


def _check_regions(profile: Profile) -> None:
    for kind, items in profile.kinds.items():
        for number, item in enumerate(items):
            for name, region in (("region", item.region), ("serves", item.serves)):
                if region >= len(profile.regions.get(kind, ())):
                    where = f"kinds.{kind}[{number}].{name}"
                    raise Unfit(where, "a region of the lane", region)
    for kind, runs in profile.regions.items():
        num_items = len(profile.kinds.get(kind, ()))
        for number, run in enumerate(runs):
            if any(each >= num_items for each in run.inputs):
                where = f"regions.{kind}[{number}].inputs"
                raise Unfit(where, "items of the lane", run.inputs)
            own = {item for part in run.parts for item in part.items}
            items = profile.kinds.get(kind, ())
            if any(each >= num_items or items[each].region != number for each in own):
                where = f"regions.{kind}[{number}].parts"
                raise Unfit(where, "items of the region", sorted(own))


def _check(profile: Profile) -> None:
    for kind, items in profile.kinds.items():
        for number, item in enumerate(items):
            where = f"kinds.{kind}[{number}]"
            if item.owner >= len(items) or item.owner == number:
                raise Unfit(f"{where}.owner", "another item of the lane", item.owner)
            if any(each >= len(items) or each == number for each in item.inputs):
                raise Unfit(f"{where}.inputs", "other items of the lane", item.inputs)
    _check_regions(profile)
    for number, kind in enumerate(profile.lanes):
        if kind not in profile.kinds:
            raise Unfit(f"lanes[{number}]", "a kind of `kinds`", kind)
    for number, mark in enumerate(profile.marks):
        if mark.lane >= len(profile.lanes):
            raise Unfit(f"marks[{number}].lane", "a lane of `lanes`", mark.lane)
        if mark.item >= len(profile.items_of(mark.lane)):
            raise Unfit(f"marks[{number}].item", "an item of its lane", mark.item)


PROFILE_FILE = Format(
    kind=Profile,
    schema="ssdtrain-profile",
    version=1,
    what="a profile",
    remedy="observe again with `session.profile` or `ssdtrain plan`",
    check=_check,
)
