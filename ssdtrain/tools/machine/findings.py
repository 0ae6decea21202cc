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
    """What it is about; see below."""
    text: str
    """What was found, with the number or name that was met."""
    advice: str
    """One line: what to do, or why nothing needs doing."""


@dataclass(frozen=True)
class About:
    """Makes the findings of one subject."""

    subject: str

    def _found(self, level: Level, text: str, advice: str) -> Finding:
        return Finding(level=level, subject=self.subject, text=text, advice=advice)

    def good(self, text: str, advice: str) -> Finding:
        """Return a finding that asks for nothing."""
        return self._found(Level.GOOD, text, advice)

    def note(self, text: str, advice: str) -> Finding:
        """Return a finding that offers something better."""
        return self._found(Level.NOTE, text, advice)

    def warning(self, text: str, advice: str) -> Finding:
        """Return a finding that costs speed or safety."""
        return self._found(Level.WARNING, text, advice)

    def problem(self, text: str, advice: str) -> Finding:
        """Return a finding that rules something out."""
        return self._found(Level.PROBLEM, text, advice)


GPU, LINKS, STORAGE, LIMITS = map(About, ("gpu", "links", "storage", "limits"))
VERSIONS, AUTOLOAD, GDS = map(About, ("versions", "autoload", "gds"))
