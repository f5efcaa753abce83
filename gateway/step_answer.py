"""What a hop answered to a step, read and checked: a node's nonsense is a failure of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.generation_request import TokenLogprobs
from gateway.journal import StepInput, position_axes
from gateway.logprob_rows import is_token, read_rows
from shared.errors import StepFailed
from shared.messages import StepResult
from shared.tensor_spec import WireTensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """A last hop's answer: the token, or the text of an old tail that returns no ids; log-probabilities if asked."""

    token_id: int | None = None
    text: str | None = None
    logprobs: TokenLogprobs | None = None


def hidden_states(tensors: Mapping[str, WireTensor], new_len: int) -> StepInput:
    """What a hop that is not last hands to the next one, exactly as it came.

    Args:
        tensors: That came with the answer.
        new_len: How many positions were asked for.

    Raises:
        StepFailed: `bad_answer`: it sent none, or of another number of positions. Whoever came next would be blamed.
    """
    tensor = tensors.get("hidden_states")
    if tensor is None:
        raise StepFailed("bad_answer", "a hop that is not last answered without hidden_states")
    if not position_axes(tensor.shape, new_len):
        got = list(tensor.shape)
        raise StepFailed("bad_answer", f"hidden_states {got} are not of the {new_len} positions asked for")
    return StepInput("hidden_states", tensor, new_len)


def read_drawn(result: StepResult, tensors: Mapping[str, WireTensor], top: int | None, vocab_size: int | None) -> Drawn:
    """What a last hop drew.

    Args:
        result: The answer.
        tensors: That came with it.
        top: `SamplingParams.logprobs` of the session.
        vocab_size: Entries of the model's vocabulary; None where that is not known.

    Raises:
        StepFailed: `bad_answer`: no token, or no log-probabilities of it where they were asked for.
    """
    token_id = drawn_token(result, vocab_size)
    if top is None:
        return Drawn(token_id, result.text)
    if token_id is None:
        raise StepFailed("bad_answer", "the last hop answered with a text, which has no log-probabilities")
    ((named_id, logprobs),) = read_rows(tensors, rows=1, top=top, vocab_size=vocab_size)
    if named_id != token_id:
        raise StepFailed("bad_answer", "the last hop gave the log-probability of another token than it drew")
    return Drawn(token_id, result.text, logprobs)


def drawn_token(result: StepResult, vocab_size: int | None) -> int | None:
    """The token id that a last hop drew; None when it answered with text.

    Raises:
        StepFailed: `bad_answer`: neither, or no id that a model can have.
    """
    if result.token_ids is None:
        if result.text is None:
            raise StepFailed("bad_answer", "the last hop answered with neither token_ids nor text")
        return None
    if len(result.token_ids) != 1 or not is_token(result.token_ids[0], vocab_size):
        raise StepFailed("bad_answer", "the last hop must answer with one token id of the model's vocabulary")
    return result.token_ids[0]
