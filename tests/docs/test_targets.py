"""Pages and help that list where bytes may go name every choice."""

import re

import pytest

import ssdtrain
from ssdtrain.config import Target
from tests.docs.pages import ROOT

CHOICES = sorted(path.stem for path in (ROOT / "configs/offload").glob("*.yaml"))


def first_cells(page: str) -> dict[str, str]:
    """The rows of a page's tables, by the names in their first cells."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    return {re.findall(r"`(.+?)`", row[1])[0]: row[2] for row in rows}


def test_every_target_has_a_choice() -> None:
    assert set(CHOICES) == {target.value for target in Target} | {"none"}


@pytest.mark.parametrize("target", [target.value for target in Target])
def test_how_to_choose_names_it(target: str) -> None:
    assert target in first_cells("choosing-a-target.md")
    assert f'"{target}"' in str(ssdtrain.offload.__doc__)


def test_the_quickstart_lists_the_choices() -> None:
    row = first_cells("quickstart.md")["offload"]
    assert sorted(re.findall(r"`(.+?)`", row)) == CHOICES
