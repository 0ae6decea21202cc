"""What `doctor` tells a user: one finding, one line of advice."""

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How much a finding matters."""

    GOOD = "good"
    """Nothing to do."""
    NOTE = "note"
    """Works, but something better is within reach."""
    WARNING = "warning"
    """Works slowly, unsafely, or untested."""
    PROBLEM = "problem"
    """What it names cannot work here."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation about the machine."""

    level: Level
    subject: str
    """What it is about: `gpu`, `links`, `storage`, `limits`, `versions`,
    `autoload`, `gds`."""
    text: str
    """What was found, with the number or name that was met."""
    advice: str
    """One line: what to do, or why nothing needs doing."""


def good(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(level=Level.GOOD, subject=subject, text=text, advice=advice)


def note(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that offers something better."""
    return Finding(level=Level.NOTE, subject=subject, text=text, advice=advice)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that costs speed or safety."""
    return Finding(level=Level.WARNING, subject=subject, text=text, advice=advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that rules something out."""
    return Finding(level=Level.PROBLEM, subject=subject, text=text, advice=advice)
