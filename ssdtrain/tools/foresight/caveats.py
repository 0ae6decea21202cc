"""What a captured step leaves out, in words, by the names of its graph's notes; and why
one could not be captured."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ssdtrain.errors
from ssdtrain.errors import ConfigError

ASSUMED = "assumed_yes"
"""Answers of the data that were taken as yes."""
UNFUSED = "unfused_attention"
SCANNED = "fused_scan"
COMPILED = "compiled"
RECURRENT = "recurrent"

WORDS: Mapping[str, str] = {
    ASSUMED: "an answer of the data (an `if` on a tensor), taken as yes: the other "
    "branch is not in the prediction. Fix the branch, or capture the step where it "
    "runs (capture --step).",
    UNFUSED: "attention in single precision, or with a mask and fewer key heads than "
    "query heads, captured as products and a softmax where a GPU runs one kernel: its "
    "time and memory are told too high. In half precision it is captured as it runs.",
    SCANNED: "a scan of a state-space or delta-rule layer, priced as the kernel of "
    "mamba_ssm or fla. What these fuse with it is priced apart: memory is told too "
    "high. Without the package a step is far slower and needs more memory.",
    COMPILED: "a compiled function, predicted as it runs without torch.compile: a "
    "compiled step is shorter. Capture it where it runs (capture --step).",
    RECURRENT: "a recurrent layer, captured operator by operator where a GPU runs "
    "cuDNN's: its time is told too long, and its memory is another.",
}
"""By note; how often stands before."""

# What the message of an error says, and what to do about it.
REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("item()", "nonzero", "data-dependent", "_unique", "local_scalar_dense"),
        "Values that the host looks into (Tensor.item(), boolean masks, unique) have "
        "to be constants: there is no data. Or capture the step where it runs: "
        "ssdtrain foresight capture --step FILE.py:FUNCTION.",
    ),
    (
        (
            *("CUDA enabled", "NVIDIA driver", "expected device", "on device"),
            *("same device", "data ptr", "numpy"),
        ),
        "Without a GPU, model and inputs are built on torch's default device, meta: "
        "leave out .cuda(), .to(...), .numpy() and device=, and make inputs within "
        "FUNCTION (torch.randn, torch.randint, not NumPy's).",
    ),
    (
        ("must have same reduction dim", "cannot be multiplied", "size mismatch"),
        "The model does not take these inputs: their sizes differ.",
    ),
)


def left_out(notes: Mapping[str, str]) -> list[str]:
    """A sentence for every note that limits a prediction."""
    return [f"{notes[name]} x {text}" for name, text in WORDS.items() if name in notes]


def caveats_of(model: nn.Module, forward: Callable[[], Any]) -> dict[str, str]:
    """Notes of what a model has that is captured otherwise than it runs."""
    recurrent = sum(isinstance(module, nn.RNNBase) for module in model.modules())
    compiled = len(set(map(id, _compiled(model, forward))))
    counts = {RECURRENT: recurrent, COMPILED: compiled}
    return {name: str(count) for name, count in counts.items() if count}


def _compiled(model: nn.Module, forward: Callable[[], Any]) -> Iterator[object]:
    """What torch.compile has wrapped, in the model and in what its forward names."""
    around = list(_named_in(forward))
    modules = [*model.modules(), *(one for one in around if isinstance(one, nn.Module))]
    for module in modules:
        if hasattr(module, "_orig_mod"):
            yield module._orig_mod
        elif getattr(module, "_compiled_call_impl", None) is not None:
            yield module
        else:
            around += [type(module).forward, *vars(module).values()]
    for one in around:
        is_wrapped = hasattr(one, "_torchdynamo_orig_callable")
        if not isinstance(one, nn.Module) and is_wrapped:
            yield one


def _named_in(function: Callable[[], Any]) -> Iterator[object]:
    """What a function's body names, of its closure and of its module."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty yet
            yield cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]


def explained(error: Exception, what: str) -> ConfigError:
    """An error of a user's model: `what` failed, where, and what to do about it."""
    text = " ".join(str(error).split())
    met = (advice for words, advice in REMEDIES if any(word in text for word in words))
    remedy, kind = next(met, ""), type(error).__name__
    said = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ..."
    place = _place(error)
    message = f"{what}: {kind}: {said}{f' ({place})' if place else ''}"
    return ConfigError(f"{message}. {remedy}" if remedy else f"{message}.")


MOST_TEXT = 300
OWN = tuple(str(Path(str(of.__file__)).parent) for of in (torch, ssdtrain.errors))


def _place(error: BaseException) -> str:
    """The last line of the user's or of his libraries' code."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((*OWN, "<")):
            name = frame.filename.rpartition("/")[2]
            return f"{name}, line {frame.lineno}"
    return ""
