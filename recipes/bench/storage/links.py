#!/usr/bin/env python3
"""Record what `ssdtrain doctor` finds on this machine.

    python -m recipes.bench.storage.links --directory /mnt/nvme0

All arguments but --out are doctor's. The record holds the command, the facts, the
findings and the measured curves (`links`: the schema of the link file).
"""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

from recipes.bench.common import results
from recipes.bench.common.cells import environment
from ssdtrain.tools.machine import command


def main() -> int:
    """Run doctor, keep its JSON, print the findings."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.add_argument("--out", default="recipes/bench/results/storage/links.json")
    args = parser.parse_args()
    args.json = True
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = command.run(args)
    record = json.loads(text.getvalue())
    about = {"environment": environment(), "settings": {}}
    results.write(Path(args.out), {**about, "cells": {"doctor": record}})
    for finding in record["findings"]:
        print(finding["level"], "|", finding["text"], "|", finding["advice"])
    return status


if __name__ == "__main__":
    sys.exit(main())
