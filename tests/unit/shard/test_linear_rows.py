"""Kernels of our own against float64, at shapes that fill no vector, and at values that overflow others."""

from __future__ import annotations

import sys

import pytest
import torch

from shard.linear import native
from shard.linear.choice import choose_kernels
from shard.linear.int4 import GROUP, pack_groups, quantize_groups, unpack_groups
from shard.linear.int8 import LEVELS, quantize_rows
from shard.linear.rows import (
    INPUT_LEVELS_MAX,
    STEP,
    STEP_PRODUCTS,
    SUM_MAX,
    THREAD_WEIGHTS,
    Bf16Rows,
    Int4Rows,
    Int8Rows,
    RowKernel,
    input_levels,
)

pytestmark = pytest.mark.skipif(native.native_absence() is not None, reason="needs llvmlite, and what it compiles for")
KINDS: list[type[RowKernel]] = [Bf16Rows, Int8Rows, Int4Rows]
INPUT_ERROR = 1e-4
"""Of inputs of 16 bits, relative to the norm of inputs and weights; float32 sums are below it."""
CPU = torch.device("cpu")


def held_weight(kind: type[RowKernel], weight: torch.Tensor) -> torch.Tensor:
    """What a kernel holds of a weight, as its format says, in float64."""
    if kind is Int8Rows:
        rows, scales = quantize_rows(weight)
        return rows.double() * scales.double()
    if kind is Int4Rows:
        steps, scales, lowest = quantize_groups(weight, 0)
        return (steps.double() * scales.double()[..., None] + lowest.double()[..., None]).view(weight.shape)
    return weight.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outs", "ins"), [(1, 1), (3, 7), (37, 31), (80, 33), (1, 100), (37, 128), (80, 896), (3, 4864)]
)
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 64])
def test_outputs_are_those_of_float64(kind: type[RowKernel], outs: int, ins: int, rows: int) -> None:
    """With the weights that are held: only inputs and sums round. Any number of rows, by either way."""
    if kind is Int4Rows:
        outs, ins = 16 * outs, GROUP * -(-ins // GROUP)
    dtype = torch.bfloat16 if kind is Bf16Rows else torch.float32
    weight, inputs = torch.randn(outs, ins).to(dtype), torch.randn(rows, ins).to(dtype)
    layer = kind(weight, None)
    held = held_weight(kind, weight)
    errors = layer(inputs).double() - inputs.double() @ held.t()
    bounds = INPUT_ERROR * inputs.double().norm(dim=1)[:, None] * held.norm(dim=1)
    if dtype is torch.bfloat16:
        bounds += 2**-8 * (inputs.double() @ held.t()).abs()
    assert bool((errors.abs() <= bounds).all())
    assert layer.nbytes == kind.packed_bytes(outs, ins)


@pytest.mark.parametrize("kind", [Int8Rows, Int4Rows])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_have_the_inputs_type(kind: type[RowKernel], dtype: torch.dtype) -> None:
    """Whichever a stage computes in; each digit is there that it can hold."""
    weight, inputs = torch.randn(32, 128).to(dtype), torch.randn(1, 2, 128).to(dtype)
    outputs = kind(weight, None)(inputs)
    exact = inputs.double() @ held_weight(kind, weight).t()
    assert outputs.dtype is dtype
    assert outputs.shape == (1, 2, 32)
    assert float((outputs.double() - exact).norm() / exact.norm()) <= max(INPUT_ERROR, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4, 5, 40])
def test_a_row_that_has_lost_its_numbers_spoils_no_other(kind: type[RowKernel], rows: int) -> None:
    """Sessions share a step. An infinity is not made a number, and what is no number stays none."""
    layer = kind(torch.randn(32, 128).bfloat16(), None)
    inputs = torch.randn(rows, 128).bfloat16()
    before = layer(inputs)
    inputs[1, 7], inputs[2, 7] = torch.nan, torch.inf
    outputs = layer(inputs)
    others = [index for index in range(rows) if index not in (1, 2)]
    assert torch.equal(outputs[others], before[others])
    assert not outputs[1:3].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_and_the_largest_inputs(kind: type[RowKernel]) -> None:
    """Zeros give zeros; what is beyond a type's range is infinite, and not some number."""
    layer = kind(torch.ones(16, 64).bfloat16(), None)
    for value, expected in ((0.0, 0.0), (1e-20, 64e-20), (-1e30, -64e30), (3e38, torch.inf), (-3e38, -torch.inf)):
        outputs = layer(torch.full((1, 64), value).bfloat16())
        assert torch.allclose(outputs.float(), torch.full((1, 16), expected), rtol=0.02)


@pytest.mark.parametrize("ins", [63, 64, 16512, 16513, 40000])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(ins: int, sign: int) -> None:
    """Every product at its largest, of either sign, on both sides of where inputs begin to lose levels."""
    layer = Int8Rows(torch.full((2, ins), float(sign)), None)
    assert torch.allclose(layer(torch.ones(1, ins)), torch.full((1, 2), float(sign * ins)), rtol=1e-3)


def test_inputs_have_the_levels_that_sums_hold() -> None:
    """Sixteen bits for the widths of most models; a matrix too wide for as many as weights have goes to others."""
    assert input_levels(4864) == INPUT_LEVELS_MAX
    for ins in (20_000, 100_000):
        products = STEP_PRODUCTS * -(-ins // STEP)
        assert input_levels(ins) * LEVELS * products <= SUM_MAX < (input_levels(ins) + 1) * LEVELS * products
    assert Int8Rows.fits(1, 4_000_000)
    assert not Int8Rows.fits(1, 5_000_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 6])
def test_the_number_of_threads_changes_no_bit(kind: type[RowKernel], rows: int) -> None:
    """Each output is one thread's; a matrix large enough for two has them."""
    layer = kind(torch.randn(2 * THREAD_WEIGHTS // 256 + 17 * 16, 256).bfloat16(), None)
    inputs, threads = torch.randn(rows, 256).bfloat16(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(inputs)
        torch.set_num_threads(2)
        assert torch.equal(layer(inputs), alone)
    finally:
        torch.set_num_threads(threads)


def test_bfloat16_is_neither_copied_nor_changed() -> None:
    """The layer multiplies the weight that it was given."""
    weight = torch.randn(8, 16).bfloat16()
    layer = Bf16Rows(weight, None)
    assert layer._addresses[0] == weight.data_ptr()
    assert torch.equal(layer.weight, weight)


def test_groups_come_back_as_they_were_packed() -> None:
    """In the order of columns; any rows of them."""
    weight = torch.randn(5, 3 * GROUP)
    steps, scales, lowest = quantize_groups(weight, 0)
    words, both = pack_groups(weight)
    expected = (steps.float() * scales.float()[..., None] + lowest.float()[..., None]).view(weight.shape)
    assert torch.allclose(unpack_groups(words[[4, 1]], both[[4, 1]]), expected[[4, 1]])
    assert torch.allclose(Int4Rows(weight[:1].expand(16, -1), None).weight, expected[:1].expand(16, -1))


def test_without_openmp_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a platform whose torch brings another runtime."""
    import llvmlite.binding as llvm

    monkeypatch.setattr(native, "_openmp", dict)
    kernels = native._compile(llvm)
    weight, inputs = torch.randn(24, 64).bfloat16(), torch.randn(1, 64)
    outputs, scratch = torch.empty(1, 24), torch.empty(256)
    addresses = (weight.data_ptr(), None, inputs.data_ptr(), scratch.data_ptr(), outputs.data_ptr())
    kernels.multiply_bf16(*addresses, 24, 64, 1, 2, False, 0.0)
    assert torch.allclose(outputs, inputs @ weight.float().t(), atol=1e-4)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_without_llvmlite_torchs_kernels_do(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the log says so."""
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    native._compiled.cache_clear()
    try:
        chosen = choose_kernels(quantize, CPU, torch.bfloat16)
        assert not any(issubclass(kernel, RowKernel) for kernel in chosen.kernels)
        assert "none of our own: llvmlite cannot be imported" in chosen.reason
        assert quantize == "none" or chosen.kernels
        with pytest.raises(native.LoadFailed, match="llvmlite cannot be imported"):
            native.native_kernels()
    finally:
        monkeypatch.undo()
        native._compiled.cache_clear()
