"""Command-line arguments that several commands take."""

import argparse
import math

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import parse_fraction, parse_size


def size_argument(text: str) -> int:
    """`4096`, `512MB` (10^6) or `2GiB` (2^30) as bytes, more than 0."""
    try:
        value = parse_size("this", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("this ")) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expects more than 0 bytes, got {text!r}")
    return value


def fraction_argument(text: str) -> float:
    """`0.01` or `1%`."""
    try:
        return parse_fraction("this", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("this ")) from None


def count_argument(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expects a whole number of 1 or more, got {text!r}"
        )
    return int(text)


def positive_argument(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expects a number above 0, got {text!r}")
    return value


def refuse_all_but_one(args: argparse.Namespace, **ways: str) -> None:
    """Refuse none and several of these options.

    Args:
        args: what was given.
        ways: by option, what a value of it may be.

    Raises:
        ConfigError: not exactly one is there.
    """
    given = [f"--{name}" for name in ways if getattr(args, name) is not None]
    if len(given) != 1:
        expected = " or ".join(f"--{name} {text}" for name, text in ways.items())
        got = " and ".join(given) or "neither"
        raise ConfigError(f"expects {expected}, got {got}")


def reason(error: Exception, args: argparse.Namespace) -> str:
    """Return what went wrong; a file by the option that named it."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    file = str(error.filename)
    for name, value in vars(args).items():
        if file in map(str, value if isinstance(value, list) else [value]):
            return f"--{name.replace('_', '-')} {file}: {error.strerror}"
    return f"{file}: {error.strerror}"


def show(parser: argparse.ArgumentParser, examples: str) -> None:
    """Let `--help` end with the examples as they are written."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = examples
