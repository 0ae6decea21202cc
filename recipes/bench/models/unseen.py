"""Models that nobody tuned a plan for, beside the checkpointing that they come with.

Stock transformers architectures and a diffusion transformer, random weights, bf16,
fused AdamW. Each cell has two copies of a model in one process, one under the named
base and one under ssdtrain, and times them in turns: blocks of steps, the ratio of each
pair of blocks, their mean and the upper end of its 95 % interval. Where a shared host
disturbs them there are more blocks, until that end is `CLOSE` to the mean.

`regions` runs all layers again, as checkpointing does. `=gc`, `=second` and
`=selective` have the measured peak of transformers' non-reentrant checkpointing, of
every second layer and of torch's selective checkpointing (attention and every second
product stay) as their budget. `fit` and `overhead` (max_overhead=0.02) are compared
with plain steps. The peak is what a step needs above the level before it. A rerun goes
on.

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
from recipes.bench.harness.timing import Peak, wait
from recipes.bench.models.real_row import selective_contexts
from recipes.bench.models.stock import Stock, encoder, shrunk
from recipes.bench.models.stock import checkpoint as enable

BLOCKS, MOST_BLOCKS = 10, 40
CLOSE = 0.01
STEPS = 3
"""Of a block, behind one that is not timed."""
T_95 = {1: 6.314, 2: 2.920, 3: 2.353, 5: 2.015, 9: 1.833, 15: 1.753}
"""Student's t, one-sided, by degrees of freedom."""
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An architecture at its size; without a stock one `DiffusionTransformer`."""

    stock: Stock | None
    batch: int = 8
    length: int = 1024


def _decoder(
    kind: str, layers: int, *sizes: Any, batch: int = 4, **others: Any
) -> Case:
    settings = _text(layers, *sizes, **others)
    return Case(Stock(kind, settings), batch)


def _text(
    layers: int, hidden: int, inside: int, heads: int, kv: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        **others,
    }


def _seq2seq(kind: str, layers: int, *given: Any, **others: Any) -> Case:
    *inputs, batch, length = given
    names = ("encoder_layers", "decoder_layers")
    settings = dict.fromkeys(names, layers) | others
    stock = Stock(kind, settings, "ForConditionalGeneration", names, *inputs)
    return Case(stock, batch, length)


_IMAGES = {"head": "ForImageClassification", "inputs": "images"}
CASES = {
    "t5": _seq2seq(
        *("T5", 16, 8, 512),
        **{"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16},
        **{"num_layers": 16, "num_decoder_layers": 16, "vocab_size": 32128},
        **{"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    ),
    "vit": Case(
        Stock(
            "ViT",
            encoder(1408, 40, 16, image_size=224, num_labels=1000),
            **_IMAGES,
        ),
        48,
    ),
    "whisper": _seq2seq(
        *("Whisper", 24, "sound", 4, 256),
        **{"d_model": 1280, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
        **{"encoder_attention_heads": 20, "decoder_attention_heads": 20},
        **{"vocab_size": 51866, "decoder_start_token_id": 0},
    ),
    "bert": Case(
        Stock("Bert", encoder(1536, 24, 24, vocab_size=30522), "ForMaskedLM"),
        length=512,
    ),
    "clip": Case(
        Stock(
            "CLIP",
            {
                "text_config": encoder(1024, 24, 16),
                "vision_config": encoder(1280, 32, 16, patch_size=14, image_size=224),
                "projection_dim": 1024,
            },
            "Model",
            inputs="pairs",
        ),
        *(32, 77),
    ),
    "olmoe": _decoder(
        *("Olmoe", 10, 2048, 1024, 16, 16), num_experts=16, num_experts_per_tok=4
    ),
    "gemma2": _decoder("Gemma2", 14, 2304, 9216, 8, 4, head_dim=256),
    "neox": Case(Stock("GPTNeoX", encoder(2048, 20, 16, vocab_size=32000)), 4),
    "phi3": _decoder("Phi3", 12, 3072, 8192, 32, 32),
    "dit": Case(None, 4, 4096),
    # Not looked at while plans were tuned.
    "bart": _seq2seq(
        *("Bart", 16, 8, 512),
        **{"d_model": 1024, "vocab_size": 50265},
        **{"encoder_attention_heads": 16, "decoder_attention_heads": 16},
        **{"pad_token_id": 1, "decoder_start_token_id": 2},
    ),
    "dinov2": Case(
        Stock(
            "Dinov2",
            encoder(1024, 24, 16, image_size=224, patch_size=14, num_labels=100),
            **_IMAGES,
        ),
        64,
    ),
    "mamba": Case(
        Stock(
            "Mamba", {"hidden_size": 1024, "num_hidden_layers": 12, "vocab_size": 32000}
        ),
        *(4, 256),
    ),
    "llava": Case(
        Stock(
            "Llava",
            {
                "vision_config": encoder(
                    *(1024, 12, 16), model_type="clip_vision_model", patch_size=14
                ),
                "text_config": _text(14, 2048, 8192, 16, 8, model_type="llama"),
                "image_token_index": 2,  # no random token is this one
            },
            "ForConditionalGeneration",
            inputs="both",
        ),
        *(4, 1024),
    ),
    "mixtral": _decoder("Mixtral", 8, 2048, 3584, 16, 8, num_local_experts=8),
    "wav2vec2": Case(
        Stock(
            "Wav2Vec2",
            encoder(1024, 24, 16, num_labels=10),
            "ForSequenceClassification",
            inputs="waves",
        ),
        *(8, 160000),
    ),
}
DIFFUSION = {"hidden": 2048, "layers": 28, "heads": 16}
WAYS = ("regions", "=gc", "=second", "=selective", "fit", "overhead")
BASES = {"regions": "gc", "=gc": "gc", "=second": "second", "=selective": "selective"}


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


def built(
    case: Case, device: torch.device, *, is_tiny: bool
) -> tuple[nn.Module, Batch]:
    """The model, in training mode, with random weights of one seed; a batch."""
    rows = 2 if is_tiny else case.batch
    if case.stock is not None:
        waves = case.stock.inputs == "waves"
        length = min(case.length, 16000 if waves else 32) if is_tiny else case.length
        config = case.stock.config(tiny=is_tiny)
        model = case.stock.model(config, device)
        batch: Batch = case.stock.batch(config, rows, length, device)
        if case.stock.inputs == "pairs":
            batch["return_loss"] = True
        return model, batch
    torch.manual_seed(0)
    settings = shrunk(DIFFUSION) if is_tiny else DIFFUSION
    with device:
        model = DiffusionTransformer(**settings).train()
    draw = torch.Generator(device).manual_seed(1)
    length, width = 32 if is_tiny else case.length, settings["hidden"]
    made = partial(torch.randn, generator=draw, device=device)
    return model, {"latents": made(rows, length, width), "time": made(rows, width)}


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
    enable(model, None if base == "plain" else options)
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
        self.model, self.batch = built(case, device, is_tiny=is_tiny)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-5, fused=device.type == "cuda"
        )
        self.host_ms = 0.0
        """Of the last forward."""

    def step(self) -> tuple[float, int]:
        """ms and peak bytes above the level before."""
        wait(self.device)
        memory = Peak(self.device)
        start = time.perf_counter()
        found = self.model(**self.batch)
        self.host_ms = (time.perf_counter() - start) * 1e3
        loss = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        peak = memory.most
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return (wait(self.device) - start) * 1e3, peak


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


def warm_up(step: Callable[[], float], session: Any, limit_s: float) -> dict[str, Any]:
    """Steps (ms) until the session says that it is settled, or the time is over."""
    times, start = [], time.perf_counter()
    while not (session.is_settled and len(times) >= 3):
        times.append(round(step(), 1))
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
        t = T_95.get(len(ratios) - 1, 2.1 if len(ratios) < BLOCKS else T_95[9])
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


def in_turns(base: Side, ours: Side, most_s: float) -> list[tuple[Any, Any]]:
    """Blocks of both sides, either one first in turn.

    Args:
        most_s: no pair begins after that, once there are `BLOCKS`.
    """
    found: list[tuple[Any, Any]] = []
    start = time.perf_counter()
    while len(found) < MOST_BLOCKS:
        if len(found) >= BLOCKS:
            told = ratio_of([(own[0][0], own[1][0]) for own in found])
            is_close = told["upper"] - told["ratio"] <= CLOSE
            if is_close or time.perf_counter() - start > most_s:
                break
        if len(found) % 2:
            second = block(ours)
            found.append((block(base), second))
        else:
            found.append((block(base), block(ours)))
    return found


def measure(
    case: Case, way: str, *, is_tiny: bool, warm_s: float, most_s: float
) -> dict[str, Any]:
    """One cell."""
    import ssdtrain

    device = torch.device("cpu" if is_tiny else "cuda")
    base = BASES.get(way, "plain")
    sides = [Side(case, device, is_tiny=is_tiny) for _ in range(2)]
    base_side, our_side = sides
    set_base(base_side.model, base)
    base_side.step()  # kernels are chosen, and need more memory
    base_bytes = max(base_side.step()[1] for _ in range(2)) or 1 << 24
    settings = settings_of(way, base_bytes, device)
    least = {"min_bytes": 0} if is_tiny else {}
    with ssdtrain.offload(our_side.model, **settings, **least) as session:
        found = warm_up(lambda: our_side.step()[0], session, warm_s)
        timed = in_turns(base_side, our_side, most_s)
        found |= {"settled_behind": session.is_settled}
        found |= {"explain": session.explain().splitlines()[:20]}
    pairs = [(base[0], ours[0]) for base, ours in timed]
    base_peak, our_peak = (max(t[n][1] for t in timed) for n in range(2))
    found |= ratio_of(pairs)
    found |= {
        "base": base,
        "blocks": len(timed),
        "base_ms": round(statistics.median(p[0] for p in pairs), 1),
        "ms": round(statistics.median(p[1] for p in pairs), 1),
        "base_gb": round(base_peak / 1e9, 3),
        "gb": round(our_peak / 1e9, 3),
        "base_host_ms": round(statistics.median(t[0][2] for t in timed), 1),
        "host_ms": round(statistics.median(t[1][2] for t in timed), 1),
    }
    return found


def main(
    bench: Bench, *, warm_s: float = 22, most_s: float = 30, cpu: bool = False
) -> None:
    """Measure what is asked for.

    Args:
        warm_s: most of a warm-up
        most_s: of timing, where steps are disturbed
        cpu: tiny models, to try it
    """
    cells = bench.cells({"cpu": cpu})
    cell = partial(measure, is_tiny=cpu, warm_s=warm_s, most_s=most_s)
    for way, case in itertools.product(WAYS, CASES):
        cells.run(f"{case}/{way}", cell, CASES[case], way, limit_s=240)
