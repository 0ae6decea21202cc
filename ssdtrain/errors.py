"""Errors of ssdtrain. Each says what was expected, what came and what to set."""


class ConfigError(ValueError):
    """A setting is impossible here; the text names the field and what to set."""


class DamagedFileError(ConfigError):
    """A file holds something else than it should; the text names the file, what was
    expected, what came and what to do."""


class AttachError(RuntimeError):
    """`offload()` met a model, engine or framework version it must refuse."""


class CaptureError(RuntimeError):
    """A CUDA graph is being captured, and what this session is to do in it is the
    host's work, which no replay would repeat; the text says what to set."""


class ActivationLostError(RuntimeError):
    """Bytes that autograd saved cannot be brought back; training must stop.

    The text names the record, the place (file, offset) and the bytes.
    """


class ActivationChangedError(ActivationLostError):
    """`verify` found that backward got other bytes than autograd saved.

    The text names the module, the operator, the record and, under
    `verify="shadow"`, the first byte that differs.
    """


class ForkedError(RuntimeError):
    """A forked child asked for what only its parent has: threads, or moved bytes."""


class StorageFullError(OSError):
    """The storage has no room for this write; the caller still owns the bytes."""


class InPlaceError(RuntimeError):
    """A saved tensor was modified in place before backward used it.

    Plain autograd raises for the same program; with saved-tensor hooks it no
    longer checks, so ssdtrain does.
    """


class RegionError(RuntimeError):
    """A region's forward did not do the same when it ran again; backward stops."""


class SessionClosedError(RuntimeError):
    """A handle outlived its session: `close()` came before backward."""
