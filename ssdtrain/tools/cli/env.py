"""`ssdtrain env`: what a shell sets in front of a command of another launcher."""

import argparse
import os
import shlex
import sys
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.storage import malloc_hook
from ssdtrain.storage.clibrary import BuildError
from ssdtrain.tools.arguments import show

EXAMPLES = """examples:
  eval "$(ssdtrain env)" && python train.py
  eval "$(ssdtrain env --preload always)" && srun python train.py
  ssdtrain train preload=never                  ssdtrain train decides by itself

The malloc hook registers GPU memory with cuFile as it is allocated. It is of use where
nvidia-fs is loaded, kvikio is installed, tensors go to an SSD and the allocator does
not take expandable segments.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    parser.add_argument(
        "--preload",
        choices=[choice.value for choice in malloc_hook.Preload],
        default="auto",
        help="whether to preload the malloc hook (default: auto, where it is of use)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a comment that says why, and the line. Raises ConfigError: the hook is
    asked for and cannot be built."""
    choice = malloc_hook.Preload(args.preload)
    try:
        found = malloc_hook.decide(choice, to_ssd=True)
    except BuildError as error:
        raise ConfigError(f"--preload always: {error}") from error
    said = "; ".join(found.why.splitlines())
    print(f"# malloc hook: {'on' if found.library else 'off'}, {said}")
    if found.library is not None:
        value = malloc_hook.preload(os.environ, found.library)["LD_PRELOAD"]
        print(f"export LD_PRELOAD={shlex.quote(value)}")
    return 0


def start_with_hook(config: Any, words: list[str], *, told: bool) -> None:
    """Start this process, and its ranks, anew with the malloc hook, where that is of
    use. Raises ConfigError: the hook is asked for, and cannot be built or is not
    taken."""
    from ssdtrain.config import Target
    from ssdtrain.train.settings import member_of

    choice = member_of("preload", malloc_hook.Preload, config.get("preload", "auto"))
    offload = config.get("offload") or {}
    target = offload.get("target")
    to_ssd = target is not None and Target(target).behind.is_disk
    try:
        found = malloc_hook.decide(choice, to_ssd=to_ssd)
    except BuildError as error:
        raise ConfigError(f"preload=always: {error}") from error
    if found.library is None or malloc_hook.loaded() is not None:
        return
    if str(found.library) in os.environ.get("LD_PRELOAD", ""):
        raise ConfigError(
            f"LD_PRELOAD names {found.library} and the system did not load it; set "
            "preload=never"
        )
    if told:
        print(
            f"ssdtrain: starting with the malloc hook ({found.why}); preload=never "
            "leaves it out",
            flush=True,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    environment = malloc_hook.preload(os.environ, found.library)
    os.execve(sys.executable, [sys.executable, "-m", "ssdtrain", *words], environment)
