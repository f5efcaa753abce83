"""What a scripted node computes and keeps: `tests.support.fake_model` on its range, as strict as a real node.

A step that carries a tensor too few, one too many, or one of another shape is a `bad_step`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared.errors import StepFailed
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.support.fake_model import draw, embed, logprobs_at, mix, run_layer
from tests.support.fake_runner import read_hidden, read_ids, text_of, write_hidden

VOCAB_SIZE = 1000
NO_TARGET = -1

Answer = tuple[StepResult, dict[str, WireTensor]]


@dataclass(frozen=True)
class Held:
    """One session.

    Args:
        states: The layers' hashes.
        length: Positions.
        epoch: Of the newest step.
        step_index: Of the newest step.
        sampling: What a decode without its own draws with.
        history: The hash of all tokens that were named; None once a step has named none.
    """

    states: tuple[int, ...]
    length: int
    epoch: int
    step_index: int
    sampling: SamplingParams | None
    history: int | None = 0


@dataclass(frozen=True)
class Stage:
    """A range of the model.

    Args:
        layers: The range.
        num_layers: Of the whole model.
        text_tail: As an old tail: text instead of ids.
        streams: Hidden states of rank 4 instead of 3.
        needs_token_ids: Every step must carry token ids.
    """

    layers: LayerRange
    num_layers: int
    text_tail: bool = False
    streams: bool = False
    needs_token_ids: bool = False

    @property
    def is_last(self) -> bool:
        """Whether it draws tokens."""
        return self.layers.end == self.num_layers

    def compute(self, step: Step, tensors: Mapping[str, WireTensor], base: Held | None) -> tuple[Held, Answer]:
        """Serve a step from what is held; returns what is held after it, and the answer.

        Raises:
            StepFailed: `bad_step`.
        """
        sampling = step.sampling or (base.sampling if base else None)
        self._check(step, tensors, sampling)
        values = self._read(tensors)
        if len(values) != step.new_len or (step.cache != "decode" and step.past_len):
            raise StepFailed("bad_step", "new_len or past_len is wrong")
        states = list(base.states) if base else [0] * len(self.layers)
        for index, layer in enumerate(range(self.layers.start, self.layers.end)):
            values = run_layer(layer, states[index], values)
            states[index] = values[-1]
        length = step.past_len + step.new_len
        history = _named(tensors, base.history if base else 0)
        held = Held(tuple(states), length, step.epoch, step.step_index, sampling, history)
        return held, self._answer(step, values, held, tensors)

    def _check(self, step: Step, tensors: Mapping[str, WireTensor], sampling: SamplingParams | None) -> None:
        expected = {"hidden_states" if self.layers.start else "token_ids"}
        if self.needs_token_ids or (self.is_last and sampling is not None and sampling.needs_history):
            expected.add("token_ids")
        if self.is_last and step.score is not None:
            expected.add("target_ids")
        if set(tensors) != expected:
            raise StepFailed("bad_step", f"tensors must be {sorted(expected)}, not {sorted(tensors)}")
        if any(tensors[name].shape != (1, step.new_len) for name in expected - {"hidden_states"}):
            raise StepFailed("bad_step", "ids must be [1, new_len]")
        if not self.is_last and (step.score is not None or step.pool is not None):
            raise StepFailed("bad_step", "only a last hop scores or pools")

    def _answer(self, step: Step, values: list[int], held: Held, tensors: Mapping[str, WireTensor]) -> Answer:
        result = StepResult(session=step.session, step_index=step.step_index, epoch=step.epoch)
        output_len = step.new_len if step.output_len is None else step.output_len
        answers: dict[str, WireTensor] = {}
        if step.score is not None:
            answers |= _scored(values, read_ids(tensors["target_ids"]), step.score)
        if step.pool is not None:
            return result, {"embedding": _floats((-1,), embed(values, step.pool))}
        if not output_len:
            return result, answers
        if not self.is_last:
            return result, {"hidden_states": self._write(values[-output_len:])}
        return self._drawn(result, values[-1], held, answers)

    def _drawn(self, result: StepResult, output: int, held: Held, answers: dict[str, WireTensor]) -> Answer:
        sampling = held.sampling
        if sampling is None:
            raise StepFailed("bad_step", "a last hop needs sampling parameters")
        if sampling.needs_history and held.history is None:
            raise StepFailed("bad_step", "a last hop needs every token of the history")
        token_id = draw(output, VOCAB_SIZE, sampling, held.length, held.history or 0)
        if self.text_tail:
            return replace(result, text=text_of(token_id)), answers
        if sampling.logprobs is not None:
            if answers:
                raise StepFailed("bad_step", "rows are either those of targets or that of a drawn token")
            answers = _rows([output], [token_id], sampling.logprobs)
        return replace(result, token_ids=(token_id,)), answers

    def _read(self, tensors: Mapping[str, WireTensor]) -> list[int]:
        if not self.layers.start:
            return read_ids(tensors["token_ids"])
        hidden = tensors["hidden_states"]
        return _read_streams(hidden) if self.streams else read_hidden(hidden)

    def _write(self, values: Sequence[int]) -> WireTensor:
        return _write_streams(values) if self.streams else write_hidden(values)


def _named(tensors: Mapping[str, WireTensor], before: int | None) -> int | None:
    if "token_ids" not in tensors or before is None:
        return None
    return mix(before, *read_ids(tensors["token_ids"]))


def _scored(outputs: Sequence[int], targets: Sequence[int], top: int) -> dict[str, WireTensor]:
    places = [place for place, target in enumerate(targets) if target != NO_TARGET]
    return _rows([outputs[place] for place in places], [targets[place] for place in places], top)


def _rows(outputs: Sequence[int], token_ids: Sequence[int], top: int) -> dict[str, WireTensor]:
    ids: list[int] = []
    values: list[float] = []
    for output, token_id in zip(outputs, token_ids, strict=True):
        row = logprobs_at(output, token_id, top, VOCAB_SIZE)
        ids += [token_id, *(other for other, _ in row.top)]
        values += [row.logprob, *(value for _, value in row.top)]
    shape = (len(outputs), 1 + top)
    packed = memoryview(struct.pack(f"<{len(ids)}i", *ids))
    return {"logprobs": _floats(shape, values), "logprob_ids": WireTensor("i32", shape, packed)}


def _floats(shape: tuple[int, ...], values: Sequence[float]) -> WireTensor:
    shape = (len(values),) if shape == (-1,) else shape
    return WireTensor("f32", shape, memoryview(struct.pack(f"<{len(values)}f", *values)))


def _write_streams(values: Sequence[int]) -> WireTensor:
    """Rank 4, two residual streams: ``[2, 1, n, 2]``, the upper half of each hash in one, the lower in the other."""
    rows = [[value >> shift & 0xFFFF for value in values for shift in shifts] for shifts in ((0, 16), (32, 48))]
    return _floats((2, 1, len(values), 2), [float(part) for row in rows for part in row])


def _read_streams(tensor: WireTensor) -> list[int]:
    assert tensor.shape[:2] == (2, 1)
    assert tensor.shape[3] == 2
    count = tensor.shape[2]
    parts = [int(part) for part in struct.unpack(f"<{tensor.data.nbytes // 4}f", tensor.data)]
    low, high = parts[: 2 * count], parts[2 * count :]
    return [low[2 * i] | low[2 * i + 1] << 16 | high[2 * i] << 32 | high[2 * i + 1] << 48 for i in range(count)]
