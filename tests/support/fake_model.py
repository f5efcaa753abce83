"""A model made of hashes: every token depends on every input, and a wrong cache gives a wrong token.

Layer ``l`` folds its inputs into a running hash, one step per position, and gives the hash on:

    R[l][p] = mix(R[l][p-1], l, x[l][p])        x[l+1][p] = R[l][p]        x[0][p] = token id at p

So the layer's cache is R[l] at the last position, as little as K/V is much, and the token after position
``p`` is R[last][p], reduced to the vocabulary; with a temperature it depends on seed and position too.
The function does not depend on where the layers are cut. No torch, no numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import SamplingParams

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


def draw(last_output: int, vocab_size: int, sampling: SamplingParams, position: int) -> int:
    """The token that goes to `position`."""
    if sampling.temperature == 0:
        return last_output % vocab_size
    return mix(last_output, sampling.seed, position) % vocab_size


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
    states = [0] * num_layers
    inputs = list(prompt_ids)
    position = 0
    tokens: list[int] = []
    while len(tokens) < count:
        position += len(inputs)
        for layer in range(num_layers):
            inputs = run_layer(layer, states[layer], inputs)
            states[layer] = inputs[-1]
        tokens.append(draw(inputs[-1], vocab_size, sampling, position))
        if tokens[-1] in eos_ids:
            break
        inputs = tokens[-1:]
    return tokens
