"""Finds the regions of a model: the members of its lists of like modules."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ssdtrain.regions.attention import Attention
from ssdtrain.regions.watch import Watch

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEAST_NAMED = 3
"""Like modules under names of their own: two are a pair (queries and keys)."""
LEAST_CHAINED = 3
"""Layers of a chain inside a list: two may be the halves of one (attention and MLP)."""
MAX_STRIKES = 3
"""Calls with side effects after which a module is no region any more."""


class Region:
    """A module whose forward may run again in backward."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.watch = Watch(module)
        self.attention = Attention()
        self.refusal: str | None = None
        """Why it is no region; None: it is one."""
        self.layout: Any = None
        """Of what its last call saved: a `SavedLayout`."""
        self.again: tuple[Any, Any] | None = None
        """Looks of a layout, and guards of what a re-run saved that looked so."""
        self.communicates = False
        """Whether a forward of it has run collectives."""
        self._num_strikes = 0

    def ran(self, *, communicates: bool) -> None:
        """Its forward has, with collectives or without."""
        self.communicates |= communicates

    def made_again(self, looks: Any, alike: Any) -> None:
        """A re-run has saved tensors of these looks, and these guards are theirs."""
        self.again = looks, alike

    def strike(self, reason: str) -> None:
        """A call of it could not run again. Something that is made in the first call
        and stays (a cache of constants) is forgiven."""
        self._num_strikes += 1
        if self._num_strikes >= MAX_STRIKES:
            self.refusal = reason


def find_regions(root: nn.Module, patterns: Sequence[str] = ()) -> list[Region]:
    """The outermost regions of a model, in the order of its modules.

    Args:
        root: the model; it is no region itself.
        patterns: paths or class names with wildcards that replace the search, such as
            `model.layers.*` or `LlamaDecoderLayer`.
    """
    found: list[Region] = []
    paths: list[str] = []
    likes = set() if patterns else _layers(root)
    for path, module in root.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in paths):
            continue
        wanted = _matches(path, module, patterns) if patterns else module in likes
        if wanted and not (likes and _is_stage(module, likes)):
            paths.append(path)
            found.append(Region(path, module))
    return found


def _matches(path: str, module: nn.Module, patterns: Sequence[str]) -> bool:
    names = path, type(module).__name__
    return any(fnmatchcase(name, each) for name in names for each in patterns)


def _layers(root: nn.Module) -> set[nn.Module]:
    """Members of lists of like modules, and what is as good as one."""
    likes = set(_members_of_lists(root))
    alone = [each for each in _alone(root) if likes.isdisjoint(each.modules())]
    return likes.union(alone)


def _alone(root: nn.Module) -> Iterator[nn.Module]:
    """Modules that are layers if none is inside of them: the only one of a list, which
    may be called many times (ALBERT); and like modules under names of their own
    (`down1`, `down2`, `down3`)."""
    for module in root.modules():
        members = [each for each in module.children() if _has_parts(each)]
        if isinstance(module, nn.ModuleList):
            if len(module) == 1:
                yield from members
        elif not isinstance(module, LISTS):
            kinds = Counter(map(type, members))
            for member in members:
                if kinds[type(member)] >= LEAST_NAMED:
                    if not isinstance(member, LISTS):
                        yield member


def _members_of_lists(root: nn.Module) -> Iterator[nn.Module]:
    for module in root.modules():
        if not isinstance(module, LISTS):
            continue
        members = list(module.children())
        kinds = Counter(map(type, members))
        # The first layer of a stack is often of a kind of its own.
        most = max(kinds.values(), default=0)
        is_stack = isinstance(module, nn.ModuleList) and 1 < most > len(members) / 2
        for member in members:
            is_like = kinds[type(member)] > 1 or is_stack or _is_checkpointed(member)
            if is_like and _has_parts(member) and not _is_list(member):
                yield member


def _is_stage(module: nn.Module, likes: set[nn.Module]) -> bool:
    """Whether it is a chain of layers, such as a stage of ConvNeXt: to run all of it
    again at once would take the memory of all of them."""
    own = sum(each in likes for each in module.children())
    return type(module) is nn.Sequential and own >= LEAST_CHAINED


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether it is a layer that transformers can checkpoint."""
    return hasattr(type(module), "gradient_checkpointing")


def _has_parts(module: nn.Module) -> bool:
    """A module without modules saves little more than its input."""
    return next(module.children(), None) is not None


def _is_list(module: nn.Module) -> bool:
    """Lists that nobody calls; a Sequential is called."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
