"""What can go wrong with unified tensors."""


class PlacementError(ValueError):
    """No processor can reach all operands of a call; see `pydirect.placement`."""


class UnsupportedOperatorError(NotImplementedError):
    """An operator that the processor chosen by the placement rules does not have."""


class NotEnabledError(RuntimeError):
    """The unified device is asked for and `pydirect.enable` has not been called."""
