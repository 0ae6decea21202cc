#!/usr/bin/env python3
"""BERT, masked tokens: `ssdtrain train model=bert` with any override after it.

recipes/bert.py size=small engine=plain offload=host train.steps=100
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "model=bert", *sys.argv[1:]]))
