#!/usr/bin/env python3
"""Layers of hector.message: `ssdtrain train gnn=message_LAYER` with any override.

recipes/message.py treelstm
recipes/message.py gat trainer.data.name=mag trainer.data.directory=/data/mag
"""

import sys

from ssdtrain.tools.cli import main

LAYERS = ("sage", "gin", "gat", "treelstm")

if __name__ == "__main__":
    if sys.argv[1:2] not in [[layer] for layer in LAYERS]:
        sys.exit(f"recipes/message.py expects {', '.join(LAYERS)}, then overrides")
    sys.exit(main(["train", f"gnn=message_{sys.argv[1]}", *sys.argv[2:]]))
