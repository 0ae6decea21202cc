"""`dgl.function`: see `hector.message.functions`."""

from hector.message.functions import *  # noqa: F403
