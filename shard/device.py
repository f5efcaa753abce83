"""Which device and element type a stage computes in, and why: each choice says its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    """An element type and the sentence that goes into the log."""

    dtype: torch.dtype
    reason: str


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
        raise LoadFailed("device_unavailable", f"unknown device {requested!r}", device=requested) from error
    if not _is_present(device):
        raise LoadFailed("device_unavailable", f"device {requested!r} is not present", device=requested)
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
        return DtypeChoice(DTYPES[requested], "asked for")
    if checkpoint is torch.float16 and device.type == "cpu":
        return DtypeChoice(torch.float32, "the checkpoint is float16, which a CPU computes slowly")
    if checkpoint not in DTYPES.values():
        return DtypeChoice(torch.bfloat16, f"the checkpoint's {checkpoint} is not a type to compute in")
    return DtypeChoice(checkpoint, "the checkpoint's own")


def _is_present(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type == "cuda":
        return device.index < torch.cuda.device_count()
    return device.type == "mps" and torch.backends.mps.is_available()
