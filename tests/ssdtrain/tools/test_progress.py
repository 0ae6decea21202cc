"""What a long command says: a live line on a terminal, few lines elsewhere."""

import io

from rich.console import Console

from ssdtrain.tools.progress import Progress, each


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def test_elsewhere_a_line_every_ten_seconds() -> None:
    now = [0.0]
    shown, out = console(terminal=False)
    with Progress(3, shown, lambda: now[0]) as progress:
        progress.part("first")  # at once: nothing has taken long
        now[0] = 11.0
        progress.part("second")
        now[0] = 12.0
        progress.part("third")
    assert out.getvalue() == "ssdtrain: 2 of 3: second ...\n"


def test_few_long_parts_are_said_as_they_begin() -> None:
    shown, out = console(terminal=False)
    with Progress(2, shown, lambda: 0.0, interval_s=0.0) as progress:
        progress.part("first")
        progress.part("second")
    said = "ssdtrain: 1 of 2: first ...\nssdtrain: 2 of 2: second ...\n"
    assert out.getvalue() == said


def test_on_a_terminal_the_part_and_how_many_there_are() -> None:
    shown, out = console(terminal=True)
    with Progress(2, shown) as progress:
        progress.part("searching")
        progress.part("drawing")
    assert "drawing" in out.getvalue() and "1/2" in out.getvalue()


def test_items_come_through() -> None:
    assert list(each([1, 2, 3], str)) == [1, 2, 3]
