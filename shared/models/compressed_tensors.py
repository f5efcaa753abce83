"""Checkpoints of the library compressed-tensors (llm-compressor's), as far as they are numbers times a scale. Pure.

Numbers of 8 bits, floats or integers, are stored under the weight's own name; of 4 bits eight to an int32, the first in
its lowest bits, as `…_packed`. `…_scale` has one for each row, each group of a row's inputs, each block, or for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from shared.models.stored import (
    Encoding,
    QuantizedTensor,
    Weight,
    check_field,
    require_plain,
    unfit,
)
from shared.models.tensors import FLOATS, TensorEntry

FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
PACKED_ITEMS: Final = 8
"""Numbers of 4 bits in an int32."""
_CODES: Final = frozenset({"F8_E4M3", "I8"})
_PARTS: Final = ("", "_packed", "_scale", "_zero_point", "_g_idx")
_UNREAD: Final = ("_zero_point", "_g_idx")
_LEFT_OUT: Final = frozenset(
    {"weight_shape", "k_scale", "v_scale"}
    | {f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point", "global_scale")}
)
"""The shape of packed weights, known without, and scales of activations and caches, which are not quantized here."""
_MATRIX: Final = 2


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Numbers of 8 or 4 bits with their scales.

    Args:
        dtype: See `StoredFormat`.
        block: Rows and columns that share a scale, where a config group says so.
    """

    dtype: str | None
    block: tuple[int, int] | None = None

    def group(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """What is stored of each ``….weight``, under that name."""
        groups: dict[str, tuple[str, ...]] = {}
        for name in names:
            module, _, last = name.rpartition(".")
            if last in _LEFT_OUT:
                continue
            is_part = last.startswith("weight") and last.removeprefix("weight") in _PARTS
            weight = f"{module}.weight" if is_part else name
            groups[weight] = (*groups.get(weight, ()), name)
        return groups

    def join(self, name: str, parts: tuple[TensorEntry, ...]) -> Weight:
        """A matrix with its scales, or what is stored plain."""
        found = {part.name.removeprefix(name): part for part in parts}
        for unread in _UNREAD:
            if unread in found:
                raise unfit(f"{name}{unread}", "is there: only weights whose zero is 0, in their own order, are loaded")
        codes, scales = found.get("") or found.get("_packed"), found.get("_scale")
        if codes is None:
            raise unfit(name, f"is missing: there is {parts[0].name!r}")
        is_packed = codes.dtype == "I32" and "_packed" in found
        if scales is None:
            if is_packed or codes.dtype in _CODES:
                raise unfit(f"{name}_scale", f"is missing: {codes.name!r} is stored as {codes.dtype}")
            return require_plain(codes)
        if not (is_packed or codes.dtype in _CODES) or len(codes.shape) != _MATRIX:
            have = f"{codes.dtype} {list(codes.shape)}"
            raise unfit(
                codes.name, f"is {have} beside scales, where a matrix of F8_E4M3, I8 or packed I32 was expected"
            )
        rows, columns = codes.shape[0], codes.shape[1] * (PACKED_ITEMS if is_packed else 1)
        block = self._block_of(scales, rows, columns)
        if block is None or scales.dtype not in FLOATS:
            have = f"{scales.dtype} {list(scales.shape)}"
            raise unfit(scales.name, f"is {have}, which does not fit {name!r} of {rows} x {columns}")
        encoding: Encoding = "int4" if is_packed else "scaled"
        return QuantizedTensor(name, (rows, columns), codes, scales, encoding, block)

    def _block_of(self, scales: TensorEntry, rows: int, columns: int) -> tuple[int, int] | None:
        """Rows and columns of a scale, from how many there are; None where they do not divide the matrix."""
        if scales.num_elements == 1:
            return rows, columns
        if self.block and scales.shape == (ceil(rows / self.block[0]), ceil(columns / self.block[1])):
            return self.block
        if len(scales.shape) == _MATRIX and scales.shape[0] == rows and scales.shape[1] > 0:
            return None if columns % scales.shape[1] else (1, columns // scales.shape[1])
        return None


def read_compressed_tensors(settings: Mapping[str, Any], dtype: str | None) -> CompressedTensors:
    """The format that `quantization_config` describes.

    Args:
        settings: Its fields.
        dtype: See `StoredFormat`.

    Raises:
        ModelUnavailable: `model_unsupported`, naming the field that is not read and its values that are.
    """
    check_field("format", settings.get("format"), (*FORMATS, "mixed-precision"))
    check_field("quantization_status", settings.get("quantization_status", "compressed"), ("compressed", "frozen"))
    sparsity = settings.get("sparsity_config") or {}
    check_field("sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    check_field("transform_config", settings.get("transform_config") or None, (None,))
    block = None
    for where, stored_as, weights in _weight_schemes(settings):
        check_field(f"{where}.symmetric", weights.get("symmetric", True), (True,))
        check_field(f"{where}.num_bits", weights.get("num_bits"), (4,) if stored_as == "pack-quantized" else (8,))
        structure = weights.get("block_structure")
        if isinstance(structure, list) and [type(side) for side in structure] == [int, int] and min(structure) > 0:
            block = (structure[0], structure[1])
    return CompressedTensors(dtype, block)


def _weight_schemes(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Path of each group's weights in the config, the format they are stored in, and what else is said of them."""
    groups = settings.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            stored_as = group.get("format") or settings["format"]
            check_field(f"config_groups.{name}.format", stored_as, FORMATS)
            yield f"config_groups.{name}.weights", stored_as, group["weights"]
