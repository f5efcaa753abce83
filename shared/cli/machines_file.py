"""The YAML file that tells `meshnet plan` of machines; docs/planning.md lists its fields.

Every fault is one sentence that names the machine, the field and what it must be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from shared.fields import NAME_CHARS_MAX
from shared.models.facts import ModelFacts
from shared.options import PORT_MAX, parse_bytes
from shared.planning.commands import NodeAddress
from shared.planning.fleet import Machine
from shared.planning.plan import MACHINES_MAX

FILE_BYTES_MAX: Final = 1 << 20
"""`MACHINES_MAX` machines with every field take a tenth of it."""
TIME_MS_MAX: Final = 600_000.0
"""Ten minutes for one layer or one round trip: nobody means more."""
BANDWIDTH_MBIT_MAX: Final = 10_000_000.0
"""Ten terabits per second."""
MEMORY_BYTES_MAX: Final = 1 << 50
"""A pebibyte; keeps sums exact."""
DEFAULT_PORT: Final = 9001
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")
_ADDRESS: Final = re.compile(r"(?P<host>[^/:\s\[\]]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_DEVICE: Final = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


class MachinesFileError(ValueError):
    """The file cannot be used; says where and why."""


@dataclass(frozen=True, slots=True)
class MachineEntry:
    """One machine of the file, before a model is known.

    Args:
        values: Its fields, read; absent ones left out.
    """

    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.values["name"])

    @property
    def address(self) -> NodeAddress:
        """Where the gateway reaches it; by its name unless the file says otherwise."""
        address = self.values.get("address", f"{self.name}:{DEFAULT_PORT}")
        return NodeAddress(address, self.values.get("device"))

    def machine(self, model: ModelFacts) -> Machine:
        """The machine as a planner sees it; `memory_bandwidth` becomes the time to read a layer of this model."""
        given = dict(self.values)
        options = {field: given[key] for key, field in _MACHINE_FIELDS.items() if key in given}
        if "decode_s_per_layer" not in options:
            options["decode_s_per_layer"] = max(model.mean_active_bytes, 1.0) / given["memory_bandwidth"]
        return Machine(name=self.name, memory_bytes=given["memory"], **options)


def read_machines_file(path: Path) -> list[MachineEntry]:
    """Read and check the file.

    Raises:
        MachinesFileError: It cannot be read, is no YAML, or says something that cannot be.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise MachinesFileError(f"{path}: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise MachinesFileError(f"{path}: larger than {FILE_BYTES_MAX} bytes, the limit of a machines file")
    try:
        return parse_machines(yaml.safe_load(content))
    except yaml.YAMLError as error:
        raise MachinesFileError(f"{path}: no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise MachinesFileError(f"{path}: nested too deeply to be a machines file") from error
    except MachinesFileError as error:
        raise MachinesFileError(f"{path}: {error}") from error


def parse_machines(document: object) -> list[MachineEntry]:
    """Check what YAML gave.

    Raises:
        MachinesFileError: Naming the machine and the field.
    """
    if not isinstance(document, dict) or set(document) != {"machines"}:
        raise MachinesFileError("must have one field, machines: a list of machines")
    items = document["machines"]
    if not isinstance(items, list) or not 1 <= len(items) <= MACHINES_MAX:
        raise MachinesFileError(f"machines: must be a list of 1 to {MACHINES_MAX} machines")
    entries = [_parse_machine(item, f"machines[{index}]") for index, item in enumerate(items)]
    for index, entry in enumerate(entries):
        if any(entry.name == other.name for other in entries[:index]):
            raise MachinesFileError(f"machines[{index}].name: {entry.name!r} is the name of another machine too")
    return entries


def _parse_machine(item: object, where: str) -> MachineEntry:
    if not isinstance(item, dict):
        raise MachinesFileError(f"{where}: must be a mapping with at least name, memory and decode_ms_per_layer")
    name = item.get("name")
    label = f"{where} ({name})" if isinstance(name, str) else where
    unknown = [str(key) for key in item if key not in _READERS]
    if unknown:
        raise MachinesFileError(f"{label}.{unknown[0]}: no such field; there are {', '.join(_READERS)}")
    missing = [key for key in ("name", "memory") if key not in item]
    if missing:
        raise MachinesFileError(f"{label}.{missing[0]}: missing")
    if ("decode_ms_per_layer" in item) == ("memory_bandwidth" in item):
        raise MachinesFileError(f"{label}: needs decode_ms_per_layer or memory_bandwidth, and not both")
    values = {}
    for key, value in item.items():
        try:
            values[key] = _READERS[key](value)
        except ValueError as error:
            raise MachinesFileError(f"{label}.{key}: {error}") from error
    return MachineEntry(values)


def _read_size(value: object) -> int:
    size = value if type(value) is int else parse_bytes(value) if isinstance(value, str) else 0
    if not 0 < size <= MEMORY_BYTES_MAX:
        raise ValueError(f"must be a size above 0 and up to 1024T such as 512M or 16G, got {value!r}")
    return size


def _read_size_or_none(value: object) -> int:
    return 0 if value == 0 and type(value) is int else _read_size(value)


def _number(low: float, high: float, scale: float, *, above: bool = False) -> Callable[[object], float]:
    """A number within bounds, scaled to seconds or bytes per second; `above` leaves out the lower bound itself."""

    def read(value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
            bound = f"above {low:g} and up to {high:g}" if above else f"from {low:g} to {high:g}"
            raise ValueError(f"must be a number {bound}, got {value!r}")
        return float(value) * scale  # type: ignore[arg-type]

    return read


def _matching(pattern: re.Pattern[str], example: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"must look like {example}, got {value!r}")
        return value

    return read


def _read_address(value: object) -> str:
    text = _matching(_ADDRESS, "host:9001")(value)
    port = int(text.rpartition(":")[2])
    if not 1 <= port <= PORT_MAX:
        raise ValueError(f"must have a port from 1 to {PORT_MAX}, got {port}")
    return text


_MS: Final = 0.001
_MBIT: Final = 1_000_000 / 8

_READERS: Final[dict[str, Callable[[object], Any]]] = {
    "name": _matching(_NAME, f"desk-1 (letters, digits, '.', '_' and '-', at most {NAME_CHARS_MAX})"),
    "memory": _read_size,
    "decode_ms_per_layer": _number(0, TIME_MS_MAX, _MS, above=True),
    "memory_bandwidth": _read_size,
    "prefill_ms_per_layer_per_token": _number(0, TIME_MS_MAX, _MS),
    "head_ms": _number(0, TIME_MS_MAX, _MS),
    "rtt_ms": _number(0, TIME_MS_MAX, _MS),
    "bandwidth_mbit": _number(0, BANDWIDTH_MBIT_MAX, _MBIT, above=True),
    "hop_overhead_ms": _number(0, TIME_MS_MAX, _MS),
    "runtime_memory": _read_size_or_none,
    "address": _read_address,
    "device": _matching(_DEVICE, "auto, cpu, cuda, cuda:1 or mps"),
}
_MACHINE_FIELDS: Final = {
    "decode_ms_per_layer": "decode_s_per_layer",
    "prefill_ms_per_layer_per_token": "prefill_s_per_layer_token",
    "head_ms": "head_s",
    "rtt_ms": "rtt_s",
    "bandwidth_mbit": "bytes_per_s",
    "hop_overhead_ms": "hop_overhead_s",
    "runtime_memory": "runtime_bytes",
}
