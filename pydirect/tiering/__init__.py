"""Hot rows near, cold rows in host memory (S. W. Min, dissertation, chapter 4)."""

from pydirect.tiering.cache import HotRows, TieredFetch
from pydirect.tiering.place import Tier, TierPlan, plan_tiers
from pydirect.tiering.reorder import Reordering, reorder_by
from pydirect.tiering.scores import (
    degree_score,
    hit_ratio,
    reverse_pagerank,
    weighted_reverse_pagerank,
)

__all__ = [
    "HotRows",
    "Reordering",
    "Tier",
    "TierPlan",
    "TieredFetch",
    "degree_score",
    "hit_ratio",
    "plan_tiers",
    "reorder_by",
    "reverse_pagerank",
    "weighted_reverse_pagerank",
]
