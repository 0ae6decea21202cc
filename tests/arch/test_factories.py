"""Tensors of ssdtrain's own name their device and dtype: a program may have set others
as the defaults (`torch.set_default_device("cuda")`)."""

import ast
from collections.abc import Iterator

import pytest

from tests.arch.test_layers import name, ssdtrain_files, tree_of

FACTORIES = frozenset(
    """
    arange as_tensor asarray empty empty_permuted empty_strided eye full linspace
    logspace ones rand randint randn randperm range scalar_tensor sparse_coo_tensor
    tensor tril_indices triu_indices zeros
    """.split()
)
MODELS = ("build_public.py", "calibrate.py", "learn.py", "subject.py", "bert.py")
"""Files that build models, on the default device that their caller has entered."""


def unnamed(tree: ast.AST) -> Iterator[str]:
    """Calls of `torch` that make something where and as the defaults say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for each in node.names:
                if each.name in FACTORIES:
                    yield f"line {node.lineno}: from torch import {each.name}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        home, called = node.func.value, node.func.attr
        if not isinstance(home, ast.Name) or home.id != "torch":
            continue
        named = {each.arg for each in node.keywords}
        if called == "Generator" and not node.args and "device" not in named:
            yield f"line {node.lineno}: torch.Generator without a device"
        if called in FACTORIES and not {"device", "dtype"} <= named:
            yield f"line {node.lineno}: torch.{called} without device= or dtype="


def test_internal_tensors_name_their_device_and_dtype() -> None:
    for path in ssdtrain_files():
        if path.name not in MODELS:
            found = list(unnamed(tree_of(path)))
            assert not found, f"{name(path)}: {found}"


@pytest.mark.parametrize(
    "code",
    [
        "torch.zeros(3, dtype=torch.int8)",
        "torch.tensor(1.0, device=here)",
        "torch.Generator()",
        "from torch import empty",
    ],
)
def test_the_rule_finds_them(code: str) -> None:
    assert list(unnamed(ast.parse(code)))
