"""A short name for exactly one set of weights, config and tokenizer, the same on every machine.

Two machines must never serve one route with different models of the same shape. Hashing all weights
would take minutes, and a node may have but a part of them, so the fingerprint covers:

- `config.json`, its keys sorted, without what only says who wrote it or where;
- `tokenizer.json`, byte for byte;
- every tensor's name, element type and shape, from the safetensors headers, whatever the files are called;
- a few bytes from the middle of matrices all over the model, which a fine-tune changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shared.models.errors import ModelUnavailable
from shared.models.folder import INDEX_FILE, check_folder, weight_files
from shared.models.partial_file import missing_spans
from shared.models.spans import Span
from shared.models.tensors import LENGTH_BYTES, TensorEntry, header_bytes, parse_header, parse_index

FINGERPRINT_CHARS: Final = 16
SAMPLED_TENSORS_MAX: Final = 64
"""Each may be a request to another machine. Chosen as if at random: a fine-tune of every twelfth matrix goes unseen
once in 250 times, one of every fourth once in a hundred million."""
SAMPLE_BYTES: Final = 256
_INCIDENTAL_KEYS: Final = frozenset({"_name_or_path", "transformers_version", "architectures", "auto_map"})


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits for the model in this folder.

    Raises:
        ModelUnavailable: `not_a_model`, if a file is missing; `weights_corrupt`, if one is no safetensors file.
    """
    check_folder(folder)
    digest = hashlib.sha256()
    digest.update(_canonical_config(folder / "config.json"))
    digest.update(hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest())
    tensors = sorted(stored_tensors(folder), key=lambda tensor: tensor.name)
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    for sample in _samples(folder, tensors):
        digest.update(sample)
    return digest.hexdigest()[:FINGERPRINT_CHARS]


def stored_tensors(folder: Path) -> Iterator[TensorEntry]:
    """Every tensor of the folder's safetensors files, from their headers.

    Raises:
        ModelUnavailable: `weights_corrupt`, if a file is damaged, or lacks what the index says it has.
    """
    index = folder / INDEX_FILE
    promised = parse_index(index.read_text(encoding="utf-8")) if index.is_file() else {}
    for path in weight_files(folder):
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = header_bytes(stream.read(LENGTH_BYTES), path.name, size)
            entries = parse_header(stream.read(length), path.name, size)
        check_promised(promised, path.name, entries)
        yield from entries


def check_promised(weight_map: Mapping[str, str], file: str, entries: Iterable[TensorEntry]) -> None:
    """Whether a file has every tensor that the index puts there.

    Raises:
        ModelUnavailable: `weights_corrupt`, naming one that it lacks.
    """
    lacking = {name for name, where in weight_map.items() if where == file} - {entry.name for entry in entries}
    if lacking:
        message = f"{file} has no tensor {min(lacking)!r}, which the index puts there"
        raise ModelUnavailable("weights_corrupt", message, file=file)


def sample_spans(tensors: Iterable[TensorEntry]) -> dict[str, list[Span]]:
    """What of each file the fingerprint reads beside its header."""
    spans: dict[str, list[Span]] = {}
    for tensor in _sampled(tensors):
        spans.setdefault(tensor.file, []).append(_sample_span(tensor))
    return spans


def _sampled(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """At most `SAMPLED_TENSORS_MAX` tensors, matrices if there are any, in the order of their names' hashes."""
    by_hash = sorted(tensors, key=lambda tensor: hashlib.sha256(tensor.name.encode()).digest())
    matrices = [tensor for tensor in by_hash if len(tensor.shape) > 1]
    return (matrices or by_hash)[:SAMPLED_TENSORS_MAX]


def _sample_span(tensor: TensorEntry) -> Span:
    middle = (tensor.offset + tensor.end) // 2
    return Span(middle, min(middle + SAMPLE_BYTES, tensor.end))


def _samples(folder: Path, tensors: Sequence[TensorEntry]) -> Iterator[bytes]:
    """The sampled bytes.

    Raises:
        ModelUnavailable: `not_a_model`, if they have not been fetched.
    """
    for file, spans in sample_spans(tensors).items():
        if missing_spans(folder / file, spans):
            raise ModelUnavailable("not_a_model", f"{folder} has too little of {file} to tell which model it is")
    for tensor in _sampled(tensors):
        span = _sample_span(tensor)
        with (folder / tensor.file).open("rb") as stream:
            stream.seek(span.start)
            yield stream.read(span.nbytes)


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
