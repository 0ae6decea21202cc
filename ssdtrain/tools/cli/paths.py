"""`ssdtrain paths`: where the files that come with ssdtrain are on this machine."""

import argparse

from ssdtrain.packaged import packaged_directory
from ssdtrain.tools.arguments import show

NAMES = ("configs", "launch", "recipes")
EXAMPLES = """examples:
  ssdtrain paths
  export PATH="$(ssdtrain paths launch):$PATH"     deepspeed --config ssdtrain.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    parser.add_argument("which", nargs="?", choices=NAMES, help="print this one alone")


def run(args: argparse.Namespace) -> int:
    """Print them."""
    if args.which is not None:
        print(packaged_directory(args.which))
        return 0
    for name in NAMES:
        print(f"{name:<8} {packaged_directory(name)}")
    return 0
