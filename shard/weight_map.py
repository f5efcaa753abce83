"""Which tensors of a checkpoint belong to a layer range: safetensors headers and names, without reading weights.

A safetensors file is ``[8 bytes: header length N, little-endian][N bytes: JSON][tensor bytes]``. The JSON
maps a name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the end of the
header (https://github.com/huggingface/safetensors#format). A checkpoint of several files has an index
whose `weight_map` says which file holds which tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from shared.errors import LoadFailed
from shared.layers import LayerRange

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""

ITEM_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element of the format's element types."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types that may be converted to the one a stage computes in."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes are: `offset` counts from the start of `file`."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """How a model names the parts that decide which tensors a range needs.

    Args:
        layer_list: Dotted path of the list of decoder layers, for example ``model.layers``.
        num_layers: Decoder layers of the whole model.
        embedding: Dotted name of the input embedding's weight.
        head: Dotted name of the output head's weight.
        tied: The head computes with the embedding's weight.
        ties: Parameter → the one whose tensor it shares; head and embedding may be among them.
        embeds_everywhere: Every range needs the embedding, not only the first.
    """

    layer_list: str
    num_layers: int
    embedding: str
    head: str
    tied: bool
    ties: Mapping[str, str] = field(default_factory=dict)
    embeds_everywhere: bool = False

    @property
    def embedding_module(self) -> str:
        """Dotted path of the input embedding."""
        return self.embedding.removesuffix(".weight")

    @property
    def head_module(self) -> str:
        """Dotted path of the output head."""
        return self.head.removesuffix(".weight")

    def is_last(self, layers: LayerRange) -> bool:
        """Whether a range ends with the model's last layer."""
        return layers.end == self.num_layers

    def embeds(self, layers: LayerRange) -> bool:
        """Whether a range has the input embedding."""
        return layers.start == 0 or self.embeds_everywhere

    def holds(self, parameter: str, layers: LayerRange) -> bool:
        """Whether a range has this parameter of the model."""
        if parameter.startswith(f"{self.head_module}."):
            return self.is_last(layers)
        if parameter.startswith(f"{self.embedding_module}."):
            return self.embeds(layers)
        return not parameter.startswith(f"{self.layer_list}.") or layer_index(parameter, self.layer_list) in layers

    def ties_within(self, layers: LayerRange) -> dict[str, str]:
        """`ties` among the parameters that a range has, whether or not it has the one that all share with."""
        ties: dict[str, str] = {}
        for group in self.tied_groups():
            held = [parameter for parameter in group if self.holds(parameter, layers)]
            ties.update((parameter, held[0]) for parameter in held[1:])
        return ties

    def tied_as_stored(self, names: Iterable[str]) -> ModelOutline:
        """Head and embedding are tied exactly if the checkpoint has no tensor for the head."""
        tied = not any(_same_parameter(name, self.head) for name in names)
        others = {parameter: source for parameter, source in self.ties.items() if parameter != self.head}
        return replace(self, tied=tied, ties=others | ({self.head: self.embedding} if tied else {}))

    def tied_groups(self) -> list[list[str]]:
        """Parameters that share one tensor, the one that all share with first."""
        groups: dict[str, list[str]] = {}
        for parameter, source in self.ties.items():
            groups.setdefault(source, [source]).append(parameter)
        return list(groups.values())


def parse_index(text: str) -> dict[str, str]:
    """Read an index: tensor name → file name.

    Raises:
        LoadFailed: `weights_corrupt` when it is no index, or names a file outside its own folder.
    """
    try:
        files = json.loads(text)["weight_map"]
    except (ValueError, TypeError, KeyError) as error:
        raise LoadFailed("weights_corrupt", "the safetensors index is not a JSON object with a weight_map") from error
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise LoadFailed("weights_corrupt", "the index's weight_map must map tensor names to file names")
    for file in files.values():
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise LoadFailed("weights_corrupt", f"the index names {file!r}, which is no file beside it", file=file)
    return files


def header_bytes(prefix: bytes, file: str, file_bytes: int) -> int:
    """The header's length, from the file's first eight bytes.

    Raises:
        LoadFailed: `weights_corrupt` when the file cannot hold such a header.
    """
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES or not 2 <= length <= min(HEADER_BYTES_MAX, file_bytes - LENGTH_BYTES):
        raise _corrupt(file, f"is {file_bytes} bytes long and announces a header of {length} bytes")
    return length


def parse_header(header: bytes, file: str, file_bytes: int) -> list[TensorEntry]:
    """Read a file's header and check every tensor against the file's length.

    Raises:
        LoadFailed: `weights_corrupt`, naming the file and tensor: malformed, or truncated.
    """
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise _corrupt(file, "has a header that is not JSON") from error
    if not isinstance(fields, dict):
        raise _corrupt(file, "has a header that is not a JSON object")
    fields.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(header)
    return [_parse_entry(name, value, file, data_start, file_bytes) for name, value in fields.items()]


def _parse_entry(name: str, value: object, file: str, data_start: int, file_bytes: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise _corrupt(file, f"describes tensor {name!r} by something that is not an object")
    dtype, shape, offsets = (
        value.get("dtype"),
        _read_counts(value.get("shape")),
        _read_counts(value.get("data_offsets")),
    )
    if dtype not in ITEM_BYTES:
        raise _corrupt(file, f"holds tensor {name!r} of unknown type {dtype!r}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise _corrupt(file, f"has no valid shape and offsets for tensor {name!r}")
    entry = TensorEntry(name, file, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise _corrupt(file, f"gives tensor {name!r} {offsets[1] - offsets[0]} bytes, its shape takes {entry.nbytes}")
    if data_start + offsets[1] > file_bytes:
        raise _corrupt(file, f"is truncated: tensor {name!r} ends at {data_start + offsets[1]} of {file_bytes} bytes")
    return entry


def layer_index(name: str, layer_list: str) -> int | None:
    """Which decoder layer a tensor belongs to; None for embeddings, norms and heads.

    The number that follows the last name of the list's path for the first time: a checkpoint may have another
    prefix than the model, and experts and the like have their own numbers further right.
    """
    list_name = layer_list.rpartition(".")[2]
    for part, following in pairwise(name.split(".")):
        if part == list_name and following.isdecimal():
            return int(following)
    return None


def select_names(
    names: Collection[str], outline: ModelOutline, layers: LayerRange, *, is_part: bool = False
) -> dict[str, str]:
    """Choose the tensors that a range needs: name in the checkpoint → name to load it as.

    The two names differ where a checkpoint keeps once what the model has twice: of tied parameters, a range loads the
    one that is stored as the one that it has. What belongs to no layer and is neither embedding nor head (final norm,
    learned positions, per-layer embeddings) is small or needed everywhere, and is loaded by every range.

    Args:
        names: Of all tensors in the checkpoint.
        outline: Of the model.
        layers: The range.
        is_part: The checkpoint is of a larger model, of which this one is the text part: its tensors are found by
            where the embedding is, and named as in this model; all others are left out.
    """
    as_model = _names_as_model(names, outline) if is_part else {name: name for name in names}
    root = checkpoint_root(as_model.values(), outline)
    embeddings = [name for name in as_model if _same_parameter(as_model[name], outline.embedding)]
    heads = [name for name in as_model if _same_parameter(as_model[name], outline.head)]
    special = {*embeddings, *heads}
    chosen = {
        name: known
        for name, known in as_model.items()
        if name not in special and _is_in_range(known, root, outline, layers)
    }
    if outline.tied:
        embeddings = heads = embeddings or heads
    if outline.embeds(layers):
        chosen.update((name, outline.embedding) for name in embeddings)
    if outline.is_last(layers) and not (outline.tied and outline.embeds(layers)):
        chosen.update((name, outline.head) for name in heads)
    return chosen | _select_tied(as_model, outline, layers, chosen)


def checkpoint_root(names: Iterable[str], outline: ModelOutline) -> str | None:
    """What stands in the checkpoint before the path that leads to the layers and to the embedding alike.

    For example ``language_model.model.`` where the model has ``model.``; None when it cannot be told.
    """
    common = _common_prefix(outline.layer_list, outline.embedding)
    embedding, layer_list = outline.embedding.removeprefix(common), outline.layer_list.removeprefix(common)
    known = set(names)
    roots = {name.removesuffix(embedding) for name in known if name == embedding or name.endswith(f".{embedding}")}
    having_layers = [root for root in roots if any(name.startswith(f"{root}{layer_list}.0.") for name in known)]
    return min(having_layers, key=lambda root: (root != common, len(root), root), default=None)


def _names_as_model(names: Collection[str], outline: ModelOutline) -> dict[str, str]:
    root = checkpoint_root(names, outline)
    if root is None:
        return {}
    common = _common_prefix(outline.layer_list, outline.embedding)
    as_model = {name: f"{common}{name.removeprefix(root)}" for name in names if name.startswith(root)}
    return as_model | {name: outline.head for name in names if _same_parameter(name, outline.head)}


def _select_tied(
    as_model: Mapping[str, str], outline: ModelOutline, layers: LayerRange, chosen: Collection[str]
) -> dict[str, str]:
    """Of parameters that share one tensor, and are neither embedding nor head: what is stored, as what is held."""
    extra: dict[str, str] = {}
    for group in outline.tied_groups():
        if outline.embedding in group:
            continue
        held = [parameter for parameter in group if outline.holds(parameter, layers)]
        stored = [name for name, known in as_model.items() if any(_same_parameter(known, each) for each in group)]
        if held and stored and not any(name in chosen for name in stored):
            extra[stored[0]] = held[0]
    return extra


def range_bytes(entries: Iterable[TensorEntry], item_bytes: int | None = None) -> int:
    """Bytes of the given tensors, each float taking `item_bytes` if given, else what it takes in the file."""
    return sum(
        entry.num_elements * item_bytes if item_bytes and entry.dtype in FLOATS else entry.nbytes for entry in entries
    )


def majority_float(entries: Iterable[TensorEntry]) -> str | None:
    """The floating element type that most bytes have; None when there is none."""
    by_dtype: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in FLOATS:
            by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    return max(by_dtype, key=lambda dtype: by_dtype[dtype], default=None)


def group_by_file(names: Iterable[str], files: Mapping[str, str]) -> dict[str, list[str]]:
    """File → the tensors wanted of it."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(files[name], []).append(name)
    return grouped


def _is_in_range(name: str, root: str | None, outline: ModelOutline, layers: LayerRange) -> bool:
    """Other parts of a larger model have numbered layers too: only those below the root are decoder layers."""
    below = outline.layer_list.removeprefix(_common_prefix(outline.layer_list, outline.embedding))
    if root is not None and not name.startswith(f"{root}{below}."):
        return True
    layer = layer_index(name, outline.layer_list)
    return layer is None or layer in layers


def _common_prefix(one: str, other: str) -> str:
    """The dotted path that both begin with, with a dot behind it; empty when there is none."""
    common = [
        a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    ]
    return "".join(f"{part}." for part in common)


def _same_parameter(name: str, parameter: str) -> bool:
    """Whether a checkpoint's name means the model's parameter: one may carry a prefix that the other lacks."""
    return name == parameter or name.endswith(f".{parameter}") or parameter.endswith(f".{name}")


def _read_counts(value: object) -> list[int] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return value
    return None


def _corrupt(file: str, what: str) -> LoadFailed:
    return LoadFailed("weights_corrupt", f"{file} {what}", file=file)
