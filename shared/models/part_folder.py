"""A folder of a model of which only parts have been fetched: config, tokenizer and headers first, then byte ranges.

::

    <cache>/parts/<key>/config.json, …           whole
    <cache>/parts/<key>/*.safetensors            with holes
    <cache>/parts/<key>/*.safetensors.pieces     which bytes are there (`shared.models.partial_file`)

Every file of weights has a lock of its own, so two nodes on one machine fetch what both need once, and wait for each
other only there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import sample_spans
from shared.models.folder import INDEX_FILE, SINGLE_FILE
from shared.models.partial_file import (
    PartialWriter,
    Piece,
    discard,
    hash_span,
    missing_spans,
    open_partial,
    read_ledger,
)
from shared.models.progress import Progress, ProgressSink, ignore_progress
from shared.models.range_client import CONNECTIONS_MAX, RangeClient, never
from shared.models.remote import RemoteFile, RemoteModel, hash_mismatch
from shared.models.spans import Span, coalesce, covers, cut, subtract, total_bytes
from shared.models.store import Store, require_space
from shared.models.tensors import LENGTH_BYTES, TensorEntry, header_bytes, parse_header, parse_index
from shared.replace_file import replace_file

PIECE_BYTES: Final = 16 * 1024 * 1024
"""One request: so much is fetched again after a kill, and a gateway hashes so much before it answers."""
HEADER_GUESS_BYTES: Final = 32 * 1024
"""Read of each file at first: the whole header of most, so that it takes one request."""
REPORT_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PartFolder:
    """The folder, and where what it lacks comes from.

    Args:
        path: The folder; made when something is fetched.
        model: The files.
        store: Whose locks are used.
        cancelled: Asked often while something is fetched; once true, that ends with `ModelUnavailable` (`cancelled`).
    """

    path: Path
    model: RemoteModel
    store: Store
    cancelled: Callable[[], bool] = field(default=never)

    @property
    def reference(self) -> str:
        """Names the model exactly, for other machines."""
        return self.model.reference

    def missing_bytes(self, spans: Mapping[str, Sequence[Span]]) -> int:
        """How many of these bytes are not there."""
        return total_bytes(span for name, wanted in spans.items() for span in self._missing(name, wanted))

    def fetch_outline(self, progress: ProgressSink) -> None:
        """Fetch config, tokenizer, headers and what the fingerprint samples: no weights, for those who compute nothing.

        Raises:
            ModelUnavailable: They cannot be had, or are not those of a model.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._client() as client:
            self._fetch_side_files(client)
            names = self._weight_names(client)
            task, entries = f"Reading headers of {self.model.label}", list[TensorEntry]()
            with ThreadPoolExecutor(CONNECTIONS_MAX, "headers") as pool:
                for done, header in enumerate(pool.map(lambda name: self._fetch_header(client, name), names), 1):
                    entries.extend(header)
                    progress(Progress(task, done, len(names), "steps"))
                samples = sample_spans(entries)
                meter = _Meter(f"Reading samples of {self.model.label}", self.missing_bytes(samples), progress)
                for _ in pool.map(lambda name: self._fetch_file(client, name, samples[name], meter), samples):
                    pass

    def fetch(self, spans: Mapping[str, Sequence[Span]], progress: ProgressSink) -> None:
        """Make sure that these bytes of these files are there. Safe while other processes do the same.

        Raises:
            ModelUnavailable: They cannot be had; what has been fetched is kept, and counts at the next attempt.
        """
        wanted = {name: coalesce(each) for name, each in spans.items()}
        missing = self.missing_bytes(wanted)
        if not missing:
            return
        require_space(self.path, missing, f"this part of {self.model.label}")
        meter = _Meter(f"Downloading {self.model.label}", missing, progress)
        with self._client() as client:
            for name in sorted(wanted):
                self._fetch_file(client, name, wanted[name], meter)

    def _client(self) -> RangeClient:
        return RangeClient(self.model, cancelled=self.cancelled)

    def _missing(self, name: str, wanted: Sequence[Span]) -> list[Span]:
        path = self.path / name
        return missing_spans(path, wanted) if path.exists() else list(wanted)

    def _fetch_side_files(self, client: RangeClient) -> None:
        files = self.model.side_files
        absent = [name for name in ("config.json", "tokenizer.json") if name not in {file.name for file in files}]
        if absent:
            raise ModelUnavailable("not_a_model", f"{self.model.label} has no {' and no '.join(absent)}")
        for file in files:
            self._fetch_small(client, file)

    def _fetch_small(self, client: RangeClient, file: RemoteFile) -> None:
        """A file that is kept whole; one that is there already was checked when it came."""
        path = self.path / file.name
        if path.exists():
            return
        content = client.read_whole(file)
        try:
            replace_file(path, content)
        except OSError as error:
            raise ModelUnavailable("disk_full", f"{path} cannot be written: {error.strerror or error}") from error

    def _weight_names(self, client: RangeClient) -> list[str]:
        """The files that hold the weights, as the index names them.

        Raises:
            ModelUnavailable: `not_a_model`, if there are none; `weights_corrupt`, if the index is none or names a file
                that is absent.
        """
        self.model.require_weights()
        if INDEX_FILE not in self.model.files:
            return [SINGLE_FILE]
        self._fetch_small(client, self.model.files[INDEX_FILE])
        names = sorted(set(parse_index((self.path / INDEX_FILE).read_text(encoding="utf-8")).values()))
        for name in names:
            if name not in self.model.files:
                message = f"the index of {self.model.label} names {name}, which is not there"
                raise ModelUnavailable("weights_corrupt", message, file=name)
        return names

    def _fetch_header(self, client: RangeClient, name: str) -> list[TensorEntry]:
        """Read a file's header; one that is none is not kept, for it may have been damaged on the way."""
        file, meter = self.model.files[name], _Meter("", 0, ignore_progress)
        self._fetch_file(client, name, [Span(0, min(HEADER_GUESS_BYTES, file.size_bytes))], meter)
        path = self.path / name
        try:
            with path.open("rb", buffering=0) as stream:  # what is read ahead may not have come yet
                length = header_bytes(stream.read(LENGTH_BYTES), name, file.size_bytes)
                self._fetch_file(client, name, [Span(0, LENGTH_BYTES + length)], meter)
                return parse_header(stream.read(length), name, file.size_bytes)
        except ModelUnavailable as error:
            if error.code == "weights_corrupt":
                discard(path)
            raise

    def _fetch_file(self, client: RangeClient, name: str, wanted: Sequence[Span], meter: _Meter) -> None:
        """Make sure that these bytes of one file are there; a file that is then whole must have the hash it should."""
        file, path = self.model.files[name], self.path / name
        if covers(read_ledger(path).spans, wanted):
            return
        whole = [Span(0, file.size_bytes)]
        with (
            self.store.lock(f"{self.path.name}.{name}", f"fetch {name}", meter.progress),
            open_partial(path, file.size_bytes, meter.progress) as writer,
        ):
            present = read_ledger(path).spans
            missing = coalesce(subtract(wanted, present))  # samples that are there part no request
            _fetch_pieces(client, file, cut(missing, PIECE_BYTES), writer, meter)
            if file.sha256 is None or not covers([*present, *missing], whole):
                return
            found = hash_span(path, whole[0])
            if found != file.sha256:
                discard(path)
                raise hash_mismatch(file.url, found, file.sha256)


class _Meter:
    """Counts the bytes of several threads for one bar."""

    def __init__(self, task: str, total: int, progress: ProgressSink) -> None:
        self.progress = progress
        self._task, self._total = task, total
        self._done = self._reported = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many bytes have come."""
        with self._lock:
            self._done += count
            if self._done - self._reported >= REPORT_BYTES or self._done >= self._total:
                self._reported = self._done
                self.progress(Progress(self._task, min(self._done, self._total), self._total))


def _fetch_pieces(
    client: RangeClient, file: RemoteFile, pieces: Iterable[Span], writer: PartialWriter, meter: _Meter
) -> None:
    """Several at a time; the first error, or an interruption, ends all. Pieces that are complete stay recorded.

    Raises:
        ModelUnavailable: The first error.
    """
    failures: list[Exception] = []

    def fetch(span: Span) -> None:
        def write(offset: int, data: bytes) -> None:
            writer.write(offset, data)
            meter.add(len(data))

        try:
            writer.record(Piece(span, client.read(file, span, write)))
        except Exception as error:  # noqa: BLE001 - the outermost frame of this thread's task; raised below
            failures.append(error)
            client.abort(error)

    with ThreadPoolExecutor(CONNECTIONS_MAX, "pieces") as pool:
        running = [pool.submit(fetch, span) for span in pieces]
        try:
            wait(running)
        except BaseException as interruption:
            client.abort(interruption)
            raise
    if failures:
        raise failures[0]
