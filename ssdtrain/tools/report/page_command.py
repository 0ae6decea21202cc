"""`ssdtrain report RUN [RUN ...]`: runs in, one HTML page out."""

import argparse
from pathlib import Path

from ssdtrain.errors import ConfigError
from ssdtrain.tools.arguments import show
from ssdtrain.tools.progress import Progress
from ssdtrain.tools.report.page import page, read_run, runs_of
from ssdtrain.train.rundirs import RUNS, no_such_run

EXAMPLES = """examples:
  ssdtrain report latest                 writes runs/latest/report.html
  ssdtrain report RUN OTHER              writes RUN/compared-with-OTHER.html
  ssdtrain report SWEEP                  the runs of a sweep beside one another
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a directory, a name below runs/, latest"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="default: report.html in the run's directory, or compared-with-OTHER.html "
        "in the first one's",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page. Raises ConfigError: no such run, or it has not finished."""
    paths = [_find(name) for name in args.runs]
    with Progress(1) as progress:
        progress.part("searching the frontiers")
        text = page([read_run(run) for path in paths for run in runs_of(path)])
    # A comparison does not replace a run's own page.
    others = "-".join(path.name for path in paths[1:])
    own = paths[0] / (f"compared-with-{others}.html" if others else "report.html")
    out = Path(args.out).expanduser() if args.out else own
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written ({error})") from error
    print(f"written to {out}")
    return 0


def _find(name: str) -> Path:
    """Return the directory of a run, links resolved: a page names the run, not the
    link. Raises ConfigError: there is none."""
    for path in (Path(name).expanduser(), RUNS / name):
        if path.is_dir():
            return path.resolve()
    there = (path.name for path in RUNS.glob("*/"))
    raise ConfigError(f"report {name}: {no_such_run(name, there)}")
