"""A short name for exactly one set of weights, config and tokenizer, the same on every machine.

Two machines must never serve one route with different models of the same shape. Hashing all weights
would take minutes, so the fingerprint covers:

- `config.json`, its keys sorted, without what only says who wrote it or where;
- `tokenizer.json`, byte for byte;
- every tensor's name, element type and shape, from the safetensors headers, whatever the files are called;
- a few bytes from the middle of tensors all over the model, which a fine-tune changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.models.errors import ModelUnavailable
from shared.models.folder import check_folder, weight_files

FINGERPRINT_CHARS: Final = 16
SAMPLED_TENSORS_MAX: Final = 512
"""Enough to meet every layer of any model, few enough for a disk that seeks."""
SAMPLE_BYTES: Final = 64
HEADER_BYTES_MAX: Final = 100 * 1024 * 1024
"""The limit of the safetensors format itself."""
_INCIDENTAL_KEYS: Final = frozenset({"_name_or_path", "transformers_version", "architectures", "auto_map"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits for the model in this folder.

    Raises:
        ModelUnavailable: `not_a_model`, if a file is missing or is no safetensors file.
    """
    check_folder(folder)
    digest = hashlib.sha256()
    digest.update(_canonical_config(folder / "config.json"))
    digest.update(hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest())
    tensors = sorted(stored_tensors(folder), key=lambda tensor: tensor.name)
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    for sample in _samples(tensors):
        digest.update(sample)
    return digest.hexdigest()[:FINGERPRINT_CHARS]


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Every tensor of the folder's safetensors files, from their headers."""
    for path in weight_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(HEADER_BYTES_MAX, size):
                raise _not_safetensors(path)
            header = _parse_header(path, file.read(header_bytes))
        data_start = 8 + header_bytes
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                start, end = (data_start + int(offset) for offset in entry["data_offsets"])
                tensor = StoredTensor(name, str(entry["dtype"]), tuple(entry["shape"]), path, start, end)
            except (KeyError, TypeError, ValueError) as error:
                raise _not_safetensors(path) from error
            if not data_start <= start <= end <= size:
                raise ModelUnavailable("not_a_model", f"{path} is cut short at tensor {name}", path=str(path))
            yield tensor


def _samples(tensors: list[StoredTensor]) -> Iterator[bytes]:
    """Bytes from the middle of at most `SAMPLED_TENSORS_MAX` tensors, evenly spread over their sorted names."""
    stride = max(1, -(-len(tensors) // SAMPLED_TENSORS_MAX))
    handles: dict[Path, int] = {}
    try:
        for tensor in tensors[::stride]:
            if tensor.file not in handles:
                handles[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            middle = (tensor.start + tensor.end) // 2
            yield os.pread(handles[tensor.file], min(SAMPLE_BYTES, tensor.end - middle), middle)
    finally:
        for handle in handles.values():
            os.close(handle)


def _canonical_config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnavailable("not_a_model", f"{path} is no JSON: {error}", path=str(path)) from error
    return json.dumps(_without_incidentals(config), sort_keys=True, separators=(",", ":")).encode()


def _without_incidentals(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_incidentals(item) for key, item in value.items() if key not in _INCIDENTAL_KEYS}


def _parse_header(path: Path, encoded: bytes) -> dict[str, Any]:
    try:
        header = json.loads(encoded)
    except ValueError as error:
        raise _not_safetensors(path) from error
    if not isinstance(header, dict):
        raise _not_safetensors(path)
    return header


def _not_safetensors(path: Path) -> ModelUnavailable:
    return ModelUnavailable("not_a_model", f"{path} is no safetensors file", path=str(path))
