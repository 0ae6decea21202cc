"""`python -m ssdtrain`."""

import sys

if __name__ == "__main__":
    try:
        from ssdtrain.tools.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # before there is a command to say so
        sys.exit(130)
