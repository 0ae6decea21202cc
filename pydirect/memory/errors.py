"""What can go wrong with host memory."""


class HostMemoryError(RuntimeError):
    """Host memory could not be allocated, pinned or mapped.

    The text names the bytes asked for, the limit that was met and what to set.
    """


class ManagedMemoryError(HostMemoryError):
    """More managed memory was asked for than the GPUs have free.

    `empty_table` takes pinned memory then.
    """


class HostMemoryWarning(UserWarning):
    """An allocation that is granted but close to a limit of this machine."""
