#!/usr/bin/env python3
"""GraphSAGE, features in host memory: `ssdtrain train gnn=graphsage` with any override.

recipes/graphsage.py trainer.epochs=20 trainer.dataset.name=cora \\
    trainer.dataset.directory=/data/planetoid
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "gnn=graphsage", *sys.argv[1:]]))
