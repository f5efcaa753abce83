"""Processes that fetch parts of a model: killed in the middle, and two at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.models.partial_file import read_ledger
from shared.models.range_client import CONNECTIONS_MAX
from shared.models.spans import total_bytes
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.fleet import REPO, child_env
from tests.support.numpy_model import FILES, layer_spans, numpy_model

MODEL = numpy_model()
LAYERS = (0, 1, 2, 3)
SPANS = layer_spans(MODEL, *LAYERS)[FILES[0]]
WEIGHTS = f"/org/tiny/resolve/{COMMIT}/{FILES[0]}"
PIECE_BYTES = 20_000
TIMEOUT_S = 60
FETCH = """
import sys
from pathlib import Path
from shared.models import part_folder
from shared.models.progress import ignore_progress
from shared.models.source import resolve_outline
from tests.support.numpy_model import layer_spans, numpy_model
part_folder.PIECE_BYTES = int(sys.argv[2])
folder = resolve_outline("org/tiny", cache_dir=Path(sys.argv[1]))
print(folder.path, flush=True)
folder.absent.fetch(layer_spans(numpy_model(), *map(int, sys.argv[3:])), ignore_progress)
"""
"""What a node does before it loads, without loading."""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub with the model."""
    with running_hub(FakeHub(files={"org/tiny": dict(MODEL)})) as running:
        yield running


def start_fetch(url: str, folder: Path) -> subprocess.Popen[str]:
    """Fetch the layers into a cache of its own."""
    env = child_env(HF_ENDPOINT=url, HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")
    command = [sys.executable, "-c", FETCH, str(folder), str(PIECE_BYTES), *map(str, LAYERS)]
    return subprocess.Popen(command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> Path:
    """Wait for its end, and give the folder."""
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return Path(output.strip())


def assert_has_layers(folder: Path) -> None:
    """Every byte of the layers is the model's."""
    content = (folder / FILES[0]).read_bytes()
    assert all(content[span.start : span.end] == MODEL[FILES[0]][span.start : span.end] for span in SPANS)


def test_a_killed_fetch_goes_on_where_it_was(hub: FakeHub, tmp_path: Path):
    """SIGKILL once half has come: pieces that were complete are checked and kept, and only the others asked for."""
    total = total_bytes(SPANS)
    hub.stall_once_sent[WEIGHTS] = total // 2
    first = start_fetch(hub.url, tmp_path)
    assert hub.stalled.wait(TIMEOUT_S)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=TIMEOUT_S)
    hub.stall_once_sent.clear()
    hub.released.set()
    (ledger,) = tmp_path.glob(f"parts/*/{FILES[0]}.pieces")
    left_open = read_ledger(ledger.with_suffix("")).left_open
    assert len(left_open) >= total // 2 // PIECE_BYTES - 2 * CONNECTIONS_MAX > 0
    kept = total_bytes(piece.span for piece in left_open)
    sent_before = sum(asked_bytes(hub))
    assert_has_layers(finish(start_fetch(hub.url, tmp_path)))
    assert sum(asked_bytes(hub)) - sent_before <= 1.02 * (total - kept)


def asked_bytes(hub: FakeHub) -> list[int]:
    """How many bytes each request for the file of weights was for."""
    ranges = [header.removeprefix("bytes=").split("-") for header in hub.ranges(WEIGHTS) if header]
    return [int(end) + 1 - int(start) for start, end in ranges]


def test_two_processes_fetch_everything_once(hub: FakeHub, tmp_path: Path):
    """Two nodes of one machine start together."""
    hub.delay_s = 0.01
    processes = [start_fetch(hub.url, tmp_path) for _ in range(2)]
    folders = [finish(process) for process in processes]
    assert folders[0] == folders[1]
    assert_has_layers(folders[0])
    whole = len(MODEL[FILES[0]])
    assert hub.sent[WEIGHTS] <= 1.05 * whole
