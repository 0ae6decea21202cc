"""What a training run can be told, as frozen dataclasses, checked at construction. The
Hydra groups in `configs/` fill these; `schema` registers them."""

from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ssdtrain.config import OffloadConfig, PlanChoice
from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Unfit, decode
from ssdtrain.plan.plan import read_plan
from ssdtrain.quantities import did_you_mean, fraction, parse_fields, places, size
from ssdtrain.train.mcore.parallel import Parallel

Group = TypeVar("Group")


class Family(str, Enum):
    """The models of the evaluation (chapter 5.4)."""

    GPT = "gpt"
    """Decoder only, next-token prediction."""
    BERT = "bert"
    """Encoder only, masked tokens."""
    T5 = "t5"
    """Encoder and decoder, span corruption."""


class EngineKind(str, Enum):
    """Who runs the training step."""

    PLAIN = "plain"
    """One process, a plain PyTorch loop."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed: a pipeline of stages, or ZeRO."""
    MEGATRON = "megatron"
    """Megatron-Core: tensor, pipeline and data parallel, its own model classes."""


class Precision(str, Enum):
    """Number format of parameters and of the forward pass."""

    FP32 = "fp32"
    BF16 = "bf16"
    """Parameters and compute in bfloat16."""
    BF16_AUTOCAST = "bf16-autocast"
    """fp32 parameters, bfloat16 matrix products."""
    FP16 = "fp16"
    """Half precision with loss scaling."""


class Checkpointing(str, Enum):
    """Which activations the model recomputes by itself."""

    NONE = "none"
    REENTRANT = "reentrant"
    NON_REENTRANT = "non-reentrant"


class Numa(str, Enum):
    """Whether ranks run on the NUMA nodes of their GPUs."""

    AUTO = "auto"
    """Where the machine has several, and nobody has bound the rank already."""
    NEVER = "never"


class OptimizerKind(str, Enum):
    """Optimizers of the reference trainers."""

    ADAMW = "adamw"
    SGD = "sgd"
    """Without momentum, as the evaluation of chapter 5.4 uses it."""


def member_of(name: str, enum: type[Enum], value: Any) -> Any:
    """Return the member of `enum` for `value`; ConfigError lists the choices."""
    try:
        return enum(value)
    except ValueError:
        known = [member.value for member in enum]
        raise ConfigError(
            f"{name} expects {', '.join(map(repr, known))}, got {value!r}"
            f"{did_you_mean(value, known)}"
        ) from None


def choose_all(settings: object, group: str, **enums: type[Enum]) -> None:
    """Replace fields of a frozen dataclass by the members that they name."""
    for name, enum in enums.items():
        value = member_of(f"{group}.{name}", enum, getattr(settings, name))
        object.__setattr__(settings, name, value)


def at_least(name: str, value: float | None, least: float) -> None:
    """Raise ConfigError unless `value` is None or at least `least`."""
    if value is not None and not value >= least:
        raise ConfigError(f"{name} expects a number >= {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A transformer built from a `transformers` configuration, with random weights."""

    family: Family = Family.GPT
    """gpt, bert or t5."""
    hidden_size: int
    """Width of the residual stream; divisible by `num_heads`."""
    num_layers: int
    """Transformer blocks in all."""
    num_heads: int
    """Attention heads."""
    sequence_length: int
    """Tokens in one sequence."""
    vocab_size: int | None = None
    """Rows of the embedding; None: what the tokens need, rounded up to 128."""
    dropout: float = fraction(0.1)
    """Probability of every dropout in the model."""
    checkpointing: Checkpointing = Checkpointing.NONE
    """none, reentrant or non-reentrant: torch's activation checkpointing by block."""

    def __post_init__(self) -> None:
        parse_fields(self, "model.")
        choose_all(self, "model", family=Family, checkpointing=Checkpointing)
        for name in ("hidden_size", "num_layers", "num_heads", "vocab_size"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.sequence_length", self.sequence_length, 2)
        if self.family is Family.T5:
            at_least("model.num_layers (t5: half are decoders)", self.num_layers, 2)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.hidden_size must be divisible by model.num_heads, got "
                f"{self.hidden_size} and {self.num_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Who runs the step, on how many ranks."""

    kind: EngineKind = EngineKind.PLAIN
    """plain, deepspeed or megatron."""
    num_ranks: int | None = None
    """Processes that `ssdtrain train` starts on this node when no launcher did; None:
    one per GPU, two without a GPU."""
    num_stages: int | None = None
    """Pipeline stages; None: 2 if the ranks divide by it, otherwise 1. 0: no
    pipeline, data parallel with `zero_stage`."""
    zero_stage: int = 0
    """ZeRO stage 0 to 3 (2 and 3 need num_stages=0)."""
    config: dict[str, Any] | None = None
    """More DeepSpeed configuration, merged over what the other settings imply."""

    def __post_init__(self) -> None:
        choose_all(self, "engine", kind=EngineKind)
        at_least("engine.num_ranks", self.num_ranks, 1)
        at_least("engine.num_stages", self.num_stages, 0)
        if self.kind is EngineKind.PLAIN and (self.num_ranks or 1) > 1:
            raise ConfigError(
                f"engine.num_ranks={self.num_ranks} needs an engine that runs several "
                "ranks; set engine=deepspeed or engine=megatron, or leave it out."
            )
        if self.zero_stage not in (0, 1, 2, 3):
            told = f"engine.zero_stage expects 0 to 3, got {self.zero_stage}"
            raise ConfigError(told)
        if self.zero_stage > 1 and self.num_stages != 0:
            raise ConfigError(
                f"engine.zero_stage={self.zero_stage} shards gradients, which "
                "DeepSpeed's pipeline cannot; set engine.num_stages=0 (no pipeline)."
            )


class DataSource(str, Enum):
    """Where the text comes from when `data.files` names none."""

    STDLIB = "stdlib"
    """The sources of Python's standard library."""
    FILES = "files"
    """Nowhere: `data.files` has to name it."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which text is read, and where its token file is kept."""

    source: DataSource = DataSource.STDLIB
    """stdlib or files: what is read when `files` is empty; `files` fails then."""
    files: tuple[str, ...] = places(())
    """Files, directories or glob patterns, in place of the standard library."""
    field: str = "text"
    """The key that holds the text in JSON-lines files (*.jsonl)."""
    tokenizer: str | None = None
    """A `tokenizer.json` file of the `tokenizers` library; None: bytes."""
    max_bytes: int | None = size(None)
    """Stop reading after this many bytes of text; None: read everything."""
    cache_directory: str = "~/.cache/ssdtrain"
    """Where token files are kept between runs."""

    def __post_init__(self) -> None:
        parse_fields(self, "data.")
        files = (self.files,) if isinstance(self.files, str) else self.files
        object.__setattr__(self, "files", files)
        choose_all(self, "data", source=DataSource)
        if self.source is DataSource.FILES and not files:
            raise ConfigError(
                "data=text expects the files to train on, got none; set "
                "data.files=[book.txt], or data=stdlib."
            )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The loop: how long, how large, which optimizer, what is written."""

    steps: int = 8
    """Optimizer steps."""
    micro_batch_size: int = 4
    """Sequences in one micro-batch."""
    num_micro_batches: int = 4
    """Micro-batches per optimizer step and data-parallel rank."""
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    """adamw or sgd."""
    learning_rate: float = 3e-4
    """The highest learning rate."""
    warmup_steps: int = 2
    """Steps of linear warm-up; then cosine decay to `min_learning_rate_ratio`."""
    min_learning_rate_ratio: float = fraction(0.1)
    """The last learning rate as a fraction of the highest."""
    weight_decay: float = 0.01
    """Decoupled weight decay (adamw)."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    precision: Precision = Precision.FP32
    """fp32, bf16, bf16-autocast or fp16."""
    seed: int = 0
    """Seeds weights, dropout and the order of the data."""
    deterministic: bool = True
    """torch's deterministic algorithms: without them two equal runs differ by
    themselves on a GPU, with or without ssdtrain."""
    compare: bool = True
    """Run twice, without ssdtrain first, and check that the losses are equal."""
    checkpoint_every: int = 0
    """Save a checkpoint every this many steps, and after the last; 0: never."""
    resume: str | None = None
    """A `checkpoints` directory to start from, in a run of its own; `resume=RUN`
    goes on with a run instead."""
    tensorboard: bool = True
    """Write TensorBoard events next to the JSON lines."""

    def __post_init__(self) -> None:
        parse_fields(self, "train.")
        choose_all(self, "train", optimizer=OptimizerKind, precision=Precision)
        for name in ("steps", "micro_batch_size", "num_micro_batches"):
            at_least(f"train.{name}", getattr(self, name), 1)
        if self.resume is not None and not Path(self.resume).expanduser().is_dir():
            raise ConfigError(
                "train.resume expects the checkpoints directory of a run, got "
                f"{self.resume!r}; resume=latest goes on with the newest run."
            )
        for name in (
            *("learning_rate", "weight_decay", "warmup_steps"),
            *("checkpoint_every", "gradient_clipping", "seed"),
        ):
            at_least(f"train.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run: everything above, and where its files go."""

    run_directory: str
    """Metrics, checkpoints, reports and (by default) the activations of this run."""
    model: ModelSettings
    engine: EngineSettings
    data: DataSettings
    train: TrainSettings
    parallel: Parallel
    offload: dict[str, Any]
    """Settings of `ssdtrain.offload`; empty: ssdtrain stays out (`offload=none`)."""
    progress: bool = True
    """Show how far the run is."""

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "RunSettings":
        """Build from the plain values of a composed config. Raises ConfigError: a value
        can never work; the text names the field."""
        offload = dict(values.get("offload") or {})
        if offload:
            # Here, and not when it is attached: that is after the run without it.
            plan = OffloadConfig.from_mapping(offload).plan
            if plan not in [choice.value for choice in PlanChoice]:
                read_plan(plan)
        return cls(
            run_directory=str(values.get("run_directory") or "runs/latest"),
            model=_group(ModelSettings, "model", values),
            engine=_group(EngineSettings, "engine", values),
            data=_group(DataSettings, "data", values),
            train=_group(TrainSettings, "train", values),
            parallel=_group(Parallel, "parallel", {"parallel": {}, **values}),
            offload=offload,
            progress=bool(values.get("progress", True)),
        )


def _group(kind: type[Group], name: str, values: dict[str, Any]) -> Group:
    """Return a group's settings, each of its declared type. Raises ConfigError: the
    group is missing, or a value is unknown or of another type."""
    given = values.get(name)
    if not isinstance(given, dict):
        raise ConfigError(f"{name} expects a group of settings, got {given!r}")
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown setting {name}.{key}; known: {sorted(known)}")
    try:
        made = kind(**given)
        decode(kind, vars(made), name)
    except Unfit as error:
        told = f"{error.where} expects {error.expected}, got {error.got!r}"
        raise ConfigError(told) from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{name} has a value of another type ({error})") from error
    return made
