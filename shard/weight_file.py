"""Reading a checkpoint's tensors from disk: only those asked for, each once, into memory of its own.

Bytes are read with `pread` rather than mapped: a mapped file that is truncated under a running node
kills it, mapped pages stay resident while a conversion fills its own memory, and the page cache
gives no huge pages. A tensor of the wanted element type is read straight into its final place; another
type passes through a small buffer.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shard.weight_map import group_by_file
from shared.errors import LoadFailed
from shared.models.errors import ModelUnavailable
from shared.models.folder import INDEX_FILE, PICKLE_ADVICE, SINGLE_FILE
from shared.models.partial_file import missing_spans
from shared.models.spans import Span, total_bytes
from shared.models.tensors import FLOATS, LENGTH_BYTES, TensorEntry, header_bytes, parse_header, parse_index

BUFFER_BYTES = 4 * 1024 * 1024
"""How much is read before it is converted, and between two reports of progress."""
HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""Tensors of at least this size get huge pages where the system has them: fewer TLB misses while weights stream."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def list_tensors(folder: Path) -> dict[str, str]:
    """Tensor name → file name of a checkpoint, from its index or its single file's header.

    Raises:
        LoadFailed: `weights_missing` when the folder has no safetensors; `weights_corrupt`.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        with as_load_failed():
            return parse_index(index.read_text(encoding="utf-8"))
    if (folder / SINGLE_FILE).is_file():
        return {entry.name: SINGLE_FILE for entry in read_header(folder, SINGLE_FILE)}
    advice = f"; {PICKLE_ADVICE}" if any(folder.glob("pytorch_model*.bin")) else ""
    raise LoadFailed("weights_missing", f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}{advice}", path=str(folder))


def locate(folder: Path, names: Iterable[str], files: dict[str, str]) -> list[TensorEntry]:
    """Find the named tensors in the files that hold them; no other file is opened.

    Raises:
        LoadFailed: `weights_missing` for a file or tensor that is not there; `weights_corrupt`.
    """
    found = []
    for file, wanted in group_by_file(names, files).items():
        entries = {entry.name: entry for entry in read_header(folder, file)}
        for name in wanted:
            if name not in entries:
                raise LoadFailed("weights_missing", f"{file} has no tensor {name!r}, which the index puts there")
            found.append(entries[name])
    return found


def read_header(folder: Path, file: str) -> list[TensorEntry]:
    """Read and check one file's header.

    Raises:
        LoadFailed: `weights_missing` when it cannot be opened, `weights_corrupt` when it is damaged.
    """
    try:
        with as_load_failed(), (folder / file).open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = header_bytes(stream.read(LENGTH_BYTES), file, file_bytes)
            return parse_header(stream.read(length), file, file_bytes)
    except OSError as error:
        raise LoadFailed("weights_missing", f"cannot read {folder / file}: {error.strerror}", file=file) from error


def require_present(folder: Path, entries: Iterable[TensorEntry]) -> None:
    """Make sure that the tensors' bytes are there, in files of which only parts may have been fetched.

    Raises:
        LoadFailed: `weights_missing`, naming the file.
    """
    spans: dict[str, list[Span]] = {}
    for entry in entries:
        spans.setdefault(entry.file, []).append(Span(entry.offset, entry.end))
    for file, wanted in spans.items():
        if missing := missing_spans(folder / file, wanted):
            lacking = total_bytes(missing)
            message = f"only parts of {file} are here, and {lacking:,} bytes of this range are not among them"
            raise LoadFailed("weights_missing", message, file=file)


@contextmanager
def as_load_failed() -> Iterator[None]:
    """What is wrong with a model's files is why it cannot be loaded."""
    try:
        yield
    except ModelUnavailable as error:
        raise LoadFailed(error.code, error.message, **error.fields) from error


class WeightReader:
    """Reads tensors of a checkpoint into memory; a context manager that holds the files open.

    Safe to use from several threads at once.

    Args:
        folder: Where the checkpoint's files are.
        entries: The tensors that will be read, for the total of the progress.
        progress: Called with (bytes read, bytes in all), never concurrently.
    """

    def __init__(
        self, folder: Path, entries: Iterable[TensorEntry], progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._total_bytes = sum(entry.nbytes for entry in entries)
        self._done_bytes = 0
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self.failure: LoadFailed | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, entry: TensorEntry, dtype: torch.dtype | None) -> torch.Tensor:
        """Read one tensor, converted to `dtype` if it is a float of another type.

        Raises:
            LoadFailed: `weights_corrupt` when the file ends early; also kept as `failure`.
        """
        try:
            if not entry.num_elements:
                return torch.empty(entry.shape, dtype=dtype or TORCH_DTYPES[entry.dtype])
            stored = TORCH_DTYPES[entry.dtype]
            if dtype in (None, stored) or entry.dtype not in FLOATS:
                return self._read_as_stored(entry, stored)
            return self._read_converted(entry, stored, dtype)
        except LoadFailed as failure:
            self.failure = failure
            raise

    def read_part(self, entry: TensorEntry, start: int, count: int) -> torch.Tensor:
        """Read so many of a tensor's bytes from one on, as they are.

        Raises:
            LoadFailed: `weights_corrupt` when the file ends early; also kept as `failure`.
        """
        part = bytearray(count)
        try:
            self._fill(entry, memoryview(part), start)
        except LoadFailed as failure:
            self.failure = failure
            raise
        return torch.frombuffer(part, dtype=torch.uint8)

    def _read_as_stored(self, entry: TensorEntry, stored: torch.dtype) -> torch.Tensor:
        memory = _allocate(entry.nbytes)
        for start in range(0, entry.nbytes, BUFFER_BYTES):
            self._fill(entry, memory[start : start + BUFFER_BYTES], start)
        return torch.frombuffer(memory, dtype=stored).view(entry.shape)

    def _read_converted(self, entry: TensorEntry, stored: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        tensor = allocate_tensor((entry.num_elements,), dtype)
        buffer = memoryview(bytearray(min(BUFFER_BYTES, entry.nbytes)))
        for start in range(0, entry.nbytes, BUFFER_BYTES):
            part = buffer[: min(BUFFER_BYTES, entry.nbytes - start)]
            self._fill(entry, part, start)
            first = start // stored.itemsize
            tensor[first : first + part.nbytes // stored.itemsize] = torch.frombuffer(part, dtype=stored)
        return tensor.view(entry.shape)

    def _fill(self, entry: TensorEntry, part: memoryview, start: int) -> None:
        """Read the tensor's bytes from `start` on until `part` is full."""
        descriptor = self._open(entry.file)
        done = 0
        while done < part.nbytes:
            count = os.preadv(descriptor, [part[done:]], entry.offset + start + done)
            if not count:
                message = f"{entry.file} ends in the middle of tensor {entry.name!r}"
                raise LoadFailed("weights_corrupt", message, file=entry.file, tensor=entry.name)
            done += count
        self._report(part.nbytes)

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(self._folder / file, os.O_RDONLY)
                except OSError as error:
                    raise LoadFailed("weights_missing", f"cannot read {file}: {error.strerror}", file=file) from error
            return self._files[file]

    def _report(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            if self._progress:
                self._progress(self._done_bytes, self._total_bytes)


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory of their own, given back to the system as soon as the tensor goes."""
    count = math.prod(shape)
    return torch.frombuffer(_allocate(count * dtype.itemsize), dtype=dtype).view(shape)


def _allocate(size: int) -> memoryview:
    """Fresh zeroed memory, page-aligned, given back to the system as soon as the last view of it goes."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
