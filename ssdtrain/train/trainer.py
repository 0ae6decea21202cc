"""Train without and with ssdtrain; compare losses, weights, time and memory."""

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError
from ssdtrain.plan.reasons import why_nothing_left
from ssdtrain.train import loop
from ssdtrain.train.choices import NO_GPU
from ssdtrain.train.comparison import compare, later
from ssdtrain.train.confirm import doubt_of_writes
from ssdtrain.train.data.batches import Batches
from ssdtrain.train.data.objectives import objective_of
from ssdtrain.train.data.tokens import token_file
from ssdtrain.train.data.vocabulary import Vocabulary
from ssdtrain.train.loop import Leg, LegResult
from ssdtrain.train.mcore.indexed import prefix_of, tokens_of
from ssdtrain.train.metrics import Sinks, Terminal, check_tensorboard
from ssdtrain.train.models import model_of
from ssdtrain.train.pipeline import PipelineRunner, choose_stages
from ssdtrain.train.plain import PlainRunner
from ssdtrain.train.ranks import Ranks
from ssdtrain.train.runner import Runner, Workload
from ssdtrain.train.settings import EngineKind, RunSettings, at_least
from ssdtrain.train.stop import STDERR, Stop, StoppedError
from ssdtrain.train.tally import Beside, added
from ssdtrain.train.zero import ZeroRunner

READING = "reading the text and loading transformers"


class Trainer:
    """`ssdtrain train` for transformers."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._prepared: _Prepared | None = None

    @classmethod
    def from_config(cls, values: dict[str, Any]) -> "Trainer":
        """Build from a composed root config. ConfigError: a value can never work."""
        return cls(RunSettings.from_mapping(values))

    def ranks_to_start(self) -> int:
        """Return how many processes this run needs; 0: this one. Raises ConfigError:
        stages do not divide them, or engine=megatron without a GPU."""
        engine = self.settings.engine
        if engine.kind is EngineKind.PLAIN or Ranks.from_environment().launched:
            return 0
        num_ranks = engine.num_ranks or torch.cuda.device_count() or 2
        if engine.kind is EngineKind.MEGATRON:
            if not torch.cuda.is_available():
                raise ConfigError(NO_GPU)
            self.settings.parallel.check_ranks(num_ranks)
        else:
            choose_stages(engine.num_stages, num_ranks)
        return num_ranks

    def prepare(self) -> None:
        """Read the text, build the first leg's model and load its checkpoint, before a
        file of the run is written. Raises ConfigError: a setting does not fit."""
        ranks = Ranks.from_environment()
        ranks.share_cores()
        if torch.cuda.is_available():
            torch.cuda.set_device(ranks.device())
        if ranks.is_first and self.settings.train.tensorboard:
            check_tensorboard()
        sinks = Sinks(self._terminal(ranks))
        try:
            with deterministic(self.settings.train.deterministic):
                sinks.stage(READING)
                workload = self._workload(ranks)
                loop.make_directories(workload)
                beside = Beside(workload)
                begun = _begin(workload, self._legs()[0], sinks)
                beside.begin(begun.first, [leg.value for leg in self._legs()])
        except BaseException:
            sinks.close()
            raise
        self._prepared = _Prepared(workload, sinks, beside, [begun])

    def run(self) -> dict[str, Any]:
        """Train; with `train.compare` once without ssdtrain first. Returns plain values
        for JSON, the same on every rank; `ok` is the verdict."""
        if self._prepared is None:
            self.prepare()
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise RuntimeError("prepare() left nothing to run")
        ranks, sinks, results = prepared.workload.ranks, prepared.sinks, []
        told_fd = STDERR if ranks.is_first else None
        with (
            deterministic(self.settings.train.deterministic),
            sinks,
            Stop(told_fd=told_fd, beside=sinks.beside) as stop,
        ):
            if ranks.is_first:
                directory = Path(self.settings.run_directory)
                sinks.open(directory, tensorboard=self.settings.train.tensorboard)
            try:
                for leg in self._legs():
                    results.append(_trained(prepared, leg, stop))
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
            except StoppedError:
                ranks.leave()  # all stopped behind the same step
                raise
        gathered = ranks.gather(results)
        ranks.leave()
        by_leg = {
            one.leg: [row[at] for row in gathered] for at, one in enumerate(results)
        }
        return _summary(self.settings, by_leg)

    def _legs(self) -> list[Leg]:
        if not self.settings.offload:
            return [Leg.WITHOUT]
        return [Leg.WITHOUT, Leg.WITH] if self.settings.train.compare else [Leg.WITH]

    def _workload(self, ranks: Ranks) -> Workload:
        settings = self.settings
        vocabulary = Vocabulary.from_tokenizer(settings.data.tokenizer)
        shape = settings.model
        objective = objective_of(shape.family, shape.sequence_length, vocabulary)
        prefix = prefix_of(settings.data)
        tokens = tokens_of(prefix) if prefix else token_file(settings.data, vocabulary)
        batches = Batches(
            tokens, objective, settings.train.micro_batch_size, settings.train.seed
        )
        num_rows = vocabulary.num_rows
        if settings.model.vocab_size is not None:
            num_rows = settings.model.vocab_size
            at_least(
                "model.vocab_size (ids of this text)", num_rows, vocabulary.num_ids
            )
        return Workload(settings, model_of(settings.model, num_rows), batches, ranks)

    def _terminal(self, ranks: Ranks) -> Terminal | None:
        if not (self.settings.progress and ranks.is_first):
            return None
        tokens = tokens_per_step(self.settings, ranks.world_size)
        return Terminal(Console(), self.settings.train.steps, tokens)


class _Begun(NamedTuple):
    """A leg that can take its first step."""

    runner: Runner
    first: int


class _Prepared(NamedTuple):
    """What `Trainer.prepare` leaves for `Trainer.run`."""

    workload: Workload
    sinks: Sinks
    beside: Beside
    begun: list[_Begun]
    """The first leg; taken out as it trains, so that its model does not outlive it."""


def _trained(prepared: _Prepared, leg: Leg, stop: Stop) -> LegResult:
    """Train one leg; the first has been begun, the next begins here."""
    workload, sinks, beside, begun = prepared
    runner, first = begun.pop() if begun else _begin(workload, leg, sinks)
    steps = workload.settings.train.steps
    if first < steps:  # minutes, maybe, on a CPU
        tokens = tokens_per_step(workload.settings, workload.ranks.world_size)
        text = f"{leg.value}: step {first + 1}/{steps}, {tokens:,} tokens a step"
        sinks.stage(text)
    try:
        given: Any = {"sinks": sinks, "stop": stop, "first": first, "beside": beside}
        return loop.Loop(workload, runner, leg, **given).run()
    finally:
        runner.close()


def _begin(workload: Workload, leg: Leg, sinks: Sinks) -> _Begun:
    engine = workload.settings.engine.kind.value
    sinks.stage(f"{leg.value}: building the model, engine={engine}")
    runner = runner_of(workload)
    try:
        return _Begun(runner, loop.first_step(workload, runner))
    except BaseException:
        runner.close()
        raise


def tokens_per_step(settings: RunSettings, world_size: int) -> int:
    """Return tokens that all ranks together train on in one optimizer step."""
    engine, parallel = settings.engine, settings.parallel
    ranks_a_replica = 1
    if engine.kind is EngineKind.MEGATRON:
        ranks_a_replica = parallel.tensor * parallel.pipeline
    elif engine.kind is EngineKind.DEEPSPEED:
        ranks_a_replica = choose_stages(engine.num_stages, world_size) or 1
    sequences = settings.train.micro_batch_size * settings.train.num_micro_batches
    replicas = max(1, world_size // ranks_a_replica)
    return sequences * settings.model.sequence_length * replicas


def runner_of(workload: Workload) -> Runner:
    """Return the engine that the settings ask for, with a freshly built model."""
    if workload.settings.engine.kind is EngineKind.PLAIN:
        return PlainRunner(workload)
    if workload.settings.engine.kind is EngineKind.MEGATRON:
        return megatron_runner(workload)
    if choose_stages(workload.settings.engine.num_stages, workload.ranks.world_size):
        return PipelineRunner(workload)
    return ZeroRunner(workload)


def megatron_runner(workload: Workload) -> Runner:
    """Import the runner of an extra. Raises ConfigError: it is not installed."""
    try:
        from ssdtrain.train.mcore.runner import MegatronRunner
    except ImportError as error:
        raise ConfigError(
            f"engine=megatron needs megatron-core ({error}); install it with "
            "`pip install 'ssdtrain[megatron]'`, or set engine=deepspeed."
        ) from error
    return MegatronRunner(workload)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Switch torch's deterministic algorithms on or off, and back afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    fills: Any = torch.utils.deterministic
    filling = fills.fill_uninitialized_memory
    if wanted:
        # cuBLAS reads this once, when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Filling every `empty` would touch all of DeepSpeed's gigabytes of buckets.
    fills.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        fills.fill_uninitialized_memory = filling


def _summary(settings: RunSettings, legs: dict[str, list[LegResult]]) -> dict[str, Any]:
    """Return what happened, over all ranks, as plain values."""
    every = next(iter(legs.values()))
    result: dict[str, Any] = {
        "model": settings.model.family.value,
        "engine": settings.engine.kind.value,
        "target": settings.offload.get("target"),
        "num_ranks": len(next(iter(legs.values()))),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "peak_of": peak_of(settings),
        "first_step": every[0].own.first + 1,
        "last_step": every[0].own.first + len(every[0].own.steps),
        "legs": {name: _leg_summary(results) for name, results in legs.items()},
        "recorded": _recorded(legs),
    }
    if Leg.WITHOUT.value in legs and Leg.WITH.value in legs:
        result.update(_compared(legs[Leg.WITHOUT.value], legs[Leg.WITH.value]))
    if Leg.WITH.value in legs:
        results, own = legs[Leg.WITH.value], result["legs"][Leg.WITH.value]
        offload = OffloadConfig.from_mapping(settings.offload)
        why = own["totals"], own["fallbacks"], offload.plan, offload.min_bytes
        result["written_to"] = offload.target.behind.name
        result["why_nothing_left"] = why_nothing_left(*why)
        if (doubt := doubt_of_writes(offload.target, results)) is not None:
            result.setdefault("verdict", {})["writes_confirmed"] = not doubt
            result["why_failed"] = {"writes_confirmed": doubt} if doubt else {}
    result["ok"] = all(result.get("verdict", {}).values())
    return result


def peak_of(settings: RunSettings) -> str:
    """Return what peaks count: allocated bytes on a GPU, saved tensors on a CPU."""
    if torch.cuda.is_available():
        return "allocated"
    least = loop.least_bytes(settings)
    return "saved tensors" + (f" of {least / 1e6:.3g} MB or more" if least else "")


def _recorded(legs: dict[str, list[LegResult]]) -> dict[str, Any]:
    """Return memory curves of the rank with the highest peak, and all traces."""
    first = next(iter(legs.values()))
    rank = max(range(len(first)), key=lambda i: first[i].own.peak_bytes)
    own = {name: results[rank] for name, results in legs.items()}
    ours = legs.get(Leg.WITH.value, [])
    return {
        "rank": rank,
        "step": first[rank].own.first + len(first[rank].own.steps),
        "peak_bytes": {name: one.own.steps[-1].peak_bytes for name, one in own.items()},
        "memory": {name: _milliseconds(one) for name, one in own.items()},
        "planned": [(result.profile, result.plan) for result in ours],
        "spans": [result.spans for result in ours],
    }


def _milliseconds(result: LegResult) -> list[tuple[float, int]]:
    start = result.course[0].time_ns if result.course else 0
    return [((s.time_ns - start) / 1e6, s.num_bytes) for s in result.course]


def _leg_summary(results: list[LegResult]) -> dict[str, Any]:
    own = [result.own for result in results]
    totals: dict[str, Any] = {}
    fallbacks: dict[str, int] = {}
    for tally in own:
        totals = added(totals, tally.totals)
        fallbacks = added(fallbacks, tally.fallbacks)
    return {
        "losses": list(own[0].losses),
        "step_ms": statistics.median(later(own[0].step_ms)),
        "peak_bytes": [tally.peak_bytes for tally in own],
        "last_peak_bytes": [tally.steps[-1].peak_bytes for tally in own],
        "explained": results[0].explained,
        "os_written": [tally.written._asdict() for tally in own],
        "totals": totals,
        "fallbacks": fallbacks,
    }


def _compared(without: list[LegResult], with_: list[LegResult]) -> dict[str, Any]:
    pairs = list(zip(without, with_, strict=True))
    weights = all(a.weights_checksum == b.weights_checksum for a, b in pairs)
    losses = all(a.own.loss_bits == b.own.loss_bits for a, b in pairs)
    verdict = {"losses_equal": losses, "weights_equal": weights}
    tallies = [result.own for result in without], [result.own for result in with_]
    found = compare(*tallies, on_cpu=not torch.cuda.is_available())
    return {
        "step_ratio": found.ratio,
        "why_no_ratio": found.why_not,
        "step_explained": str(found),
        "step_parts_ms": found.parts_ms,
        "step_share_explained": found.share,
        "verdict": verdict,
    }
