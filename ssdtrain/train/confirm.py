"""Whether the operating system confirms what ssdtrain says it has written."""

from ssdtrain.config import Target
from ssdtrain.storage.directory import MEMORY_FILE_SYSTEMS
from ssdtrain.train.loop import LegResult


def doubt_of_writes(target: Target, results: list[LegResult]) -> str | None:
    """Return why writes are not confirmed, rank by rank; "" where they are, None where
    none was due: also a staged target that wrote nothing although bytes were reloaded,
    or it was full or missing, is not confirmed."""
    if not target.behind.is_disk:
        return None
    claimed = [_sum(result, "bytes_written") for result in results]
    if any(claimed):
        pairs = enumerate(zip(results, claimed, strict=True))
        found = [_doubt(rank, *pair) for rank, pair in pairs]
        return "; ".join(dict.fromkeys(doubt for doubt in found if doubt))
    reloaded = sum(_sum(result, "bytes_reloaded") for result in results)
    fell_back = any(result.own.fallbacks for result in results)
    if not target.behind.is_staged or not (reloaded or fell_back):
        return None
    return (
        f"offload.target={target.value} wrote nothing to it: the rows marked as "
        "fallbacks, and the run's log.txt, say what the directory refused"
    )


def _doubt(rank: int, result: LegResult, num_bytes: int) -> str:
    # Whatever the counters say: the process writes other files, too.
    in_memory = sorted(MEMORY_FILE_SYSTEMS.intersection(result.file_systems))
    if in_memory and num_bytes:
        return (
            f"offload.directory is on {in_memory[0]}, which is main memory: no drive "
            "was written to. Set it to a directory on an SSD, or offload=host for "
            "memory, which is faster"
        )
    done = result.own.written
    if done.confirms(num_bytes):
        return ""
    if done.process_bytes is None and done.device_bytes is None:
        return "the system has no counter of this process's writes, nor of the drive's"
    counted = max(count for count in done if count is not None)
    return (
        f"rank {rank} says {num_bytes:,} bytes, the operating system counted "
        f"{counted:,}"
    )


def _sum(result: LegResult, name: str) -> int:
    return int(result.own.bytes.get(name, 0))
