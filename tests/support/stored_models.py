"""Tiny models whose checkpoints are stored quantized, as the hub has them: made from plain ones by rounding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.architectures import tiny_config
from tests.support.parity_case import build_whole

FP8_MAX = 448.0
FLOATS_4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
FILE = "model.safetensors"
STORED = {"qwen3": "fp8", "qwen3_moe": "fp8", "gpt_oss": "mxfp4"}
"""By model type: how its checkpoint is stored; experts one by one in the second, as one tensor in the third."""
BLOCK = (8, 4)
"""Divides every matrix of the tiny models."""
COMPRESSED_GROUP = 8


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    scheme = {"dynamic": False, "symmetric": True, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


COMPRESSED = {
    "float-quantized": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "int-quantized": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "pack-quantized": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=COMPRESSED_GROUP
    ),
}
"""`quantization_config` by the format's name."""


def build_stored(model_type: str, folder: Path, *, block: tuple[int, int] | None = BLOCK, **settings: Any) -> Path:
    """Write a tiny model that is stored as `STORED` says, and computed in bfloat16 unless asked otherwise.

    Args:
        model_type: A key of `STORED`.
        folder: Where to.
        block: Of fp8.
        settings: More fields of `quantization_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(model_type)
    if model_type == "gpt_oss":
        config.intermediate_size = 2 * GROUP
    config.save_pretrained(folder)
    build_whole(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        if STORED[model_type] == "fp8" and name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor, block or tuple(tensor.shape))
        elif STORED[model_type] == "mxfp4" and name.endswith("_proj") and "experts" in name:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_tensors(folder, tensors)
    fields = {"weight_block_size": block, "activation_scheme": "dynamic"} if STORED[model_type] == "fp8" else {}
    described = {"quant_method": STORED[model_type], "modules_to_not_convert": ["lm_head"], **fields, **settings}
    edit_config(folder, dtype="bfloat16", quantization_config=described)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def build_compressed(kind: str, folder: Path, plain: Path, *, scale_dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a tiny model as compressed-tensors does, and the plain one, in float32, that it stands for.

    Args:
        kind: A key of `COMPRESSED`.
        folder: Of the quantized one.
        plain: Of the other.
        scale_dtype: Of scales.
    """
    folder.mkdir(parents=True)
    tiny_config("qwen3").save_pretrained(folder)
    build_whole(folder)
    tensors, floats = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / FILE).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.to(torch.bfloat16)
            floats[name] = tensors[name].to(torch.float32)
            continue
        groups = tensor.unflatten(1, (-1, COMPRESSED_GROUP if kind == "pack-quantized" else tensor.shape[1]))
        largest = {"float-quantized": FP8_MAX, "int-quantized": 127, "pack-quantized": 7}[kind]
        scales = (groups.abs().amax(-1) / largest).to(scale_dtype)
        codes = (groups / scales.unsqueeze(-1)).clamp(-largest, largest)
        codes = codes.to(torch.float8_e4m3fn) if kind == "float-quantized" else codes.round().to(torch.int8)
        floats[name] = (codes.to(torch.float32) * scales.unsqueeze(-1).to(torch.float32)).flatten(1)
        codes, tensors[f"{name}_scale"] = codes.flatten(1), scales
        if kind == "pack-quantized":
            halves = codes.to(torch.uint8) + 8
            tensors[f"{name}_packed"] = (halves[:, 0::2] % 16 + halves[:, 1::2] * 16).view(torch.int32)
            tensors[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            tensors[name] = codes
    save_tensors(folder, tensors)
    edit_config(folder, dtype="bfloat16", quantization_config=COMPRESSED[kind])
    plain.mkdir()
    save_tensors(plain, floats)
    (plain / "config.json").write_text((folder / "config.json").read_text())
    edit_config(plain, dtype="float32", quantization_config=None)
    return folder


def build_dequantized(stored: Path, folder: Path, block: tuple[int, int]) -> Path:
    """The plain checkpoint that an fp8 one stands for, element by element, in float32.

    Args:
        stored: The quantized one.
        folder: Where to.
        block: Of the quantized one.
    """
    folder.mkdir()
    tensors = load_file(stored / FILE)
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        plain[name] = tensor.to(torch.float32)
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            rows, columns = (torch.arange(size) // side for size, side in zip(tensor.shape, block, strict=True))
            plain[name] *= scales[rows][:, columns]
    save_tensors(folder, plain)
    (folder / "config.json").write_text((stored / "config.json").read_text())
    edit_config(folder, dtype="float32", quantization_config=None)
    return folder


def to_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, and the scale of each of its blocks; those at the edges may be smaller."""
    grid = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    scales, codes = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid[0]):
        for column in range(grid[1]):
            rows = slice(row * block[0], (row + 1) * block[0])
            columns = slice(column * block[1], (column + 1) * block[1])
            scales[row, column] = weight[rows, columns].abs().max() / FP8_MAX
            codes[rows, columns] = (weight[rows, columns] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts ``[experts, in, out]`` as blocks ``[experts, out, groups, 16]`` and scales ``[experts, out, groups]``."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    nearest = (groups.abs() / exponents.exp2()).unsqueeze(-1).sub(torch.tensor(FLOATS_4)).abs().argmin(-1)
    codes = nearest + 8 * (groups < 0)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a checkpoint."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    """Replace fields of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
