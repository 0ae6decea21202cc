"""The `unified` device: PyTorch's extension point, taken by `enable`, no rebuild.

Unified tensors are ordinary `torch.Tensor` objects under the dispatch key PrivateUse1:
views, printing, autograd and `state_dict` are PyTorch's own. Memory comes from
`pydirect.region`, operators are carried out by `pydirect.operators`, gradients are the
business of `pydirect.transfer`, and `pydirect.accelerator` keeps CUDA in its place.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import backend_registration

from pydirect import sharing
from pydirect.accelerator import can_keep_cuda, keep_cuda
from pydirect.creation import RECORDED_KERNELS, creation_kernels
from pydirect.errors import NotEnabledError, UnsupportedOperatorError
from pydirect.operators import Kind, kernel_for, run
from pydirect.placement import Affinity
from pydirect.region import DEVICE_TYPE, region_of
from pydirect.transfer import Counters, Machine

logger = logging.getLogger(__name__)

# Operators that make a tensor like another or look at its metadata: PyTorch's own
# composition of empty, copy_ and fill_ gives the right thing, a unified tensor.
_KEEPS = frozenset(
    {
        "clone", "lift", "is_pinned", "_pin_memory", "is_same_size", "sparse_dim",
        "dense_dim", "is_coalesced", "_has_same_storage_numel", "_unsafe_view",
        "_to_copy", "_copy_from", "_copy_from_and_resize", "_lazy_clone", "set",
        "resize", "resize_as", "_resize_output", "_assert_tensor_metadata",
        "_reshape_copy", "is_set_to", "copy_", "set_", "resize_", "resize_as_",
        "_resize_output_", "detach_", "as_strided_", "t_", "transpose_", "squeeze_",
        "unsqueeze_", "rename_", "copy", "_functional_assert_scalar",
    }
)  # fmt: skip
_FOREIGN = ("sparse", "mkldnn", "nested", "quantize", "miopen", "mps", "_test_")

_COMPUTING_KEYS = (
    "CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
)  # fmt: skip


class UnifiedModule(Machine):
    """What PyTorch finds as ``torch.unified``: the device module of the backend."""

    def __init__(self) -> None:
        super().__init__(counters=Counters())
        self._libraries: list[torch.library.Library] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is one unified device: nothing to choose."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the generators of the CPU and of CUDA."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self) -> None:
        """Wait until every GPU has finished with unified memory."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def keep(self, library: torch.library.Library) -> None:
        """Registrations last as long as their library object."""
        self._libraries.append(library)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """Answers of the device to questions of the C++ side."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def enable() -> None:
    """Add the device ``unified`` to PyTorch in this process.

    Names PyTorch's one place for a device from outside (``privateuseone`` until then),
    registers the device's operators, teaches `torch.Tensor` and the sharing of storages
    about it, and keeps CUDA the accelerator (`pydirect.accelerator`). It cannot be
    undone: PyTorch has no way to give the name back. Calling it again does nothing.

    Raises:
        RuntimeError: another backend has taken the place, or this build of PyTorch
            cannot keep CUDA next to the device; nothing has changed then.
    """
    if isinstance(getattr(torch, DEVICE_TYPE, None), UnifiedModule):
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            f"PyTorch has one place for a device from outside, and {name!r} has taken "
            "it: call pydirect.enable() in a process without that backend"
        )
    if torch.version.cuda is not None and not can_keep_cuda():
        raise RuntimeError(
            "this build of PyTorch cannot keep CUDA as its accelerator beside the "
            "unified device, and CUDA training would stop working: see "
            "pydirect.accelerator. pydirect.gather and pydirect.memory work without it"
        )
    module = UnifiedModule()
    backend_registration._setup_privateuseone_for_python_backend(
        rename=DEVICE_TYPE, backend_module=module, hook=_Hooks()
    )
    keep_cuda()
    _register_kernels(module)
    _register_methods(module)
    sharing.register(enable)
    logger.info("the device %r is enabled until this process ends", DEVICE_TYPE)


def enabled() -> UnifiedModule:
    """What ``torch.unified`` is.

    Raises:
        NotEnabledError: `enable` has not been called.
    """
    module = getattr(torch, DEVICE_TYPE, None)
    if not isinstance(module, UnifiedModule):
        raise NotEnabledError(
            "the device 'unified' is not there: call pydirect.enable() once, before "
            'pydirect.unify(tensor) or tensor.to("unified"); it cannot be undone'
        )
    return module


def _register_kernels(module: UnifiedModule) -> None:
    library = torch.library.Library("aten", "IMPL")
    module.keep(library)
    own = creation_kernels()
    for name, kernel in own.items():
        library.impl(name, kernel, "PrivateUse1")
    for name, kernel in RECORDED_KERNELS.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
    for name, writes in _computing_operators():
        if name in own:
            continue
        if writes:
            library.impl(name, kernel_for(module, name, Kind.WRITES), "PrivateUse1")
            continue
        below = kernel_for(module, name, Kind.FUNCTIONAL)
        above = kernel_for(module, name, Kind.DIFFERENTIABLE)
        library.impl(name, below, "PrivateUse1")
        library.impl(name, above, "AutogradPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    module.keep(others)
    others.fallback(_fallback(module), "PrivateUse1")


def _computing_operators() -> Iterator[tuple[str, bool]]:
    """(name with overload, whether it writes an operand) of every operator of PyTorch
    that computes on dense tensors: no views, no factories, nothing composed."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for qualified in torch._C._dispatch_get_all_op_names():
        name = qualified.removeprefix("aten::")
        packet, _, overload = name.partition(".")
        if name == qualified or _keeps(packet):
            continue
        if has(qualified, "CompositeImplicitAutograd"):
            continue
        if not any(has(qualified, key) for key in _COMPUTING_KEYS):
            continue
        schema = torch._C._get_schema(f"aten::{packet}", overload)
        aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
        writes = any(info.is_write for info in aliases)
        takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
        if takes_tensors and (writes or not aliases):
            yield name, writes


def _keeps(packet: str) -> bool:
    return (
        packet in _KEEPS
        or packet.endswith("_like")
        or packet.startswith("new_")
        or any(word in packet for word in _FOREIGN)
    )


def _fallback(module: UnifiedModule) -> Callable[..., Any]:
    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        """Operators of other libraries, and those that no processor of ours has."""
        schema = op._schema
        aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
        writes = any(info.is_write for info in aliases)
        if schema.name.startswith("aten::") or (aliases and not writes):
            raise UnsupportedOperatorError(
                f"{op} is not supported on unified tensors: use its dense counterpart, "
                'or move the operands with .to("cuda") or .cpu() first'
            )
        return run(module, op, Kind.WRITES if writes else Kind.FUNCTIONAL, args, kwargs)

    return fallback


def _register_methods(module: UnifiedModule) -> None:
    """Methods of tensors, besides PyTorch's generated ``is_unified`` and
    ``unified``."""
    methods: dict[str, Any] = {
        "affinity": property(lambda tensor: region_of(tensor).affinity),
        "set_affinity_": set_affinity_,
    }
    for name, method in methods.items():
        if hasattr(torch.Tensor, name):
            raise RuntimeError(f"torch.Tensor has a {name} of its own")
        setattr(torch.Tensor, name, method)


def set_affinity_(tensor: torch.Tensor, affinity: Affinity | str) -> torch.Tensor:
    """Switch who works on the memory of ``tensor``, for every view of it.

    Moves no byte (section 4.4.3). Affinity belongs to the memory: views share it.

    Args:
        tensor: unified.
        affinity: "host" or "gpu".

    Raises:
        ValueError: not unified, or no such affinity.
    """
    region_of(tensor).affinity = Affinity(affinity)
    return tensor


__all__ = ["UnifiedModule", "enable", "enabled", "set_affinity_"]
