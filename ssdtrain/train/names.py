"""Which setting was meant: by its last name, and by what others call it."""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile

# Last names of settings that mean the same here, and what other trainers call them.
_CALLED = """
micro_batch_size batch_size batch: bs mbs per_device_train_batch_size train_batch_size
num_micro_batches: accumulate_grad_batches global_batch_size grad_accum
num_micro_batches: gradient_accumulation_steps micro_batches
steps epochs: iters max_iters max_steps num_steps
epochs steps: num_epochs num_train_epochs
checkpoint_every checkpoint_epochs: save_every save_steps
checkpointing: gradient_checkpointing
gradient_clipping: clip grad_clip max_grad_norm
hidden_size hidden_channels: d_model dim embed_dim hidden hidden_dim n_embd
num_heads heads: n_head num_attention_heads
num_layers: layers n_layer num_hidden_layers
sequence_length: block_size context_length max_length max_seq_len max_seq_length
sequence_length: seq_len seq_length
learning_rate lr: lr
min_learning_rate_ratio: min_lr
warmup_steps: warmup warmup_iters
weight_decay: wd
precision dtype: mixed_precision
num_ranks ranks: nproc num_gpus num_nodes world_size
pipeline num_stages: pp
tensor: tp
zero_stage: zero
run_directory: dir logging_dir out output_dir
vocab_size: vocab
"""
ALIASES: dict[str, list[str]] = {}
"""Settings that a last name may mean, the likeliest first."""
for _line in _CALLED.split("\n")[1:-1]:
    _ours, _theirs = (part.split() for part in _line.split(":"))
    for _name in (*_ours, *_theirs):
        ALIASES.setdefault(_name, _ours)
MOST = 2
"""Settings that are suggested."""
CUTOFF = 0.75
"""How alike two last names must be: `batch` is not `epochs`."""


def meant(key: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the dotted settings that a wrong key may mean, or
    nothing; of equally good ones those that come first."""
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
