"""`meshnet demo`: the same answer twice, the second time with a node killed in mid-sentence."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from shared.cli.fleet import LocalFleet, authorization
from shared.cli.narrator import Narrator
from shared.cli.options import DEMO_TOKENS_MIN
from shared.cli.plan import UpSettings
from shared.cli.up import Output, WorkFailed, run_fleet

NODES: Final = 3
VICTIM: Final = "node-1"
"""Neither the first nor the last: it is known by hidden states alone."""
PAUSE_S: Final = 0.5
"""A gap between two tokens that a reader notices."""
STREAM_TIMEOUT_S: Final = 120.0
"""The longest silence of a stream: the gateway itself gives up well before."""


@dataclass
class Answer:
    """One streamed answer.

    Args:
        pieces: Its text as it came.
        is_cut_short: It reached the limit on its tokens before its end.
        at_s: When each piece came, on the loop's clock.
    """

    pieces: list[str] = field(default_factory=list)
    is_cut_short: bool = False
    at_s: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole."""
        return "".join(self.pieces)

    def summary(self) -> str:
        """Its speed and its longest gap, in words."""
        gaps = [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]
        if not gaps:
            return f"{len(self.pieces)} piece of text"
        rate = len(gaps) / sum(gaps)
        return f"{len(self.pieces)} pieces of text, {rate:.1f} a second; the longest pause was {max(gaps):.1f} s"


def run_demo(
    *,
    model: str,
    prompt: str,
    max_tokens: int,
    port: int,
    threads: int | None,
    cache_dir: Path | None,
    api_keys: tuple[str, ...],
) -> int:
    """Start three nodes, ask twice, kill one, compare.

    Returns:
        The exit code: 0 when both answers were the same text.

    Raises:
        click.ClickException: What the user asked for cannot be had; says why.
    """
    settings = UpSettings(
        model=model,
        nodes=NODES,
        host="127.0.0.1",
        port=port,
        threads=threads,
        dtype="float32",  # in which a rebuilt cache gives the very same tokens
        quantize="none",
        device="cpu",
        cache_dir=cache_dir,
        log_level="info",
        log_format="json",
        insecure=False,
        api_keys=api_keys,
    )
    narrator = Narrator(Console())
    demo = Demo(settings, prompt, max_tokens, narrator)
    return run_fleet(settings, demo.run, _Narrated(narrator))


class _Narrated(Output):
    """What is said of the processes becomes part of the narration; their own lines are not shown."""

    def __init__(self, narrator: Narrator) -> None:
        super().__init__(verbose=False)
        self._narrator = narrator

    def say(self, line: str) -> None:
        self._narrator.note(f"… {line}", "yellow")


class Demo:
    """The demonstration, on a fleet that is ready.

    Args:
        settings: How the fleet was started.
        prompt: What is asked.
        max_tokens: The most tokens of the answer.
        narrator: Where it is shown.
    """

    def __init__(self, settings: UpSettings, prompt: str, max_tokens: int, narrator: Narrator) -> None:
        self._settings = settings
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._narrator = narrator

    async def run(self, fleet: LocalFleet, mesh: dict[str, Any]) -> None:
        """Ask twice and compare.

        Raises:
            WorkFailed: The answer is too short to be interrupted, ended with an error, or was not the same.
        """
        self._introduce(mesh)
        headers = authorization(self._settings.api_key)
        async with httpx.AsyncClient(timeout=STREAM_TIMEOUT_S, trust_env=False, headers=headers) as client:
            self._narrator.title("The answer, undisturbed")
            undisturbed = await self._ask(client)
            if len(undisturbed.pieces) < DEMO_TOKENS_MIN:
                raise WorkFailed(
                    f"the answer is too short to be interrupted: {undisturbed.text!r}; try another --prompt"
                )
            self._narrator.note(undisturbed.summary(), "dim")
            self._narrator.title(f"Once more, and {VICTIM} is killed in mid-sentence")
            disturbed = await self._ask_and_kill(client, fleet, kill_after=len(undisturbed.pieces) // 2)
            self._narrator.note(disturbed.summary(), "dim")
        self._conclude(undisturbed, disturbed)

    def _introduce(self, mesh: dict[str, Any]) -> None:
        name = next((node["model_name"] for node in mesh["nodes"] if node.get("model_name")), self._settings.model)
        self._narrator.title(f"{name}: {mesh['num_layers']} layers, held by three processes")
        for node in mesh["nodes"]:
            start, end = node["layers"]
            self._narrator.note(f"{node['id']}  layers {start:>2} to {end - 1:<2}  {node['dtype']}, pid {node['pid']}")

    async def _ask(self, client: httpx.AsyncClient) -> Answer:
        answer = Answer()
        async for piece in self._pieces(client, answer):
            self._take(answer, piece)
        return answer

    async def _ask_and_kill(self, client: httpx.AsyncClient, fleet: LocalFleet, kill_after: int) -> Answer:
        answer, killed, went_on = Answer(), False, False
        before = await self._recovery_figures(client)
        async for piece in self._pieces(client, answer):
            pause_s = asyncio.get_running_loop().time() - answer.at_s[-1] if answer.at_s else 0.0
            if killed and not went_on and pause_s > PAUSE_S:
                went_on = True
                self._narrator.note(f"✓ {pause_s:.1f} s later the answer goes on:", "green")
            self._take(answer, piece)
            if not killed and len(answer.pieces) >= kill_after:
                killed = True
                self._narrator.note(f"✗ kill -9 {fleet.pid(VICTIM)}   ({VICTIM})", "bold red")
                os.kill(fleet.pid(VICTIM), signal.SIGKILL)
        after = await self._recovery_figures(client)
        self._narrator.note(_healing(before, after), "dim")
        return answer

    async def _recovery_figures(self, client: httpx.AsyncClient) -> dict[str, int]:
        mesh = (await client.get(f"{self._settings.base_url}/mesh")).raise_for_status().json()
        figures = {node["id"]: node["steps"]["prefill"] for node in mesh["nodes"]}
        return {**figures, "replays": mesh["gateway"]["replays"]}

    def _take(self, answer: Answer, piece: str) -> None:
        answer.pieces.append(piece)
        answer.at_s.append(asyncio.get_running_loop().time())
        self._narrator.stream(piece)

    async def _pieces(self, client: httpx.AsyncClient, answer: Answer) -> AsyncIterator[str]:
        """The answer's text as it streams; notes at its end whether it was cut short.

        Raises:
            WorkFailed: The stream cannot be had, or ends with an error.
        """
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": self._prompt}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "stream": True,
        }
        url = f"{self._settings.base_url}/v1/chat/completions"
        try:
            async with client.stream("POST", url, json=body) as response:
                if not response.is_success:
                    raise WorkFailed(f"the gateway answers {response.status_code}: {(await response.aread()).decode()}")
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data in (line, "[DONE]"):
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise WorkFailed(f"the answer ended with an error: {chunk['error']['message']}")
                    if chunk["choices"] and chunk["choices"][0]["finish_reason"] == "length":
                        answer.is_cut_short = True
                    if chunk["choices"] and (piece := chunk["choices"][0]["delta"].get("content")):
                        yield piece
        except httpx.TransportError as error:
            raise WorkFailed(f"the stream broke off: {error or type(error).__name__}") from error

    def _conclude(self, undisturbed: Answer, disturbed: Answer) -> None:
        if disturbed.text != undisturbed.text:
            raise WorkFailed(f"the texts differ:\n{undisturbed.text}\n---\n{disturbed.text}")
        if disturbed.is_cut_short:
            self._narrator.note(f"Both end where --max-tokens {self._max_tokens} ends them.", "dim")
        self._narrator.title(f"The same text, all {len(disturbed.text)} characters of it.")


def _healing(before: dict[str, int], after: dict[str, int]) -> str:
    """What the gateway and the nodes counted meanwhile; the killed node's counters began anew."""
    replays = after["replays"] - before["replays"]
    others = [name for name in after if name not in (VICTIM, "replays")]
    prefills = ", ".join(f"{name} {after[name] - before[name]}" for name in others)
    hops = "1 hop was" if replays == 1 else f"{replays} hops were"
    rebuilt = f"{hops} rebuilt, from what the gateway had kept"
    return f"{rebuilt}; prefills: {prefills}, the new {VICTIM} {after[VICTIM]}"
