"""How the trainers of ms-swift 4.6 make their callbacks."""

from typing import Any

from swift.callbacks import callbacks_map


class SwiftMixin:
    def _get_callbacks(self, args: Any) -> list[Any]:
        return [callbacks_map[name](args, self) for name in args.callbacks]
