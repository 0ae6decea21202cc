"""Wraps the forwards of regions, on the instance, as plain.py does with the root's.

Hooks of the module run around its `forward`, so they do not run twice. A shard's
weights are gathered when `forward` begins, in backward as well: FSDP2 gathers before
the gradient of the module's result reaches the operators inside. A module that is
compiled by itself is wrapped around its compiled call.
"""

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
from ssdtrain.regions.updated import has_statistics

COMPILED = "_compiled_call_impl"


def wrap_regions(
    root: nn.Module, found: list[Region], regions: Regions, patches: Patches
) -> None:
    """Let every call of these modules be a region call, if it is chosen."""
    normalizations = [*filter(has_statistics, root.modules())]
    regions.normalizations.extend(normalizations)
    is_compiled = vars(root).get(COMPILED) is not None
    # By name: to import it takes a second.
    is_compiled = is_compiled or type(root).__name__ == "OptimizedModule"
    for region in found:
        region.watch.belongs_to(root, region.path, normalizations)
        if is_compiled:
            regions.refuse_compiled(region)
        else:
            _wrap(region, regions, patches)


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
