"""A `shard.runner.Runner` that computes `tests.support.fake_model`: a whole node without torch or weights."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shard.kv_cache import HeldCache
from shard.runner import Pass, PassOutput
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from shared.tensor_spec import WireTensor
from tests.support.fake_model import draw, run_layer

KV_BYTES_PER_TOKEN_AND_LAYER = 100
HIDDEN_SIZE = 4
CANCEL_POLL_S = 0.005
"""A real stage asks between layers, which is as often."""


@dataclass(slots=True)
class FakeCache:
    """The running hashes of a range's layers."""

    states: list[int]
    bytes_per_token: int
    length: int = 0

    @property
    def nbytes(self) -> int:
        """As much as it says."""
        return self.length * self.bytes_per_token


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
    context_len: int = 0
    device: str = "cpu"
    dtype: str = "f32"
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

    def memory_free_bytes(self) -> int:
        """Enough."""
        return 1 << 30

    def new_cache(self) -> FakeCache:
        """An empty cache."""
        return FakeCache([0] * len(self.layers), self.kv_bytes_per_token)

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
        for index, layer in enumerate(range(self.layers.start, self.layers.end)):
            values = run_layer(layer, cache.states[index], values)
            cache.states[index] = values[-1]
        cache.length += step.new_len
        return self._output(step, each.sampling, values)

    def _take_time(self, each: Pass) -> None:
        until = time.monotonic() + self.step_s + self.position_s * each.step.new_len
        while True:
            if each.cancelled():
                raise StepFailed("cancelled", "cancelled between layers")
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, CANCEL_POLL_S))

    def _output(self, step: Step, sampling: SamplingParams | None, values: list[int]) -> PassOutput:
        output_len = step.new_len if step.output_len is None else step.output_len
        if not output_len:
            return PassOutput()
        if not self.is_last:
            return PassOutput(tensors={"hidden_states": write_hidden(values[-output_len:])})
        if sampling is None:
            raise ValueError("the executor lets no last hop sample without parameters")
        token = draw(values[-1], self.vocab_size, sampling, step.past_len + step.new_len)
        return PassOutput(text=text_of(token)) if self.text_tail else PassOutput(token_ids=(token,))


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
