"""Node classification on a relational graph, full-batch or by sampled mini-batches."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hector.capture import CapturedStep
from hector.datasets.task import NodeClassification
from hector.runtime.progress import telling
from hector.sampling import FanoutOf, NeighborSampler
from hector.train.checkpoint import (
    Checkpoint,
    fitting,
    load,
    random_state,
    save,
    set_random_state,
)
from hector.train.config import (
    MESSAGE_KINDS,
    DataConfig,
    LayerKind,
    ModelConfig,
    OptimizerConfig,
    Resume,
    RunConfig,
)
from hector.train.data import load_data
from hector.train.mini_batches import MiniBatches
from hector.train.model import (
    Features,
    HostedEmbedding,
    LayerFactory,
    NodeClassifier,
    compiled_layer,
)
from hector.train.progress import Progress, kept_rows
from hector.train.ranks import Ranks
from hector.train.steps import Optimizers, Steps, accuracy

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run ended with."""

    accuracies: tuple[float, ...]
    """Test accuracy after the last epoch, one a repetition."""
    losses: tuple[float, ...]
    """Training loss of each epoch of the last repetition run here."""
    epoch_ms: float | None
    """Median time of an epoch run here (forward, backward, step), if one was."""

    @property
    def mean_accuracy(self) -> float:
        return fmean(self.accuracies)

    def __str__(self) -> str:
        time_text = (
            "" if self.epoch_ms is None else f", {self.epoch_ms:.2f} ms an epoch"
        )
        spread = " (one seed)"
        if (count := len(self.accuracies)) > 1:
            spread = f" +- {100 * pstdev(self.accuracies):.2f}"
            spread += f" (mean and deviation of {count} seeds)"
        return f"test accuracy {100 * self.mean_accuracy:.2f} %{spread}{time_text}"


class NodeClassificationTrainer:
    """Trains one classifier a seed and reports the mean test accuracy.

    Built by Hydra from `configs/gnn/*.yaml`, or by hand; `run()` does the work.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        data: DataConfig | NodeClassification,
        optimizer: OptimizerConfig,
        run: RunConfig,
        epochs: int = 50,
        batch: int | None = None,
        fanouts: Sequence[int] = (16, 16),
        fanouts_of: FanoutOf | str = FanoutOf.NODE,
        capture: bool = False,
        features: Features | HostedEmbedding | None = None,
        make_layer: LayerFactory = compiled_layer,
        ranks: int = 1,
    ) -> None:
        """Under a launcher such as torchrun all ranks build the same trainer.

        Args:
            data: which data set to read or generate, or a graph with labels.
            epochs: of each repetition. A run of one repetition can go on beyond.
            batch: labelled nodes of a step; None takes all, on the whole graph.
            fanouts: in-edges drawn for a node, hop by hop; -1 takes all.
            fanouts_of: whether they are a node's, or a node's in each relation.
            capture: run steps as CUDA graphs, mini-batches one for each of a few sizes.
            features: rows of nodes in place of learned embeddings, gathered in each
                step for the nodes that it needs; or where learned embeddings lie.
            ranks: processes for `ssdtrain train` to start; each takes a share of every
                batch's labelled nodes, and gradients are averaged.
        """
        if epochs < 1:
            raise ValueError(f"expected epochs of at least 1, got {epochs}")
        if batch is not None and batch < 1:
            raise ValueError(f"expected batch of at least 1 or none, got {batch}")
        if batch is not None and len(fanouts) < model.num_layers:
            raise ValueError(
                f"expected fanouts for {model.num_layers} layers, got {list(fanouts)}"
            )
        self.epochs, self.batch, self.fanouts = epochs, batch, tuple(fanouts)
        self.fanouts_of = FanoutOf(fanouts_of)
        self.capture, self.features = capture, features
        if run.dtype not in _DTYPES:
            raise ValueError(f"expected dtype in {sorted(_DTYPES)}, got {run.dtype!r}")
        self.model_config = model
        self.data = data
        self.optimizer_config = optimizer
        self.run_config = run
        self.make_layer = make_layer
        self.ranks = Ranks.from_environment()
        self._to_start = 0 if self.ranks.world_size > 1 or ranks == 1 else ranks
        if ranks < 1:
            raise ValueError(f"expected ranks of at least 1, got {ranks}")
        if capture and max(ranks, self.ranks.world_size) > 1:
            raise ValueError(
                "expected one rank with capture, got several: a captured step waits "
                "for no other process; set capture=false"
            )
        self._refuse_combinations()
        self.device = self.ranks.device(run.device)
        if capture and batch is None and self.device.type != "cuda":
            raise ValueError(
                f"expected a GPU to capture a full-batch step on, got {self.device}; "
                "set capture=false"
            )
        self._prepared: _Prepared | None = None
        self.losses: list[float] = []
        self.epoch_ms: list[float] = []

    def _refuse_combinations(self) -> None:
        """
        Raises:
            ValueError: settings that do not go together.
        """
        capture, layer = self.capture, LayerKind(self.model_config.layer)
        if capture and layer in MESSAGE_KINDS:
            raise ValueError(
                f"expected capture=false with layer {layer.value}, whose functions are "
                "traced in each step, got true"
            )
        if isinstance(self.features, HostedEmbedding):
            alone = self._to_start == 0 and self.ranks.world_size == 1
            plain = self.run_config.dtype == "float32"
            plain = plain and self.optimizer_config.weight_decay == 0
            if not (alone and plain) or capture:
                raise ValueError(
                    "expected one rank, capture=false, float32 and no weight decay "
                    "with embeddings in host memory, whose gradients are sparse; set "
                    "them so, or features.place=device"
                )

    def run(self) -> dict[str, Any]:
        """Train, print the result in a line and return it as plain JSON values."""
        result = self.train()
        if self.ranks.is_first:
            print(result)
        return {
            **self.settings(),
            "trainer.epochs": self.epochs,
            "device": str(self.device),
            "accuracies": list(result.accuracies),
            "mean_accuracy": result.mean_accuracy,
            "final_loss": result.losses[-1] if result.losses else None,
            "epoch_ms": result.epoch_ms,
        }

    def prepare(self) -> None:
        """Read the graph, build the first repetition's model and load the checkpoint:
        what cannot work fails here, before a file is written. `train` goes on from it.

        Raises:
            ValueError: a setting does not fit the data, the model or this machine.
        """
        self.ranks.join(self.device)
        with ExitStack() as stack:
            progress = self._open_progress(stack)
            progress.stage("reading the graph")
            task = self.task().to(self.device)
            self._make_output_directory()
            found = self._find_checkpoint()
            first = found.repetition if found else 0
            loop = None
            if first < self.run_config.num_seeds:
                loop = self._repetition(task, first, progress)
                if found is not None:
                    loop.restore(found)
            self._prepared = _Prepared(task, found, loop)

    def train(self) -> TrainingResult:
        """Train every repetition; resumes as `run.resume` says."""
        if self._prepared is None:
            self.prepare()
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise RuntimeError("prepare() left nothing to train")
        task, found, loop = prepared
        del prepared
        accuracies = list(found.accuracies) if found else []
        with ExitStack() as stack:
            progress = self._open_progress(stack)
            metrics = self._open_metrics(stack, found)
            while loop is not None:
                for row in loop.epochs(accuracies):
                    if metrics is not None:
                        print(json.dumps(row), file=metrics, flush=True)
                    progress.epoch(row)
                accuracies.append(loop.test_accuracy())
                following = loop.index + 1
                loop = None  # one model at a time
                if following < self.run_config.num_seeds:
                    loop = self._repetition(task, following, progress)
        return TrainingResult(
            accuracies=tuple(accuracies),
            losses=tuple(self.losses),
            epoch_ms=median(self.epoch_ms) if self.epoch_ms else None,
        )

    def ranks_to_start(self) -> int:
        """Processes for `ssdtrain train` to start; 0: this one is enough, or one of
        them."""
        return self._to_start

    def task(self) -> NodeClassification:
        """The graph with labels that is trained on."""
        if isinstance(self.data, NodeClassification):
            return self.data
        return load_data(self.data, self.run_config.seed)

    @property
    def checkpoint_path(self) -> Path | None:
        directory = self.run_config.output_directory
        return None if directory is None else Path(directory) / "checkpoint.pt"

    def settings(self) -> dict[str, Any]:
        """The values that decide the result: those of a checkpoint must be equal."""
        run = asdict(self.run_config)
        parts = {
            "model": asdict(self.model_config),
            "data": (
                self.data.facts()
                if isinstance(self.data, NodeClassification)
                else asdict(self.data)
            ),
            "optimizer": asdict(self.optimizer_config),
            "run": {k: run[k] for k in ("seed", "num_seeds", "dtype")},
        }
        if self.ranks.world_size > 1:
            parts["run"]["ranks"] = self.ranks.world_size
        parts["trainer"] = {}
        if self.run_config.num_seeds > 1:  # a mean is of repetitions of one length
            parts["trainer"]["epochs"] = self.epochs
        if self.batch is not None:
            parts["trainer"] |= {
                "batch": self.batch,
                "fanouts": list(self.fanouts),
                "fanouts_of": self.fanouts_of,
            }
        # JSON turns enums into their values and tuples into lists.
        flat = {f"{p}.{k}": v for p, values in parts.items() for k, v in values.items()}
        values: dict[str, Any] = json.loads(json.dumps(flat))
        return values

    def build_model(self, task: NodeClassification, seed: int) -> NodeClassifier:
        """A classifier initialised from `seed`, on this run's device and dtype."""
        torch.manual_seed(seed)
        model = NodeClassifier(
            self.model_config,
            task.graph,
            task.num_classes,
            self.make_layer,
            task.features if self.features is None else self.features,
        )
        return model.to(self.device, _DTYPES[self.run_config.dtype])

    def _repetition(
        self, task: NodeClassification, index: int, progress: Progress
    ) -> "_Repetition":
        progress.stage(f"preparing seed {self.run_config.seed + index}")
        return _Repetition(self, task, index)

    def _find_checkpoint(self) -> Checkpoint | None:
        path, resume = self.checkpoint_path, self.run_config.resume
        if resume is Resume.NEVER or path is None or not path.exists():
            if resume is Resume.MUST:
                raise ValueError(f"expected a checkpoint at {path} to resume, got none")
            return None
        return load(path, self.settings(), self.device)

    def _make_output_directory(self) -> None:
        directory = self.run_config.output_directory
        try:
            if directory is not None and self.ranks.is_first:
                Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"expected run.output_directory where files can be made, got "
                f"{directory} ({error.strerror})"
            ) from error

    def _open_metrics(
        self, stack: ExitStack, found: Checkpoint | None
    ) -> IO[str] | None:
        """The metrics file, cut back to the checkpoint that the run goes on from."""
        if self.run_config.output_directory is None or not self.ranks.is_first:
            return None
        path = Path(self.run_config.output_directory) / "metrics.jsonl"
        kept = []
        if found is not None and path.exists():
            end = (self.run_config.seed + found.repetition, found.epoch)
            kept = kept_rows(path, end)
        file = stack.enter_context(path.open("w"))
        file.writelines(kept)
        return file

    def _open_progress(self, stack: ExitStack) -> Progress:
        epochs = self.run_config.num_seeds * self.epochs
        shown = self.run_config.progress and self.ranks.is_first
        progress = Progress(epochs, shown=shown)
        stack.enter_context(telling(progress.tell))
        return stack.enter_context(progress)


class _Prepared(NamedTuple):
    """What `prepare` leaves for `train`."""

    task: NodeClassification
    found: Checkpoint | None
    loop: "_Repetition | None"
    """None: every repetition is over."""


class _Repetition:
    """One seed's training loop."""

    def __init__(
        self,
        trainer: NodeClassificationTrainer,
        task: NodeClassification,
        index: int,
    ) -> None:
        self.trainer, self.task, self.index = trainer, task, index
        self._first_epoch = 0
        seed = trainer.run_config.seed + index
        self.seed = seed
        self.model = trainer.build_model(task, seed)
        config = trainer.optimizer_config
        cuda = trainer.device.type == "cuda"
        hosted = self.model.hosted
        own = set() if hosted is None else set(hosted.parameters())
        self.optimizer: torch.optim.Optimizer | Optimizers = torch.optim.Adam(
            [p for p in self.model.parameters() if p not in own],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            capturable=trainer.capture and cuda,
            # An HGT has a hundred parameters, each of a few rows: one by one, or in
            # lists, their updates are most of a small graph's kernels.
            fused=cuda or None,
        )
        if hosted is not None:
            sparse = getattr(hosted, "sparse_optimizer")  # noqa: B009
            rows = sparse(torch.optim.SparseAdam, lr=config.learning_rate)
            self.optimizer = Optimizers(self.optimizer, rows)
        self.ranks = trainer.ranks
        parallel: torch.nn.Module = self.model
        if self.ranks.world_size > 1:
            # RGAT has parameters that its default attention does not use.
            parallel = DistributedDataParallel(self.model, find_unused_parameters=True)
        self._steps = Steps(parallel, self.optimizer, task)
        self._captured: CapturedStep | None = None
        self._batches: MiniBatches | None = None
        if trainer.batch is not None:
            self._batches = MiniBatches(
                self._steps,
                NeighborSampler(task.graph, trainer.fanouts, trainer.fanouts_of),
                batch=trainer.batch,
                ranks=self.ranks,
                gathered=self.model.gathered,
                capture=trainer.capture,
            )
        elif trainer.capture:
            self._captured = CapturedStep(self._steps.full_batch)

    def restore(self, start: Checkpoint) -> None:
        """Go on from a checkpoint; CheckpointMismatchError if it is of another one."""
        with fitting(self.trainer.checkpoint_path or Path()):
            self.model.load_state_dict(start.model)
            self.optimizer.load_state_dict(start.optimizer)
            set_random_state(start, self.trainer.device)
        self._first_epoch = start.epoch

    def epochs(self, accuracies: list[float]) -> Iterator[dict[str, Any]]:
        """Train, yielding a metrics row an epoch.

        accuracies: of the repetitions before, for checkpoints.
        """
        trainer = self.trainer
        trainer.losses.clear()
        every = trainer.run_config.checkpoint_epochs
        for epoch in range(self._first_epoch, trainer.epochs):
            began = time.perf_counter()
            self.ranks.seed(self.seed, epoch, own=False)
            loss, correct = self._step(epoch)
            # Reading the loss waits for the device: the time is the epoch's.
            value = float(loss)
            elapsed_ms = 1e3 * (time.perf_counter() - began)
            trainer.losses.append(value)
            trainer.epoch_ms.append(elapsed_ms)
            ends = epoch + 1 == trainer.epochs
            if every and ((epoch + 1) % every == 0 or ends) and self.ranks.is_first:
                self._save(epoch + 1, accuracies)
            yield {
                "seed": self.seed,
                "epoch": epoch,
                "loss": value,
                "train_accuracy": float(correct),
                "epoch_ms": round(elapsed_ms, 3),
            }

    def test_accuracy(self) -> float:
        self.model.eval()
        with torch.no_grad():
            logits = self.model(self.task.graph)[self.task.test_nodes]
        return float(accuracy(logits, self.task.test_labels))

    def _step(self, epoch: int) -> tuple[Tensor, Tensor]:
        """One epoch: its mean loss and accuracy."""
        self.model.train()
        if self._batches is not None:
            return self._batches.epoch(lambda: self._seed_own(epoch))
        if self._captured is not None:
            loss, correct = self._captured()
            return loss.clone(), correct.clone()
        if self.ranks.world_size == 1:
            return self._steps.full_batch()
        self._seed_own(epoch)
        nodes, labels = self.task.train_nodes, self.task.train_labels
        mine = self.ranks.share(nodes)
        weight = self.ranks.world_size * mine.numel() / nodes.numel()
        loss, correct = self._steps.some(mine, self.ranks.share(labels), weight)
        return self.ranks.mean(loss), self.ranks.mean(correct)

    def _seed_own(self, epoch: int) -> None:
        self.ranks.seed(self.seed, epoch, own=True)

    def _save(self, epoch: int, accuracies: list[float]) -> None:
        path = self.trainer.checkpoint_path
        if path is None:
            raise ValueError("expected output_directory to write checkpoints, got none")
        cpu, cuda = random_state(self.trainer.device)
        save(
            Checkpoint(
                settings=self.trainer.settings(),
                repetition=self.index,
                epoch=epoch,
                model=self.model.state_dict(),
                optimizer=self.optimizer.state_dict(),
                cpu_rng=cpu,
                cuda_rng=cuda,
                accuracies=accuracies,
            ),
            path,
        )
