"""The search for a plan, from the request to the answer that is taken.

One rank searches, in a process during training, and the others take what it offers.
(tests/ssdtrain/observe/test_searching.py, test_beside.py)
"""

import logging
from dataclasses import replace

from ssdtrain.jsonfile import dumps
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.choose import SEARCH_MARKS
from ssdtrain.plan.search import Answer, Request, Search, answer_of, answers
from ssdtrain.transfer.device import Device

logger = logging.getLogger(__name__)


class Searching:
    """Searches for plans, one after the other."""

    def __init__(self, device: Device, peers: Peers) -> None:
        self._device = device
        self._peers = peers
        self._request: Request | None = None
        """Of the last search."""
        self._search: Search | None = None
        """During training."""
        self._is_awaited = False
        """Whether the leading rank searches for this one, too."""
        self._ended: list[Search] = []
        """Searches that are over, and whose processes end."""

    @property
    def is_under_way(self) -> bool:
        """Whether a plan is searched for during training, by whoever leads."""
        is_awaited = self._is_awaited and not self._peers.leads
        return is_awaited or self._search is not None

    def begin(self, request: Request, effort: int) -> Answer | None:
        """Begin to search.

        Args:
            request: what for; the effort is chosen here.
            effort: how long to search; no more than `QUICK_MARKS` if a plan is wanted
                soon.

        Returns:
            What was found, where nothing runs during training.
        """
        self._request = request
        if not self._device.runs_beside:
            return self._here(effort)
        self._is_awaited = not self._peers.leads
        if not self._is_awaited:
            self._search = Search(replace(request, efforts=(effort,)))
        return None

    def _here(self, effort: int) -> Answer:
        """Search on this thread."""
        if self._request is None:
            return Answer(error="no step was observed")
        *_, answer = answers(replace(self._request, efforts=(effort,)))
        return answer

    def step_starts(self) -> None:
        """Clear away what searches have left whose processes have ended."""
        self._ended = [search for search in self._ended if not search.clear()]

    def answer(self, *, has_plan: bool) -> Answer | None:
        """Return what was found during training, if it has come in this step.

        Args:
            has_plan: whether training can go on without an answer.
        """
        if self._peers.leads:
            return self._own_answer(has_plan)
        text = self._peers.offered()
        if text is None:
            return None
        self._is_awaited = False
        return answer_of(text)

    def _own_answer(self, has_plan: bool) -> Answer | None:
        search = self._search
        if search is None:
            return None
        answer = search.answer()
        if not search.is_over:
            return None
        self._search, text = None, search.text
        self._ended.append(search)
        if answer is None and has_plan:
            answer = Answer(error=f"the search for another one failed: {search.error}")
            text = dumps(answer)
        elif answer is None:
            logger.warning(
                "ssdtrain: the search for a plan failed (%s); this step waits for "
                "another one",
                search.error,
            )
            answer = self._here(SEARCH_MARKS)
            text = dumps(answer)
        self._peers.offer(text)
        return answer

    def stop(self) -> None:
        """Give up what is searched for. Waits for nothing. Idempotent."""
        search, self._search, self._is_awaited = self._search, None, False
        if search is not None:
            search.stop()
            self._ended.append(search)

    def clear(self) -> None:
        """Wait for the processes of searches that are over. Idempotent."""
        while self._ended:
            self._ended.pop().clear(wait=True)
