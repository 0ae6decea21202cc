"""Searches beside training whose answers come when a test wants them."""

import pytest

from ssdtrain.observe import searching
from ssdtrain.plan.search import Answer, Request, Search


class Searches:
    """All that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.are_held = False
        """Whether answers are kept back, however soon they are there."""
        self.begun: list[Search] = []
        self.given_up: list[Search] = []
        """Before they had found anything."""
        monkeypatch.setattr(searching, "Search", self._begin)

    def _begin(self, request: Request) -> Search:
        search = Search(request)
        stop, answer = search.stop, search.answer

        def stopped() -> None:
            if not search.is_over:
                self.given_up.append(search)
            stop()

        def answered() -> Answer | None:
            return None if self.are_held else answer()

        search.stop, search.answer = stopped, answered  # type: ignore[method-assign]
        self.begun.append(search)
        return search
