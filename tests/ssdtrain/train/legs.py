"""Results of legs that nobody has run."""

from typing import Any

from ssdtrain.train.loop import LegResult
from ssdtrain.train.tally import Tally


def leg_result(leg: str, own: Tally, **more: Any) -> LegResult:
    """Of these figures, and nothing else but what is named."""
    nothing: dict[str, Any] = {
        "weights_checksum": 0,
        "course": (),
        "explained": "",
        "profile": None,
        "plan": None,
        "spans": (),
    }
    return LegResult(leg=leg, own=own, **{**nothing, **more})
