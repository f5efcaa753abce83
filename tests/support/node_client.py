"""A link to one node, as a test speaks over it: steps with defaults, answers by type."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

from shared.link import Link, dial
from shared.messages import (
    CacheMiss,
    Error,
    Heartbeat,
    Hello,
    Message,
    NodeInfo,
    NodeStats,
    SamplingParams,
    Step,
    StepResult,
)
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import write_ids

ANSWER_TIMEOUT_S = 20.0
GREEDY = SamplingParams(temperature=0.0)

M = TypeVar("M", bound=Message)
Tensors = dict[str, WireTensor]


class NodeClient:
    """Speaks to a node that holds the whole model, or a part of it.

    Messages that are not what a test waits for are kept in `others`.
    """

    def __init__(self, link: Link, info: NodeInfo) -> None:
        self.link = link
        self.info = info
        self.others: list[Message] = []
        self._step_index = 0

    async def send_step(self, session: str, tensors: Mapping[str, WireTensor], **fields: Any) -> Step:
        """Send a step; whatever is not named is right for this node. Returns the step."""
        self._step_index += 1
        step = Step(
            session=session,
            **{
                "step_index": self._step_index,
                "layers": self.info.layers,
                "model": self.info.model,
                "sampling": GREEDY if self.info.is_last else None,
                **fields,
            },
        )
        await self.link.send(step, tensors)
        return step

    async def prefill(self, session: str, ids: Sequence[int], **fields: Any) -> Step:
        """Send a prefill of token ids."""
        tensors = {"token_ids": write_ids(ids)}
        return await self.send_step(session, tensors, **{"cache": "prefill", "new_len": len(ids), **fields})

    async def decode(self, session: str, token: int, past_len: int, **fields: Any) -> Step:
        """Send a decode of one token id."""
        tensors = {"token_ids": write_ids([token])}
        return await self.send_step(session, tensors, **{"cache": "decode", "past_len": past_len, **fields})

    async def receive(self, message_type: type[M]) -> tuple[M, Tensors]:
        """The next message of this type."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                message, tensors = await self.link.receive()
                if isinstance(message, message_type):
                    return message, tensors
                self.others.append(message)

    async def answer(self, step: Step) -> StepResult | CacheMiss | Error:
        """The answer to this step."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                message, _ = await self.link.receive()
                if isinstance(message, StepResult | CacheMiss | Error) and _key(message) == _key(step):
                    return message
                self.others.append(message)

    async def result(self, step: Step) -> StepResult:
        """The answer, which must be a result."""
        message = await self.answer(step)
        assert isinstance(message, StepResult), message
        return message

    async def miss(self, step: Step) -> CacheMiss:
        """The answer, which must be a miss."""
        message = await self.answer(step)
        assert isinstance(message, CacheMiss), message
        return message

    async def error(self, step: Step) -> Error:
        """The answer, which must be an error."""
        message = await self.answer(step)
        assert isinstance(message, Error), message
        return message

    async def generate(self, session: str, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens of a node that holds the whole model, cached."""
        tokens = list((await self.result(await self.prefill(session, prompt))).token_ids or ())
        for past_len in range(len(prompt), len(prompt) + count - 1):
            result = await self.result(await self.decode(session, tokens[-1], past_len))
            tokens += result.token_ids or ()
        return tokens

    async def stats(self) -> NodeStats:
        """The node's figures, asked with a heartbeat."""
        await self.link.send(Heartbeat(seq=1))
        heartbeat, _ = await self.receive(Heartbeat)
        assert heartbeat.stats is not None
        return heartbeat.stats


def _key(message: Step | StepResult | CacheMiss | Error) -> tuple[str | None, int | None, int]:
    return message.session, message.step_index, message.epoch


def gateway_hello(**fields: Any) -> Hello:
    """What a gateway says."""
    return Hello(**{"versions": (1,), "role": "gateway", "peer": "test", **fields})


@contextlib.asynccontextmanager
async def connected(url: str, **hello_fields: Any) -> AsyncIterator[NodeClient]:
    """A client of the node at this address, closed with the block."""
    link = await dial(url, gateway_hello(**hello_fields))
    info = link.peer_node
    assert info is not None
    try:
        yield NodeClient(link, info)
    finally:
        await link.close()
