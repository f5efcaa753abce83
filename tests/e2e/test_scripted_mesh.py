"""The scripted mesh does what its script says, over real HTTP: what others rely on when they test a client with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import REPO, child_env
from tests.support.scripted_mesh import RunningMesh, ScriptError, read_script, running_scripted_mesh
from tests.support.text_tokenizers import build_metaspace

FIVE = "one two three four five"
FAULTS = [
    ("miss", {"reason": "expired"}),
    ("error", {"reason": "out_of_memory"}),
    ("drop_link", {}),
    ("crash", {"for_s": 0.1}),
]
SCRIPT: dict[str, Any] = {
    "version": 1,
    "model": {"name": "made-up"},
    "rules": [
        {"match": {"contains": "in turn"}, "answers": ["first", {"text": "second"}]},
        {"match": {"regex": "by.*byte"}, "answers": [{"text": "né 😀<think>", "split": "byte"}]},
        {"match": {"contains": "for ever"}, "answers": [{"text": "ab", "split": "character", "end": False}]},
        *(
            {
                "match": {"contains": f"{kind} at {hop}"},
                "answers": [FIVE],
                "faults": [{"at": 2, "kind": kind, "hop": hop, **more}],
            }
            for kind, more in FAULTS
            for hop in ("first", "middle", "last")
        ),
        {"match": {"contains": "never works"}, "answers": [FIVE], "faults": [{"at": 2, "kind": "error", "times": 0}]},
        {"match": {"contains": "in the end"}, "answers": [FIVE], "faults": [{"at": 0, "kind": "miss"}]},
        {"match": {"contains": "at once"}, "answers": [FIVE], "faults": [{"at": 0, "kind": "miss", "hop": "first"}]},
    ],
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[RunningMesh]:
    """One mesh for all tests of this file."""
    with running_scripted_mesh(SCRIPT) as running:
        yield running


def chat(mesh: RunningMesh, content: str, **parameters: Any) -> dict[str, Any]:
    """One whole answer."""
    body = {"model": "made-up", "messages": [{"role": "user", "content": content}], **parameters}
    response = mesh.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text(mesh: RunningMesh, content: str, **parameters: Any) -> str:
    """Its text."""
    return str(chat(mesh, content, **parameters)["choices"][0]["message"]["content"])


def test_answers_come_in_turn_and_seeds_repeat_them(mesh: RunningMesh):
    """A new seed takes the next answer, a known one its own again."""
    assert [text(mesh, "in turn", seed=seed) for seed in (1, 2, 1, 2, 3)] == [
        "first",
        "second",
        "first",
        "second",
        "first",
    ]


def test_a_text_may_be_split_by_byte(mesh: RunningMesh):
    """One token for each byte, one for the control token, one for the end."""
    answer = chat(mesh, "by each byte", seed=0)
    assert answer["usage"]["completion_tokens"] == len("né 😀".encode()) + 2
    assert answer["choices"][0]["message"]["content"].startswith("né 😀")


def test_an_answer_without_an_end_goes_on(mesh: RunningMesh):
    """Until the call's own limit."""
    answer = chat(mesh, "for ever", max_tokens=7)
    assert answer["choices"][0]["message"]["content"] == "abababa"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("hop", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", [kind for kind, _ in FAULTS])
def test_every_fault_at_every_hop_is_met_and_survived(mesh: RunningMesh, kind: str, hop: str):
    """The gateway rebuilt something, and the answer is whole."""
    before = mesh.figures()["gateway"]["replays"]
    assert text(mesh, f"{kind} at {hop}") == FIVE
    assert mesh.figures()["gateway"]["replays"] > before


def test_a_fault_at_the_prompt_comes_once(mesh: RunningMesh):
    """At a hop that is not the last, which does not draw."""
    before = mesh.figures()["gateway"]["misses"]
    assert text(mesh, "at once") == FIVE
    assert mesh.figures()["gateway"]["misses"] == before + 1


def test_a_fault_at_the_end_of_a_long_prompt(mesh: RunningMesh):
    """What the prompt's last words ask for is not missed at its first chunk, nor taken for another rule's."""
    before = mesh.figures()["gateway"]["misses"]
    assert text(mesh, "word " * 600 + "in the end") == FIVE
    assert mesh.figures()["gateway"]["misses"] == before + 1


@pytest.mark.parametrize(("content", "code"), [("never works", "internal_error"), ("no such thing", "no_rule")])
def test_what_cannot_be_answered_is_an_error(mesh: RunningMesh, content: str, code: str):
    """A fault that always comes, and a prompt without a rule."""
    body = {"model": "made-up", "messages": [{"role": "user", "content": content}]}
    response = mesh.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, code)


def test_another_model_and_flags_of_the_gateway(tmp_path: Path):
    """A SentencePiece-like tokenizer from a folder, and a key that callers need."""
    script = {
        "version": 1,
        "mesh": {"hops": 2},
        "rules": [{"match": {"any": True}, "answers": [{"text": "a😀", "split": "byte"}]}],
    }
    headers = {"authorization": "Bearer k"}
    with running_scripted_mesh(script, model=build_metaspace(tmp_path), flags=("--api-key", "k")) as mesh:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        assert mesh.http.post("/v1/chat/completions", json=body).status_code == 401
        answer = mesh.http.post("/v1/chat/completions", json=body, headers=headers).json()
    assert answer["choices"][0]["message"]["content"] == "a😀"


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"version": 2}, "$.version"),
        ({"rules": [{"match": {}, "answers": ["x"]}]}, "$.rules[0].match"),
        ({"rules": [{"match": {"regex": "("}, "answers": ["x"]}]}, "$.rules[0].match"),
        ({"rules": [{"match": {"any": True}, "answers": []}]}, "$.rules[0].answers"),
        ({"rules": [{"match": {"any": True}, "answers": [{"text": "x", "tokens": [1]}]}]}, "$.rules[0].answers[0]"),
        ({"rules": [{"match": {"any": True}, "answers": ["x"], "faults": [{"at": 0, "kind": "x"}]}]}, "faults[0].kind"),
        ({"mesh": {"hops": 9}}, "$.mesh.hops"),
        ({"typo": 1}, "typo"),
    ],
)
def test_a_wrong_script_is_refused_with_the_place(wrong: dict[str, Any], place: str):
    """Before anything starts."""
    with pytest.raises(ScriptError, match=r".") as raised:
        read_script({"version": 1, "rules": [], **wrong})
    assert place in str(raised.value)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path):
    """And ends with 2."""
    file = tmp_path / "script.json"
    file.write_text('{"version": 1, "rules": [{"match": {"any": true}, "answers": [{"tokens": [99999]}]}]}')
    command = [sys.executable, "-m", "tests.support.scripted_mesh", "--script", str(file)]
    ended = subprocess.run(command, cwd=REPO, env=child_env(), capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: token 99999 of an answer is outside the vocabulary")
    assert ended.stderr.count("\n") == 1
