"""`ssdtrain fits MODEL`: will it fit, how fast, and what is the best way."""

import argparse
import json
import re
from dataclasses import asdict

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.arguments import count_argument, show
from ssdtrain.tools.foresight.recorder import STATES
from ssdtrain.tools.report.build_public import Loss, Train
from ssdtrain.tools.report.capture import OPTIMIZER, Question
from ssdtrain.tools.report.fits import CONTEXT, PLAIN, FitReport, fits
from ssdtrain.tools.report.public_models import PUBLIC

EXAMPLES = f"""examples:
  ssdtrain fits qwen3-8b --train lora --tokens 32k --gpu h100
  ssdtrain fits llama-3.1-70b --tokens 8k --gpu h200 --gpus 8 --fsdp
  ssdtrain fits path/to/config.json --tokens 4k
  ssdtrain fits my.py:build --micro-batch 64
      build(64) gives (model, forward), and forward() a loss

Short names: {", ".join(PUBLIC)}.
Nothing is downloaded, and no GPU is needed. 1k tokens are 1024.
"""
_TOKENS = re.compile(r"(\d+)\s*([km]?)", re.I)
_TIMES = {"": 1, "k": 1024, "m": 1024 * 1024}


def tokens_argument(text: str) -> int:
    """`32k` or `8192`, of 64 tokens or more."""
    found = _TOKENS.fullmatch(text.strip())
    number = int(found[1]) * _TIMES[found[2].lower()] if found else 0
    if number < 64:
        raise argparse.ArgumentTypeError(
            f"expects a number of tokens such as 8192 or 32k, got {text!r}"
        )
    return number


def add_loss(parser: argparse.ArgumentParser) -> None:
    """Add `--loss`; `ssdtrain search` has it too."""
    parser.add_argument(
        "--loss",
        choices=[loss.value for loss in Loss],
        default=Loss.STOCK.value,
        help="as transformers computes it (default), or fused as Liger does",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name, a config.json, or FILE.py:FUNCTION")
    add(
        "--train",
        choices=[train.value for train in Train],
        default=Train.FULL.value,
        help="all weights (default), or LoRA of rank 16 on every linear layer",
    )
    of_tokens = "of one forward and backward on each GPU (default: 8k)"
    add("--tokens", type=tokens_argument, help=of_tokens)
    given = "what FILE.py:FUNCTION is given (default: 1)"
    add("--micro-batch", type=count_argument, metavar="N", help=given)
    add("--gpu", default="h100", help="h100, h200 or a device file")
    add(
        "--gpus",
        type=count_argument,
        default=1,
        help="in all; a host has 8 (default: 1)",
    )
    sharded = "weights, gradients and optimizer are sharded over --gpus"
    add("--fsdp", action="store_true", help=sharded)
    add_loss(parser)
    known = ", ".join(sorted(STATES))
    add("--optimizer", default=OPTIMIZER, help=f"one of {known} (default: {OPTIMIZER})")
    add("--json", action="store_true", help="print JSON, no table")


def run(args: argparse.Namespace) -> int:
    """Answer. Raises ConfigError: input that cannot work, or weights that cannot fit;
    OSError: a file cannot be read."""
    names = ("model", "gpu", "gpus", "fsdp", "optimizer")
    given = {name: getattr(args, name) for name in names}
    is_own = Question(model=args.model).is_own
    if is_own and args.tokens:
        raise ConfigError("--tokens is for public models; give --micro-batch")
    if args.micro_batch and not is_own and not args.model.endswith(".py"):
        raise ConfigError("--micro-batch is for FILE.py:FUNCTION; give --tokens")
    if args.tokens:
        given["tokens"] = args.tokens
    if args.micro_batch:
        given["micro_batch"] = args.micro_batch
    answer = fits(Question(**given, train=Train(args.train), loss=Loss(args.loss)))
    if args.json:
        print(json.dumps(asdict(answer), indent=1))
    else:
        print("\n".join(fits_lines(answer)))
    return 0


def fits_lines(answer: FitReport) -> list[str]:
    """Return the answer as one screen of text."""
    asked = answer.question
    spread = f"{asked.gpus} x " if asked.gpus > 1 else ""
    sharded = ", sharded" if asked.fsdp else ""
    size = f"{asked.tokens:,} tokens a GPU"
    if asked.is_own:
        size = f"a micro-batch of {asked.micro_batch}"
    dtype = "" if asked.is_own else "   bf16, as are gradients and optimizer"
    when = "" if asked.fsdp else "   made as activations are freed: not added to them"
    each = "Bytes are of one GPU, tokens/s of all." if asked.gpus > 1 else ""
    found = [
        f"{asked.model}, {asked.train.value} training, {size}, "
        f"{spread}{asked.gpu}{sharded}",
        each,
        f"  weights      {bytes_text(answer.weight_bytes):>10}{dtype}",
        f"  gradients    {bytes_text(answer.gradient_bytes):>10}{when}",
        f"  optimizer    {bytes_text(answer.optimizer_bytes):>10}",
        f"  activations  {bytes_text(answer.activation_bytes):>10}   at the peak of "
        "plain training",
        f"  to be used   {bytes_text(answer.usable_bytes):>10}   of the GPU's "
        f"{bytes_text(answer.capacity_bytes)}",
        "",
        f"  {'':14} {'step':>10} {'' if asked.is_own else 'tokens/s':>10} "
        f"{'memory':>10}",
    ]
    for way in answer.ways:
        speed = "" if asked.is_own else f"{way.tokens_per_s:,.0f}"
        told = "" if way.fits else "   does not fit"
        found.append(
            f"  {way.name:14} {way.step_ms:>7.0f} ms {speed:>10} "
            f"{bytes_text(way.memory_bytes):>10}{told}"
        )
    if answer.longest:
        what = "Largest micro-batch" if asked.is_own else "Most tokens a step"
        if answer.is_causal:
            what = "Longest context"
        told = ", ".join(
            f"{name} {most:,}" if asked.is_own else f"{name} {most // CONTEXT}k"
            for name, most in answer.longest.items()
        )
        found += ["", f"{what} that fits: {told}."]
    return [*found, "", *_advice(answer)]


def _advice(answer: FitReport) -> list[str]:
    found = [answer.sentence]
    asked, plain = answer.question, answer.way(PLAIN)
    traffic = answer.traffic
    if plain is not None and answer.is_bound_by_host:
        found.append(
            f"Of the {plain.step_ms:.0f} ms of the plain step the GPU waits "
            f"{answer.host_wait_ms:.0f} for the host to launch kernels. Hosts differ "
            "by a factor of two, and so may these steps."
        )
    found += [f"Note: {each}" for each in answer.caveats]
    if plain is None or plain.fits:
        return found
    if traffic is not None:
        a_gpu = " for each GPU" if asked.gpus > 1 else ""
        number = answer.gpus_of_host
        whole = bytes_text(number * traffic.host_bytes)
        in_all = f", {whole} for the {number} of a host" if number > 1 else ""
        again = bytes_text(traffic.again_bytes) if traffic.again_bytes else "nothing"
        found.append(
            f"Each step moves {bytes_text(traffic.moved_bytes)} to host memory and "
            f"back, and computes {again} again. Host memory needed{a_gpu}: "
            f"{bytes_text(traffic.host_bytes)}{in_all}."
        )
    if answer.is_causal and asked.loss is Loss.STOCK:
        found.append(
            "All rows have the loss of transformers; --loss fused asks for Liger's, "
            "which needs less memory."
        )
    return found
