#!/usr/bin/env python3
"""GPT, next token: `ssdtrain train model=gpt` with any override after it.

recipes/gpt.py size=small engine=plain offload=host train.steps=100
"""

import sys

from ssdtrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "model=gpt", *sys.argv[1:]]))
