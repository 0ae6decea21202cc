"""KV caches of transformers' models, which layers are given in training as well.

[Note: KV caches]
A configuration's `use_cache` is true, so in training each layer writes to a cache that
nobody reads. A layer that runs again would write twice. So it gets an empty cache of
its own each time that it runs: it computes the same, and its keys and values go when it
ends. The model's cache stays empty. A caller who asks for it, or gives one, gets it
filled, and such layers run once. One that comes back empty is an error, as its losses
would be others.
(tests/ssdtrain/regions/test_kv_cache.py)
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

NAMES = ("past_key_values", "layer_past")
"""Keywords of layers."""
STEADY = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def asks_for_cache(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a caller of a model wants its KV cache, or has one."""
    given = (*args, *kwargs.values())
    return bool(kwargs.get("use_cache")) or any(
        hasattr(type(each), "get_seq_length") for each in given
    )


def empty_caches(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The caches with nothing in them that a layer is given in training."""
    given = {name: kwargs[name] for name in NAMES if kwargs.get(name) is not None}
    if not (given and module.training and hasattr(module, "gradient_checkpointing")):
        return {}
    if getattr(module, "_can_checkpoint_with_cache", False):
        return {}
    return {name: cache for name, cache in given.items() if _is_empty(cache)}


def with_own(forward: Callable[..., Any], caches: dict[str, Any]) -> Callable[..., Any]:
    """A layer's forward with empty caches like these."""
    empty = {name: _copied(cache) for name, cache in caches.items()}

    def run(*args: Any, **kwargs: Any) -> Any:
        own = {name: _copied(cache) for name, cache in empty.items()}
        return forward(*args, **{**kwargs, **own})

    return run


def _is_empty(cache: Any) -> bool:
    parts: list[Any] = [cache]
    if hasattr(cache, "self_attention_cache"):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    layers = [getattr(part, "layers", None) for part in parts]
    return all(isinstance(each, list) and all(map(_is_unused, each)) for each in layers)


def _is_unused(layer: Any) -> bool:
    """Whether it holds nothing, and a copy shares nothing that may be written."""
    held = {type(value) for name, value in vars(layer).items() if name[0] != "_"}
    return held <= STEADY


def _copied(cache: Any) -> Any:
    own = _like(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(own, name, [*map(_like, value)])
        elif isinstance(value, dict):
            setattr(own, name, dict(value))
        elif hasattr(value, "layers"):
            setattr(own, name, _copied(value))
    return own


def _like(value: Any) -> Any:
    """As `copy.copy` does, in a quarter of its time: once a layer of the cache, twice a
    call."""
    own = object.__new__(type(value))
    vars(own).update(vars(value))
    return own
