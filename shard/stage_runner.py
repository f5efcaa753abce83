"""Runs steps on a torch stage: wire tensors in, wire tensors or a drawn token out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog
import torch

from shard.device import device_memory, memory_used
from shard.drawing import Matcher
from shard.grammar_source import GrammarSource
from shard.last_hop import begin_grammar, finish, needs_head_inputs
from shard.runner import Pass, PassOutput
from shard.session import HeldCache
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shard.step_check import bad_step
from shard.tensor_io import WIRE_NAMES, to_torch, to_wire
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import SAMPLING_FIELDS, SamplingParams, Step
from shared.tensor_spec import WireTensor

_FLOATS = ("f32", "bf16", "f16", "f64")
_INTEGERS = ("i32", "i64")
NO_TARGET = -1
"""In `target_ids`: a position that is not scored."""

log = structlog.stdlib.get_logger(__name__)


class StageRunner:
    """A `shard.runner.Runner` over a loaded stage. `check`, `new_matcher` and `run` belong to the compute thread.

    Args:
        stage: What it runs.
        tokenizer_json: The model's, for grammars; None follows none.
        working_bytes: What its largest step takes while it runs.
    """

    def __init__(self, stage: Stage, *, tokenizer_json: Path | None = None, working_bytes: int = 0) -> None:
        self._stage = stage
        self._working_bytes = working_bytes
        self.memory_limit_bytes = device_memory(stage.device).limit_bytes
        self._grammars = GrammarSource(tokenizer_json, stage.end_ids, stage.vocab_size)

    @property
    def layers(self) -> LayerRange:
        """The range it holds."""
        return self._stage.layers

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model."""
        return self._stage.num_layers

    @property
    def device(self) -> str:
        """For example ``cpu`` or ``cuda:0``."""
        return str(self._stage.device)

    @property
    def dtype(self) -> str:
        """Element type of outputs, and of weights unless they are quantized."""
        return WIRE_NAMES[self._stage.dtype]

    @property
    def quantize(self) -> str:
        """How weights of linear layers are held."""
        return self._stage.quantize

    @property
    def supports_kv_cache(self) -> bool:
        """False when the model's layers reject a cache."""
        return self._stage.supports_kv_cache

    @property
    def returns_token_ids(self) -> bool:
        """Whether it has the head."""
        return self._stage.is_last

    @property
    def kv_bytes_per_token(self) -> int:
        """What one position of one session takes."""
        return self._stage.kv_bytes_per_token

    @property
    def weight_bytes(self) -> int:
        """What its weights take."""
        return self._stage.weight_bytes

    @property
    def context_len(self) -> int:
        """Positions the model was trained for; 0 when unknown."""
        return self._stage.context_len

    @property
    def needs_token_ids(self) -> bool:
        """It is not first, and its steps must carry token ids all the same."""
        return self._stage.needs_token_ids

    @property
    def refused_cuts(self) -> tuple[int, ...]:
        """Layers of the model before which no range may begin."""
        return tuple(self._stage.refused_cuts)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._stage.vocab_size

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """All, but `grammar` where the model has no tokenizer.json to follow one with."""
        return tuple(name for name in SAMPLING_FIELDS if name != "grammar" or self._grammars.can_follow)

    @property
    def rewinds(self) -> bool:
        """Whether its caches can go back."""
        return self._stage.new_cache().rewinds

    @property
    def features(self) -> tuple[str, ...]:
        """A last hop scores and embeds."""
        return ("score", "embed") if self._stage.is_last else ()

    def memory_free_bytes(self) -> int:
        """Memory of its device that is free now for sessions: what a step works in is left out."""
        return max(0, device_memory(self._stage.device).free_bytes - self._working_bytes)

    def memory_used_bytes(self) -> int:
        """What this process has of its device's memory."""
        return memory_used(self._stage.device)

    def new_cache(self) -> StageCache:
        """An empty cache for one session."""
        return self._stage.new_cache()

    def new_matcher(self, params: SamplingParams) -> Matcher:
        """A place at the beginning of the grammar of these parameters; the first takes the tokenizer's load time.

        Raises:
            StepFailed: `bad_step`: the model has no tokenizer.json.
        """
        return self._grammars.create(params)

    def check(self, step: Step, tensors: Mapping[str, WireTensor]) -> None:
        """Look at what can be judged before computing; the stage itself compares the boundary's shape.

        Raises:
            StepFailed: `bad_step`, naming the tensor.
        """
        token_ids, hidden_states = tensors.get("token_ids"), tensors.get("hidden_states")
        if token_ids is not None:
            _check_kind("token_ids", token_ids, _INTEGERS)
            if token_ids.shape != (1, step.new_len):
                raise _bad_shape("token_ids", token_ids, f"[1, {step.new_len}]")
            _check_ids("token_ids", token_ids, 0, self._stage.vocab_size)
        if self._stage.is_last and step.score is not None:
            self._check_targets(step, tensors.get("target_ids"))
        if self._stage.is_first:
            if token_ids is None:
                raise bad_step("token_ids", "is missing, and this is the first hop")
            return
        if token_ids is None and self._stage.needs_token_ids:
            raise bad_step("token_ids", "is missing, and this model needs the ids on every hop")
        if hidden_states is None:
            raise bad_step("hidden_states", "is missing, and this is not the first hop")
        _check_kind("hidden_states", hidden_states, _FLOATS)
        axis = self._stage.input_axis
        if len(hidden_states.shape) <= axis or hidden_states.shape[axis] != step.new_len:
            raise _bad_shape("hidden_states", hidden_states, f"{step.new_len} positions at axis {axis}")

    def _check_targets(self, step: Step, target_ids: WireTensor | None) -> None:
        if target_ids is None:
            raise bad_step("target_ids", "is missing, and the step is to be scored")
        _check_kind("target_ids", target_ids, _INTEGERS)
        if target_ids.shape != (1, step.new_len):
            raise _bad_shape("target_ids", target_ids, f"[1, {step.new_len}]")
        _check_ids("target_ids", target_ids, NO_TARGET, self._stage.vocab_size)

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """One after the other, so that each fails alone."""
        return [self._run_one(each) for each in passes]

    def _run_one(self, each: Pass) -> PassOutput | MeshError:
        try:
            begin_grammar(each)
            (output,) = self._stage.forward([self._as_input(each)])
            return self._as_output(each, output)
        except StepFailed as error:
            return error
        except Exception as error:
            # A forward is code we did not write, met with a model we may not know: whatever it
            # raises ends this step alone.
            log.exception("forward.failed", session=each.step.session, step_index=each.step.step_index)
            return StepFailed("internal_error", f"the stage failed: {type(error).__name__}")

    def _as_input(self, each: Pass) -> StageInput:
        step, tensors = each.step, each.tensors
        token_ids, hidden_states = tensors.get("token_ids"), tensors.get("hidden_states")
        return StageInput(
            token_ids=None if token_ids is None else to_torch(token_ids),
            hidden_states=None if hidden_states is None else self._read_hidden_states(hidden_states),
            cache=_as_stage_cache(each.cache),
            past_len=step.past_len,
            output_len=step.output_len,
            head_inputs=self._stage.is_last and needs_head_inputs(step),
            cancelled=each.cancelled,
        )

    def _read_hidden_states(self, wire: WireTensor) -> torch.Tensor:
        """As the stage computes: a node of another element type may be before this one."""
        return to_torch(wire, self._stage.device).to(self._stage.dtype)

    def _as_output(self, each: Pass, output: torch.Tensor) -> PassOutput:
        if self._stage.is_last:
            return finish(self._stage, each, output)
        return PassOutput({"hidden_states": to_wire(output)} if each.step.output_len != 0 else {})


def _as_stage_cache(cache: HeldCache | None) -> StageCache | None:
    if cache is not None and not isinstance(cache, StageCache):
        raise ValueError(f"a stage was given a {type(cache).__name__}")
    return cache


def _check_kind(name: str, tensor: WireTensor, kinds: tuple[str, ...]) -> None:
    if tensor.dtype not in kinds:
        raise bad_step(name, f"must be one of {', '.join(kinds)}, got {tensor.dtype}")


def _check_ids(name: str, ids: WireTensor, lowest_allowed: int, vocab_size: int) -> None:
    """An id without an embedding ends a CUDA context, not just the step."""
    lowest, highest = (int(bound) for bound in to_torch(ids).aminmax())
    if lowest < lowest_allowed or highest >= vocab_size:
        raise bad_step(name, f"must be from {lowest_allowed} to {vocab_size - 1}, got {lowest} to {highest}")


def _bad_shape(name: str, tensor: WireTensor, expected: str) -> StepFailed:
    return bad_step(name, f"must have {expected}, got shape {list(tensor.shape)}")
