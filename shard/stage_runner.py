"""Runs steps on a torch stage: wire tensors in, wire tensors or a drawn token out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
import torch

from shard.kv_cache import HeldCache
from shard.machine import free_memory_bytes
from shard.runner import Pass, PassOutput
from shard.sampling import sample
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shard.tensor_io import WIRE_NAMES, to_torch, to_wire
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import Step
from shared.tensor_spec import WireTensor

_FLOATS = ("f32", "bf16", "f16", "f64")
_INTEGERS = ("i32", "i64")

log = structlog.stdlib.get_logger(__name__)


class StageRunner:
    """A `shard.runner.Runner` over a loaded stage. `check` and `run` belong to the compute thread."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._vocab_size: int = stage.config.get_text_config(decoder=True).vocab_size

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
        """Element type of weights and outputs."""
        return WIRE_NAMES[self._stage.dtype]

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
    def context_len(self) -> int:
        """Positions the model was trained for; 0 when unknown."""
        return self._stage.context_len

    def memory_free_bytes(self) -> int:
        """Memory of its device that is free now."""
        if self._stage.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._stage.device)[0])
        return free_memory_bytes()

    def new_cache(self) -> StageCache:
        """An empty cache for one session."""
        return self._stage.new_cache()

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
            _check_ids(token_ids, self._vocab_size)
        if self._stage.is_first:
            if token_ids is None:
                raise _bad_step("token_ids", "is missing, and this is the first hop")
            return
        if hidden_states is None:
            raise _bad_step("hidden_states", "is missing, and this is not the first hop")
        _check_kind("hidden_states", hidden_states, _FLOATS)
        axis = self._stage.input_axis
        if len(hidden_states.shape) <= axis or hidden_states.shape[axis] != step.new_len:
            raise _bad_shape("hidden_states", hidden_states, f"{step.new_len} positions at axis {axis}")

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """One after the other, so that each fails alone."""
        return [self._run_one(each) for each in passes]

    def _run_one(self, each: Pass) -> PassOutput | MeshError:
        try:
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
            cancelled=each.cancelled,
        )

    def _read_hidden_states(self, wire: WireTensor) -> torch.Tensor:
        """As the stage computes: a node of another element type may be before this one."""
        return to_torch(wire, self._stage.device).to(self._stage.dtype)

    def _as_output(self, each: Pass, output: torch.Tensor) -> PassOutput:
        if each.step.output_len == 0:
            return PassOutput()
        if not self._stage.is_last:
            return PassOutput(tensors={"hidden_states": to_wire(output)})
        if each.sampling is None:
            raise ValueError("the executor lets no last hop sample without parameters")
        return PassOutput(token_ids=(sample(output, each.sampling, each.step.past_len + each.step.new_len),))


def _as_stage_cache(cache: HeldCache | None) -> StageCache | None:
    if cache is not None and not isinstance(cache, StageCache):
        raise ValueError(f"a stage was given a {type(cache).__name__}")
    return cache


def _check_kind(name: str, tensor: WireTensor, kinds: tuple[str, ...]) -> None:
    if tensor.dtype not in kinds:
        raise _bad_step(name, f"must be one of {', '.join(kinds)}, got {tensor.dtype}")


def _check_ids(token_ids: WireTensor, vocab_size: int) -> None:
    """An id without an embedding ends a CUDA context, not just the step."""
    lowest, highest = (int(bound) for bound in to_torch(token_ids).aminmax())
    if lowest < 0 or highest >= vocab_size:
        raise _bad_step("token_ids", f"must be from 0 to {vocab_size - 1}, got {lowest} to {highest}")


def _bad_shape(name: str, tensor: WireTensor, expected: str) -> StepFailed:
    return _bad_step(name, f"must have {expected}, got shape {list(tensor.shape)}")


def _bad_step(name: str, message: str) -> StepFailed:
    return StepFailed("bad_step", f"{name} {message}", field=name)
