"""`python -m ssdtrain`."""

import os
import sys

if __name__ == "__main__":
    try:
        from ssdtrain.tools.cli import main

        code = main()
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from ssdtrain.train.ranks import end_process

            end_process(code)
        sys.exit(code)
    except KeyboardInterrupt:  # before there is a command to say so
        sys.exit(130)
