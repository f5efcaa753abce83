"""Tensors travel to and from wire bytes unchanged, and without a copy."""

from __future__ import annotations

import pytest
import torch

from shard.tensor_io import TORCH_DTYPES, WIRE_NAMES, to_torch, to_wire
from shared.frame import decode_frame, encode_frame
from shared.tensor_spec import ITEM_BYTES, WireTensor


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_wire_type_survives_a_frame(name: str) -> None:
    """Tensor → frame → immutable bytes → tensor is the identity, for each element type."""
    tensor = torch.tensor([[[0.0, 1.0, 3.0], [1.0, 0.0, 100.0]]]).to(TORCH_DTYPES[name])
    received = decode_frame(b"".join(encode_frame({"kind": "x"}, {"t": to_wire(tensor)})))
    assert torch.equal(to_torch(received.tensors["t"]), tensor)


def test_the_wire_knows_every_type_that_torch_gives() -> None:
    """Names and widths agree with the protocol's table."""
    assert {name: dtype.itemsize for dtype, name in WIRE_NAMES.items()} == ITEM_BYTES


def test_received_bytes_are_viewed_not_copied() -> None:
    """Writing to the received buffer shows in the tensor."""
    buffer = bytearray(8)
    tensor = to_torch(WireTensor("f32", (2,), memoryview(buffer)))
    buffer[4:] = memoryview(torch.tensor([2.5]).numpy()).cast("B")
    assert tensor.tolist() == [0.0, 2.5]


def test_a_contiguous_tensor_is_sent_as_it_lies() -> None:
    """The wire's bytes are the tensor's own memory."""
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    wire = to_wire(tensor)
    tensor[1] = 1.0
    assert to_torch(wire).tolist() == [0.0, 1.0, 0.0]


def test_a_strided_view_is_sent_in_order() -> None:
    """A slice of the last positions becomes contiguous bytes of that slice alone."""
    tensor = torch.arange(24).view(1, 4, 6).narrow(1, 2, 2).transpose(1, 2)
    wire = to_wire(tensor)
    assert wire.shape == (1, 6, 2)
    assert torch.equal(to_torch(wire), tensor)


@pytest.mark.parametrize("shape", [(), (0,), (1, 0, 4)])
def test_scalars_and_empty_tensors_survive(shape: tuple[int, ...]) -> None:
    """Also what has no elements, or no dimensions."""
    assert to_torch(to_wire(torch.ones(shape))).shape == shape


def test_read_only_bytes_give_no_warning() -> None:
    """The warning of torch about immutable buffers is spent on purpose (warnings are errors here)."""
    assert to_torch(WireTensor("i32", (1,), memoryview(b"\x07\0\0\0"))).item() == 7


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_tensor_makes_the_round_trip() -> None:
    """From the wire to the GPU and back."""
    tensor = torch.randn(1, 3, 4, dtype=torch.bfloat16)
    on_gpu = to_torch(to_wire(tensor), torch.device("cuda", 0))
    assert on_gpu.device.type == "cuda"
    assert torch.equal(to_torch(to_wire(on_gpu)), tensor)
