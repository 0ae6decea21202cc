"""Functions that all sessions share: who replaces them, and who puts them back."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.engines.patch import SHARED, Shared, check_parameters
from ssdtrain.errors import AttachError


class User:
    """A session, as far as a shared patch knows it."""


def plain(x: int) -> int:
    return x


def shared_on(home: SimpleNamespace) -> Shared[User]:
    def wrap(before: Callable[[int], int]) -> Callable[[int], int]:
        return lambda x: before(x) + 100

    found = Shared[User](home)
    found.replace(home, "function", wrap)
    return found


def test_the_first_user_replaces_and_the_last_puts_back() -> None:
    home, one, two = SimpleNamespace(function=plain), User(), User()
    shared = shared_on(home)
    assert home.function is plain and Shared.at(home) is None
    shared.add(one)
    shared.add(two)
    assert home.function(1) == 101 and Shared.at(home) is shared
    assert home.function.__name__ == "plain"
    shared.remove(one)
    assert home.function(1) == 101
    shared.remove(two)
    shared.remove(two)
    assert vars(home) == {"function": plain}


def test_a_user_that_is_gone_counts_no_more() -> None:
    home, one, two = SimpleNamespace(function=plain), User(), User()
    shared = shared_on(home)
    shared.add(one)
    shared.add(two)
    del one
    gc.collect()
    shared.remove(two)
    assert vars(home) == {"function": plain}


def test_what_somebody_has_replaced_since_is_theirs() -> None:
    home, user = SimpleNamespace(function=plain), User()
    shared = shared_on(home)
    shared.add(user)

    def theirs(x: int) -> int:
        return -x

    home.function = theirs
    assert Shared.at(home) is None, "the next session wraps theirs"
    shared.remove(user)
    assert home.function is theirs and SHARED not in vars(home)


def test_a_function_with_other_parameters_is_refused() -> None:
    known: dict[str, Any] = {"package": "no-such-package", "tested": ("1.0", "2.0")}
    home = SimpleNamespace(function=plain)
    check_parameters(home, "function", "x, y", "x", **known)
    with pytest.raises(AttachError, match=r"function takes \(x\).*\(x, y\).*1\.0, 2"):
        check_parameters(home, "function", "x, y", **known)
    with pytest.raises(AttachError, match="of unknown version: gone takes"):
        check_parameters(home, "gone", "x", **known)
