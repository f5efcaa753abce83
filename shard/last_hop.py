"""What a last hop makes of a step's output: the drawn token, scored tokens, an embedding, log-probabilities.

Shapes: T = the step's positions, R = those that are scored, H = hidden size, V = vocabulary, n = alternatives.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shard.drawing import Matcher
from shard.grammar import GrammarMatcher
from shard.logprobs import LogProbs, join, log_probs
from shard.runner import Pass, PassOutput
from shard.sampling import Before, sample
from shard.stage import Stage
from shard.tensor_io import to_torch, to_wire
from shared.messages import Pooling, SamplingParams, Step
from shared.tensor_spec import WireTensor

SCORE_LOGITS_BYTES_MAX = 32 * 1024 * 1024
"""Logits, in float32, that scoring holds at once: 55 positions of 152,000 tokens. A prompt's would be gigabytes."""


def needs_head_inputs(step: Step) -> bool:
    """Whether the step asks for more than the logits of its last position."""
    return step.score is not None or step.pool is not None


def draws_token(step: Step) -> bool:
    """Whether a last hop draws a token for this step."""
    return step.output_len != 0 and step.pool is None


def begin_grammar(each: Pass) -> None:
    """Have the grammar followed while the layers run.

    Raises:
        StepFailed: What the session's grammar met in an earlier step.
    """
    if each.matcher is not None:
        each.matcher.foresee(_answer(each))


def finish(stage: Stage, each: Pass, output: torch.Tensor) -> PassOutput:
    """Answer a step of the last hop.

    Args:
        stage: Whose head turns positions into logits.
        each: The step.
        output: What `Stage.run` gave: ``[T, H]`` where `needs_head_inputs`, else the last position's logits ``[V]``.

    Raises:
        StepFailed: No token can be drawn, or none is allowed; see `sample` and `log_probs`.
    """
    step = each.step
    if not needs_head_inputs(step):
        return _draw(each, output) if draws_token(step) else PassOutput()
    tensors: dict[str, WireTensor] = {}
    if step.pool is not None:
        tensors["embedding"] = to_wire(pool(output, step.pool))
    if step.score is not None:
        tensors |= _as_tensors(_score(stage, output, _read_targets(each), step.score))
    if not draws_token(step):
        return PassOutput(tensors)
    drawn = _draw(each, stage.run_head(output[-1:])[0])
    return PassOutput({**drawn.tensors, **tensors}, drawn.token_ids)


def pool(head_inputs_TH: torch.Tensor, how: Pooling) -> torch.Tensor:  # noqa: N803 - shape suffix
    """A step's part of an embedding, ``f32 [H]``: the sum over its positions, or the last of them."""
    return head_inputs_TH[-1].float() if how == "last" else head_inputs_TH.float().sum(dim=0)


def _score(stage: Stage, head_inputs_TH: torch.Tensor, targets_T: torch.Tensor, count: int) -> LogProbs:  # noqa: N803
    positions = (targets_T >= 0).nonzero().flatten()
    slice_len = max(1, SCORE_LOGITS_BYTES_MAX // (4 * stage.vocab_size))
    parts = [LogProbs(np.empty((0, 1 + count), np.float32), np.empty((0, 1 + count), np.int32))]
    for start in range(0, len(positions), slice_len):
        chosen = positions[start : start + slice_len]
        logits_RV = _as_array(stage.run_head(head_inputs_TH[chosen.to(head_inputs_TH.device)]))  # noqa: N806
        parts.append(log_probs(logits_RV, targets_T[chosen].numpy(), count))
    return join(parts[1:] or parts)


def _draw(each: Pass, logits_V: torch.Tensor) -> PassOutput:  # noqa: N803
    params, step = each.sampling, each.step
    if params is None:
        raise ValueError("the executor lets no last hop sample without parameters")
    token = sample(logits_V, params, step.past_len + step.new_len, _before(each, params))
    if each.matcher is not None:
        each.matcher.foresee([*_answer(each), token])  # while the token travels and the other hops work
    if params.logprobs is None:
        return PassOutput(token_ids=(token,))
    row = log_probs(_as_array(logits_V.unsqueeze(0)), np.asarray([token]), params.logprobs)
    return PassOutput(_as_tensors(row), (token,))


def _before(each: Pass, params: SamplingParams) -> Before:
    history = _history(each)
    if not params.grammar:
        return Before(history)
    return Before(history, _as_grammar(each.matcher).mask(_answer(each)))


def _history(each: Pass) -> npt.NDArray[np.int32]:
    return np.empty(0, np.int32) if each.history is None else np.frombuffer(each.history, np.int32)


def _answer(each: Pass) -> list[int]:
    prompt_len = each.sampling.prompt_len if each.sampling else 0
    answer: list[int] = _history(each)[prompt_len:].tolist()
    return answer


def _read_targets(each: Pass) -> torch.Tensor:
    return to_torch(each.tensors["target_ids"])[0].long()


def _as_array(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.detach().to("cpu", torch.float32).numpy()
    return array


def _as_tensors(rows: LogProbs) -> dict[str, WireTensor]:
    return {
        "logprobs": WireTensor("f32", rows.values.shape, rows.values.data),
        "logprob_ids": WireTensor("i32", rows.ids.shape, rows.ids.data),
    }


def _as_grammar(matcher: Matcher | None) -> GrammarMatcher:
    if not isinstance(matcher, GrammarMatcher):
        raise ValueError(f"a draw within a grammar was given a {type(matcher).__name__}")
    return matcher
