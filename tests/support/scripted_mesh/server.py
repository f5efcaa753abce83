"""Scripted nodes and a real gateway in this process, until the gateway ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from gateway.__main__ import command, read_tokenizer, serve
from gateway.options import read_settings
from gateway.server import http_url, listen
from gateway.settings import GatewaySettings
from gateway.tokenizer import ChatTokenizer
from shared.models.folder import ModelFolder, read_config
from tests.support.scripted_mesh.director import Director
from tests.support.scripted_mesh.model import TextCoder
from tests.support.scripted_mesh.nodes import FINGERPRINT, create_nodes
from tests.support.scripted_mesh.script import Answer, Script, ScriptError

READY_TIMEOUT_S = 30.0
READY_POLL_S = 0.02


def gateway_settings(flags: Sequence[str], nodes: Sequence[str]) -> GatewaySettings:
    """Settings as `python -m gateway` reads them from its flags."""
    arguments = [part for url in nodes for part in ("--node", url)]
    context = command.make_context("gateway", ["--model", "scripted", *arguments, *flags])
    return read_settings(context.params)


def create_director(script: Script, folder: Path, tokenizer: ChatTokenizer) -> Director:
    """The script, ready for this model.

    Raises:
        ScriptError: An answer does not fit the model's tokenizer.
    """
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    coder = TextCoder(backend, min(tokenizer.eos_ids, default=None))
    for rule in script.rules:
        for turn in range(len(rule.answers)):
            _check_answer(rule.answer(turn), coder)
    return Director(script, coder)


def _check_answer(answer: Answer, coder: TextCoder) -> None:
    over = [token_id for token_id in coder.answer_ids(answer) if token_id >= coder.vocab_size]
    if over:
        raise ScriptError(f"token {over[0]} of an answer is outside the vocabulary of {coder.vocab_size}")


async def serve_script(
    script: Script, folder: Path, *, port: int, flags: Sequence[str], ready: Callable[[str], None]
) -> None:
    """Serve until signalled.

    Args:
        script: What to answer.
        folder: The model's tokenizer and configs.
        port: Where the gateway listens on loopback.
        flags: More flags of the gateway.
        ready: Called with the base_url once every node is linked.

    Raises:
        ScriptError: An answer does not fit the model.
        SettingError: A flag is wrong.
        OSError: The port is taken.
    """
    model = ModelFolder(folder, script.model.name, FINGERPRINT)
    plain = gateway_settings(flags, ["ws://127.0.0.1:1"])
    tokenizer = read_tokenizer(plain, model)
    director = create_director(script, folder, tokenizer)
    num_layers = read_config(folder).num_layers
    nodes = create_nodes(script.mesh, director, num_layers=num_layers, context_len=tokenizer.context_len)
    settings = gateway_settings(flags, [node.url for node in nodes])
    with listen("127.0.0.1", port) as listener:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(node.run()) for node in nodes]
            running.append(tasks.create_task(_tell_when_ready(http_url(listener), settings, ready)))
            with contextlib.redirect_stdout(sys.stderr):  # the one line on stdout is `ready`'s
                await serve(settings, model, tokenizer, listener)
            for task in running:
                task.cancel()


async def _tell_when_ready(url: str, settings: GatewaySettings, ready: Callable[[str], None]) -> None:
    headers = {"authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
    async with httpx.AsyncClient(base_url=url, headers=headers) as client, asyncio.timeout(READY_TIMEOUT_S):
        while any(node["state"] != "ready" for node in (await client.get("/mesh")).json()["nodes"]):
            await asyncio.sleep(READY_POLL_S)
    ready(f"{url}/v1")
