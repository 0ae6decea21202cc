"""KV caches of transformers' models, which layers are given in training as well.

[Note: KV caches]
A configuration's `use_cache` is true, so in training each layer writes to a cache that
nobody reads. A layer that runs again would write twice. So it gets an empty cache of
its own each time that it runs: it computes the same, and its keys and values go when it
ends. The model's cache stays empty. A caller who asks for it, or gives one, gets it
filled, also of a model inside of the offloaded one; such layers run once, as do those
without gradients (`generate()`). One that comes back empty, or is asked how long it is
now, is an error, as losses would be others.
(tests/ssdtrain/regions/test_kv_cache.py)
"""

import weakref
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from ssdtrain.errors import RegionError

NAMES = ("past_key_values", "layer_past")
"""Keywords of layers."""
LENGTHS = {"get_seq_length": 0, "get_mask_sizes": 1}
"""Methods that tell how long a layer's part is, and the place of its number."""
WITHHELD = "_withheld_layers"
"""Attribute of a cache: numbers of layers that have filled a part of their own."""
STEADY = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def asks_for_cache(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a caller of a model wants its KV cache, or has one."""
    given = (*args, *kwargs.values())
    return bool(kwargs.get("use_cache")) or any(
        hasattr(type(each), "get_seq_length") for each in given
    )


class EmptyCaches:
    """Finds the caches with nothing in them. All layers of a model are given the same
    one, which has a part for each: it is looked at once, as long as it stays so."""

    def __init__(self) -> None:
        self._last: EmptyCache | None = None

    def of(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str | int, "EmptyCache"]:
        """Those that a layer is given in training, by keyword or position."""
        if not (module.training and hasattr(module, "gradient_checkpointing")):
            return {}
        given: dict[str | int, Any] = {
            name: kwargs[name] for name in NAMES if kwargs.get(name) is not None
        }
        for at, value in enumerate(args):
            if type(value) is not Tensor and hasattr(value, "get_seq_length"):
                given[at] = value
        if not given:
            return {}
        if getattr(module, "_can_checkpoint_with_cache", False):
            return {}
        found = {}
        for name, cache in given.items():
            last = self._last  # read once: another thread may look at another cache
            if last is None or not last.stands_for(cache):
                last = EmptyCache(cache) if _is_empty(cache) else None
                self._last = last
            if last is not None:
                found[name] = last
        return found


class EmptyCache:
    """A cache as it was when there was nothing in it."""

    def __init__(self, cache: object) -> None:
        self.original = weakref.ref(cache)
        self._versions = _versions(cache)
        self._empty = _copied(cache, lambda layers: [*map(_like, layers)])

    def is_of(self, cache: Any) -> bool:
        """Whether it is that one's."""
        return cache is not None and self.original() is cache

    def stands_for(self, cache: Any) -> bool:
        """Whether it is that one, and nobody has changed it since."""
        return self.is_of(cache) and self._versions == _versions(cache)

    def withhold(self, used: Iterable[tuple[int, int]]) -> None:
        """Let the cache no longer say how long these parts are, as it does not know."""
        parts = _parts(self.original())
        for number, at in used:
            own = vars(parts[number])
            if WITHHELD not in own:
                own[WITHHELD] = set()
                own.update({name: Told(parts[number], name) for name in LENGTHS})
                self._versions = _versions(self.original())
            own[WITHHELD].add(at)

    def copied(self) -> Any:
        """Return a cache with nothing in it."""
        return _copied(self._empty, _Copies)


class _Copies(MutableSequence[Any]):
    """A list of copies, made when they are asked for: a layer asks for one of many."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._made: dict[int, Any] | None = {}
        """By index; None: all are, and there."""

    def __getitem__(self, at: Any) -> Any:
        if self._made is None or not isinstance(at, int):
            return self._all()[at]
        at = range(len(self._values))[at]
        if at not in self._made:
            self._made[at] = _like(self._values[at])
        return self._made[at]

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, at: Any, value: Any) -> None:
        self._all()[at] = value

    def __delitem__(self, at: Any) -> None:
        del self._all()[at]

    def insert(self, at: int, value: Any) -> None:
        """As a list does."""
        self._all().insert(at, value)

    def used(self) -> Iterable[int]:
        """Indices of those that were asked for."""
        return range(len(self._values)) if self._made is None else self._made

    def _all(self) -> list[Any]:
        if self._made is not None:
            self._values, self._made = [*self], None
        return self._values


class Slots:
    """Parts of the caches that one layer has used in the forward of the model that
    runs. A model may call it several times, with another part each time (HRM) or with
    another cache (for a question and its answer)."""

    def __init__(self) -> None:
        self._written: list[tuple[EmptyCache, set[tuple[int, int]]]] = []

    def use(
        self,
        path: str,
        caches: dict[str | int, EmptyCache],
        own: dict[str | int, Any],
    ) -> None:
        """A call has ended.

        Args:
            path: of the layer.
            caches: that it was given.
            own: those that it had in their places.

        Raises:
            RegionError: it has used a part that an earlier call has filled.
        """
        for name, cache in own.items():
            used: set[tuple[int, int]] = set()
            for number, part in enumerate(_parts(cache)):
                layers = part.layers
                found = layers.used() if isinstance(layers, _Copies) else ()
                used.update((number, at) for at in found)
            given = caches[name]
            for other, written in self._written:
                if other.is_of(given.original()) and not used.isdisjoint(written):
                    raise RegionError(
                        f"{path} is called again with a KV cache that its first call "
                        "would have filled. Call the model with use_cache=True where "
                        "you use its cache, and with use_cache=False elsewhere."
                    )
            self._written.append((given, used))
            given.withhold(used)


def with_own(
    forward: Callable[..., Any],
    caches: dict[str | int, EmptyCache],
    end: Callable[[dict[str | int, Any]], None],
) -> Callable[..., Any]:
    """A layer's forward with empty caches like these.

    Args:
        end: is given them when the forward has ended; not in a re-run.
    """
    waiting = [end]

    def run(*args: Any, **kwargs: Any) -> Any:
        own = {name: cache.copied() for name, cache in caches.items()}
        args, kwargs = with_given(args, kwargs, own)
        result = forward(*args, **kwargs)
        if waiting:
            waiting.pop()(own)
        return result

    return run


def with_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], others: dict[str | int, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, with others by keyword or position."""
    named = {name: value for name, value in others.items() if isinstance(name, str)}
    if len(named) < len(others):
        args = tuple([others.get(at, value) for at, value in enumerate(args)])
    return args, {**kwargs, **named}


def _parts(cache: Any) -> list[Any]:
    if hasattr(cache, "self_attention_cache"):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _is_empty(cache: Any) -> bool:
    layers = [getattr(part, "layers", None) for part in _parts(cache)]
    return all(isinstance(each, list) and all(map(_is_unused, each)) for each in layers)


def _is_unused(layer: Any) -> bool:
    """Whether it holds nothing, and a copy shares nothing that may be written. Layers
    of state space models have dictionaries of their states."""
    held = {name: value for name, value in vars(layer).items() if name[0] != "_"}
    for name, value in [*held.items()]:
        if type(value) is dict:
            held.update((f"{name} {key}", each) for key, each in value.items())
            del held[name]
    return {*map(type, held.values())} <= STEADY


class Told:
    """A method of a cache that tells a length; of its copy, where that is copied.

    Args:
        cache: that has it among its attributes, so it is not held.
        name: of the method.
    """

    def __init__(self, cache: object, name: str) -> None:
        self._cache, self._name = weakref.ref(cache), name

    def __reduce__(self) -> tuple[Any, ...]:
        return Told, (self._cache(), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Its last argument is the number of a layer, or it is the first."""
        cache, place = self._cache(), LENGTHS[self._name]
        at = kwargs.get("layer_idx", args[-1] if len(args) > place else 0)
        if at in vars(cache)[WITHHELD]:
            raise RegionError(
                "a KV cache that stayed empty is asked for its length. Call the model "
                "with use_cache=True where you use its cache, and with use_cache=False "
                "elsewhere."
            )
        return getattr(type(cache), self._name)(cache, *args, **kwargs)


def _versions(cache: Any) -> list[int]:
    """Numbers that Python changes when anything of an empty cache is set."""
    spaces = [vars(cache), *(v for v in vars(cache).values() if type(v) is dict)]
    for part in _parts(cache):
        spaces.append(vars(part))
        for layer in part.layers:
            spaces += vars(layer), *(v for v in vars(layer).values() if type(v) is dict)
    return [*map(dict_version, spaces)]


def _copied(cache: Any, copies: Callable[[list[Any]], Any]) -> Any:
    """copies: of a list of layers."""
    own = _like(cache)
    for name in (WITHHELD, *LENGTHS):
        vars(own).pop(name, None)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(own, name, copies(value))
        elif hasattr(value, "layers"):
            setattr(own, name, _copied(value, copies))
    return own


def _like(value: Any) -> Any:
    """As `copy.copy` does, in a quarter of its time: once a layer of the cache, twice a
    call. Its dictionaries are copied as well."""
    own = object.__new__(type(value))
    held = vars(own)
    held.update(vars(value))
    for name, each in held.items():
        if type(each) is dict:
            held[name] = dict(each)
    return own
