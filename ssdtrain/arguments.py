"""Command-line arguments that several commands take."""

import argparse

UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_argument(text: str) -> int:
    """`4096`, `512M` or `2G` (binary units) as bytes."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    try:
        value = int(float(number) * UNITS[unit]) if unit else int(number)
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"expects bytes such as 4096, 512M or 2G, got {text!r}"
        ) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expects more than 0 bytes, got {text!r}")
    return value
