"""Devices and element types are chosen with a reason, or refused with one."""

from __future__ import annotations

import pytest
import torch

from shard.device import choose_device, choose_dtype
from shared.errors import LoadFailed

CPU = torch.device("cpu")


def test_auto_takes_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` follows what is present."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").device == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice = choose_device("auto")
    assert choice.device == torch.device("cuda", 0)
    assert "CUDA" in choice.reason


@pytest.mark.parametrize("requested", ["cuda:9", "mps", "toaster", "xla"])
def test_an_absent_device_is_refused_by_name(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown and absent devices give the same typed error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(LoadFailed, match=requested) as caught:
        choose_device(requested)
    assert caught.value.code == "device_unavailable"
    assert caught.value.fields == {"device": requested}


def test_an_asked_for_gpu_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` means the first one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda").device == torch.device("cuda", 0)
    assert choose_device("cuda:1").device == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("requested", "device", "checkpoint", "expected"),
    [
        ("float32", "cpu", torch.bfloat16, torch.float32),
        ("auto", "cpu", torch.bfloat16, torch.bfloat16),
        ("auto", "cpu", torch.float16, torch.float32),
        ("auto", "cuda", torch.float16, torch.float16),
        ("auto", "cpu", torch.float64, torch.bfloat16),
    ],
)
def test_the_dtype_follows_the_checkpoint_unless_asked(
    requested: str, device: str, checkpoint: torch.dtype, expected: torch.dtype
) -> None:
    """Each choice says why."""
    choice = choose_dtype(requested, torch.device(device), checkpoint)
    assert choice.dtype is expected
    assert choice.reason


def test_an_unknown_dtype_is_refused() -> None:
    """The error lists what there is."""
    with pytest.raises(LoadFailed, match="auto, float32, bfloat16, float16"):
        choose_dtype("int3", CPU, torch.float32)
