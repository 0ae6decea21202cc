"""Hot rows near, cold rows in host memory (S. W. Min, dissertation, chapter 4)."""

from pydirect.tiering.embedding import TieredEmbedding
from pydirect.tiering.place import TierPlan, plan_tiers
from pydirect.tiering.reorder import Reordering, reorder_by
from pydirect.tiering.scores import (
    Score,
    degree_score,
    hit_ratio,
    reverse_pagerank,
    score_nodes,
    weighted_reverse_pagerank,
)
from pydirect.tiering.spread import spread_table
from pydirect.tiering.table import (
    TieredFetch,
    TieredTable,
    free_budget_bytes,
    share_of,
)

__all__ = [
    "Reordering",
    "Score",
    "TierPlan",
    "TieredEmbedding",
    "TieredFetch",
    "TieredTable",
    "degree_score",
    "free_budget_bytes",
    "hit_ratio",
    "plan_tiers",
    "reorder_by",
    "reverse_pagerank",
    "score_nodes",
    "share_of",
    "spread_table",
    "weighted_reverse_pagerank",
]
