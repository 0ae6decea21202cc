"""The `unified` device: registered with PyTorch's extension point, no rebuild.

Unified tensors are ordinary `torch.Tensor` objects under the dispatch key PrivateUse1:
views, printing, autograd and `state_dict` are PyTorch's own. Memory comes from
`pydirect.region`, operators are carried out by `pydirect.operators`.

[Note: PrivateUse1 takes CUDA's place] PyTorch knows one accelerator per process, and a
registered PrivateUse1 device is it, also next to CUDA. Three things follow. (1)
`Tensor.is_pinned()` and `Tensor.pin_memory()` ask the wrong device; both are replaced
here by versions that ask CUDA. (2) `torch.accelerator` names `unified`; code that must
know the GPU asks `torch.cuda`. (3) Autograd no longer switches to the stream of the
forward pass in its worker threads: backward runs on the thread's current stream. Train
on the default stream, or wrap backward of a side stream or a CUDA graph in
``torch.autograd.set_multithreading_enabled(False)``.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils import backend_registration

from pydirect import sharing
from pydirect.errors import UnsupportedOperatorError
from pydirect.operators import Kind, kernel_for, run
from pydirect.placement import Affinity
from pydirect.region import (
    DEVICE_TYPE,
    allocate,
    region_of,
    set_storage,
    show,
)
from pydirect.transfer import (
    Counters,
    Machine,
    alias_on,
    copy_into,
    empty_strided,
)

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

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

# Views read sizes and strides only: the CPU kernels make them, on unified storages.
_VIEWS = (
    "as_strided", "view", "view.dtype", "_reshape_alias", "unfold", "view_as_real",
    "view_as_complex", "alias",
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
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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


def register() -> UnifiedModule:
    """Register the device once; returns what ``torch.unified`` is.

    Raises:
        RuntimeError: another backend has taken PyTorch's extension point.
    """
    present = getattr(torch, DEVICE_TYPE, None)
    if isinstance(present, UnifiedModule):
        return present
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            f"PyTorch has one place for a device from outside, and {name!r} has taken "
            "it: import pydirect in a process without that backend"
        )
    module = UnifiedModule()
    backend_registration._setup_privateuseone_for_python_backend(
        rename=DEVICE_TYPE, backend_module=module, hook=_Hooks()
    )
    _register_kernels(module)
    _register_methods(module)
    sharing.register()
    return module


def _register_kernels(module: UnifiedModule) -> None:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    module.keep(library)
    own = _own_kernels(module)
    for name, kernel in own.items():
        library.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
    for name, writes in _computing_operators():
        if name in own:
            continue
        if writes:
            library.impl(name, kernel_for(module, name, Kind.WRITES), "PrivateUse1")  # type: ignore[no-untyped-call]
            continue
        below = kernel_for(module, name, Kind.FUNCTIONAL)
        above = kernel_for(module, name, Kind.DIFFERENTIABLE)
        library.impl(name, below, "PrivateUse1")  # type: ignore[no-untyped-call]
        library.impl(name, above, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    others = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    module.keep(others)
    others.fallback(_fallback(module), "PrivateUse1")  # type: ignore[no-untyped-call]


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


def _own_kernels(module: UnifiedModule) -> dict[str, Callable[..., Any]]:
    """Kernels of allocation, copies and views."""
    own: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "empty_like": _empty_like,
        "_to_copy": _to_copy,
        "clone": _clone,
        "copy_": _copy,
        "_copy_from": _copy_from,
        "resize_": _resize,
        "set_.source_Storage": _set_source,
        "set_.source_Storage_storage_offset": _set_part,
        "set_.source_Tensor": _set_tensor,
    }
    own.update({name: _view(name) for name in _VIEWS})
    return own


def _view(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    shown_on_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(
        f"aten::{name}", "CPU"
    )
    if not shown_on_cpu:
        return _alias

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(_CPU_KEYS, *args, **kwargs)

    return kernel


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    operator = torch.ops.aten.as_strided.default
    return cast(
        torch.Tensor,
        operator.redispatch(_CPU_KEYS, tensor, tensor.size(), tensor.stride(), None),
    )


def _empty(
    size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any
) -> torch.Tensor:
    shape = torch.empty(size, device="meta", memory_format=_format(memory_format))
    return empty_strided(
        tuple(shape.shape), shape.stride(), dtype or torch.get_default_dtype()
    )


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    return empty_strided(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _empty_like(
    tensor: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> torch.Tensor:
    """As PyTorch's, and the affinity is inherited."""
    target = torch.device(DEVICE_TYPE) if device is None else torch.device(device)
    form = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta"
    )
    memory_format = options.get("memory_format") or torch.preserve_format
    like = torch.empty_like(form, memory_format=memory_format)
    if target.type != DEVICE_TYPE:
        return torch.empty_strided(
            like.size(), like.stride(), dtype=like.dtype, device=target
        )
    unified = tensor.device.type == DEVICE_TYPE
    affinity = region_of(tensor).affinity if unified else None
    return empty_strided(tuple(like.shape), like.stride(), like.dtype, affinity)


def _to_copy(tensor: Any, *, non_blocking: bool = False, **options: Any) -> Any:
    """From unified, and (PyTorch dispatches on the target) to unified."""
    if tensor.layout != torch.strided:
        raise UnsupportedOperatorError(
            f"unified tensors are dense, got {tensor.layout}: use to_dense() first"
        )
    made = _empty_like(
        tensor,
        dtype=options.get("dtype"),
        device=options.get("device"),
        memory_format=options.get("memory_format"),
    )
    return copy_into(made, tensor, non_blocking=non_blocking)


def _clone(tensor: Any, *, memory_format: Any = None) -> Any:
    made = _empty_like(tensor, memory_format=memory_format)
    return copy_into(made, tensor, non_blocking=False)


def _format(memory_format: torch.memory_format | None) -> torch.memory_format:
    return memory_format or torch.contiguous_format


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    return copy_into(target, source, non_blocking=non_blocking)


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return copy_into(target, source, non_blocking=non_blocking)


def _resize(tensor: Any, size: Any, *, memory_format: Any = None) -> Any:
    shape = torch.empty(size, device="meta", memory_format=_format(memory_format))
    needed = (tensor.storage_offset() + shape.numel()) * tensor.element_size()
    region = region_of(tensor)
    storage = tensor.untyped_storage()
    if needed > region.num_bytes:
        grown = allocate(needed, region.affinity)
        region.wait_for_gpu(before_write=False)
        grown.host[: region.num_bytes].copy_(region.host[: region.num_bytes])
        storage = show(grown)
    set_storage(
        tensor, storage, tensor.storage_offset(), tuple(shape.shape), shape.stride()
    )
    return tensor


def _set_source(tensor: Any, source: Any) -> Any:
    size = source.nbytes() // tensor.element_size()
    set_storage(tensor, source, 0, (size,), (1,))
    return tensor


def _set_part(
    tensor: Any, source: Any, offset: Any, size: Any, stride: Any = ()
) -> Any:
    shape = torch.empty(size, device="meta")
    set_storage(tensor, source, offset, tuple(size), tuple(stride) or shape.stride())
    return tensor


def _set_tensor(tensor: Any, source: Any) -> Any:
    set_storage(
        tensor,
        source.untyped_storage(),
        source.storage_offset(),
        tuple(source.shape),
        source.stride(),
    )
    return tensor


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
    """Methods of tensors, beside PyTorch's generated ``is_unified`` and ``unified``."""
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


__all__ = ["UnifiedModule", "alias_on", "register", "set_affinity_"]
