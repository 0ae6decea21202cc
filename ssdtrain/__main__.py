"""`python -m ssdtrain`."""

import sys

from ssdtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
