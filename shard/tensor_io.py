"""Tensors between the wire and torch, without a copy on the CPU.

Shapes are whatever a layer boundary carries; nothing here looks at them.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from shared.tensor_spec import WireTensor

WIRE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in WIRE_NAMES.items()}


def to_torch(wire: WireTensor, device: torch.device | None = None) -> torch.Tensor:
    """View received bytes as a tensor; only a device other than the CPU costs a copy.

    The tensor keeps the received frame alive, and must not be written to: its bytes may be immutable.
    """
    dtype = TORCH_DTYPES[wire.dtype]
    if not wire.data.nbytes:
        return torch.empty(wire.shape, dtype=dtype, device=device)
    if wire.data.readonly:
        _accept_read_only_buffers()
    tensor = torch.frombuffer(wire.data, dtype=dtype).view(wire.shape)
    if device is None or device.type == "cpu":
        return tensor
    return tensor.to(device)


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """View a tensor's elements as the bytes to send; copied only from another device or a strided view."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return WireTensor(WIRE_NAMES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().data)


@cache
def _accept_read_only_buffers() -> None:
    """Spend torch's once-per-process warning about read-only buffers: received tensors are never written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.frombuffer(bytes(1), dtype=torch.uint8)
