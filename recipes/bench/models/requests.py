"""What a session's plans were searched in, for a search without its GPU."""

import re
from pathlib import Path
from typing import Any


def save_request(session: Any, folder: Path, name: str) -> None:
    """Write the observed step, what later ones told of it and the goal, and in words
    what the plan in force promised and its steps did.

    Args:
        session: of `ssdtrain.offload`.
        folder: made where it is missing.
        name: of the row.
    """
    from ssdtrain.jsonfile import encode, write_json

    folder.mkdir(parents=True, exist_ok=True)
    # What only the planner holds: a session gives out the corrected profile.
    planner = session._planner
    if planner is None or planner._seen is None:
        return
    stem = re.sub(r"[^\w.=-]+", "_", name)
    request = encode(planner._request(planner._seen))
    write_json(folder / f"{stem}.request.json", request)
    (folder / f"{stem}.txt").write_text(session.explain() + "\n")
