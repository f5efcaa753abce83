"""Byte ranges over HTTP: what comes is what was asked for, or the error says what is wrong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest

from shared.models.errors import ModelUnavailable
from shared.models.range_client import RangeClient, content_digest_of
from shared.models.remote import RemoteFile, RemoteModel
from shared.models.spans import Span
from tests.support.fake_hub import COMMIT, FakeHub, running_hub

CONTENT = os.urandom(100_000)
PATH = f"/org/tiny/resolve/{COMMIT}/w.safetensors"
PART = Span(30_000, 60_000)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub with one file."""
    with running_hub(FakeHub(files={"org/tiny": {"w.safetensors": CONTENT, "config.json": b"{}"}})) as running:
        yield running


class Reader:
    """A client for the hub's file, and what it has read."""

    def __init__(self, hub: FakeHub, **changes: object) -> None:
        values = {"name": "w", "url": hub.url + PATH, "size_bytes": len(CONTENT), **changes}
        self.file = RemoteFile(**values)  # type: ignore[arg-type]
        self.model = RemoteModel(label="x", reference="", files={"w": self.file}, headers={"authorization": "Bearer t"})
        self.content = bytearray(len(CONTENT))
        self.waits: list[float] = []
        self.cancelled = False

    def read(self, *spans: Span) -> list[str]:
        """Read spans with one client, and give their hashes."""
        with RangeClient(self.model, cancelled=lambda: self.cancelled, sleep=self.waits.append) as client:
            return [client.read(self.file, span, self.write) for span in spans]

    def write(self, offset: int, data: bytes) -> None:
        """Keep what comes."""
        self.content[offset : offset + len(data)] = data

    def fails(self, code: str, *spans: Span) -> ModelUnavailable:
        """Reading ends with this code."""
        with pytest.raises(ModelUnavailable) as caught:
            self.read(*(spans or (PART,)))
        assert caught.value.code == code, caught.value
        return caught.value

    def has(self, span: Span) -> bool:
        """Whether the span's bytes have arrived."""
        return self.content[span.start : span.end] == CONTENT[span.start : span.end]


def sha256(span: Span) -> str:
    """Of the true bytes."""
    return hashlib.sha256(CONTENT[span.start : span.end]).hexdigest()


def test_a_span_is_asked_for_and_nothing_else(hub: FakeHub):
    """One request, with the token, that brings the span's bytes."""
    reader = Reader(hub)
    assert reader.read(PART) == [sha256(PART)]
    assert reader.has(PART)
    assert hub.sent[PATH] == PART.nbytes
    assert hub.ranges(PATH) == ["bytes=30000-59999"]
    assert hub.headers[-1]["authorization"] == "Bearer t"
    assert hub.headers[-1]["accept-encoding"] == "identity"


def test_the_token_stays_with_the_hub(hub: FakeHub):
    """Large files lie on another host, which is asked for the same range and told no secret."""
    with running_hub(FakeHub(files=hub.files)) as elsewhere:
        hub.redirects[PATH] = elsewhere.url.replace("127.0.0.1", "localhost")
        reader = Reader(hub)
        assert reader.read(PART) == [sha256(PART)]
        assert elsewhere.ranges(PATH) == ["bytes=30000-59999"]
        assert "authorization" not in elsewhere.headers[-1]
        assert hub.sent[PATH] == 0


def test_a_cut_connection_goes_on_where_it_was(hub: FakeHub):
    """No byte is fetched twice, and the hash is of all of them."""
    hub.cut_after[PATH] = [1000, 5000]
    reader = Reader(hub)
    assert reader.read(PART) == [sha256(PART)]
    assert reader.has(PART)
    assert hub.sent[PATH] == PART.nbytes
    assert hub.ranges(PATH)[1:] == ["bytes=31000-59999", "bytes=36000-59999"]


def test_a_connection_that_never_brings_anything_ends(hub: FakeHub):
    """After a few attempts, saying where it stopped."""
    hub.cut_after[PATH] = [500, 0, 0, 0, 0, 0]
    error = Reader(hub).fails("download_failed")
    assert "at byte 30,500" in error.message
    assert len(hub.ranges(PATH)) == 4


def test_a_busy_server_is_asked_again_when_it_says(hub: FakeHub):
    """429 and 503 are no end."""
    hub.failing[PATH] = [503, 429]
    reader = Reader(hub)
    assert reader.read(PART) == [sha256(PART)]
    assert reader.waits == [1.0, 1.0]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "download_failed", "another token"),
        (403, "download_failed", "licence"),
        (404, "unknown_model", "not there any more"),
    ],
)
def test_a_refusal_is_not_repeated(hub: FakeHub, status: int, code: str, words: str):
    """What asking again would not change."""
    hub.failing[PATH] = [status, 500, 500]
    assert words in Reader(hub).fails(code).message
    assert len(hub.ranges(PATH)) == 1


def test_a_server_without_ranges_is_noticed_before_it_sends_gigabytes(hub: FakeHub):
    """It answers 200 with the whole; the advice says what helps."""
    hub.ignores_ranges = True
    assert "meshnet pull" in Reader(hub).fails("ranges_unsupported").message
    whole = Span(0, len(CONTENT))
    reader = Reader(hub)
    assert reader.read(whole) == [sha256(whole)]


def test_another_etag_in_the_middle_is_another_file(hub: FakeHub):
    """Two halves of two files would be a model that never was."""
    hub.changes_after[PATH] = 1
    error = Reader(hub).fails("source_changed", Span(0, 10), Span(10, 20))
    assert "changed while it was being read" in error.message
    assert "changed" in error.message


@pytest.mark.parametrize("span", [Span(0, 10), Span(99_000, 100_000)], ids=["206", "416"])
def test_a_file_that_is_shorter_than_announced_is_another(hub: FakeHub, span: Span):
    """Whether the bytes asked for are there or not."""
    hub.shrunk[PATH] = 50_000
    assert "try again" in Reader(hub).fails("source_changed", span).message


def test_a_whole_small_file_must_have_the_announced_hash(hub: FakeHub):
    """As git or sha256 have it."""
    reader = Reader(hub, sha256=hashlib.sha256(CONTENT).hexdigest())
    with RangeClient(reader.model) as client:
        assert client.read_whole(reader.file) == CONTENT
        hub.damaged[PATH] = 1
        with pytest.raises(ModelUnavailable, match="nothing of them was kept") as caught:
            client.read_whole(reader.file)
    assert caught.value.code == "hash_mismatch"


def test_reading_ends_when_it_is_cancelled(hub: FakeHub):
    """Between two chunks."""
    reader = Reader(hub)
    reader.cancelled = True
    reader.fails("cancelled")


def test_a_content_digest_is_what_the_rfc_shows():
    """RFC 9530, appendix B.1."""
    assert content_digest_of(hashlib.sha256(b'{"hello": "world"}\n').digest()) == (
        "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    )
