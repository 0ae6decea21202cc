"""Which setting was meant: by its last name, and by what others call it."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile

# What other trainers call a setting, and its last name here.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "accumulate_grad_batches": ("num_micro_batches",),
    "batch_size": ("micro_batch_size", "batch_size", "batch"),
    "bs": ("micro_batch_size", "batch_size", "batch"),
    "block_size": ("sequence_length",),
    "checkpoint_every": ("checkpoint_epochs",),
    "clip": ("gradient_clipping",),
    "context_length": ("sequence_length",),
    "d_model": ("hidden_size", "hidden_channels"),
    "dim": ("hidden_size", "hidden_channels"),
    "dir": ("run_directory",),
    "dtype": ("precision", "dtype"),
    "embed_dim": ("hidden_size", "hidden_channels"),
    "epochs": ("epochs", "steps"),
    "global_batch_size": ("num_micro_batches",),
    "grad_accum": ("num_micro_batches",),
    "grad_clip": ("gradient_clipping",),
    "gradient_accumulation_steps": ("num_micro_batches",),
    "gradient_checkpointing": ("checkpointing",),
    "heads": ("num_heads", "heads"),
    "hidden": ("hidden_size", "hidden_channels"),
    "hidden_size": ("hidden_channels",),
    "hidden_dim": ("hidden_size", "hidden_channels"),
    "iters": ("steps", "epochs"),
    "layers": ("num_layers",),
    "learning_rate": ("lr",),
    "logging_dir": ("run_directory",),
    "lr": ("learning_rate",),
    "max_grad_norm": ("gradient_clipping",),
    "max_iters": ("steps", "epochs"),
    "max_length": ("sequence_length",),
    "max_seq_len": ("sequence_length",),
    "max_seq_length": ("sequence_length",),
    "max_steps": ("steps",),
    "micro_batches": ("num_micro_batches",),
    "micro_batch_size": ("batch_size", "batch"),
    "min_lr": ("min_learning_rate_ratio",),
    "mixed_precision": ("precision",),
    "mbs": ("micro_batch_size",),
    "n_embd": ("hidden_size", "hidden_channels"),
    "n_head": ("num_heads", "heads"),
    "n_layer": ("num_layers",),
    "num_heads": ("heads",),
    "num_ranks": ("ranks",),
    "nproc": ("num_ranks", "ranks"),
    "num_attention_heads": ("num_heads", "heads"),
    "num_epochs": ("epochs", "steps"),
    "num_gpus": ("num_ranks", "ranks"),
    "num_hidden_layers": ("num_layers",),
    "num_nodes": ("num_ranks", "ranks"),
    "num_steps": ("steps",),
    "num_train_epochs": ("epochs", "steps"),
    "out": ("run_directory",),
    "output_dir": ("run_directory",),
    "per_device_train_batch_size": ("micro_batch_size", "batch_size", "batch"),
    "pp": ("pipeline", "num_stages"),
    "precision": ("dtype",),
    "save_every": ("checkpoint_every", "checkpoint_epochs"),
    "save_steps": ("checkpoint_every", "checkpoint_epochs"),
    "seq_len": ("sequence_length",),
    "seq_length": ("sequence_length",),
    "steps": ("epochs",),
    "tp": ("tensor",),
    "train_batch_size": ("micro_batch_size", "batch_size", "batch"),
    "vocab": ("vocab_size",),
    "warmup": ("warmup_steps",),
    "warmup_iters": ("warmup_steps",),
    "wd": ("weight_decay",),
    "world_size": ("num_ranks", "ranks"),
    "zero": ("zero_stage",),
}
MOST = 2
"""Settings that are suggested."""
CUTOFF = 0.75
"""How alike two last names must be: `batch` is not `epochs`."""


def meant(key: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the settings that a wrong key may mean, or nothing.

    Args:
        key: dotted, such as `trainer.epochs`.
        known: dotted keys; of equally good ones those that come first.
    """
    found = found_by_last_name(key, known) or get_close_matches(key, known, n=1)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def found_by_last_name(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys whose last name is that of `key`, or nearly so."""
    last = _last(key)
    known = list(dict.fromkeys(known))
    lasts = {_last(name) for name in known}
    for names in ((last,), ALIASES.get(last, ()), _alike(last, lasts)):
        for name in names:
            found = [one for one in known if _last(one) == name]
            if found:
                # What shares the group that was named comes first.
                found.sort(key=lambda one: -_shared(one, key))
                best = _shared(found[0], key)
                return [one for one in found if _shared(one, key) == best][:MOST]
    return []


def _alike(last: str, lasts: set[str]) -> list[str]:
    return get_close_matches(last, sorted(lasts), n=1, cutoff=CUTOFF)


def _shared(one: str, other: str) -> int:
    """How many groups two keys share, from the left."""
    pairs = zip(one.split(".")[:-1], other.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _last(key: str) -> str:
    return key.rpartition(".")[2]
