"""Reversible patches, undone in one place, of what has the signature that we know.

`Patches` are one session's: attributes of instances above all. `Shared` ones are of
classes and modules, for all sessions at once.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Generic, TypeVar

from ssdtrain.cache.living import Living
from ssdtrain.errors import AttachError
from ssdtrain.versions import installed

MARK = "_ssdtrain_session"
SHARED = "_ssdtrain_shared"
User = TypeVar("User")


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method for those who keep what they call: once its object is gone, calls
    do nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        found = reference()
        if found is not None:
            found(*args, **kwargs)

    return call


def check_parameters(
    owner: Any, name: str, *expected: str, package: str, tested: Sequence[str]
) -> None:
    """Refuse a function that does not take what the one that we know takes.

    Args:
        owner: has the function `name`.
        expected: names of its parameters, separated by commas, as known versions
            have them.
        package: its distribution, whose versions `tested` have them.

    Raises:
        AttachError: names the version met and the versions tested.
    """
    function = getattr(owner, name, None)
    found = None
    if function is not None:
        found = ", ".join(inspect.signature(function).parameters)
    if found not in expected:
        version = installed(package) or "of unknown version"
        raise AttachError(
            f"{package} {version}: {name} takes ({found}), expected "
            f"({') or ('.join(expected)}); tested versions: {', '.join(tested)}. "
            "Install one of them."
        )


class Patches:
    """Instance attributes that were replaced, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> Callable[[], None]:
        """Set an attribute on the instance; returns what undoes it earlier.

        Undone only where it is still ours: who replaced it since keeps theirs.
        """
        had = name in vars(owner)
        before = vars(owner).get(name)
        # object.__setattr__: nn.Module would file modules and parameters elsewhere.
        object.__setattr__(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if had:
                object.__setattr__(owner, name, before)
            else:
                object.__delattr__(owner, name)

        self._undo.append(undo)
        return undo

    def also(self, undo: Callable[[], None]) -> None:
        """Undo something that was not an attribute."""
        self._undo.append(undo)

    def mark(self, owner: Any) -> None:
        """Claim an object for this session.

        Raises:
            AttachError: another session holds it.
        """
        # By identity: a copy of the owner carries the mark and is nobody's.
        if vars(owner).get(MARK) == id(owner):
            raise AttachError(
                f"this {type(owner).__name__} is already offloaded by another session; "
                "call close() on that session first. Where SSDTRAIN is set, a trainer "
                "opens one: unset it, or leave out the script's own."
            )
        self.set(owner, MARK, id(owner))

    def undo(self) -> None:
        """Restore everything. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def __iter__(self) -> Iterator[Callable[[], None]]:
        return iter(self._undo)


class Shared(Generic[User]):
    """Functions of a module or class, replaced as long as anybody uses them.

    The first user replaces them, and the last one puts them back. A user that nobody
    took off goes with its session.

    Args:
        home: the module or class that remembers this object meanwhile (`Shared.at`).
    """

    def __init__(self, home: ModuleType | type) -> None:
        self._home = home
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self.users = Living[User]()

    @staticmethod
    def at(home: Any) -> Any:
        """What replaces functions of this home now; None: nothing, or somebody has
        replaced them since."""
        found = vars(home).get(SHARED)
        return found if found is not None and found.is_in_force else None

    @property
    def is_in_force(self) -> bool:
        """Whether the functions that stand there are ours."""
        return all(
            vars(owner).get(name) is ours for owner, name, _, ours in self._replaced
        )

    def replace(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]
    ) -> None:
        """Have a function replaced by what `wrap` makes of it."""
        before = getattr(owner, name)
        ours = functools.wraps(before)(wrap(before))
        self._replaced.append((owner, name, before, ours))

    def add(self, user: User) -> None:
        """Serve one more user."""
        if not self.users:
            for owner, name, _, ours in self._replaced:
                setattr(owner, name, ours)
            setattr(self._home, SHARED, self)
        self.users.add(user)

    def remove(self, user: User) -> None:
        """Serve it no more."""
        self.users.discard(user)
        if self.users or vars(self._home).get(SHARED) is not self:
            return
        for owner, name, before, ours in self._replaced:
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)
        delattr(self._home, SHARED)
