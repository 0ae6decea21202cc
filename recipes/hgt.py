#!/usr/bin/env python3
"""HGT entity classification: `ssdtrain train gnn=hgt` with any override after it.

recipes/hgt.py trainer.data.directory=/data/aifb trainer.run.num_seeds=10
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "gnn=hgt", *sys.argv[1:]]))
