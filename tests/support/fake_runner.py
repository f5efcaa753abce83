"""A `shard.runner.Runner` that computes `tests.support.fake_model`: a whole node without torch or weights.

It draws by temperature and seed alone; what else a step's sampling asks for is in `seen`. But where that needs the
tokens before, they are compared with what the model has made of the real ones: a history that is wrong fails the step.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shard.runner import Pass, PassOutput
from shard.session import HeldCache
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import SAMPLING_FIELDS, SamplingParams, Step
from shared.tensor_spec import WireTensor
from tests.support.fake_model import draw, mix, run_layer

KV_BYTES_PER_TOKEN_AND_LAYER = 100
HIDDEN_SIZE = 4
CANCEL_POLL_S = 0.005
"""A real stage asks between layers, which is as often."""


@dataclass(slots=True)
class FakeCache:
    """The running hashes of a range's layers, and what they were at each position."""

    states: list[int]
    bytes_per_token: int
    length: int = 0
    rewinds: bool = True
    past: list[list[int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """As much as it says."""
        return self.length * self.bytes_per_token

    def copy(self) -> FakeCache:
        """One of its own."""
        return FakeCache(list(self.states), self.bytes_per_token, self.length, self.rewinds, list(self.past))

    def can_rewind(self, length: int) -> bool:
        """As a stage that can or cannot."""
        return self.rewinds and length <= self.length

    def rewind(self, length: int) -> None:
        """Go back."""
        if not self.can_rewind(length):
            raise ValueError(f"cannot go back to {length}")
        del self.past[length:]
        self.states = list(self.past[-1]) if self.past else [0] * len(self.states)
        self.length = length


class FakeMatcher:
    """A grammar that allows anything."""

    def foresee(self, answer: Sequence[int]) -> None:
        """Nothing to work out."""

    def copy(self) -> FakeMatcher:
        """One of its own."""
        return FakeMatcher()


@dataclass
class FakeRunner:
    """Computes in no time, or in as much as it is told to; can be told to fail.

    Args:
        layers: Its range.
        num_layers: Of the whole model.
        vocab_size: Token ids are below it.
        step_s: What each step takes at least, in slices that look for cancellation.
        position_s: What each entering position takes on top.
        supports_kv_cache: As a model whose layers reject a cache.
        needs_token_ids: As a model that wants ids on every hop.
        refused_cuts: As a model whose layers share something.
        rewinds: False is a model with a state that has no way back.
        text_tail: As an old tail: `text` instead of `token_ids`; see `text_of`.
        before: Called with each step on the compute thread before it is computed; may raise or block.
    """

    layers: LayerRange
    num_layers: int
    vocab_size: int = 1000
    step_s: float = 0.0
    position_s: float = 0.0
    supports_kv_cache: bool = True
    text_tail: bool = False
    rewinds: bool = True
    needs_token_ids: bool = False
    refused_cuts: tuple[int, ...] = ()
    context_len: int = 0
    device: str = "cpu"
    dtype: str = "f32"
    quantize: str = "none"
    before: Callable[[Step], None] = lambda _step: None
    seen: list[Step] = field(default_factory=list)

    @property
    def returns_token_ids(self) -> bool:
        """True of a last hop that is not an old tail."""
        return self.is_last and not self.text_tail

    @property
    def is_last(self) -> bool:
        """Whether it draws tokens."""
        return self.layers.end == self.num_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """What its cache counts per position."""
        return KV_BYTES_PER_TOKEN_AND_LAYER * len(self.layers)

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """All of them."""
        return SAMPLING_FIELDS

    @property
    def features(self) -> tuple[str, ...]:
        """As a real stage; an old tail can do neither."""
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

    def new_cache(self) -> FakeCache:
        """An empty cache."""
        return FakeCache([0] * len(self.layers), self.kv_bytes_per_token, rewinds=self.rewinds)

    def check(self, step: Step, tensors: Mapping[str, WireTensor]) -> None:
        """As a real stage: the right tensor in the right shape."""
        name: str = "token_ids"
        shape: tuple[int, ...] = (1, step.new_len)
        if self.layers.start:
            name, shape = ("hidden_states", (1, step.new_len, HIDDEN_SIZE))
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            raise StepFailed("bad_step", f"{name} must have shape {list(shape)}", field=name)
        if not self.layers.start and max(read_ids(tensor)) >= self.vocab_size:
            raise StepFailed("bad_step", f"token_ids must be below {self.vocab_size}", field="token_ids")
        if self.is_last and step.score is not None:
            targets = tensors.get("target_ids")
            if targets is None or targets.shape != (1, step.new_len):
                raise StepFailed("bad_step", f"target_ids must have shape [1, {step.new_len}]", field="target_ids")

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """One after the other."""
        return [self._run_one(each) for each in passes]

    def _run_one(self, each: Pass) -> PassOutput | MeshError:
        step = each.step
        self.seen.append(step)
        try:
            self.before(step)
            self._take_time(each)
        except StepFailed as error:
            return error
        cache = _as_fake(each.cache) or self.new_cache()
        values = (
            read_hidden(each.tensors["hidden_states"]) if self.layers.start else read_ids(each.tensors["token_ids"])
        )
        by_layer = []
        for index, layer in enumerate(range(self.layers.start, self.layers.end)):
            values = run_layer(layer, cache.states[index], values)
            cache.states[index] = values[-1]
            by_layer.append(values)
        cache.past += [list(states) for states in zip(*by_layer, strict=True)]
        cache.length += step.new_len
        if each.history is not None and self._whole_model(each.history) != values[-1]:
            raise ValueError("the history is not of the tokens that the hidden states are of")
        return self._output(each, values)

    def _whole_model(self, ids: Sequence[int]) -> int:
        values = list(ids)
        for layer in range(self.layers.end):
            values = run_layer(layer, 0, values)
        return values[-1]

    def _take_time(self, each: Pass) -> None:
        until = time.monotonic() + self.step_s + self.position_s * each.step.new_len
        while True:
            if each.cancelled():
                raise StepFailed("cancelled", "cancelled between layers")
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, CANCEL_POLL_S))

    def _output(self, each: Pass, values: list[int]) -> PassOutput:
        step, sampling = each.step, each.sampling
        tensors = self._asked_tensors(each, values) if self.is_last else {}
        output_len = step.new_len if step.output_len is None else step.output_len
        if not output_len or (self.is_last and step.pool is not None):
            return PassOutput(tensors)
        if not self.is_last:
            return PassOutput(tensors={"hidden_states": write_hidden(values[-output_len:])})
        if sampling is None:
            raise ValueError("the executor lets no last hop sample without parameters")
        history = mix(0, *each.history) if each.history is not None else 0
        token = draw(values[-1], self.vocab_size, sampling, step.past_len + step.new_len, history)
        if sampling.logprobs is not None and step.score is None:
            tensors = write_logprobs([token], sampling.logprobs, self.vocab_size)
        return PassOutput(text=text_of(token)) if self.text_tail else PassOutput(tensors, token_ids=(token,))

    def _asked_tensors(self, each: Pass, values: list[int]) -> dict[str, WireTensor]:
        tensors: dict[str, WireTensor] = {}
        if each.step.pool is not None:
            tensors["embedding"] = write_embedding(values if each.step.pool == "mean" else values[-1:])
        if each.step.score is not None:
            targets = [token for token in read_ids(each.tensors["target_ids"]) if token >= 0]
            tensors |= write_logprobs(targets, each.step.score, self.vocab_size)
        return tensors


def text_of(token: int) -> str:
    """What an old tail returns for a token."""
    return f"<{token}>"


def ids_of(text: str) -> list[int]:
    """The tokens of such a text."""
    return [int(part) for part in text.strip("<>").split("><")]


def write_ids(ids: Sequence[int]) -> WireTensor:
    """Token ids as a gateway sends them."""
    return WireTensor("i32", (1, len(ids)), memoryview(struct.pack(f"<{len(ids)}i", *ids)))


def read_ids(tensor: WireTensor) -> list[int]:
    """Token ids as the first hop reads them."""
    return list(struct.unpack(f"<{tensor.data.nbytes // 4}i", tensor.data))


def write_logprobs(tokens: Sequence[int], count: int, vocab_size: int) -> dict[str, WireTensor]:
    """A row for each token: itself, then the ids after it, each one less likely by 1 than the one before."""
    rows = [[token, *((token + i) % vocab_size for i in range(count))] for token in tokens]
    ids = [token for row in rows for token in row]
    values = [-1.0 - max(0, i - 1) for _ in rows for i in range(1 + count)]
    shape = (len(rows), 1 + count)
    return {
        "logprobs": WireTensor("f32", shape, memoryview(struct.pack(f"<{len(values)}f", *values))),
        "logprob_ids": WireTensor("i32", shape, memoryview(struct.pack(f"<{len(ids)}i", *ids))),
    }


def write_embedding(values: Sequence[int]) -> WireTensor:
    """The sum over positions of the four numbers that stand for a hash."""
    parts = [float(sum(value >> shift & 0xFFFF for value in values)) for shift in (0, 16, 32, 48)]
    return WireTensor("f32", (HIDDEN_SIZE,), memoryview(struct.pack(f"<{HIDDEN_SIZE}f", *parts)))


def write_hidden(values: Sequence[int]) -> WireTensor:
    """64-bit hashes as four floats that hold 16 bits each, exactly."""
    parts = [float(value >> shift & 0xFFFF) for value in values for shift in (0, 16, 32, 48)]
    return WireTensor("f32", (1, len(values), HIDDEN_SIZE), memoryview(struct.pack(f"<{len(parts)}f", *parts)))


def read_hidden(tensor: WireTensor) -> list[int]:
    """The inverse of `write_hidden`."""
    parts = [int(part) for part in struct.unpack(f"<{tensor.data.nbytes // 4}f", tensor.data)]
    return [
        parts[i] | parts[i + 1] << 16 | parts[i + 2] << 32 | parts[i + 3] << 48
        for i in range(0, len(parts), HIDDEN_SIZE)
    ]


def _as_fake(cache: HeldCache | None) -> FakeCache | None:
    if cache is not None and not isinstance(cache, FakeCache):
        raise ValueError(f"a fake runner was given a {type(cache).__name__}")
    return cache
