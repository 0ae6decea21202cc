"""Start the ranks of a run on this node, when no launcher did."""

from collections.abc import Sequence


def start_ranks(num_ranks: int, words: Sequence[str]) -> int:
    """Run `python -m ssdtrain <words>` as `num_ranks` ranks; wait for them.

    Returns:
        0 if every rank returned 0, otherwise 1 (the ranks have said why).
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    launcher = ["--standalone", "--nproc-per-node", str(num_ranks)]
    try:
        main([*launcher, "--module", "ssdtrain", *words])
    except ChildFailedError:
        return 1
    return 0
