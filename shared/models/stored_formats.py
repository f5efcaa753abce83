"""The formats of quantized checkpoints that are loaded, and the sentence for all others. Pure.

- ``fp8`` (DeepSeek, Qwen3-FP8): a matrix in float8 beside `…_scale_inv`, one scale for each block of 128 x 128;
- ``mxfp4`` (gpt-oss): experts as `…_blocks`, 4 bits each, and `…_scales`, a power of two for each 32;
- ``compressed-tensors`` (Kimi-K2, RedHatAI's): `shared.models.compressed_tensors`.

What is stored plain, as router, norms and head usually are, stays as it is; headers say which, the config's lists need
not be believed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from shared.models.compressed_tensors import read_compressed_tensors
from shared.models.errors import ModelUnavailable
from shared.models.folder import text_config
from shared.models.stored import (
    FLOATS_8,
    PLAIN,
    QuantizedTensor,
    StoredFormat,
    Weight,
    check_field,
    stored_settings,
    unfit,
)
from shared.models.tensors import TensorEntry

DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MXFP4_GROUP: Final = 32
MXFP4_BLOCK_BYTES: Final = MXFP4_GROUP // 2
MXFP4_RANK: Final = 4
"""``[experts, out, groups, 16]``"""
_FP8_SCALES: Final = frozenset({"F32", "BF16", "F16", "F8_E8M0", "U8"})
_BYTES: Final = FLOATS_8 | {"I8", "U8"}
"""Of numbers with few bits, whatever they stand for."""
_DEFAULT_BLOCK: Final = (128, 128)


@dataclass(frozen=True, slots=True)
class Fp8:
    """A matrix in float8 with a scale for each block.

    Args:
        dtype: See `StoredFormat`.
        block: Rows and columns of a block; None where a whole matrix has one scale.
    """

    dtype: str | None
    block: tuple[int, int] | None

    def group(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """A matrix and its scales; those of activations, which are not quantized here, are left out."""
        known = set(names)
        left_out = {f"{name}_scale_inv" for name in known} | {n for n in known if n.endswith("activation_scale")}
        return {name: (name, *({f"{name}_scale_inv"} & known)) for name in names if name not in left_out}

    def join(self, name: str, parts: tuple[TensorEntry, ...]) -> Weight:
        """A matrix of float8 with its scales, or what is stored plain."""
        codes, scales = parts[0], parts[1] if len(parts) > 1 else None
        if codes.dtype != "F8_E4M3":
            is_matrix_of_bytes = len(codes.shape) > 1 and codes.dtype in _BYTES
            if scales is not None or is_matrix_of_bytes:
                raise unfit(name, f"is stored as {codes.dtype}, where fp8 has F8_E4M3")
            return codes
        if scales is None:
            raise unfit(f"{name}_scale_inv", f"is missing: {name!r} is stored as F8_E4M3")
        if len(codes.shape) < len(_DEFAULT_BLOCK):
            raise unfit(name, f"is stored as F8_E4M3 and is no matrix: its shape is {list(codes.shape)}")
        *lead, rows, columns = codes.shape
        block = self.block or (rows, columns)
        expected = (*lead, ceil(rows / block[0]), ceil(columns / block[1]))
        is_single = self.block is None and not lead and scales.num_elements == 1
        if scales.dtype not in _FP8_SCALES or not (is_single or scales.shape == expected):
            have, blocks = f"{scales.dtype} {list(scales.shape)}", f"blocks of {block[0]} x {block[1]}"
            raise unfit(scales.name, f"is {have}, where {name!r} {list(codes.shape)} has {list(expected)} {blocks}")
        return QuantizedTensor(name, codes.shape, codes, scales, "scaled", block)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts with 4 bits for each weight, and a power of two for each 32.

    Args:
        dtype: See `StoredFormat`.
    """

    dtype: str | None

    def group(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Blocks and scales under the name of what both are made from."""
        groups: dict[str, tuple[str, ...]] = {}
        for name in names:
            weight = name.removesuffix("_blocks").removesuffix("_scales")
            groups[weight] = (*groups.get(weight, ()), name)
        return groups

    def join(self, name: str, parts: tuple[TensorEntry, ...]) -> Weight:
        """Stored ``[experts, out, groups, 16]``, computed with as ``[experts, in, out]``."""
        by_name = {part.name: part for part in parts}
        if name in by_name and len(parts) == 1:
            return PLAIN.join(name, parts)
        for needed in (f"{name}_blocks", f"{name}_scales"):
            if needed not in by_name:
                raise unfit(needed, f"is missing: there is {parts[0].name!r}")
        codes, scales = by_name[f"{name}_blocks"], by_name[f"{name}_scales"]
        is_packed = codes.dtype == "U8" and len(codes.shape) == MXFP4_RANK and codes.shape[-1] == MXFP4_BLOCK_BYTES
        if not is_packed:
            have = f"{codes.dtype} {list(codes.shape)}"
            raise unfit(codes.name, f"is {have}, where mxfp4 has U8 [experts, out, groups, {MXFP4_BLOCK_BYTES}]")
        if scales.dtype != "U8" or scales.shape != codes.shape[:-1]:
            have, expected = f"{scales.dtype} {list(scales.shape)}", list(codes.shape[:-1])
            raise unfit(scales.name, f"is {have}, where {codes.name!r} has U8 {expected}")
        experts, out, groups, _ = codes.shape
        shape = (experts, groups * MXFP4_GROUP, out)
        return QuantizedTensor(name, shape, codes, scales, "mxfp4", (1, MXFP4_GROUP))


def read_stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """How the checkpoint beside a config.json stores its weights.

    Args:
        config: The file's content.

    Raises:
        ModelUnavailable: `model_unsupported` for a format that is not loaded, naming it and what to take instead.
    """
    settings = stored_settings(config)
    if settings is None:
        return PLAIN
    method, dtype = settings.get("quant_method"), _float_type(config)
    if method == "fp8":
        return _read_fp8(settings, dtype)
    if method == "mxfp4":
        return Mxfp4(dtype)
    if method == "compressed-tensors":
        return read_compressed_tensors(settings, dtype)
    raise ModelUnavailable(
        "model_unsupported",
        f"the checkpoint is stored quantized ({method or 'an unnamed method'}), which is not loaded, whatever packages "
        "there are: take one that is stored as fp8, mxfp4 or compressed-tensors, or the one it was made from, and give "
        "--quantize int8 or int4 to hold that in fewer bits",
        quant_method=str(method),
    )


def _read_fp8(settings: Mapping[str, Any], dtype: str | None) -> Fp8:
    allowed = {"activation_scheme": ("dynamic", "static"), "scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)}
    for field, values in allowed.items():
        if settings.get(field) is not None:
            check_field(field, settings[field], values)
    block = settings.get("weight_block_size", _DEFAULT_BLOCK)
    if block is None:
        return Fp8(dtype, None)
    if isinstance(block, list | tuple) and [type(side) for side in block] == [int, int] and min(block) > 0:
        return Fp8(dtype, (block[0], block[1]))
    message = f"weight_block_size in config.json must be two positive numbers, or null, got {block!r}"
    raise ModelUnavailable("model_unsupported", message, field="weight_block_size")


def _float_type(config: Mapping[str, Any]) -> str | None:
    """The element type that a config names for what is computed with; its text part's, where that has one."""
    named = (part.get(key) for part in (text_config(dict(config)), config) for key in ("dtype", "torch_dtype"))
    return next((DTYPES[name] for name in named if isinstance(name, str) and name in DTYPES), None)
