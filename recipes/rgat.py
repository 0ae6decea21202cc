#!/usr/bin/env python3
"""RGAT entity classification: `ssdtrain train gnn=rgat` with any override after it.

recipes/rgat.py trainer.data.directory=/data/aifb trainer.run.num_seeds=10
recipes/rgat.py trainer.data.name=mag trainer.data.directory=/data/ogbn-mag-0.1 \\
    features.source=random features.place=tiered trainer.batch=1024
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "gnn=rgat", *sys.argv[1:]]))
