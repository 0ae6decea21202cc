"""What autograd holds of a tensor that a row of a compiled plan served."""

from torch import Tensor, nn

from ssdtrain.cache.identity import check_version
from ssdtrain.cache.record import Kept, ParameterView, Part


class KeptHandle(tuple[Tensor, int]):
    """A tensor that stays, and its version. A tuple: made without a call of Python."""

    __slots__ = ()

    @property
    def source(self) -> Kept:
        """As the general path would hold it."""
        return Kept(*self)

    def get(self) -> Tensor:
        """The tensor; `InPlaceError` if it was changed after it was saved."""
        tensor, version = self
        if tensor._version != version:
            check_version(tensor, version, "a kept tensor")
        return tensor


class ParameterHandle(tuple[nn.Parameter, int]):
    """A saved parameter and its version. See [Note: parameters] in record.py."""

    __slots__ = ()

    @property
    def source(self) -> ParameterView:
        """As the general path would hold it."""
        parameter, version = self
        return ParameterView(parameter, version, None, (), 0)

    def get(self) -> Tensor:
        """The parameter; `InPlaceError` if it was changed after it was saved."""
        parameter, version = self
        if parameter._version != version:
            check_version(parameter, version, "a parameter")
        return parameter


class ParameterViewHandle(tuple[nn.Parameter, int, Tensor | Part]):
    """A saved view of a parameter: whose, of which version, and the view itself, or
    where it lies, if it may not be held."""

    __slots__ = ()

    @property
    def source(self) -> ParameterView | Kept:
        """As the general path would hold it."""
        parameter, version, shown = self
        if isinstance(shown, Part):
            return ParameterView(parameter, version, *shown)
        part = Part.between(shown, parameter)
        if part is None:
            return Kept(shown, version)
        return ParameterView(parameter, version, *part, shown)

    def get(self) -> Tensor:
        """The view; `InPlaceError` if the parameter was changed after it was saved."""
        parameter, version, shown = self
        if parameter._version != version:
            check_version(parameter, version, "a parameter")
        return shown.of(parameter) if isinstance(shown, Part) else shown
