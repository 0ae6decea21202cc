"""Where runs are, and what is said of one that is not there."""

from collections.abc import Iterable
from pathlib import Path

from ssdtrain.quantities import did_you_mean

RUNS = Path("runs")
"""Below the directory that a command is started in."""
LATEST = "latest"
MOST_NAMED = 5


def no_such_run(name: str, there: Iterable[str]) -> str:
    """Return what to say of a name, with the newest of those that are there."""
    known = sorted(there, reverse=True)
    names = [each for each in known if each != LATEST]
    if not names:  # mostly another directory than the one that trained
        return (
            f"no such run, nor any other below {RUNS.resolve()}; "
            "`ssdtrain train` makes one there"
        )
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    newest = ", ".join(names[:MOST_NAMED])
    near = did_you_mean(name, known)
    return f"no such run; there are below {RUNS}: {newest}{more}{near}"
