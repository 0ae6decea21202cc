"""Everything that is known of one kind of device: data sheet, kernels, host, clock.

Shipped as JSON beside this file, made by `ssdtrain foresight fit`, and scaled to one
machine by a calibration.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.foresight.call import Call, Family
from ssdtrain.foresight.features import row_of
from ssdtrain.foresight.host import HostTable
from ssdtrain.foresight.power import Power
from ssdtrain.foresight.spec import SPECS, Spec
from ssdtrain.foresight.trees import Forest

SCHEMA = "ssdtrain-device"
SCHEMA_VERSION = 1
DATA = Path(__file__).parent / "data"
SUFFIX = ".device.json"
# Where a family has no model: the share of the roofline that kernels reach.
UNLEARNED_SHARE = 0.7
UNLEARNED_ERROR = 0.3


@dataclass(frozen=True, kw_only=True)
class Device:
    """Prices calls and operators' host time on one kind of device."""

    spec: Spec
    forests: Mapping[Family, Forest] = field(default_factory=dict)
    errors: Mapping[Family, float] = field(default_factory=dict)
    """Held-out geometric mean error of each family's model."""
    scales: Mapping[Family, float] = field(default_factory=dict)
    """Measured over predicted time on this machine, from a calibration."""
    host: HostTable
    host_scale: float = 1.0
    """Likewise of host time."""
    power: Power | None = None
    context_bytes: int = 0
    """Device memory that libraries take for good (workspaces), beside tensors."""
    _memo: dict[Any, float] = field(default_factory=dict, repr=False, compare=False)

    def kernel_us(self, call: Call) -> float:
        """Device time of a call at the highest clock, in microseconds."""
        key = (
            *(call.family, call.variant, call.dtype, tuple(call.sizes.items())),
            *(call.read_bytes, call.written_bytes, round(call.warm_bytes)),
        )
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._price(call)
        return found

    def _price(self, call: Call) -> float:
        bound = self.spec.roofline_us(call)
        forest = self.forests.get(call.family)
        if forest is None:
            return bound / UNLEARNED_SHARE
        ratio = math.exp(forest.predict(row_of(call, self.spec)))
        return bound * ratio * self.scales.get(call.family, 1.0)

    def error(self, family: Family) -> float:
        """Expected relative error of one kernel's time."""
        return self.errors.get(family, UNLEARNED_ERROR)

    def scaled(
        self, scales: Mapping[Family, float], host_scale: float = 1.0
    ) -> "Device":
        """The same kind of device, as a calibration found one."""
        return replace(
            self,
            scales={**self.scales, **scales},
            host_scale=self.host_scale * host_scale,
            _memo={},
        )


def to_json(device: Device) -> dict[str, Any]:
    """Plain values, with the schema's name and version."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "spec": asdict(device.spec),
        "forests": {f.value: forest.as_dict() for f, forest in device.forests.items()},
        "errors": {f.value: error for f, error in device.errors.items()},
        "scales": {f.value: scale for f, scale in device.scales.items()},
        "host": device.host.as_dict(),
        "host_scale": device.host_scale,
        "power": None if device.power is None else asdict(device.power),
        "context_bytes": device.context_bytes,
    }


def from_json(values: Mapping[str, Any]) -> Device:
    """Build a `Device` from what `to_json` made.

    Raises:
        ConfigError: another schema or version, or a field that is missing or wrong.
    """
    found = (values.get("schema"), values.get("schema_version"))
    if found != (SCHEMA, SCHEMA_VERSION):
        raise ConfigError(
            f"a device file has schema {SCHEMA!r} version {SCHEMA_VERSION}, got "
            f"{found[0]!r} version {found[1]!r}; make it again with "
            "`ssdtrain foresight fit`."
        )
    try:
        power = values["power"]
        return Device(
            spec=Spec(**values["spec"]),
            forests={
                Family(name): Forest.from_dict(forest)
                for name, forest in values["forests"].items()
            },
            errors={Family(name): e for name, e in values["errors"].items()},
            scales={Family(name): s for name, s in values["scales"].items()},
            host=HostTable.from_dict(values["host"]),
            host_scale=values["host_scale"],
            power=None if power is None else Power(**power),
            context_bytes=values["context_bytes"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the device file is damaged ({type(error).__name__}: {error}); make it "
            "again with `ssdtrain foresight fit`."
        ) from error


def shipped() -> tuple[str, ...]:
    """Names of the devices that come with the package."""
    names = (path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))
    return tuple(sorted(names))


def load_device(name: str | Path) -> Device:
    """A shipped device by its name, or a device file.

    Raises:
        ConfigError: neither.
    """
    path = Path(name)
    if path.suffix != ".json":
        path = DATA / f"{name}{SUFFIX}"
        if not path.is_file():
            raise ConfigError(
                f"--device expects one of {', '.join(shipped())} or a device file "
                f"(.json), got {str(name)!r}"
            )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no device file: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a device")
    return from_json(values)


def bare_device(name: str) -> Device:
    """A device of which only the data sheet is known."""
    return Device(spec=SPECS[name], host=HostTable([]))
