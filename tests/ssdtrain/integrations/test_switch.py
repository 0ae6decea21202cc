"""SSDTRAIN in words."""

import pytest

from ssdtrain import switch
from ssdtrain.config import OffloadConfig, Target
from ssdtrain.errors import ConfigError
from ssdtrain.quantities import Share


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("fit", {"device_memory": "fit"}),
        ("16GB", {"device_memory": 16 * 10**9}),
        ("80%", {"device_memory": Share(0.8)}),
        ("fit, min_bytes=0", {"device_memory": "fit", "min_bytes": 0}),
        (
            "max_overhead=2%,target=ssd,directory=/nvme",
            {"max_overhead": 0.02, "target": Target.SSD, "directory": "/nvme"},
        ),
        ("directory=/a:/b,io_threads=8", {"directory": ("/a", "/b"), "io_threads": 8}),
        ("trace=true,seed=3", {"trace": True, "seed": 3}),
    ],
)
def test_settings(text: str, settings: dict[str, object]) -> None:
    assert switch.parse_settings(text) == OffloadConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fitt", "did you mean 'fit'"),
        ("16GBB", "device_memory expects bytes"),
        ("fit,host", "got 'host' in it; did you mean 'target=host'"),
        ("ssd", "did you mean 'target=ssd'"),
        ("offload_all", "did you mean 'plan=offload-all'"),
        ("fit,target", "did you mean 'target=...'"),
        ("fit min_bytes=0", "settings stand between commas"),
        ("DEVICE_MEMORY=fit", "did you mean 'device_memory'"),
        ("advanced.io_thread=4", "did you mean 'io_threads'"),
        ("memory_budget_byte=8GB", "did you mean 'memory_budget_bytes'"),
        ("target=SSD", "did you mean 'ssd'"),
        ("recompute=region", "did you mean 'regions'"),
        ("verify=Checksum", "did you mean 'checksum'"),
        ("gpu_direct=of", "did you mean 'off'"),
        ("1", "device_memory is 1 bytes; did you mean '1GB'"),
        ("memory_budget=16", "did you mean '16GB'"),
        ("device_memory=0", "at least 1 bytes"),
        ("1e300", "device_memory expects bytes"),
        ("max_overhead=2%%", "got '2%%'"),
        ("directory=None", "leave directory out"),
        ("plan=", "plan expects a value"),
        ("io_threads=99999999", "an integer from 1 to 1024"),
        ("ssd_rated_bytes=600TBW", "ssd_rated_bytes expects bytes"),
        ("max_overhed=2%", "did you mean 'max_overhead'"),
        ("max_overhead=200", "SSDTRAIN='max_overhead=200'"),
        ("target=ssd", "needs a directory"),
        ("trace=yes", "true or false"),
        ("io_threads=many", "io_threads expects a number, got 'many'"),
        ("fit,device_memory=1GB", "'device_memory' twice"),
    ],
)
def test_slips_are_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="SSDTRAIN") as raised:
        switch.parse_settings(text)
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["", " ", "0", "off", "OFF"])
def test_nothing_is_asked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.VARIABLE, text)
    assert switch.asked() is None
    monkeypatch.delenv(switch.VARIABLE)
    assert switch.asked() is None
