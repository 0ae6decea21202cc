"""Settings under which all that can move moves at once."""

from tests.ssdtrain.conftest import everything

__all__ = ["everything"]
