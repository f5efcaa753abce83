"""A `shard.runner.Runner` without a model: hops hand token ids on as hidden states, and the last answers by script."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shard.runner import Pass, PassOutput
from shared.errors import CacheMissed, MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import SAMPLING_FIELDS, SamplingParams, Step
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import CANCEL_POLL_S, HIDDEN_SIZE, FakeMatcher, read_hidden, read_ids, write_hidden
from tests.support.scripted_mesh.director import Director
from tests.support.scripted_mesh.logprobs import (
    Row,
    embedding_tensor,
    logprob_row,
    logprob_tensors,
    prompt_logprob,
)
from tests.support.scripted_mesh.script import STALL_S, Fault


@dataclass(slots=True)
class IdCache:
    """The token ids that a session holds: all there is to cache."""

    ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Positions held."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """One each, as `ScriptedRunner.kv_bytes_per_token` says."""
        return len(self.ids)

    def copy(self) -> IdCache:
        """One of its own."""
        return IdCache(list(self.ids))

    def can_rewind(self, length: int) -> bool:
        """To any position."""
        return length <= self.length

    def rewind(self, length: int) -> None:
        """Go back."""
        del self.ids[length:]


@dataclass(kw_only=True)
class ScriptedRunner:
    """One hop.

    Args:
        layers: Its range.
        num_layers: Of the whole model.
        hop: Its number on the route.
        director: Knows the script.
        context_len: Positions of the model.
        drop_links: Closes the node's links, soon; called on the compute thread.
        crash: Ends the node, soon, and starts it again after so many seconds, or never; likewise.
    """

    layers: LayerRange
    num_layers: int
    hop: int
    director: Director
    context_len: int
    drop_links: Callable[[], None]
    crash: Callable[[float | None], None]
    device: str = "cpu"
    dtype: str = "f32"
    quantize: str = "none"
    supports_kv_cache: bool = True
    kv_bytes_per_token: int = 1
    needs_token_ids: bool = False
    refused_cuts: tuple[int, ...] = ()
    rewinds: bool = True

    @property
    def returns_token_ids(self) -> bool:
        """True of the last hop."""
        return self.layers.end == self.num_layers

    @property
    def vocab_size(self) -> int:
        """Of the served model's tokenizer."""
        return self.director.coder.vocab_size

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """All, so that every call is let through: the script has drawn already."""
        return SAMPLING_FIELDS

    @property
    def features(self) -> tuple[str, ...]:
        """As a real stage."""
        return ("score", "embed") if self.returns_token_ids else ()

    def new_matcher(self, _params: SamplingParams) -> FakeMatcher:
        """A grammar that allows anything."""
        return FakeMatcher()

    weight_bytes = 1 << 16
    memory_limit_bytes = 1 << 30

    def memory_used_bytes(self) -> int:
        """Twice its weights."""
        return 2 * self.weight_bytes

    def memory_free_bytes(self) -> int:
        """Enough."""
        return 1 << 30

    def new_cache(self) -> IdCache:
        """An empty cache."""
        return IdCache()

    def check(self, step: Step, tensors: Mapping[str, WireTensor]) -> None:
        """The right tensor in the right shape, and ids of the vocabulary."""
        name, shape = (
            ("hidden_states", (1, step.new_len, HIDDEN_SIZE)) if self.hop else ("token_ids", (1, step.new_len))
        )
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            raise StepFailed("bad_step", f"{name} must have shape {list(shape)}", field=name)
        if max(self._read(tensors)) >= self.vocab_size:
            raise StepFailed("bad_step", f"{name} must be below {self.vocab_size}", field=name, limit=self.vocab_size)
        targets = tensors.get("target_ids")
        if step.score is not None and (targets is None or targets.shape != (1, step.new_len)):
            raise StepFailed("bad_step", f"target_ids must have shape [1, {step.new_len}]", field="target_ids")

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """One after the other."""
        return [self._run_one(each) for each in passes]

    def _run_one(self, each: Pass) -> PassOutput | MeshError:
        entering = self._read(each.tensors)
        cache = each.cache if isinstance(each.cache, IdCache) else self.new_cache()
        cache.ids.extend(entering)
        try:
            for fault in self.director.faults(self.hop, each.step, cache.ids):
                self._meet(fault, each)
            return self._output(each, entering, cache.ids)
        except MeshError as error:
            return error

    def _read(self, tensors: Mapping[str, WireTensor]) -> list[int]:
        return read_hidden(tensors["hidden_states"]) if self.hop else read_ids(tensors["token_ids"])

    def _meet(self, fault: Fault, each: Pass) -> None:
        if fault.kind == "miss":
            raise CacheMissed(fault.miss_reason)
        if fault.kind == "stall":
            take_time(STALL_S if fault.for_s is None else fault.for_s, each)
            return
        if fault.kind == "drop_link":
            self.drop_links()
        elif fault.kind == "crash":
            self.crash(fault.for_s)
        raise StepFailed(fault.reason or "internal_error", "the script says so")

    def _output(self, each: Pass, entering: Sequence[int], history: Sequence[int]) -> PassOutput:
        step = each.step
        wanted = step.new_len if step.output_len is None else step.output_len
        if not self.returns_token_ids:
            return PassOutput(tensors={"hidden_states": write_hidden(entering[-wanted:])} if wanted else {})
        if step.pool is not None:
            return PassOutput(tensors=embedding_tensor(entering if step.pool == "mean" else entering[-1:]))
        drawn, row = self._draw(each, history) if wanted else (None, None)
        token_ids = None if drawn is None else (drawn,)
        if step.score is not None:
            scored = self._scored(step.score, each.tensors, entering)
            return PassOutput(logprob_tensors(scored, alternatives=step.score), token_ids)
        tensors = {} if row is None else logprob_tensors([row], alternatives=len(row) - 1)
        return PassOutput(tensors, token_ids)

    def _draw(self, each: Pass, history: Sequence[int]) -> tuple[int, Row | None]:
        if each.sampling is None:
            raise ValueError("the executor lets no last hop sample without parameters")
        plan = self.director.plan(each.step.session, history, each.sampling)
        at = len(history) - plan.prompt_len
        take_time(plan.rule.delay_s + (0 if at else plan.rule.first_delay_s), each)
        token = plan.token(at)
        if each.sampling.logprobs is None:
            return token, None
        return token, self._row(token, plan.logprob(at), each.sampling.logprobs, history[-1])

    def _scored(self, alternatives: int, tensors: Mapping[str, WireTensor], entering: Sequence[int]) -> list[Row]:
        pairs = zip(entering, read_ids(tensors["target_ids"]), strict=True)
        return [self._row(to, prompt_logprob(before, to), alternatives, before) for before, to in pairs if to >= 0]

    def _row(self, token: int, logprob: float, alternatives: int, before: int) -> Row:
        return logprob_row(token, logprob, alternatives=alternatives, vocab_size=self.vocab_size, seed=before)


def take_time(seconds: float, each: Pass) -> None:
    """Compute nothing for a while.

    Raises:
        StepFailed: `cancelled` meanwhile.
    """
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        if each.cancelled():
            raise StepFailed("cancelled", "cancelled between layers")
        time.sleep(min(left_s, CANCEL_POLL_S))
