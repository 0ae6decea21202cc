#!/usr/bin/env python3
"""T5, span corruption: `ssdtrain train model=t5` with any override after it.

recipes/t5.py size=small engine=plain offload=host train.steps=100
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "model=t5", *sys.argv[1:]]))
