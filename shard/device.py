"""Which device and element type a stage computes in, and why: each choice says its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from shard.machine import Memory, machine_memory, resident_bytes
from shared.errors import LoadFailed

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device and the sentence that goes into the log."""

    device: torch.device
    reason: str


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """An element type, the sentence that goes into the log, and the warning that does, if there is cause for one."""

    dtype: torch.dtype
    reason: str
    warning: str = ""


def choose_device(requested: str = "auto") -> DeviceChoice:
    """Pick the device: the one asked for, or with ``auto`` a CUDA device if there is one, else the CPU.

    Raises:
        LoadFailed: `device_unavailable` when the device asked for is unknown or not there.
    """
    if requested == "auto":
        if torch.cuda.is_available():
            return DeviceChoice(torch.device("cuda", 0), "a CUDA device is present")
        return DeviceChoice(torch.device("cpu"), "no CUDA device is present")
    try:
        device = torch.device("cuda:0" if requested == "cuda" else requested)
    except RuntimeError as error:
        message = f"unknown device {requested!r}: it must be auto, cpu, cuda, cuda:1 or mps"
        raise LoadFailed("device_unavailable", message, device=requested) from error
    if not _is_present(device):
        message = f"{requested!r} cannot be used here: {_absence(device)}; auto takes what there is"
        raise LoadFailed("device_unavailable", message, device=requested)
    return DeviceChoice(device, "asked for")


def choose_dtype(requested: str, device: torch.device, checkpoint: torch.dtype) -> DtypeChoice:
    """Pick the element type: the one asked for, or with ``auto`` the checkpoint's own.

    Float16 is the exception: a CPU computes it slowly, and float32 holds each of its values exactly.

    Raises:
        LoadFailed: `dtype_unsupported` for a name that is not in `DTYPES`.
    """
    if requested != "auto":
        if requested not in DTYPES:
            known = ", ".join(DTYPES)
            raise LoadFailed("dtype_unsupported", f"dtype must be auto, {known}, got {requested!r}", dtype=requested)
        return DtypeChoice(DTYPES[requested], "asked for", _slowness(DTYPES[requested], device))
    if checkpoint is torch.float16 and device.type == "cpu":
        return DtypeChoice(torch.float32, "the checkpoint is float16, which a CPU computes slowly")
    if checkpoint not in DTYPES.values():
        return DtypeChoice(torch.bfloat16, f"the checkpoint's {checkpoint} is not a type to compute in")
    return DtypeChoice(checkpoint, "the checkpoint's own")


def device_memory(device: torch.device) -> Memory:
    """The memory of a device: on a CPU the machine's, within the limits set to this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, for what comes
        return Memory(memory_used(device), free + kept, total)
    if device.type == "mps":
        total, used = torch.mps.recommended_max_memory(), memory_used(device)
        return Memory(used, max(0, total - used), total)
    return machine_memory()


def memory_used(device: torch.device) -> int:
    """What this process has of a device's memory; cheap enough to be asked with every heartbeat."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return resident_bytes()


def _slowness(dtype: torch.dtype, device: torch.device) -> str:
    """Why an element type is slow on a device; empty where it is not."""
    if dtype is not torch.float16 or device.type != "cpu" or _has_float16_kernels():
        return ""
    return (
        "this CPU has no float16 arithmetic, so each product is computed by way of float32, many times slower: "
        "bfloat16 takes as little memory, and float32 holds each float16 value exactly"
    )


def _has_float16_kernels() -> bool:
    operator: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return operator is not None and bool(operator())


def _absence(device: torch.device) -> str:
    """Why a device is not there."""
    if device.type == "cuda":
        count, cuda_backend = torch.cuda.device_count(), cast(Any, torch.backends.cuda)
        if not cuda_backend.is_built():
            return "this torch was built without CUDA"
        return f"torch sees {count} CUDA devices, cuda:0 to cuda:{count - 1}" if count else "torch sees no CUDA device"
    if device.type == "mps":
        return "mps is Apple's, and torch sees none"
    return "nodes compute on cpu, cuda or mps"


def _is_present(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type == "cuda":
        return device.index < torch.cuda.device_count()
    return device.type == "mps" and torch.backends.mps.is_available()
