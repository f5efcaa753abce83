"""A model made of hashes: every token depends on every input, and a wrong cache gives a wrong token.

Layer ``l`` folds its inputs into a running hash, one step per position, and gives the hash on:

    R[l][p] = mix(R[l][p-1], l, x[l][p])        x[l+1][p] = R[l][p]        x[0][p] = token id at p

So the layer's cache is R[l] at the last position, as little as K/V is much, and the token after position
``p`` is R[last][p], reduced to the vocabulary; with a temperature it depends on seed and position too, and where the
sampling needs the history, on every token before. Log-probabilities and embeddings are made of the same hashes, in
numbers that f32 holds exactly.
The function does not depend on where the layers are cut. No torch, no numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.generation_request import TokenLogprobs
from shared.messages import Pooling, SamplingParams

EMBEDDING_SIZE = 4
_MASK = (1 << 64) - 1
_GREEDY = SamplingParams(temperature=0.0)


def mix(state: int, *values: int) -> int:
    """A 64-bit hash of a state and some integers (splitmix64's finalizer for each)."""
    for value in values:
        state = (state ^ value) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def run_layer(layer: int, state: int, inputs: Sequence[int]) -> list[int]:
    """A layer's outputs for the positions that enter, given its state after the ones before."""
    outputs = []
    for value in inputs:
        state = mix(state, layer + 1, value)
        outputs.append(state)
    return outputs


def draw(last_output: int, vocab_size: int, sampling: SamplingParams, position: int, history: int = 0) -> int:
    """The token that goes to `position`.

    Args:
        last_output: At the position before.
        vocab_size: Ids are below it.
        sampling: Decides what else it depends on.
        position: Its own.
        history: `mix(0, *ids)` of all tokens before it; looked at where `sampling` needs it.
    """
    if sampling.needs_history:
        last_output = mix(last_output, history, sampling.min_tokens)
    if sampling.temperature == 0:
        return last_output % vocab_size
    return mix(last_output, sampling.seed, position) % vocab_size


def logprobs_at(output: int, token_id: int, top: int, vocab_size: int) -> TokenLogprobs:
    """What the model says of a token after a position, and of some others."""
    others = [mix(output, rank, 1) % vocab_size for rank in range(top)]
    return TokenLogprobs(_logprob(output, token_id), tuple((other, _logprob(output, other)) for other in others))


def _logprob(output: int, token_id: int) -> float:
    return -(mix(output, token_id) % 4096) / 64


def embed(outputs: Sequence[int], pooling: Pooling) -> list[float]:
    """A step's part of an embedding."""
    pooled = outputs if pooling == "mean" else outputs[-1:]
    return [float(sum(output >> 8 * place & 0xFF for output in pooled)) for place in range(EMBEDDING_SIZE)]


@dataclass
class Reference:
    """The whole model, fed position by position."""

    num_layers: int
    outputs: list[int] = field(default_factory=list)
    history: int = 0
    _states: list[int] = field(default_factory=list)

    def feed(self, ids: Sequence[int]) -> None:
        """Let these tokens enter."""
        self._states = self._states or [0] * self.num_layers
        self.history = mix(self.history, *ids)
        values = list(ids)
        for layer in range(self.num_layers):
            values = run_layer(layer, self._states[layer], values)
            self._states[layer] = values[-1]
        self.outputs += values


def expected_tokens(
    prompt_ids: Sequence[int],
    count: int,
    *,
    num_layers: int,
    vocab_size: int = 1000,
    sampling: SamplingParams = _GREEDY,
    eos_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """What a mesh of fake nodes must generate, the EOS id included."""
    answer = expected_answer(
        prompt_ids, count, num_layers=num_layers, vocab_size=vocab_size, sampling=sampling, eos_ids=eos_ids
    )
    return [token_id for token_id, _ in answer]


def expected_answer(
    prompt_ids: Sequence[int],
    count: int,
    *,
    num_layers: int,
    vocab_size: int = 1000,
    sampling: SamplingParams = _GREEDY,
    eos_ids: frozenset[int] = frozenset(),
) -> list[tuple[int, TokenLogprobs | None]]:
    """As `expected_tokens`, each with its log-probabilities where `sampling` asks for them."""
    model = Reference(num_layers)
    model.feed(prompt_ids)
    answer: list[tuple[int, TokenLogprobs | None]] = []
    while len(answer) < count:
        output, position = model.outputs[-1], len(model.outputs)
        token_id = draw(output, vocab_size, sampling, position, model.history)
        top = sampling.logprobs
        answer.append((token_id, None if top is None else logprobs_at(output, token_id, top, vocab_size)))
        if token_id in eos_ids:
            break
        model.feed([token_id])
    return answer


def expected_scores(
    prompt_ids: Sequence[int], top: int, *, num_layers: int, vocab_size: int = 1000
) -> list[TokenLogprobs | None]:
    """The scored prompt."""
    model = Reference(num_layers)
    model.feed(prompt_ids)
    following = zip(model.outputs[:-1], prompt_ids[1:], strict=True)
    return [None, *(logprobs_at(output, token_id, top, vocab_size) for output, token_id in following)]


def expected_embedding(prompt_ids: Sequence[int], pooling: Pooling, *, num_layers: int) -> list[float]:
    """The embedding, before it is rounded to f32."""
    model = Reference(num_layers)
    model.feed(prompt_ids)
    count = len(prompt_ids) if pooling == "mean" else 1
    return [total / count for total in embed(model.outputs, pooling)]
