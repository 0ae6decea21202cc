"""Triton's interpreter, made to take a third of its time: same results, same checks.

An operator of its language takes it 0.1 ms and more, whatever the sizes: it makes types
and shapes anew, and looks for overflow in nine more operators that nobody asks.
"""

import importlib
from types import SimpleNamespace
from typing import Any


def interpret_fast() -> None:
    """Take effect in this process, for good."""
    language = importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _exchange_once(language, interpreter)
    _remember_dtypes(interpreter)
    _remember_types(language.core)
    _add_once(type(interpreter.interpreter_semantic))


def _exchange_once(language: Any, interpreter: Any) -> None:
    """The functions of the language, and not at every call of a kernel or of one of
    its functions (`tl.sum`), which takes as long as a small kernel itself."""
    both = {"tl": language, "core": language.core}
    interpreter._patch_lang(SimpleNamespace(__globals__=both))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept


def _remember_dtypes(interpreter: Any) -> None:
    """By name: it makes a table of all of them at every question."""
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def found(kind: Any) -> Any:
        dtype = known.get(kind.name)
        if dtype is None:
            dtype = known[kind.name] = find(kind)
        return dtype

    interpreter._get_np_dtype = found


def _remember_types(core: Any) -> None:
    """What a type of blocks knows, and what a tensor knows by its type."""
    make_type, types = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def of_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = element_ty.name, *(getattr(s, "value", s) for s in sizes)
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        else:
            vars(self).update(known, element_ty=element_ty)

    make_tensor, shapes = core.tensor.__init__, dict[str, tuple[Any, Any]]()

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    core.block_type.__init__ = of_type
    core.tensor.__init__ = of_tensor


def _add_once(semantic: Any) -> None:
    """Integers are added, and not a second time to see whether that overflows: what is
    seen is told under `debug` alone."""
    check = semantic.binary_op_sanitize_overflow_impl

    def told(self: Any, *given: Any) -> None:
        if self.builder.options.debug:
            check(self, *given)

    semantic.binary_op_sanitize_overflow_impl = told
