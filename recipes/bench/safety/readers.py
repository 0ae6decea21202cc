"""Every file that the packages read: how to make a valid one, and how to read it.

Not here, because nobody writes them but the kernel, torch or Megatron: /proc and /sys,
the SMART log, Megatron's indexed datasets (`name.idx` is read by its own reader).
"""

import gzip
import json
import lzma
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.errors import HydraException
from torch import nn

import ssdtrain
from hector.datasets.knowledge import load_fb15k_237, load_ogbn_mag_small
from hector.datasets.rdf import load_rdf
from hector.emit import module as generated_code
from hector.ir.kernels import SegmentMapping, TraversalSchedule
from hector.runtime import tune
from hector.train import checkpoint as hector_checkpoint
from hector.train.progress import kept_rows
from pydirect.datasets import planetoid
from pydirect.gather.request import Path as GatherPath
from pydirect.gather.trials import Trials
from pydirect.train import read_checkpoint as pydirect_checkpoint
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.errors import ConfigError
from ssdtrain.packaged import packaged_directory
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import PLAN_FILE
from ssdtrain.plan.profile import PROFILE_FILE
from ssdtrain.storage.wear import WearLog
from ssdtrain.tools.machine.links import LINK_FILE
from ssdtrain.tools.report.plan_command import read_link_curves
from ssdtrain.train.checkpoint import fitting, read_checkpoint
from ssdtrain.train.compose import compose_config, values_of
from ssdtrain.train.data.tokens import token_file
from ssdtrain.train.data.vocabulary import Vocabulary
from ssdtrain.train.refused import explained
from ssdtrain.train.settings import DataSettings, RunSettings

CPU = torch.device("cpu")
Make = Callable[[Path], Path]
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Reader:
    """One kind of file."""

    name: str
    make: Make
    """Write a valid file into an empty directory."""
    read: Read
    """Read it, and use what was read as the product would."""
    parts: tuple[str, ...] = ()
    """What an error may name instead of the file."""


def small() -> nn.Module:
    """With something to move and something to rebuild."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def _step(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    net(torch.linspace(-1, 1, 32).reshape(4, 8)).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@cache
def _observed() -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """A profile, its plan, and the gradients of a step without ssdtrain."""
    net = small()
    plain = tuple(_step(net))
    with ssdtrain.offload(net, target="host", min_bytes=0, max_overhead=1.0) as session:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for _ in range(8):
            _step(net)
            optimizer.step()
            if session.plan is not None:
                break
        if session.plan is None or session.profile is None:
            raise RuntimeError("the step was not planned")
        return session.profile, session.plan, plain


def _make_plan(directory: Path) -> Path:
    PLAN_FILE.write(directory / "plan.json", _observed()[1])
    return directory / "plan.json"


def _train_by(path: Path) -> None:
    net = small()
    expected = _observed()[2]
    with ssdtrain.offload(
        net, target="host", min_bytes=0, plan=str(path), host_bytes=1 << 24
    ) as session:
        for _ in range(2):
            found = _step(net)
            if not all(map(torch.equal, found, expected)):
                raise RuntimeError("the gradients differ")
        session.explain()


def _make_profile(directory: Path) -> Path:
    PROFILE_FILE.write(directory / "profile.json", _observed()[0])
    return directory / "profile.json"


def _plan_from(path: Path) -> None:
    profile = PROFILE_FILE.read(path)
    for goal in (Goal(), Goal(memory_budget_bytes=1 << 50)):
        choose(profile, goal)


def _make_links(directory: Path) -> Path:
    doctor = records.read(RESULTS / "storage" / "links_h200.json")["cells"]["doctor"]
    links = LINK_FILE.from_json(doctor["links"])
    LINK_FILE.write(directory / "links.json", links)
    return directory / "links.json"


def _price(path: Path) -> None:
    for link in LINK_FILE.read(path).links:
        for size in (1, 4096, 1 << 26):
            link.curve.seconds(size)
    read_link_curves(str(path))


def _make_wear(directory: Path) -> Path:
    log = WearLog(directory / "wear.json")
    for disk in ("nvme0n1", "nvme1n1"):
        log.add(disk, 1 << 30)
    return log.path


def _log_wear(path: Path) -> None:
    log = WearLog(path)
    log.days("nvme0n1")
    log.add("nvme0n1", 5)
    if log.days("nvme0n1")[log.day] < 5:
        raise RuntimeError("bytes were lost")


def _make_config(directory: Path) -> Path:
    text = (packaged_directory() / "ssdtrain.yaml").read_text()
    (directory / "own.yaml").write_text(text)
    return directory / "own.yaml"


def _make_group(directory: Path) -> Path:
    (directory / "train").mkdir()
    text = (packaged_directory() / "train" / "default.yaml").read_text()
    (directory / "train" / "mine.yaml").write_text(text)
    (directory / "own.yaml").write_text(
        (packaged_directory() / "ssdtrain.yaml").read_text()
    )
    return directory / "train" / "mine.yaml"


def _compose(name: str, *overrides: str) -> None:
    words = [*overrides, "engine=plain"]
    try:
        config = compose_config(name, words)
    except HydraException as error:  # as the command line does
        raise ConfigError(f"{name}: {explained(error, name, words)}") from error
    try:
        RunSettings.from_mapping(values_of(config))
    except ConfigError as error:  # names the setting; the file, where it can
        raise ConfigError(f"{name}: {error}") from error


def _make_text(directory: Path) -> Path:
    lines = [json.dumps({"text": f"line {n} of \u00e9t\u00e9"}) for n in range(20)]
    (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "text.jsonl"


def _tokens(path: Path) -> None:
    with tempfile.TemporaryDirectory() as cache_directory:
        settings = DataSettings(
            files=(str(path),), cache_directory=cache_directory, field="text"
        )
        vocabulary = Vocabulary.from_tokenizer(None)
        tokens = token_file(settings, vocabulary)
        if int(tokens.max(initial=0)) >= vocabulary.num_rows:
            raise RuntimeError("a token is out of the vocabulary")


def _make_token_file(directory: Path) -> Path:
    (directory / "text.txt").write_text("some text " * 40)
    token_file(_own_settings(directory), Vocabulary.from_tokenizer(None))
    (path,) = directory.glob("tokens-*.u32")
    return path


def _own_settings(directory: Path) -> DataSettings:
    return DataSettings(
        files=(str(directory / "text.txt"),), cache_directory=str(directory)
    )


def _read_token_file(path: Path) -> None:
    vocabulary = Vocabulary.from_tokenizer(None)
    tokens = token_file(_own_settings(path.parent), vocabulary)
    if not len(tokens) or int(tokens.max()) >= vocabulary.num_rows:
        raise RuntimeError("a token is out of the vocabulary")


def _make_tokenizer(directory: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "some", "text"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def _tokenize(path: Path) -> None:
    vocabulary = Vocabulary.from_tokenizer(str(path))
    ids = vocabulary.encoder.encode("some other text")
    if len(ids) and not 0 <= int(ids.max()) < vocabulary.num_rows:
        raise RuntimeError("a token is out of the vocabulary")


def _state() -> dict[str, Any]:
    net = small()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return {"step": 3, "model": net.state_dict(), "optimizer": optimizer.state_dict()}


def _make_checkpoint(directory: Path) -> Path:
    torch.save(_state(), directory / "checkpoint.pt")
    return directory / "checkpoint.pt"


def _resume(path: Path) -> None:
    net = small()
    optimizer = torch.optim.AdamW(net.parameters())
    state = read_checkpoint(path, CPU, ("step", "model", "optimizer"))
    with fitting(path):
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        int(state["step"])


def _make_pydirect(directory: Path) -> Path:
    state = _state()
    state = {**state, "epoch": state.pop("step"), "losses": [1.0], "seconds": [0.5]}
    torch.save(state, directory / "checkpoint.pt")
    return directory / "checkpoint.pt"


def _resume_pydirect(path: Path) -> None:
    net = small()
    pydirect_checkpoint(path, CPU, net, torch.optim.AdamW(net.parameters()))


def _make_hector(directory: Path) -> Path:
    state = _state()
    hector_checkpoint.save(
        hector_checkpoint.Checkpoint(
            settings={"model.layers": 2},
            repetition=0,
            epoch=3,
            model=state["model"],
            optimizer=state["optimizer"],
            cpu_rng=torch.get_rng_state(),
            cuda_rng=None,
            accuracies=[0.5],
        ),
        directory / "checkpoint.pt",
    )
    return directory / "checkpoint.pt"


def _resume_hector(path: Path) -> None:
    net = small()
    found = hector_checkpoint.load(path, {"model.layers": 2}, CPU)
    with hector_checkpoint.fitting(path):
        net.load_state_dict(found.model)
        torch.optim.AdamW(net.parameters()).load_state_dict(found.optimizer)
        hector_checkpoint.set_random_state(found, CPU)


def _make_metrics(directory: Path) -> Path:
    rows = [
        json.dumps({"seed": s, "epoch": e, "loss": 1.0}) for s in (0, 1) for e in (0, 1)
    ]
    (directory / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return directory / "metrics.jsonl"


def _make_schedule(directory: Path) -> Path:
    path = directory / "schedule.json"
    tune.write_schedule(path, TraversalSchedule(mapping=SegmentMapping.PROGRAM))
    return path


def _make_module(directory: Path) -> Path:
    _load_module(directory)
    (path,) = directory.rglob("*.py")
    return path


def _load_module(directory: Path) -> Any:
    module = generated_code.load_module("VALUE = 3\n", directory)
    del sys.modules[module.__name__]
    return module


def _import_module(path: Path) -> None:
    if _load_module(path.parent).VALUE != 3:
        raise RuntimeError("damaged code was run")


def _make_gather_times(directory: Path) -> Path:
    cells = {"small": {one.value: 2.5 for one in GatherPath}}
    path = directory / "times.json"
    path.write_text(json.dumps({"version": 1, "cells": cells}))
    path.chmod(0o600)
    return path


def _read_gather_times(path: Path) -> None:
    Trials(path, lambda: None)  # type: ignore[arg-type,return-value]


def _make_triples(suffix: str) -> Make:
    lines = [
        f"<http://a/{n}>\t<http://r/{n % 3}>\t<http://a/{n + 1}> .\n" for n in range(30)
    ]
    text = "".join(line.replace("\t", " ") for line in lines).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix, bytes)

    def make(directory: Path) -> Path:
        (directory / "trainingSet.tsv").write_text(
            "person\tlabel_affiliation\nhttp://a/1\tx\nhttp://a/2\ty\n"
        )
        (directory / "testSet.tsv").write_text(
            "person\tlabel_affiliation\nhttp://a/3\tx\n"
        )
        (directory / f"aifb.nt{suffix}").write_bytes(pack(text))
        return directory / f"aifb.nt{suffix}"

    return make


def _make_labels(directory: Path) -> Path:
    _make_triples("")(directory)
    return directory / "trainingSet.tsv"


def _make_fb15k(directory: Path) -> Path:
    rows = "".join(f"a{n}\tr{n % 3}\ta{n + 1}\n" for n in range(20))
    for part in ("train", "valid", "test"):
        (directory / f"{part}.txt").write_text(rows)
    return directory / "valid.txt"


def _make_mag(directory: Path) -> Path:
    for relation in ("citing", "writing", "is-about"):
        edges = np.arange(40, dtype=np.int32).reshape(2, 20)
        np.save(directory / f"{relation}_coo_2.npy", edges)
    return directory / "writing_coo_2.npy"


def _make_planetoid(directory: Path) -> Path:
    np.savez(
        directory / "cora.npz",
        edge_index=np.array([[0, 1, 2, 3], [1, 0, 3, 2]]),
        y=np.array([0, 1, 0, 1]),
        train=np.array([0]),
        val=np.array([1]),
        test=np.array([2, 3]),
        x_indptr=np.array([0, 1, 2, 3, 4]),
        x_indices=np.array([0, 1, 2, 0]),
        x_dim=np.array(3),
    )
    return directory / "cora.npz"


READERS = (
    Reader("plan", _make_plan, _train_by),
    Reader("profile", _make_profile, _plan_from),
    Reader("links", _make_links, _price),
    Reader("wear log", _make_wear, _log_wear),
    Reader("config", _make_config, lambda path: _compose(str(path))),
    Reader(
        "config group",
        _make_group,
        lambda path: _compose(str(path.parents[1] / "own.yaml"), "train=mine"),
        ("train/mine", "train.", "train expects"),
    ),
    Reader("json lines", _make_text, _tokens),
    Reader("token file", _make_token_file, _read_token_file),
    Reader("tokenizer", _make_tokenizer, _tokenize),
    Reader("checkpoint", _make_checkpoint, _resume),
    Reader("pydirect checkpoint", _make_pydirect, _resume_pydirect),
    Reader("pydirect gather times", _make_gather_times, _read_gather_times),
    Reader("planetoid", _make_planetoid, lambda p: planetoid(p.parent)),
    Reader("hector checkpoint", _make_hector, _resume_hector),
    Reader("hector metrics", _make_metrics, lambda p: kept_rows(p, (1, 1))),
    Reader("hector schedule", _make_schedule, tune.read_schedule),
    Reader("hector generated code", _make_module, _import_module),
    Reader("rdf triples", _make_triples(""), lambda p: load_rdf("aifb", p.parent)),
    Reader("rdf .gz", _make_triples(".gz"), lambda p: load_rdf("aifb", p.parent)),
    Reader("rdf .xz", _make_triples(".xz"), lambda p: load_rdf("aifb", p.parent)),
    Reader("rdf labels", _make_labels, lambda p: load_rdf("aifb", p.parent)),
    Reader("fb15k", _make_fb15k, lambda p: load_fb15k_237(p.parent)),
    Reader("ogbn-mag", _make_mag, lambda p: load_ogbn_mag_small(p.parent)),
)
