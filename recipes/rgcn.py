#!/usr/bin/env python3
"""RGCN entity classification: `ssdtrain train gnn=rgcn` with any override after it.

recipes/rgcn.py trainer.data.directory=/data/aifb trainer.run.num_seeds=10
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "gnn=rgcn", *sys.argv[1:]]))
