"""Models that nobody tuned a plan for, beside the checkpointing that they come with.

Stock transformers architectures and a diffusion transformer, random weights, bf16,
fused AdamW. Each cell has two copies of a model in one process, one under the named
base and one under ssdtrain, and times them in turns: blocks of steps, the ratio of each
pair of blocks, their mean and the upper end of its 95 % interval. `regions` runs all
layers again, as checkpointing does. `=gc`, `=second` and `=selective` have the measured
peak of transformers' non-reentrant checkpointing, of every second layer and of torch's
selective checkpointing (attention and every second product stay) as their budget.
`fit` and `overhead` (max_overhead=0.02) are compared with plain steps. The peak is what
a step needs above the level before it. A rerun goes on.

    python -m recipes.bench models.unseen --only 't5/*' 'vit/regions'
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipes.bench.harness.cli import Bench
from recipes.bench.models.real_row import selective_contexts

BLOCKS = 6
STEPS = 4
"""Of a block, behind one that is not timed."""
T_95 = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860}
"""Student's t, one-sided, by degrees of freedom + 1 less one."""
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """An architecture at the size that is measured.

    kind: of its classes in transformers. inputs: `tokens`, `images`, `sound`,
    `pairs` (images with texts) or `latents`.
    """

    kind: str
    head: str
    config: dict[str, Any]
    inputs: str = "tokens"
    batch: int = 8
    length: int = 1024


def _decoder(hidden: int, inside: int, layers: int, heads: int, kv: int) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    }


def _encoder(hidden: int, layers: int, heads: int) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


CASES = {
    "t5": Case(
        *("T5", "ForConditionalGeneration"),
        {
            **{"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16},
            **{"num_layers": 16, "num_decoder_layers": 16, "vocab_size": 32128},
            **{"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
        },
        length=512,
    ),
    "vit": Case(
        *("ViT", "ForImageClassification"),
        {**_encoder(1408, 40, 16), "image_size": 224, "num_labels": 1000},
        *("images", 48),
    ),
    "whisper": Case(
        *("Whisper", "ForConditionalGeneration"),
        {
            **{"d_model": 1280, "encoder_layers": 24, "decoder_layers": 24},
            **{"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
            **{"encoder_attention_heads": 20, "decoder_attention_heads": 20},
            **{"vocab_size": 51866, "decoder_start_token_id": 0},
        },
        *("sound", 4, 256),
    ),
    "bert": Case(
        "Bert",
        "ForMaskedLM",
        {**_encoder(1536, 24, 24), "vocab_size": 30522},
        length=512,
    ),
    "clip": Case(
        *("CLIP", "Model"),
        {
            "text_config": _encoder(1024, 24, 16),
            "vision_config": {**_encoder(1280, 32, 16), "patch_size": 14},
            "projection_dim": 1024,
        },
        *("pairs", 32, 77),
    ),
    "olmoe": Case(
        *("Olmoe", "ForCausalLM"),
        {
            **_decoder(2048, 1024, 10, 16, 16),
            **{"num_experts": 16, "num_experts_per_tok": 4},
        },
        batch=4,
    ),
    "gemma2": Case(
        *("Gemma2", "ForCausalLM"),
        {**_decoder(2304, 9216, 14, 8, 4), "head_dim": 256},
        batch=4,
    ),
    "neox": Case(
        *("GPTNeoX", "ForCausalLM"),
        {**_encoder(2048, 20, 16), "vocab_size": 32000},
        batch=4,
    ),
    "phi3": Case(*("Phi3", "ForCausalLM"), _decoder(3072, 8192, 12, 32, 32), batch=4),
    "dit": Case(
        "DiT", "", {"hidden": 2048, "layers": 28, "heads": 16}, "latents", 4, 4096
    ),
    # Not looked at while plans were tuned.
    "bart": Case(
        *("Bart", "ForConditionalGeneration"),
        {
            **{"d_model": 1024, "encoder_layers": 16, "decoder_layers": 16},
            **{"encoder_attention_heads": 16, "decoder_attention_heads": 16},
            "vocab_size": 50265,
        },
        length=512,
    ),
    "dinov2": Case(
        *("Dinov2", "ForImageClassification"),
        {
            **_encoder(1024, 24, 16),
            "image_size": 224,
            "patch_size": 14,
            "num_labels": 100,
        },
        *("images", 64),
    ),
    "mamba": Case(
        *("Mamba", "ForCausalLM"),
        {**{"hidden_size": 1024, "num_hidden_layers": 12, "vocab_size": 32000}},
        *("tokens", 4, 256),
    ),
    "llava": Case(
        *("Llava", "ForConditionalGeneration"),
        {
            "vision_config": {
                **_encoder(1024, 12, 16),
                **{"model_type": "clip_vision_model", "patch_size": 14},
            },
            "text_config": {**_decoder(2048, 8192, 14, 16, 8), "model_type": "llama"},
            "image_token_index": 31999,
        },
        *("images and tokens", 4, 1024),
    ),
    "mixtral": Case(
        *("Mixtral", "ForCausalLM"),
        {**_decoder(2048, 3584, 8, 16, 8), "num_local_experts": 8},
        batch=4,
    ),
    "wav2vec2": Case(
        *("Wav2Vec2", "ForSequenceClassification"),
        {**_encoder(1024, 24, 16), "num_labels": 10},
        *("waves", 8, 160000),
    ),
}
WAYS = ("regions", "=gc", "=second", "=selective", "fit", "overhead")
BASES = {"regions": "gc", "=gc": "gc", "=second": "second", "=selective": "selective"}
TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "hidden"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "num_heads", "heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "layers"), 3),
    "d_kv": 16,
}
"""Instead of the real sizes, for a run without a GPU."""


def tiny(settings: dict[str, Any]) -> dict[str, Any]:
    """The same architecture, small."""
    return {
        name: tiny(value) if isinstance(value, dict) else TINY.get(name, value)
        for name, value in settings.items()
    }


class DiffusionBlock(nn.Module):
    """A transformer layer whose norms are shifted and scaled by the time step."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)
        )
        self.shifts = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: (batch, tokens, width). time: (batch, width)."""
        shifts = self.shifts(nn.functional.silu(time))[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + shifts[1]) + shifts[0]
        q, k, v = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in self.qkv(y).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + shifts[2] * self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x) * (1 + shifts[4]) + shifts[3]
        y = self.down(nn.functional.gelu(self.up(y), approximate="tanh"))
        return x + shifts[5] * y


class DiffusionTransformer(nn.Module):
    """Weights in float32, computed under autocast, as diffusion trainers do."""

    def __init__(self, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DiffusionBlock(hidden, heads) for _ in range(layers)
        )
        self.checkpoint: Callable[..., Any] | None = None
        self.which: set[int] = set()

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        """The loss."""
        x = latents
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            for number, layer in enumerate(self.layers):
                if self.checkpoint is not None and number in self.which:
                    x = self.checkpoint(layer, x, time)
                else:
                    x = layer(x, time)
        return x.float().square().mean()


def build(case: Case, device: torch.device, *, is_tiny: bool) -> nn.Module:
    """The model, in training mode, with random weights of one seed."""
    settings = tiny(case.config) if is_tiny else case.config
    torch.manual_seed(0)
    if case.kind == "DiT":
        with device:
            return DiffusionTransformer(**settings).train()
    import transformers

    settings = dict(settings)
    if case.inputs in ("tokens", "sound"):
        settings |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
        settings["pad_token_id"] = settings.get("decoder_start_token_id")
    if case.kind == "Bart":
        settings |= {"pad_token_id": 1, "decoder_start_token_id": 2}
    config = getattr(transformers, f"{case.kind}Config")(**settings)
    kind = getattr(transformers, f"{case.kind}{case.head}")
    with device:
        model: nn.Module = kind._from_config(config, dtype=torch.bfloat16)
    return model.train()


def batch_of(case: Case, model: Any, device: torch.device, *, is_tiny: bool) -> Batch:
    """Arguments of a forward; the same ones at every step."""
    draw = torch.Generator(device).manual_seed(1)
    batch = 2 if is_tiny else case.batch
    length = min(case.length, 32) if is_tiny else case.length

    def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).to(dtype)

    def tokens(most: int, *shape: int) -> Tensor:
        return torch.randint(3, most, shape, generator=draw, device=device)

    if case.inputs == "latents":
        width = model.layers[0].up.in_features
        return {
            "latents": noise(batch, length, width, dtype=torch.float32),
            "time": noise(batch, width, dtype=torch.float32),
        }
    config = model.config
    if case.inputs == "images":
        side = config.image_size
        labels = tokens(config.num_labels, batch)
        return {"pixel_values": noise(batch, 3, side, side), "labels": labels}
    if case.inputs == "waves":
        waves = noise(batch, 16000 if is_tiny else length)
        return {"input_values": waves, "labels": tokens(config.num_labels, batch)}
    if case.inputs == "pairs":
        side = config.vision_config.image_size
        ids = tokens(config.text_config.vocab_size, batch, min(length, 77))
        return {"pixel_values": noise(batch, 3, side, side), "input_ids": ids}
    if case.inputs == "images and tokens":
        vision = config.vision_config
        num = (vision.image_size // vision.patch_size) ** 2
        ids = tokens(31000, batch, length + num)
        ids[:, :num] = config.image_token_id
        side = vision.image_size
        return {
            "pixel_values": noise(batch, 3, side, side),
            **{"input_ids": ids, "labels": ids},
        }
    ids = tokens(config.vocab_size, batch, length)
    if case.inputs == "sound":
        return {
            "input_features": noise(batch, config.num_mel_bins, 3000),
            "labels": ids,
        }
    return {"input_ids": ids, "labels": ids}


def set_base(model: Any, base: str) -> None:
    """Let the model's layers be checkpointed: `plain`, `gc`, `second`, `selective`."""
    from torch.utils.checkpoint import checkpoint

    options: dict[str, Any] = {"use_reentrant": False}
    if base == "selective":
        options["context_fn"] = partial(selective_contexts, first=False)
    if isinstance(model, DiffusionTransformer):
        model.checkpoint = None if base == "plain" else partial(checkpoint, **options)
        every = 2 if base == "second" else 1
        model.which = set(range(0, len(model.layers), every))
        return
    if base == "plain":
        model.gradient_checkpointing_disable()
        return
    model.gradient_checkpointing_enable(options)
    if base == "second":
        layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        layers = [
            m for m in layers if type(m).__mro__[1].__name__.startswith("Gradient")
        ]
        for layer in layers[1::2]:
            layer.gradient_checkpointing = False


class Side:
    """One copy of the model, with its optimizer."""

    def __init__(self, case: Case, device: torch.device, *, is_tiny: bool) -> None:
        self.device = device
        self.model = build(case, device, is_tiny=is_tiny)
        self.batch = batch_of(case, self.model, device, is_tiny=is_tiny)
        if case.inputs == "pairs":
            self.batch["return_loss"] = True  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-5, fused=device.type == "cuda"
        )
        self.host_ms = 0.0
        """Of the last forward."""

    def step(self) -> tuple[float, int]:
        """ms and peak bytes above the level before."""
        is_cuda = self.device.type == "cuda"
        level = 0
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            level = torch.cuda.memory_allocated()
        start = time.perf_counter()
        found = self.model(**self.batch)
        self.host_ms = (time.perf_counter() - start) * 1e3
        loss = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - level if is_cuda else 0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, peak


def settings_of(way: str, base_bytes: int, device: torch.device) -> dict[str, Any]:
    """What ssdtrain is told.

    base_bytes: measured peak of the base.
    """
    if way == "regions":
        return {"plan": "keep-all", "recompute": "regions"}
    if way == "fit":
        return {"device_memory": "fit"}
    if way == "overhead":
        return {"max_overhead": 0.02}
    return {"memory_budget": base_bytes}


def warm_up(side: Side, session: Any, limit_s: float) -> dict[str, Any]:
    """Steps until the session says that it is settled, or the time is over."""
    times, start = [], time.perf_counter()
    while not (session.is_settled and len(times) >= 3):
        times.append(round(side.step()[0], 1))
        if time.perf_counter() - start > limit_s:
            break
    return {
        "steps_before": len(times),
        "seconds_before": round(time.perf_counter() - start, 1),
        "settled": session.is_settled,
        "first_steps_ms": times[:40],
    }


def ratio_of(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Mean of ours over the base, and the upper end of its 95 % interval."""
    ratios = [ours / base for base, ours in pairs]
    mean, width = statistics.mean(ratios), 0.0
    if len(ratios) > 1:
        t = T_95.get(len(ratios) - 1, 2.0)
        width = t * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {"ratio": round(mean, 4), "upper": round(mean + width, 4)}


def block(side: Side) -> tuple[float, int, float]:
    """Median ms, largest peak and median ms of the host's forward of some steps."""
    side.step()
    times, peaks, hosts = [], [], []
    for _ in range(STEPS):
        ms, peak = side.step()
        times.append(ms)
        peaks.append(peak)
        hosts.append(side.host_ms)
    return statistics.median(times), max(peaks), statistics.median(hosts)


def measure(case: Case, way: str, *, is_tiny: bool, warm_s: float) -> dict[str, Any]:
    """One cell."""
    import ssdtrain

    device = torch.device("cpu" if is_tiny else "cuda")
    base = BASES.get(way, "plain")
    sides = [Side(case, device, is_tiny=is_tiny) for _ in range(2)]
    base_side, our_side = sides
    set_base(base_side.model, base)
    base_bytes = max(base_side.step()[1] for _ in range(3)) or 1 << 20
    settings = settings_of(way, base_bytes, device)
    least = {"min_bytes": 0} if is_tiny else {}
    with ssdtrain.offload(our_side.model, **settings, **least) as session:
        found = warm_up(our_side, session, warm_s)
        timed = [(block(base_side), block(our_side)) for _ in range(BLOCKS)]
        found |= {"settled_behind": session.is_settled}
    pairs = [(base[0], ours[0]) for base, ours in timed]
    base_peak, our_peak = (max(t[n][1] for t in timed) for n in range(2))
    found |= ratio_of(pairs)
    found |= {
        "base": base,
        "base_ms": round(statistics.median(p[0] for p in pairs), 1),
        "ms": round(statistics.median(p[1] for p in pairs), 1),
        "base_gb": round(base_peak / 1e9, 3),
        "gb": round(our_peak / 1e9, 3),
        "base_host_ms": round(statistics.median(t[0][2] for t in timed), 1),
        "host_ms": round(statistics.median(t[1][2] for t in timed), 1),
    }
    return found


def main(bench: Bench, *, warm_s: float = 22, cpu: bool = False) -> None:
    """Measure what is asked for.

    Args:
        warm_s: most of a warm-up
        cpu: tiny models, to try it
    """
    cells = bench.cells({"cpu": cpu})
    cell = partial(measure, is_tiny=cpu, warm_s=warm_s)
    for way, case in itertools.product(WAYS, CASES):
        cells.run(f"{case}/{way}", cell, CASES[case], way, limit_s=240)
