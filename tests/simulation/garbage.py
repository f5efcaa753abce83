"""Answers that no working node gives, and that a gateway must not take."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from gateway.journal import BATCHED_RANK
from shared.messages import Message, StepResult
from shared.tensor_spec import WireTensor
from tests.support.scripted_node import VOCAB_SIZE

Answer = tuple[Message, dict[str, WireTensor]]


def no_tensors(message: Message, _tensors: dict[str, WireTensor]) -> Answer:
    """Nothing of what was asked for."""
    return (replace(message, token_ids=None) if isinstance(message, StepResult) else message), {}


def one_position_more(message: Message, tensors: dict[str, WireTensor]) -> Answer:
    """Hidden states of another number of positions than was asked for; from a last hop, nothing.

    Nothing too where the rank does not say which axis counts positions, so that the number cannot be seen to be wrong.
    """
    hidden = tensors.get("hidden_states")
    if hidden is None or len(hidden.shape) != BATCHED_RANK:
        return no_tensors(message, tensors)
    shape = (*hidden.shape[:-2], hidden.shape[-2] + 1, hidden.shape[-1])
    return message, {**tensors, "hidden_states": WireTensor("f32", shape, memoryview(bytes(4 * prod(shape))))}


def impossible_token(message: Message, tensors: dict[str, WireTensor]) -> Answer:
    """A token that the vocabulary does not have; from other hops, nothing."""
    if not isinstance(message, StepResult) or message.token_ids is None:
        return no_tensors(message, tensors)
    return replace(message, token_ids=(VOCAB_SIZE,)), tensors
