"""What can be judged of a step before anything is computed: its counts, and its sampling parameters. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import StepFailed
from shared.messages import SamplingParams, Step

STEP_POSITIONS_MAX = 32_768
"""Positions that may enter with one step; a longer prompt comes in chunks."""


def check_lengths(step: Step, positions_max: int) -> None:
    """Check a step's counts against each other and against what this node takes.

    Raises:
        StepFailed: `bad_step`, naming the field and the limit.
    """
    if not 1 <= step.new_len <= STEP_POSITIONS_MAX:
        raise bad_step("new_len", f"must be from 1 to {STEP_POSITIONS_MAX}, got {step.new_len}")
    if step.cache != "decode" and step.past_len:
        raise bad_step("past_len", f"must be 0 unless the step decodes, got {step.past_len}")
    if step.rewind_from is not None and (step.cache != "decode" or step.rewind_from < step.past_len):
        raise bad_step("rewind_from", f"must be at least past_len {step.past_len}, on a decode, got {step.rewind_from}")
    if step.output_len is not None and step.output_len > step.new_len:
        raise bad_step("output_len", f"must be at most new_len {step.new_len}, got {step.output_len}")
    if step.past_len + step.new_len > positions_max:
        total_len = step.past_len + step.new_len
        raise bad_step("past_len + new_len", f"must be at most {positions_max} positions, got {total_len}")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check parameters that a step or a fork brings, so that a draw need not.

    Raises:
        StepFailed: `bad_step`, naming the field and the limit.
    """
    check_ranges(params)
    _check_ids("allowed_ids", params.allowed_ids, vocab_size)
    _check_ids("banned_ids", params.banned_ids, vocab_size)
    _check_ids("end_ids", params.end_ids, vocab_size)
    _check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab_size)


def check_ranges(params: SamplingParams) -> None:
    """Check what a draw's arithmetic relies on; a node does not trust its gateway to have checked.

    Raises:
        StepFailed: `bad_step`, naming the field and the limit.
    """
    if not params.temperature >= 0:
        raise bad_step("sampling.temperature", f"must be at least 0, got {params.temperature}")
    if not 0 <= params.top_p <= 1:
        raise bad_step("sampling.top_p", f"must be from 0 to 1, got {params.top_p}")
    if not 0 <= params.min_p <= 1:
        raise bad_step("sampling.min_p", f"must be from 0 to 1, got {params.min_p}")
    if not params.repetition_penalty > 0:
        raise bad_step("sampling.repetition_penalty", f"must be above 0, got {params.repetition_penalty}")


def bad_step(field: str, message: str) -> StepFailed:
    """The error that names a field or a tensor and says what is wrong with it."""
    return StepFailed("bad_step", f"{field} {message}", field=field)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise bad_step(f"sampling.{name}", f"must be ids from 0 to {vocab_size - 1}, got {highest}")
