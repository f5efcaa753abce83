"""One file over HTTP: continued after every kind of break, and given up in bounded time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.models.download import FRUITLESS_ATTEMPTS_MAX, download
from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress
from tests.support.fake_hub import FakeHub, running_hub

PATH = "/org/repo/resolve/main/file.bin"
CONTENT = os.urandom(700_000)


@dataclass
class Download:
    """A server with the file, and where it goes."""

    hub: FakeHub
    target: Path
    waits: list[float] = field(default_factory=list)
    seen: list[Progress] = field(default_factory=list)

    def run(self) -> bytes:
        """Download without waiting between attempts."""
        download(
            self.hub.url + PATH,
            self.target,
            len(CONTENT),
            headers={},
            progress=self.seen.append,
            sleep=self.waits.append,
        )
        return self.target.read_bytes()


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Download]:
    """A fresh server and folder."""
    with running_hub(FakeHub(files={"org/repo": {"file.bin": CONTENT}})) as hub:
        yield Download(hub, tmp_path / "file.bin")


def test_a_file_arrives_whole(case: Download):
    """In one request, with its end reported."""
    assert case.run() == CONTENT
    assert case.hub.ranges(PATH) == [None]
    assert case.seen[-1].is_finished


def test_a_connection_that_breaks_is_continued(case: Download):
    """As often as it brings something: what has arrived is not asked for again."""
    case.hub.cut_after[PATH] = [300_000, 100_000, 100_000, 100_000, 50_000]
    assert case.run() == CONTENT
    starts = [int(header.removeprefix("bytes=").removesuffix("-")) for header in case.hub.ranges(PATH)[1:] if header]
    assert starts == sorted(starts)
    assert starts[-1] >= 600_000


def test_what_an_earlier_process_left_is_continued(case: Download):
    """It was killed in the middle of the file."""
    case.target.write_bytes(CONTENT[:412_345])
    assert case.run() == CONTENT
    assert case.hub.ranges(PATH) == ["bytes=412345-"]


def test_a_whole_file_is_not_asked_for(case: Download):
    """It was killed before it could say so."""
    case.target.write_bytes(CONTENT)
    assert case.run() == CONTENT
    assert case.hub.requests == []


def test_more_than_the_file_is_no_beginning_of_it(case: Download):
    """Something else lies there: begin anew."""
    case.target.write_bytes(CONTENT + b"more")
    assert case.run() == CONTENT
    assert case.hub.ranges(PATH) == [None]


def test_a_server_that_ignores_ranges_sends_it_all_again(case: Download):
    """And the file is not twice as long."""
    case.hub.ignores_ranges = True
    case.target.write_bytes(CONTENT[:1000])
    assert case.run() == CONTENT


def test_a_server_that_gives_nothing_is_given_up(case: Download):
    """After a few attempts, and what is there stays for the next one."""
    case.target.write_bytes(CONTENT[:1000])
    case.hub.cut_after[PATH] = [0] * FRUITLESS_ATTEMPTS_MAX
    with pytest.raises(ModelUnavailable, match=r"failed at byte 1,000: .*goes on from there") as caught:
        case.run()
    assert caught.value.code == "download_failed"
    assert case.hub.downloads(PATH) == FRUITLESS_ATTEMPTS_MAX
    assert case.target.read_bytes() == CONTENT[:1000]
    assert len(case.waits) == FRUITLESS_ATTEMPTS_MAX - 1


def test_a_file_that_is_not_there_is_not_asked_for_twice(case: Download):
    """404 is an answer."""
    case.hub.missing.add(PATH)
    with pytest.raises(ModelUnavailable, match="answers 404") as caught:
        case.run()
    assert caught.value.code == "unknown_model"
    assert case.hub.downloads(PATH) == 1
