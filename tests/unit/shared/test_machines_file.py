"""The machines file: what it says becomes machines, and what is wrong with it one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.cli.machines_file import FILE_BYTES_MAX, MachinesFileError, parse_machines, read_machines_file
from shared.models.facts import LayerFacts, ModelFacts, SlotFacts
from shared.planning.fleet import Machine

DESK = {"name": "desk", "memory": "16G", "decode_ms_per_layer": 0.9}
MODEL = ModelFacts(
    layers=(LayerFacts(2_000_000, 2_000_000, SlotFacts()),) * 2,
    embedding_bytes=0,
    head_bytes=0,
    is_tied=False,
    shared_bytes=0,
    hidden_bytes=64,
)


def parse_one(**changes: Any) -> Machine:
    """The usual machine with some fields changed."""
    return parse_machines({"machines": [{**DESK, **changes}]})[0].machine(MODEL)


def test_every_field_reaches_the_planner_in_its_units(tmp_path: Path):
    """Milliseconds become seconds, megabits bytes."""
    path = tmp_path / "machines.yaml"
    path.write_text(
        """
machines:
  - name: desk
    memory: 16G
    decode_ms_per_layer: 0.9
    prefill_ms_per_layer_per_token: 0.004
    head_ms: 2
    rtt_ms: 0.5
    bandwidth_mbit: 800
    hop_overhead_ms: 1
    runtime_memory: 256M
    address: 10.0.0.7:9005
    device: cuda:1
"""
    )
    entry = read_machines_file(path)[0]
    machine = entry.machine(MODEL)
    assert machine.memory_bytes == 16 << 30
    assert machine.decode_s_per_layer == pytest.approx(0.0009)
    assert machine.prefill_s_per_layer_token == pytest.approx(4e-6)
    assert machine.head_s == pytest.approx(0.002)
    assert machine.rtt_s == pytest.approx(0.0005)
    assert machine.bytes_per_s == pytest.approx(1e8)
    assert machine.hop_overhead_s == pytest.approx(0.001)
    assert machine.runtime_bytes == 256 << 20
    assert (entry.address.address, entry.address.device) == ("10.0.0.7:9005", "cuda:1")


def test_an_address_is_the_name_unless_given():
    """With the port that a node takes by itself."""
    entry = parse_machines({"machines": [DESK]})[0]
    assert entry.address.address == "desk:9001"
    assert entry.address.listen == "0.0.0.0:9001"


def test_memory_bandwidth_stands_for_the_time_to_read_a_layer():
    """Decoding reads every active weight once."""
    item = {"name": "desk", "memory": "1G", "memory_bandwidth": 1_000_000_000}
    assert parse_machines({"machines": [item]})[0].machine(MODEL).decode_s_per_layer == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory": "lots"}, r"machines\[0\] \(desk\)\.memory: must be a number of bytes above 0 such as 512M"),
        ({"memory": -1}, r"memory: must be a size above 0 and up to 1024T"),
        ({"memory": True}, r"memory: must be a size above 0"),
        ({"memory": "2000T"}, r"memory: must be a size above 0 and up to 1024T"),
        ({"decode_ms_per_layer": 0}, r"decode_ms_per_layer: must be a number above 0 and up to 600000, got 0"),
        ({"decode_ms_per_layer": float("nan")}, r"decode_ms_per_layer: must be a number above 0"),
        ({"decode_ms_per_layer": "fast"}, r"decode_ms_per_layer: must be a number above 0"),
        ({"rtt_ms": -1}, r"rtt_ms: must be a number from 0 to 600000, got -1"),
        ({"rtt_ms": 1e9}, r"rtt_ms: must be a number from 0 to 600000"),
        ({"bandwidth_mbit": 0}, r"bandwidth_mbit: must be a number above 0"),
        ({"address": "desk"}, r"address: must look like host:9001, got 'desk'"),
        ({"address": "desk:70000"}, r"address: must have a port from 1 to 65535, got 70000"),
        ({"device": "tpu"}, r"device: must look like auto, cpu, cuda"),
        ({"name": "my desk"}, r"name: must look like desk-1"),
        ({"name": "x" * 65}, r"name: must look like desk-1 .* at most 64"),
        ({"speed": 3}, r"speed: no such field; there are name, memory"),
        ({"memory_bandwidth": "4G"}, r"needs decode_ms_per_layer or memory_bandwidth, and not both"),
    ],
)
def test_a_bad_field_is_named_with_its_limit(changes: dict[str, Any], sentence: str):
    """The machine, the field, what it must be and what it was."""
    with pytest.raises(MachinesFileError, match=sentence):
        parse_one(**changes)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (None, "must have one field, machines"),
        ([DESK], "must have one field, machines"),
        ({"machines": [DESK], "nodes": []}, "must have one field, machines"),
        ({"machines": []}, "machines: must be a list of 1 to 512 machines"),
        ({"machines": [DESK] * 513}, "machines: must be a list of 1 to 512 machines"),
        ({"machines": ["desk"]}, r"machines\[0\]: must be a mapping"),
        ({"machines": [{"name": "desk", "decode_ms_per_layer": 1}]}, r"machines\[0\] \(desk\)\.memory: missing"),
        ({"machines": [{"memory": "1G", "decode_ms_per_layer": 1}]}, r"machines\[0\]\.name: missing"),
        ({"machines": [{"name": "a", "memory": "1G"}]}, "needs decode_ms_per_layer or memory_bandwidth"),
        ({"machines": [DESK, DESK]}, r"machines\[1\]\.name: 'desk' is the name of another machine too"),
    ],
)
def test_a_document_of_another_shape_is_refused(document: object, sentence: str):
    """Whatever YAML can say."""
    with pytest.raises(MachinesFileError, match=sentence):
        parse_machines(document)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"machines: [", "no YAML: "),
        (b"machines: !!python/object:os.system {}", "no YAML: "),
        (b"\xff\xfe\x00", "no YAML: "),
        (b"[" * 10_000, "nested too deeply"),
        (b"#" * (FILE_BYTES_MAX + 1), f"larger than {FILE_BYTES_MAX} bytes"),
    ],
    ids=["cut short", "code", "no text", "deep", "large"],
)
def test_a_file_that_is_no_yaml_names_itself(tmp_path: Path, content: bytes, sentence: str):
    """And no code in it is run."""
    path = tmp_path / "machines.yaml"
    path.write_bytes(content)
    with pytest.raises(MachinesFileError, match=sentence) as caught:
        read_machines_file(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_names_itself(tmp_path: Path):
    """As the system puts it."""
    with pytest.raises(MachinesFileError, match="No such file"):
        read_machines_file(tmp_path / "none.yaml")
