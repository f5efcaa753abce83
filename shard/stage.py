"""A stage: one layer range of a model, loaded, and how a step runs through it.

Shapes: 1 = batch, T = new positions, R = some of them, H = hidden size, V = vocabulary. What a layer boundary
carries is whatever the model's layers pass on, usually ``[1, T, hidden_size]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from shard.call_names import CallNames
from shard.head import head_alone
from shard.layer_flow import LayerFlow
from shard.model_outline import ModelOutline
from shard.session_cache import StageCache
from shard.window import PassEnded, PassState
from shared.errors import StepFailed
from shared.layers import LayerRange


def never_cancelled() -> bool:
    """A step that nobody cancels."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """One step's share of a forward.

    Args:
        token_ids: ``[1, T]``, any integer type. The first range needs them, others pass them on to models
            that want ids in every layer.
        hidden_states: What the hop before gave; all ranges but the first need them.
        cache: Holds exactly `past_len` positions, and takes the new ones; None is stateless.
        past_len: Positions before the new ones; 0 without a cache.
        output_len: How many of the last positions' outputs are wanted; None wants all of them.
        head_inputs: On the last range, what enters the head is wanted, of all positions, and no logits.
        cancelled: Asked between layers; true stops the step.
    """

    token_ids: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    cache: StageCache | None = None
    past_len: int = 0
    output_len: int | None = None
    head_inputs: bool = False
    cancelled: Callable[[], bool] = never_cancelled


class Stage:
    """One layer range, loaded. Everything but the attributes is for one thread at a time.

    Attributes:
        layers: The range.
        num_layers: Decoder layers of the whole model.
        device: Where it computes.
        dtype: What it computes in, and the element type of its outputs.
        quantize: How it holds the weights of linear layers: ``none``, ``int8`` or ``int4``.
        config: The model's.
        vocab_size: Token ids are below this.
        end_ids: The model's end of sequence, as its config names it.
        context_len: Positions the model was trained for; 0 when unknown.
        is_first: It embeds token ids.
        is_last: It applies the final norm and the head.
        needs_token_ids: It is not first, and its layers, or what is around them, need the token ids all the same.
        refused_cuts: Layers of the whole model before which no range may begin, and why.
        weight_bytes: Bytes of its weights in memory.
        supports_kv_cache: False when the model's layers reject a cache; `no_cache_reason` says why.
        continues_in_chunks: False when layers continue from a cache by one position at a time only; longer steps
            are then run so.
        kv_bytes_per_token: What one more position of one session takes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        outline: ModelOutline,
        layers: LayerRange,
        state: PassState,
        *,
        flow: LayerFlow,
        device: torch.device,
        dtype: torch.dtype,
        weight_bytes: int,
        quantize: str,
    ) -> None:
        self._model = model
        self._outline = outline
        self._state = state
        names = CallNames.of(type(model))
        self._names = replace(names, position_ids=None) if flow.positions_from_ids else names
        self.config: PreTrainedConfig = model.config
        self.layers, self.num_layers = layers, outline.num_layers
        self.is_first, self.is_last = layers.start == 0, outline.is_last(layers)
        self.needs_token_ids = flow.needs_token_ids and not self.is_first
        self.refused_cuts = flow.refused_cuts
        self._idle_layers = flow.idle_layers
        self.device, self.dtype, self.weight_bytes = device, dtype, weight_bytes
        self.quantize = quantize
        text_config = self.config.get_text_config(decoder=True)
        self.vocab_size: int = text_config.vocab_size
        self.end_ids = _as_ids(getattr(text_config, "eos_token_id", None))
        self.context_len: int = getattr(text_config, "max_position_embeddings", None) or 0
        self.supports_kv_cache = True
        self.no_cache_reason: str | None = None
        self.continues_in_chunks = True
        self.kv_bytes_per_token = 0
        self.input_axis, self.output_axis = 1, 1

    def new_cache(self) -> StageCache:
        """An empty cache for one session."""
        return StageCache(self.config, self.layers, self._idle_layers)

    def forward(self, batch: Sequence[StageInput]) -> list[torch.Tensor]:
        """Run steps, one after the other; gives one output each (see `run`).

        Raises:
            StepFailed: For the first step that fails. Those before it have been applied, so where steps must
                fail alone, give them alone.
        """
        return [self.run(item) for item in batch]

    def run(self, item: StageInput) -> torch.Tensor:
        """Run one step.

        Gives the hidden states of the last `output_len` positions, or on the last range the logits ``[V]`` of
        the last position (empty when `output_len` is 0), or with `head_inputs` what enters the head, ``[T, H]``.
        When it fails, `item.cache` is as before, or damaged.

        Raises:
            StepFailed: `bad_step` for inputs of a wrong kind, shape or range; `cancelled`; `out_of_memory`.
            ValueError: If the cache does not hold exactly `past_len` positions.
        """
        token_ids, hidden_states = self._check(item)
        try:
            with torch.inference_mode():
                if item.past_len and token_ids.shape[1] > 1 and not self.continues_in_chunks:
                    return self._run_one_by_one(item, token_ids, hidden_states)
                return self._run_together(item, token_ids, hidden_states)
        except BaseException as error:
            if item.cache is not None:
                item.cache.abort(item.past_len)
            failure = _as_step_failure(error)
            if failure is None:
                raise
            raise failure from error

    def run_head(self, head_inputs_RH: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape suffix
        """Logits ``[R, V]`` of positions whose head inputs an earlier run gave. The caller bounds R.

        Raises:
            StepFailed: `out_of_memory`.
        """
        ids = torch.zeros((1, head_inputs_RH.shape[0]), dtype=torch.long, device=self.device)
        arguments = self._arguments(StageInput(), ids)
        self._state.begin(injected=None, ends_early=False, cancelled=never_cancelled)
        try:
            inputs = head_inputs_RH.unsqueeze(0)
            with torch.inference_mode(), head_alone(self._model, self._outline, self._state, inputs):
                return cast(torch.Tensor, self._model(**arguments).logits[0])
        except (RuntimeError, MemoryError) as error:
            failure = _as_step_failure(error)
            if failure is None:
                raise
            raise failure from error

    def peek(self, new_len: int) -> torch.Size:
        """The shape of what this model passes on to the range's first layer, which is not the model's first."""
        self._state.peeking = True
        try:
            item = StageInput()
            with torch.inference_mode():
                self._pass(item, torch.zeros((1, new_len), dtype=torch.long, device=self.device), None, ends_early=True)
        finally:
            self._state.peeking = False
        return cast(torch.Size, self._state.placeholder_shape)

    @property
    def takes_cache(self) -> bool:
        """Whether the model's forward has a parameter for a cache."""
        return self._names.cache is not None

    def _check(self, item: StageInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids ``[1, T]`` (placeholders where the range has no use for them) and hidden states."""
        held_len = item.cache.length if item.cache else 0
        if held_len != item.past_len or (item.cache and item.cache.damaged):
            raise ValueError(f"the cache holds {held_len} positions, the step continues at {item.past_len}")
        hidden_states = None if self.is_first else self._check_hidden_states(item.hidden_states)
        if item.token_ids is not None:
            token_ids = self._check_token_ids(item.token_ids)
        elif hidden_states is None:
            raise _bad_step("token_ids", "the first layer range needs token_ids")
        elif self.needs_token_ids:
            raise _bad_step("token_ids", "every layer range of this model needs token_ids")
        else:
            token_ids = torch.zeros((1, hidden_states.shape[self.input_axis]), dtype=torch.long, device=self.device)
        if item.output_len is not None and not 0 <= item.output_len <= token_ids.shape[1]:
            message = f"output_len is {item.output_len}, the step has {token_ids.shape[1]} positions"
            raise _bad_step("output_len", message)
        return token_ids, hidden_states

    def _check_token_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        if token_ids.dim() != 2 or token_ids.shape[0] != 1 or not token_ids.shape[1]:
            raise _bad_step("token_ids", f"token_ids must have shape [1, new_len], got {list(token_ids.shape)}")
        if token_ids.is_floating_point() or token_ids.dtype is torch.bool:
            raise _bad_step("token_ids", f"token_ids must be integers, got {token_ids.dtype}")
        lowest, highest = (int(bound) for bound in token_ids.aminmax())
        if lowest < 0 or highest >= self.vocab_size:
            message = f"token_ids must be from 0 to {self.vocab_size - 1}, got {lowest} to {highest}"
            raise _bad_step("token_ids", message)
        return token_ids.to(self.device, torch.long)

    def _check_hidden_states(self, hidden_states: torch.Tensor | None) -> torch.Tensor:
        """The pass itself compares the shape with what the model brings to its first layer."""
        if hidden_states is None:
            raise _bad_step("hidden_states", f"layer range {self.layers} needs hidden_states")
        if not hidden_states.is_floating_point():
            raise _bad_step("hidden_states", f"hidden_states must be floating point, got {hidden_states.dtype}")
        if hidden_states.dim() <= self.input_axis or not hidden_states.numel():
            shape = list(hidden_states.shape)
            raise _bad_step(
                "hidden_states", f"hidden_states of shape {shape} has no positions at axis {self.input_axis}"
            )
        return hidden_states.to(self.device)

    def _run_together(
        self, item: StageInput, token_ids: torch.Tensor, hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        ends_early = not self.is_last or (item.output_len == 0 and not item.head_inputs)
        hidden, logits = self._pass(item, token_ids, hidden_states, ends_early=ends_early)
        if hidden is None:
            return cast(torch.Tensor, logits)
        if item.head_inputs and self.is_last:
            return hidden[0]
        return hidden.new_empty(0) if self.is_last else self._last_positions(hidden, item.output_len)

    def _run_one_by_one(
        self, item: StageInput, token_ids: torch.Tensor, hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        """For layers that can only continue by one position at a time."""
        new_len = token_ids.shape[1]
        outputs: list[torch.Tensor] = []
        logits: torch.Tensor | None = None
        for i in range(new_len):
            passed_on = None if hidden_states is None else hidden_states.narrow(self.input_axis, i, 1)
            wants_head = item.head_inputs or (item.output_len != 0 and i == new_len - 1)
            ends_early = not (self.is_last and wants_head)
            hidden, logits = self._pass(item, token_ids[:, i : i + 1], passed_on, ends_early=ends_early)
            if hidden is not None:
                outputs.append(hidden)
        if self.is_last and item.head_inputs:
            return torch.cat(outputs, dim=1)[0]
        if self.is_last:
            return outputs[0].new_empty(0) if logits is None else logits
        return self._last_positions(torch.cat(outputs, dim=self.output_axis), item.output_len)

    def _last_positions(self, hidden: torch.Tensor, output_len: int | None) -> torch.Tensor:
        new_len = hidden.shape[self.output_axis]
        if output_len is None or output_len == new_len:
            return hidden
        return hidden.narrow(self.output_axis, new_len - output_len, output_len).contiguous()

    def _pass(
        self, item: StageInput, token_ids: torch.Tensor, injected: torch.Tensor | None, *, ends_early: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the range's last layer gave, or what came to the head, if the pass ends there, else logits ``[V]``."""
        ends_at_head = item.head_inputs and self.is_last
        self._state.begin(
            injected=injected,
            ends_early=ends_early,
            ends_at_head=ends_at_head,
            last_only=True,
            cancelled=item.cancelled,
        )
        try:
            outputs = self._model(**self._arguments(item, token_ids))
        except PassEnded:
            outputs = None
        finally:
            hidden = self._state.end()
        if item.cache is not None:
            item.cache.commit(token_ids.shape[1])
        return hidden, None if outputs is None else outputs.logits[0, -1]

    def _arguments(self, item: StageInput, token_ids: torch.Tensor) -> dict[str, Any]:
        names = self._names
        arguments: dict[str, Any] = {"input_ids": token_ids}
        past_len = item.cache.length if item.cache else 0
        positions = torch.arange(past_len, past_len + token_ids.shape[1], device=self.device)
        if names.position_ids:
            arguments[names.position_ids] = positions.unsqueeze(0)
        if names.cache_position:
            arguments[names.cache_position] = positions  # [T]
        if names.use_cache:
            arguments[names.use_cache] = item.cache is not None
        if names.logits_to_keep:
            arguments[names.logits_to_keep] = 0  # all: some models drop positions before their last layers otherwise
        if names.cache and item.cache is not None:
            arguments[names.cache] = item.cache.begin()
        return arguments


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _as_step_failure(error: BaseException) -> StepFailed | None:
    """A failure that is the step's or the machine's fault, not this code's, as what the sender is told."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return StepFailed("out_of_memory", "the step does not fit into the device's memory")
    if isinstance(error, RuntimeError) and "not enough memory" in str(error):  # what torch's CPU allocator says
        return StepFailed("out_of_memory", "the step does not fit into memory")
    if isinstance(error, IndexError):  # learned positions: past the end of their table
        return StepFailed("bad_step", f"the step reaches past what the model has positions for: {error}")
    return None


def _bad_step(field: str, message: str) -> StepFailed:
    return StepFailed("bad_step", message, field=field)
