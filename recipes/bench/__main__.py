"""Every benchmark: `python -m recipes.bench NAME [options]`; `--list` names them."""

import sys

from recipes.bench.harness.cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
