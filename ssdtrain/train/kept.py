"""A plan that stays with a training's checkpoints: a run that is resumed follows it at
once and observes nothing."""

from dataclasses import dataclass
from pathlib import Path

from ssdtrain.api import Session
from ssdtrain.jsonfile import Format
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.storage.open import rank_of


@dataclass(frozen=True, kw_only=True)
class KeptPlan:
    """What one rank keeps."""

    settings: str
    """What the plan was made for."""
    plan: Plan
    profile: Profile


KEPT_FILE = Format(
    kind=KeptPlan,
    schema="ssdtrain-kept-plan",
    version=1,
    what="a plan that was kept with a checkpoint",
    remedy="delete the file: the plan is then made again",
)


def path_in(checkpoint: str | Path) -> Path:
    """The file of this rank in the directory of a checkpoint."""
    return Path(checkpoint) / f"ssdtrain-plan-{rank_of().rank}.json"


def keep(session: Session, settings: object, checkpoint: str | Path) -> bool:
    """Write the plan in force into a checkpoint that is there; False: there is none
    yet. The `repr` of `settings` tells it from other plans."""
    plan, profile = session.plan, session.profile
    if plan is None or profile is None:
        return False
    kept = KeptPlan(settings=repr(settings), plan=plan, profile=profile)
    KEPT_FILE.write(path_in(checkpoint), kept)
    return True


def kept_in(checkpoint: str | Path, settings: object) -> tuple[Plan, Profile] | None:
    """Return what a checkpoint's run followed; None: nothing, or it was for other
    settings. Raises DamagedFileError: the file is not what `keep` wrote."""
    try:
        kept = KEPT_FILE.read(path_in(checkpoint))
    except FileNotFoundError:
        return None
    return (kept.plan, kept.profile) if kept.settings == repr(settings) else None


def follow_kept(session: Session, settings: object, checkpoint: str | Path) -> bool:
    """Follow a checkpoint's plan from the first step on; False: there is none for these
    settings. Raises DamagedFileError: the file is not what `keep` wrote."""
    found = kept_in(checkpoint, settings)
    if found is not None:
        session.follow(*found)
    return found is not None
