"""Wraps the forwards of regions, on the instance, as plain.py does with the root's.

Hooks of the module run around its `forward`, so they do not run twice. A shard's
weights are gathered when `forward` begins, in backward as well: FSDP2 gathers before
the gradient of the module's result reaches the operators inside. A module that is
compiled by itself is wrapped around its compiled call.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from ssdtrain.cache.regioncall import RegionCall
from ssdtrain.cache.regions import Regions
from ssdtrain.cache.traced import tracer, untraced
from ssdtrain.engines.patch import Patches
from ssdtrain.engines.plain import look_like, method_of
from ssdtrain.regions.find import Region
from ssdtrain.regions.kvcaches import asks_for_cache
from ssdtrain.regions.updated import has_statistics

COMPILED, OPTIMIZED = "_compiled_call_impl", "OptimizedModule"


def wrap_regions(
    root: nn.Module, found: list[Region], regions: Regions, patches: Patches
) -> None:
    """Let every call of these modules be a region call, if it is chosen."""
    normalizations = [*filter(has_statistics, root.modules())]
    regions.normalizations.extend(normalizations)
    is_compiled = vars(root).get(COMPILED) is not None
    # By name: to import it takes a second.
    is_compiled = is_compiled or type(root).__name__ == OPTIMIZED
    for region in found:
        region.watch.belongs_to(root, region.path, normalizations)
        if is_compiled:
            regions.refuse_compiled(region)
        else:
            _wrap(region, regions, patches)
    if found and not is_compiled:
        if not _has_cache(root):  # its own caller is heard by plain.py
            for module in _with_caches(root):
                _hear_caller(module, regions, patches)


def _has_cache(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "use_cache")


def _with_caches(module: nn.Module) -> Iterator[nn.Module]:
    """The models of transformers that have KV caches, also one inside of another: a
    caller may pass that by."""
    if vars(module).get(COMPILED) is not None or type(module).__name__ == OPTIMIZED:
        return  # regions inside of it run once
    if _has_cache(module) and hasattr(type(module), "base_model_prefix"):
        yield module
    for child in module.children():
        yield from _with_caches(child)


def _hear_caller(module: nn.Module, regions: Regions, patches: Patches) -> None:
    """Let a call of a model inside of the root ask for its KV cache."""
    before = vars(module).get("forward")
    attached = [True]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is module and attached:
            if tracer():  # regions inside of it run once
                attached.clear()
                undo()
            else:
                with regions.asked(asks_for_cache(args, kwargs)):
                    return method_of(self, "forward", before)(*args, **kwargs)
        return method_of(self, "forward", before)(*args, **kwargs)

    look_like(forward, module.forward)
    forward = torch.compiler.disable(forward, recursive=False)
    undo = patches.set(module, "forward", MethodType(forward, module))
    patches.also(attached.clear)


def _wrap(region: Region, regions: Regions, patches: Patches) -> None:
    module = region.module
    compiled = vars(module).get(COMPILED)
    name = "forward" if compiled is None else COMPILED
    before = vars(module).get(name)
    attached = [True]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = method_of(self, name, before)
        if self is not module or not attached:
            return inner(*args, **kwargs)
        # Here, because what is untraced sees no compiler around it.
        compiles = tracer()
        if compiles is not None and compiles is not False:
            untraced(regions.refuse_compiled)(region)
            # The wrapper would break its graph in every step.
            attached.clear()
            undo()
            return inner(*args, **kwargs)
        if regions.pack is None:  # a forward without hooks
            return inner(*args, **kwargs)
        # From here on no compiler looks at the frames of this thread.
        given = regions.without_caches(region, inner, args, kwargs)
        inner, args, kwargs = given
        call = regions.begin(region, inner, args, kwargs)
        if call is None:
            return inner(*args, **kwargs)
        if not isinstance(call, RegionCall):
            with call:
                return inner(*args, **kwargs)
        try:
            result = inner(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            regions.abort(call)
            raise regions.shortage(call, error) from error
        except BaseException:
            regions.abort(call)
            raise
        regions.end(call)
        return result

    if compiled is None:
        look_like(forward, module.forward)
    # Only this frame: what it calls may be compiled. See [Note: compiled models].
    forward = torch.compiler.disable(forward, recursive=False)
    undo = patches.set(module, name, MethodType(forward, module))
    patches.also(attached.clear)
