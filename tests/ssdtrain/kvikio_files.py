"""Files of kvikio for tests on a GPU, where most machines have no nvidia-fs."""

from typing import Any

import pytest

from ssdtrain.storage import gds


def use_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `GdsStorage` use kvikio as it is here: without GPUDirect Storage kvikio's
    own threads move the same bytes. Skips the test where there is no kvikio."""
    kvikio: Any = pytest.importorskip("kvikio")
    if gds.why_no_gds():
        defaults: Any = pytest.importorskip("kvikio.defaults")

        def open_posix(path: str) -> Any:
            with defaults.set("compat_mode", kvikio.CompatMode.ON):
                return kvikio.CuFile(path, "r+")

        monkeypatch.setattr(gds, "open_cufile", open_posix)
