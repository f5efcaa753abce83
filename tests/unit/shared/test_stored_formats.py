"""What a config says of its checkpoint, and which tensors make a weight, decided by value."""

from __future__ import annotations

from typing import Any

import pytest

from shared.models.compressed_tensors import CompressedTensors
from shared.models.errors import ModelUnavailable
from shared.models.stored import PLAIN, Plain, QuantizedTensor, join_all
from shared.models.stored_formats import Fp8, Mxfp4, read_stored_format
from shared.models.tensors import TensorEntry

FP8 = Fp8("BF16", (128, 128))
MXFP4 = Mxfp4("BF16")


def tensor(name: str, dtype: str, *shape: int) -> TensorEntry:
    """A stored tensor."""
    return TensorEntry(name, "model.safetensors", dtype, shape, 0)


def config(**settings: Any) -> dict[str, Any]:
    """A config of a quantized checkpoint."""
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", **settings}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, PLAIN),
        ({"quantization_config": None, "dtype": "bfloat16"}, PLAIN),
        (config(), FP8),
        (config(weight_block_size=[16, 8], scale_fmt="ue8m0"), Fp8("BF16", (16, 8))),
        (config(weight_block_size=None, activation_scheme="static"), Fp8("BF16", None)),
        ({"text_config": config(quant_method="mxfp4") | {"dtype": "float16"}}, Mxfp4("F16")),
        ({"torch_dtype": "float32", "quantization_config": {"quant_method": "mxfp4"}}, Mxfp4("F32")),
        ({"quantization_config": {"quant_method": "mxfp4"}}, Mxfp4(None)),
    ],
)
def test_a_config_names_its_format(content: dict[str, Any], expected: object):
    """And the type that the whole model is computed in."""
    assert read_stored_format(content) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"stored quantized \(gptq\)"),
        ({"quant_method": "nobody-knows"}, r"\(nobody-knows\).*stored as fp8, mxfp4 or compressed-tensors"),
        ({"quant_method": None}, "an unnamed method"),
        ({"activation_scheme": "sometimes"}, "activation_scheme 'sometimes'"),
        ({"scale_fmt": "double"}, "scale_fmt 'double'"),
        ({"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"weight_block_size": [128]}, r"two positive numbers, or null, got \[128\]"),
        ({"weight_block_size": [0, 128]}, "two positive numbers"),
        ({"weight_block_size": [True, 128]}, "two positive numbers"),
        ({"weight_block_size": 128}, "two positive numbers"),
    ],
)
def test_what_is_not_loaded_is_refused_by_name(settings: dict[str, Any], said: str):
    """The method, or the field, and what it may be."""
    with pytest.raises(ModelUnavailable, match=said) as caught:
        read_stored_format(config(**settings))
    assert caught.value.code == "model_unsupported"


def test_a_description_that_is_no_object_is_refused():
    """Not taken for none."""
    with pytest.raises(ModelUnavailable, match="no JSON object"):
        read_stored_format({"quantization_config": ["fp8"]})


def test_fp8_joins_a_matrix_and_its_scales():
    """Edges included: 300 rows are three blocks of 128. Its bytes are both, its elements the matrix's."""
    weight, scales = tensor("a.weight", "F8_E4M3", 300, 128), tensor("a.weight_scale_inv", "F32", 3, 1)
    plain, activation = tensor("b.weight", "BF16", 300, 128), tensor("a.activation_scale", "F32")
    joined = join_all(FP8, [weight, scales, plain, activation])
    assert joined == [QuantizedTensor("a.weight", (300, 128), weight, scales, "scaled", (128, 128)), plain]
    assert (joined[0].num_elements, joined[0].nbytes) == (38400, 38400 + 12)


def test_fp8_joins_experts_in_one_tensor():
    """One grid of scales for each."""
    weight, scales = tensor("a.up_proj", "F8_E4M3", 4, 256, 128), tensor("a.up_proj_scale_inv", "BF16", 4, 2, 1)
    (joined,) = join_all(FP8, [weight, scales])
    assert joined.parts == (weight, scales)


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (None, "'a.weight_scale_inv' is missing"),
        (("F32", 2, 1), r"'a.weight_scale_inv' is F32 \[2, 1\], where 'a.weight' \[300, 128\] has \[3, 1\]"),
        (("F32",), r"is F32 \[\]"),
        (("I32", 3, 1), r"is I32 \[3, 1\]"),
    ],
)
def test_fp8_scales_must_fit(scales: tuple[Any, ...] | None, said: str):
    """Missing, of another grid, or no numbers."""
    tensors = [tensor("a.weight", "F8_E4M3", 300, 128)]
    tensors += [tensor("a.weight_scale_inv", *scales)] if scales else []
    with pytest.raises(ModelUnavailable, match=said) as caught:
        join_all(FP8, tensors)
    assert caught.value.code == "weights_corrupt"


@pytest.mark.parametrize("dtype", ["F8_E5M2", "I8", "U8"])
def test_fp8_is_of_one_type(dtype: str):
    """Experts of four bits, packed into bytes, are not taken for numbers."""
    with pytest.raises(ModelUnavailable, match=f"'a.weight' is stored as {dtype}, where fp8 has F8_E4M3"):
        join_all(FP8, [tensor("a.weight", dtype, 128, 128)])
    with pytest.raises(ModelUnavailable, match="no matrix"):
        join_all(FP8, [tensor("a.weight", "F8_E4M3", 128), tensor("a.weight_scale_inv", "F32", 1)])


def test_a_plain_weight_has_no_scales():
    """One of both is wrong."""
    with pytest.raises(ModelUnavailable, match=r"'a\.weight' is stored as BF16"):
        join_all(FP8, [tensor("a.weight", "BF16", 128, 128), tensor("a.weight_scale_inv", "F32", 1, 1)])


def test_mxfp4_joins_blocks_and_scales():
    """Two groups of 32 inputs, which come first once they are floats."""
    blocks, scales = tensor("a.up_proj_blocks", "U8", 4, 6, 2, 16), tensor("a.up_proj_scales", "U8", 4, 6, 2)
    bias = tensor("a.up_proj_bias", "BF16", 4, 6)
    joined = join_all(MXFP4, [scales, blocks, bias])
    assert joined == [QuantizedTensor("a.up_proj", (4, 64, 6), blocks, scales, "mxfp4", (1, 32)), bias]


@pytest.mark.parametrize(
    ("blocks", "scales", "said"),
    [
        (("U8", 4, 6, 2, 8), ("U8", 4, 6, 2), r"'a_blocks' is U8 \[4, 6, 2, 8\]"),
        (("I8", 4, 6, 2, 16), ("U8", 4, 6, 2), "'a_blocks' is I8"),
        (("U8", 6, 2, 16), ("U8", 6, 2), r"'a_blocks' is U8 \[6, 2, 16\]"),
        (("U8", 4, 6, 2, 16), ("U8", 4, 6, 1), r"'a_scales' is U8 \[4, 6, 1\], where 'a_blocks' has U8 \[4, 6, 2\]"),
        (("U8", 4, 6, 2, 16), ("F32", 4, 6, 2), "'a_scales' is F32"),
        (("U8", 4, 6, 2, 16), None, "'a_scales' is missing"),
        (None, ("U8", 4, 6, 2), "'a_blocks' is missing"),
    ],
)
def test_mxfp4_parts_must_fit(blocks: tuple[Any, ...] | None, scales: tuple[Any, ...] | None, said: str):
    """Missing, of another type, or another shape."""
    parts = [tensor(name, *part) for name, part in (("a_blocks", blocks), ("a_scales", scales)) if part]
    with pytest.raises(ModelUnavailable, match=said):
        join_all(MXFP4, parts)


@pytest.mark.parametrize(
    ("codes", "scales", "block"),
    [
        (("", "F8_E4M3", 256, 128), ("BF16", 256, 1), (1, 128)),
        (("", "I8", 256, 128), ("F32", 1), (256, 128)),
        (("", "F8_E4M3", 300, 128), ("F32", 3, 1), (128, 128)),
        (("_packed", "I32", 256, 16), ("BF16", 256, 4), (1, 32)),
    ],
)
def test_compressed_tensors_join_numbers_and_scales(
    codes: tuple[Any, ...], scales: tuple[Any, ...], block: tuple[int, int]
):
    """A scale for each row, for all, for each block, and for each group of a row; eight small numbers to an int32."""
    stored = [tensor(f"a.weight{codes[0]}", *codes[1:]), tensor("a.weight_scale", *scales)]
    beside = [tensor("a.weight_shape", "I64", 2), tensor("a.input_scale", "F32", 1), tensor("k_scale", "F32", 1)]
    plain = tensor("a.bias", "BF16", 128)
    joined = join_all(CompressedTensors("BF16", (128, 128)), [*stored, *beside, plain])
    encoding = "int4" if codes[0] else "scaled"
    assert joined == [QuantizedTensor("a.weight", (codes[2], 128), *stored, encoding, block), plain]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"": ("I8", 4, 8)}, "'a.weight_scale' is missing: 'a.weight' is stored as I8"),
        ({"_packed": ("I32", 4, 1)}, "'a.weight_scale' is missing"),
        ({"_scale": ("BF16", 4, 1)}, "'a.weight' is missing: there is 'a.weight_scale'"),
        ({"": ("BF16", 4, 8), "_scale": ("BF16", 4, 1)}, r"'a.weight' is BF16 \[4, 8\] beside scales"),
        ({"": ("I32", 4, 8), "_scale": ("BF16", 4, 1)}, "'a.weight' is I32"),
        ({"": ("I8", 2, 4, 8), "_scale": ("BF16", 4, 1)}, r"'a.weight' is I8 \[2, 4, 8\]"),
        ({"": ("I8", 4, 8), "_scale": ("BF16", 4, 3)}, r"'a.weight_scale' is BF16 \[4, 3\], .* of 4 x 8"),
        ({"": ("I8", 4, 8), "_scale": ("BF16", 3, 1)}, r"'a.weight_scale' is BF16 \[3, 1\]"),
        ({"": ("I8", 4, 8), "_scale": ("I8", 4, 1)}, "'a.weight_scale' is I8"),
        ({"": ("I8", 4, 8), "_scale": ("BF16", 4, 1), "_zero_point": ("I8", 4, 1)}, "'a.weight_zero_point' is there"),
        ({"": ("I8", 4, 8), "_scale": ("BF16", 4, 1), "_g_idx": ("I32", 8)}, "'a.weight_g_idx' is there"),
    ],
)
def test_compressed_tensors_must_fit(parts: dict[str, tuple[Any, ...]], said: str):
    """Each is named that is missing, unknown, or of another shape."""
    with pytest.raises(ModelUnavailable, match=said) as caught:
        join_all(CompressedTensors(None), [tensor(f"a.weight{part}", *what) for part, what in parts.items()])
    assert caught.value.code == "weights_corrupt"


@pytest.mark.parametrize(
    ("fields", "weights", "said"),
    [
        ({"format": "nvfp4-pack-quantized"}, {}, "format 'nvfp4-pack-quantized'"),
        ({"format": None}, {}, "format None"),
        ({"quantization_status": "calibration"}, {}, "quantization_status 'calibration'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparsity_config.format 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {}}}, {}, "transform_config"),
        ({}, {"symmetric": False}, r"config_groups.g.weights.symmetric False.*: True can be loaded"),
        ({}, {"num_bits": 8}, "num_bits 8.*: 4 can be loaded"),
        ({"format": "int-quantized"}, {"num_bits": 4}, "num_bits 4.*: 8 can be loaded"),
    ],
)
def test_fields_of_compressed_tensors_are_checked(fields: dict[str, Any], weights: dict[str, Any], said: str):
    """What would be more than a number times a scale is refused by the field's name."""
    valid = {"num_bits": 4, "type": "int", "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    groups, changed = ({"g": {"targets": ["Linear"], "weights": each}} for each in (valid, {**valid, **weights}))
    assert read_stored_format(config(**settings, config_groups=groups)) == CompressedTensors("BF16")
    with pytest.raises(ModelUnavailable, match=said) as caught:
        read_stored_format(config(**{**settings, "config_groups": changed, **fields}))
    assert caught.value.code == "model_unsupported"


def test_float8_without_a_description_is_refused():
    """Its scales would be ignored, and what came out would be noise."""
    with pytest.raises(ModelUnavailable, match="nothing says by which scales to read it"):
        join_all(Plain(), [tensor("a.weight", "F8_E4M3", 128, 128)])
