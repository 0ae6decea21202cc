"""`project`: one training set-up in, what it asks of memory, links and SSDs out.

[Note: the forward time]
Chapter 5.3.6 takes a layer as a small pipeline: max(sum over its operators of
max(compute, memory), ZeRO communication). A case brings either the throughput of
its matrix products, and then tensor-parallel communication and the pipeline bubble
are added; or a throughput measured end to end, which contains them already.
"""

from dataclasses import dataclass
from enum import Enum

from ssdtrain.errors import ConfigError
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.bubble import bubble_over_ideal, layers_in_flight
from ssdtrain.tools.project.layer import Split, operators, reduced_bytes, saved_bytes
from ssdtrain.tools.project.tables import GB, TERA, GpuSheet, TransformerShape


class Sharding(str, Enum):
    """How the training state is divided over data-parallel ranks."""

    NONE = "none"
    """Every rank holds all of it (divided by tensor and pipeline parallelism)."""
    ZERO3 = "zero3"
    """Parameters, gradients and optimizer state are divided over all ranks; each
    layer's weights are gathered before its forward."""


class Throughput(str, Enum):
    """What `Case.tflops` was measured on."""

    KERNEL = "kernel"
    """Matrix products alone: communication and bubbles come on top."""
    END_TO_END = "end to end"
    """Whole steps: communication and bubbles are inside."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster."""

    name: str
    model: TransformerShape
    gpu: GpuSheet
    gpus: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Model chunks a GPU (interleaved pipeline)."""
    sequence_parallel: bool = False
    sharding: Sharding = Sharding.NONE
    batch: int
    """Sequences a step, over all GPUs."""
    micro_batch: int
    tflops: float | None = None
    """Reached TFLOP/s a GPU; None: peak times the assumed efficiency."""
    throughput: Throughput = Throughput.KERNEL

    def __post_init__(self) -> None:
        replica = self.tensor * self.pipeline
        if min(self.gpus, self.tensor, self.pipeline, self.chunks) < 1:
            raise ConfigError(
                f"{self.name}: gpus, tensor, pipeline and chunks expect 1 or more"
            )
        if self.gpus % replica:
            raise ConfigError(
                f"{self.name}: {self.gpus} GPUs are no multiple of tensor x pipeline "
                f"= {self.tensor} x {self.pipeline}"
            )
        if self.batch < 1 or self.micro_batch < 1:
            raise ConfigError(
                f"{self.name}: batch and micro_batch expect 1 or more, got "
                f"{self.batch} and {self.micro_batch}"
            )
        if self.micro_batches < 1:
            raise ConfigError(
                f"{self.name}: {self.batch} sequences over {self.data} data-parallel "
                f"ranks are less than one micro-batch of {self.micro_batch}"
            )
        if self.tflops is not None and self.tflops <= 0:
            raise ConfigError(
                f"{self.name}: tflops expects more than 0, got {self.tflops}"
            )

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def micro_batches(self) -> float:
        """Micro-batches a step on each data-parallel rank (may be a fraction)."""
        return self.batch / self.data / self.micro_batch

    @property
    def layers_per_gpu(self) -> float:
        """Layers of one pipeline stage."""
        return self.model.layers / self.pipeline

    def split(self, micro_batch: float | None = None) -> Split:
        """Return how one layer of one micro-batch is divided."""
        return Split(
            micro_batch=self.micro_batch if micro_batch is None else micro_batch,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
        )


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What one case asks for, per GPU. Bytes, seconds, GB/s of 1e9."""

    case: Case
    layer_seconds: float
    """Forward of one layer for one micro-batch."""
    forward_seconds: float
    """All micro-batches of a step, bubble included."""
    step_seconds: float
    activation_bytes: float
    """Saved in one step, layers only (the embedding and the head are left out)."""
    write_gb_per_s: float
    """Needed to write them within the write window of the step."""
    state_bytes: float
    """Weights, gradients and optimizer state."""
    largest_micro_batch: int
    """With `resident_layers` layers of activations in GPU memory, all else away."""
    largest_micro_batch_power_of_two: int
    """The same, rounded down to a power of two; 0 if not one sequence fits."""
    largest_in_flight_bytes: float
    """Activations that are away at the fullest moment, at the largest micro-batch."""
    power_of_two_in_flight_bytes: float
    """The same at the power of two."""


def project(case: Case, assume: Assumptions) -> Projection:
    """Apply the model to one case."""
    layer = layer_seconds(case, assume)
    forward = layer * case.layers_per_gpu * case.micro_batches
    if case.throughput is Throughput.KERNEL:
        share = bubble_over_ideal(case.pipeline, case.micro_batches, case.chunks)
        forward *= 1 + share
    step = assume.step_per_forward * forward
    layer_bytes = saved_bytes(case.model, case.split(), assume.dropout_mask_bytes)
    written = layer_bytes * case.layers_per_gpu * case.micro_batches
    state = state_bytes(case, assume)
    largest = largest_micro_batch(case, assume)
    rounded = 1 << (largest.bit_length() - 1) if largest else 0
    return Projection(
        case=case,
        layer_seconds=layer,
        forward_seconds=forward,
        step_seconds=step,
        activation_bytes=written,
        write_gb_per_s=written / (assume.write_window * step) / GB,
        state_bytes=state,
        largest_micro_batch=largest,
        largest_micro_batch_power_of_two=rounded,
        largest_in_flight_bytes=in_flight_bytes(case, assume, largest),
        power_of_two_in_flight_bytes=in_flight_bytes(case, assume, rounded),
    )


def layer_seconds(case: Case, assume: Assumptions) -> float:
    """Forward time of one layer for one micro-batch. See [Note: the forward time]."""
    gpu = case.gpu
    reached = case.tflops or assume.matmul_efficiency * gpu.tflops
    bandwidth = assume.memory_efficiency * gpu.spec.memory_gb_per_s * GB
    own = sum(
        max(operator.flops / (reached * TERA), operator.num_bytes / bandwidth)
        for operator in operators(case.model, case.split())
    )
    if case.throughput is Throughput.KERNEL and case.tensor > 1:
        sent = reduced_bytes(case.model, case.split())
        own += sent / (gpu.peer_gb_per_s * GB)
    return max(own, gather_seconds(case, assume))


def gather_seconds(case: Case, assume: Assumptions) -> float:
    """ZeRO-3's all-gather of one layer's fp16 weights; 0 without ZeRO-3."""
    if case.sharding is not Sharding.ZERO3:
        return 0.0
    share = (case.data - 1) / case.data
    num_bytes = 2 * case.model.layer_parameters / case.tensor * share
    return num_bytes / (assume.network_gb_per_s * GB)


def state_bytes(case: Case, assume: Assumptions) -> float:
    """Training state a GPU holds all the time."""
    whole = assume.state_bytes * case.model.parameters
    if case.sharding is not Sharding.ZERO3:
        return whole / (case.tensor * case.pipeline)
    weights = 2 * case.model.layer_parameters / case.tensor
    return whole / case.gpus + assume.gathered_layers * weights


def largest_micro_batch(case: Case, assume: Assumptions) -> int:
    """Most sequences whose `resident_layers` layers fit next to the state; 0 if
    none."""
    room = case.gpu.memory_gb * GB - state_bytes(case, assume)
    one = saved_bytes(case.model, case.split(1), assume.dropout_mask_bytes)
    return max(0, int(room / (assume.resident_layers * one)))


def in_flight_bytes(case: Case, assume: Assumptions, micro_batch: int) -> float:
    """Activations of the first pipeline stage when it holds most of them."""
    one = saved_bytes(case.model, case.split(micro_batch), assume.dropout_mask_bytes)
    return one * layers_in_flight(case.model.layers, case.pipeline, case.chunks)
