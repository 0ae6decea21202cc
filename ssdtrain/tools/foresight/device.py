"""Everything that is known of one kind of device: data sheet, kernels, host, clock;
made by `ssdtrain foresight fit`, and scaled to one machine by a calibration."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Format, Fraction, Natural, Unfit, load_json
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.features import feature_names, row_of
from ssdtrain.tools.foresight.host import HostTable
from ssdtrain.tools.foresight.laws import Law, law_us
from ssdtrain.tools.foresight.power import Power
from ssdtrain.tools.foresight.spec import SPECS, DeviceSpec
from ssdtrain.tools.foresight.trees import Forest

DATA = Path(__file__).parent / "data"
SUFFIX = ".device.json"
VERSION = 3
"""Of device files: the constants that closed forms have."""
RELATIVES: Mapping[str, str] = {"h200": "h100", "h100": "h200"}
"""Whose kernels stand in where a device was not measured itself."""
TRANSFER_ERROR = 0.06
# Where a family has no model: the share of the roofline that kernels reach.
UNLEARNED_SHARE = 0.7
UNLEARNED_ERROR = 0.3
DEFAULT_DEVICE = "h100"
"""Whose models price steps where no other device is named."""


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """Prices calls and operators' host time on one kind of device."""

    spec: DeviceSpec
    forests: Mapping[KernelFamily, Forest] = field(default_factory=dict)
    laws: Mapping[KernelFamily, Law] = field(default_factory=dict)
    """Closed forms that the forests were learned next to; the roofline's elsewhere."""
    errors: Mapping[KernelFamily, float] = field(default_factory=dict)
    """Held-out geometric mean error of each family's model."""
    scales: Mapping[KernelFamily, float] = field(default_factory=dict)
    """Measured over predicted time on this machine, from a calibration."""
    host: HostTable
    host_scale: float = 1.0
    """The same of host time."""
    power: Power | None = None
    context_bytes: int = 0
    """Device memory that libraries take for good (workspaces), next to tensors."""
    reached: float = UNLEARNED_SHARE
    """Share of the roofline that kernels without a model reach."""
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
            return bound / self.reached
        [by_law] = law_us(self.laws.get(call.family), [call], self.spec)
        ratio = math.exp(forest.predict(row_of(call, self.spec, by_law)))
        return by_law * ratio * self.scales.get(call.family, 1.0)

    def error(self, family: KernelFamily) -> float:
        """Expected relative error of one kernel's time."""
        return self.errors.get(family, UNLEARNED_ERROR)

    def scaled(
        self, scales: Mapping[KernelFamily, float], host_scale: float = 1.0
    ) -> "DeviceCosts":
        """The same kind of device, as a calibration found one."""
        return replace(
            self,
            scales={**self.scales, **scales},
            host_scale=self.host_scale * host_scale,
            _memo={},
        )


@dataclass(frozen=True, kw_only=True)
class _File:
    """A device as its file holds it."""

    spec: DeviceSpec
    forests: Mapping[KernelFamily, Forest]
    laws: Mapping[KernelFamily, Mapping[str, tuple[float, ...]]]
    errors: Mapping[KernelFamily, Fraction]
    scales: Mapping[KernelFamily, Fraction]
    host: Mapping[str, tuple[float, ...]]
    host_scale: Fraction
    power: Power | None
    context_bytes: Natural


def _check(file: _File) -> None:
    for family, forest in file.forests.items():
        where = f"forests.{family.value}"
        if forest.names != feature_names(family):
            raise Unfit(f"{where}.names", "this version's features", "others")
        try:
            forest.check()
        except ConfigError as error:
            raise Unfit(where, "trees that end", str(error)) from None
    for family, values in file.laws.items():
        try:
            Law.from_dict(family, values)
        except ValueError as error:
            where, expected = f"laws.{family.value}", "this version's constants"
            raise Unfit(where, expected, str(error)) from None
    HostTable.from_dict(file.host)


_FORMAT = Format(
    kind=_File,
    schema="ssdtrain-device",
    version=VERSION,
    what="a device file",
    remedy="make it again with `ssdtrain foresight fit`",
    check=_check,
)


def to_json(device: DeviceCosts) -> dict[str, Any]:
    """Plain values, with the schema's name and version."""
    own = {field.name: getattr(device, field.name) for field in fields(_File)}
    own["laws"] = {family: law.as_dict() for family, law in device.laws.items()}
    return _FORMAT.to_json(_File(**{**own, "host": device.host.as_dict()}))


def from_json(values: object, source: str = "") -> DeviceCosts:
    """Build a `DeviceCosts` from what `to_json` made. Raises DamagedFileError: another
    schema or version, or a wrong field."""
    file = _FORMAT.from_json(values, source)
    laws = {family: Law.from_dict(family, own) for family, own in file.laws.items()}
    read = {"laws": laws, "host": HostTable.from_dict(file.host)}
    return DeviceCosts(**{**vars(file), **read})


def write_device(path: str | Path, device: DeviceCosts) -> None:
    """Write a device file on one line: its trees are long lists of numbers. Raises
    OSError: the file cannot be written."""
    text = json.dumps(to_json(device), separators=(",", ":"))
    Path(path).write_text(text + "\n", encoding="utf-8")


def shipped() -> tuple[str, ...]:
    """Names of the devices that come with the package."""
    names = (path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))
    return tuple(sorted(names))


def load_device(name: str | Path) -> DeviceCosts:
    """A shipped device by its name, or a device file. Raises ConfigError: neither, or
    the file is damaged."""
    path = Path(name)
    return _read(path) if path.suffix == ".json" else _shipped_device(str(name))


@cache
def _shipped_device(name: str) -> DeviceCosts:
    path, relative = DATA / f"{name}{SUFFIX}", RELATIVES.get(name)
    if path.is_file():
        return _read(path)
    if relative in shipped():
        return transferred(_shipped_device(relative), SPECS[name])
    raise ConfigError(
        f"no device {name!r}: expects one of {', '.join(shipped())}, or a "
        "device file (.json), which `ssdtrain foresight learn` writes on a GPU"
    )


def _read(path: Path) -> DeviceCosts:
    try:
        values = load_json(path, _FORMAT.what, _FORMAT.remedy)
    except OSError as error:
        told = f"device file {path} cannot be read ({error.strerror})"
        raise ConfigError(told) from error
    return from_json(values, str(path))


def transferred(device: DeviceCosts, spec: DeviceSpec) -> DeviceCosts:
    """Another device by its data sheet: kernels keep their distance from the roofline,
    which is right for a relative, with the errors seen between an H100 and an H200."""
    errors = {family: e + TRANSFER_ERROR for family, e in device.errors.items()}
    return replace(device, spec=spec, errors=errors, _memo={})


def bare_device(name: str) -> DeviceCosts:
    """A device of which only the data sheet is known."""
    return DeviceCosts(spec=SPECS[name], host=HostTable([]))
