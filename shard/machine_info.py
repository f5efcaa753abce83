"""What a node that takes any range says of its machine: measured once, and remembered in the cache folder.

What does not change from start to start (speed, the runtime's size) is kept under a name made of everything that it
depends on, so that a restart neither measures nor imports torch. What does change (free memory, models on the disk) is
looked at each time. Nothing here imports torch before it must.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import structlog

from shard.find_weights import local_models
from shard.machine import machine_memory
from shard.settings import NodeSettings
from shared.messages import MachineInfo
from shared.replace_file import replace_file

MEASURE_VERSION = 2
"""Raised when a measurement would now mean something else, or be written otherwise."""
REMEMBERED_S = 7 * 24 * 3600.0
"""For how long: machines get other cooling, other neighbours, other clocks."""
RESERVE_SHARE = 0.1
"""Of the free memory, what a node leaves to everything else on its machine unless it is told how much it may use."""
WIRE_DTYPES: Mapping[str, str | None] = {"auto": None, "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_CPU_INFO = Path("/proc/cpuinfo")
_GPU_DEVICES = Path("/dev/nvidiactl")

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What is measured; fields as in `MachineInfo`."""

    device: str
    runtime_bytes: int
    read_bytes_per_s: int
    prefill_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a measurement.

    Args:
        figures: These.
        is_disturbed: Something else had the processor for a part of the time: they are too low.
    """

    figures: MachineFigures
    is_disturbed: bool = False


def describe_machine(settings: NodeSettings, cache: Path, environ: Mapping[str, str]) -> MachineInfo:
    """Say what the node offers. Blocks: the first time for the import of torch and a second of measuring.

    Args:
        settings: The node's.
        cache: The cache folder.
        environ: Says which GPUs are visible.

    Raises:
        LoadFailed: `device_unavailable`.
    """
    figures = remembered_figures(
        settings, cache / "machines", environ, measure=lambda: _measure(settings), now_s=time.time()
    )
    return MachineInfo(
        device=figures.device,
        dtype=WIRE_DTYPES[settings.dtype],
        memory_bytes=settings.memory_bytes or _default_memory_bytes(figures),
        runtime_bytes=figures.runtime_bytes,
        read_bytes_per_s=figures.read_bytes_per_s,
        prefill_bytes_per_s=figures.prefill_bytes_per_s,
        models=tuple(local_models(settings.model, cache)),
        quantize=settings.quantize,
    )


def remembered_figures(
    settings: NodeSettings,
    folder: Path,
    environ: Mapping[str, str],
    *,
    measure: Callable[[], Measured],
    now_s: float,
) -> MachineFigures:
    """The figures of this machine with these settings, measured unless an earlier start has done so.

    Args:
        settings: The node's.
        folder: Where they are remembered.
        environ: Says which GPUs are visible.
        measure: Measures. What it found while it was disturbed is taken for now, and not remembered.
        now_s: Since the epoch; what is older than `REMEMBERED_S` is measured anew.
    """
    path = folder / f"{_key(settings, environ)}.json"
    try:
        remembered = orjson.loads(path.read_bytes())
        if 0 <= now_s - remembered["measured_at"] < REMEMBERED_S:
            return MachineFigures(**remembered["figures"])
    except FileNotFoundError:
        pass
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        log.warning("machine.figures_unreadable", path=str(path), reason=str(error))
    measured = measure()
    figures = asdict(measured.figures)
    if measured.is_disturbed:
        log.warning("machine.measured_while_busy", **figures, reason="other work took processor time; not remembered")
        return measured.figures
    log.info("machine.measured", **figures, remembered=str(path))
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, orjson.dumps({"measured_at": now_s, "figures": figures}, option=orjson.OPT_INDENT_2))
    return measured.figures


def _measure(settings: NodeSettings) -> Measured:
    log.info("machine.measuring", reason="once for these settings; it takes some seconds")
    from shard.measure_machine import measure_machine  # noqa: PLC0415 - torch takes seconds to import

    return measure_machine(settings.device, settings.dtype, settings.threads, settings.quantize)


def _default_memory_bytes(figures: MachineFigures) -> int:
    """What is free now, less a reserve; and what the process takes already, or will once torch is imported."""
    if figures.device.startswith("cuda"):
        import torch  # noqa: PLC0415 - only CUDA itself knows

        return int(torch.cuda.mem_get_info(figures.device)[0] * (1 - RESERVE_SHARE))
    memory = machine_memory()
    return memory.used_bytes + int(memory.free_bytes * (1 - RESERVE_SHARE))


def _key(settings: NodeSettings, environ: Mapping[str, str]) -> str:
    """Everything that the figures depend on."""
    depends_on = (
        MEASURE_VERSION,
        socket.gethostname(),
        _processor(),
        sys.version_info[:2],
        importlib.metadata.version("torch"),
        settings.device,
        settings.dtype,
        settings.quantize,
        settings.threads,
        _GPU_DEVICES.exists(),
        environ.get("CUDA_VISIBLE_DEVICES", ""),
    )
    return hashlib.sha256(repr(depends_on).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())
