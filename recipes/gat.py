#!/usr/bin/env python3
"""Graph attention, features in host memory: `ssdtrain train gnn=gat` with any override.

recipes/gat.py trainer.epochs=20 trainer.dataset.name=cora \\
    trainer.dataset.directory=/data/planetoid
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "gnn=gat", *sys.argv[1:]]))
