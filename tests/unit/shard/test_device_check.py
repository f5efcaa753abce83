"""A device that is not there is refused before anything is fetched, by a node and by `meshnet up`."""

from __future__ import annotations

import pytest
import torch

from shard import device_check
from shard.device import choose_dtype
from shared.options import SettingError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuda", "--device: 'cuda' cannot be used here: this torch was built without CUDA; auto takes what there is"),
        ("mps", "--device: 'mps' cannot be used here: mps is Apple's, and torch sees none; auto takes what there is"),
        ("toaster", "--device: unknown device 'toaster': it must be auto, cpu, cuda, cuda:1 or mps"),
        ("meta", "--device: 'meta' cannot be used here: nodes compute on cpu, cuda or mps; auto takes what there is"),
    ],
)
def test_an_absent_device_is_one_sentence(name: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    """That names it, says what is wrong, and what to take instead."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SettingError) as refused:
        device_check.check_device(name)
    assert str(refused.value) == reason


def test_what_there_is_of_a_kind_is_said(monkeypatch: pytest.MonkeyPatch):
    """A number that is too high names the highest."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingError, match=r"torch sees 2 CUDA devices, cuda:0 to cuda:1"):
        device_check.check_device("cuda:2")


def test_the_program_says_no_with_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """For `meshnet up`, which reads the last line."""
    monkeypatch.setattr("sys.argv", ["device_check", "toaster"])
    assert device_check.main() == 2
    assert capsys.readouterr().err.startswith("unknown device 'toaster'")
    monkeypatch.setattr("sys.argv", ["device_check", "cpu"])
    assert device_check.main() == 0


@pytest.mark.parametrize(("has_kernels", "warned"), [(False, True), (True, False)])
def test_float16_on_a_cpu_without_it_is_warned_of(
    has_kernels: bool,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """With what to take instead; other element types and other devices are not."""
    monkeypatch.setattr("shard.device._has_float16_kernels", lambda: has_kernels)
    assert ("bfloat16 takes as little memory" in choose_dtype("float16", CPU, torch.float32).warning) is warned
    assert choose_dtype("bfloat16", CPU, torch.float32).warning == ""
    assert choose_dtype("float16", torch.device("cuda", 0), torch.float32).warning == ""
