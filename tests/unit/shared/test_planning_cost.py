"""Costs of a range, each against a sum done by hand."""

from __future__ import annotations

import pytest

from shared.layers import LayerRange
from shared.models.facts import LayerFacts, ModelFacts, SlotFacts
from shared.models.range_memory import CAPACITY_MIN, GROWTH, WINDOW_SLACK
from shared.planning.cost import FRAME_BYTES, TOKEN_BYTES, CostModel
from shared.planning.fleet import Demand, Machine

LAYER = LayerFacts(weight_bytes=1000, active_bytes=1000, slot=SlotFacts(bytes_per_token=4))
DEMAND = Demand(sessions=3, context_len=100, prompt_len=300, chunk_tokens=256)
MACHINE = Machine(
    name="m",
    memory_bytes=1_000_000,
    decode_s_per_layer=0.002,
    prefill_s_per_layer_token=0.0001,
    rtt_s=0.01,
    bytes_per_s=1e6,
    hop_overhead_s=0.001,
    runtime_bytes=50_000,
)


def model(layers: tuple[LayerFacts, ...] = (LAYER,) * 4, *, is_tied: bool = False) -> ModelFacts:
    """A model of round numbers, untied unless said."""
    return ModelFacts(
        layers=layers,
        embedding_bytes=5000,
        head_bytes=5000,
        is_tied=is_tied,
        shared_bytes=10,
        hidden_bytes=64,
    )


def test_memory_is_layers_ends_and_what_every_range_holds():
    """A middle range has no end, a first and a last one each, and a whole untied model both."""
    costs = CostModel(model(), DEMAND)
    weights = [costs.weights_bytes(LayerRange(*layers)) for layers in ((1, 3), (0, 2), (2, 4), (0, 4))]
    assert weights == [2010, 7010, 7010, 14010]


def test_a_tied_head_is_held_once_by_a_range_that_is_first_and_last():
    """On two machines both hold it."""
    costs = CostModel(model(is_tied=True), DEMAND)
    assert costs.weights_bytes(LayerRange(0, 4)) == 9010
    assert costs.weights_bytes(LayerRange(2, 4)) == 7010


def test_caches_count_all_sessions_at_full_length_with_room_to_grow():
    """Slots grow by half from what they begin with; a window's never beyond it and its slack; a state has one size."""
    window = LayerFacts(1000, 1000, SlotFacts(bytes_per_token=4, tokens_max=20))
    linear = LayerFacts(1000, 1000, SlotFacts(state_bytes=77))
    costs = CostModel(model((LAYER, window, linear)), DEMAND)
    per_layer = [costs.kv_bytes(LayerRange(index, index + 1)) for index in range(3)]
    assert per_layer == [3 * 4 * CAPACITY_MIN, 3 * 4 * (20 + WINDOW_SLACK), 3 * 77]
    longer = CostModel(model(), Demand(context_len=1000))
    assert longer.kv_bytes(LayerRange(0, 1)) == 4 * int(1000 * GROWTH)


def test_free_memory_is_what_weights_caches_and_runtime_leave():
    """Nothing of the machine is counted twice or forgotten."""
    cost = CostModel(model(), DEMAND).stage(MACHINE, LayerRange(1, 3))
    taken = cost.weights_bytes + cost.kv_bytes + cost.working_bytes + MACHINE.runtime_bytes
    assert taken + cost.free_bytes == MACHINE.memory_bytes


def test_a_middle_hop_takes_overhead_round_trip_bytes_both_ways_and_layers():
    """The formula of docs/planning.md."""
    cost = CostModel(model(), DEMAND).stage(MACHINE, LayerRange(1, 3))
    assert cost.compute_s == pytest.approx(2 * 0.002)
    assert cost.transfer_s == pytest.approx(2 * (FRAME_BYTES + 64) / 1e6)
    assert cost.latency_s == pytest.approx(0.001 + 0.01 + cost.transfer_s + cost.compute_s)


def test_a_whole_model_on_one_machine_moves_ids_only():
    """Neither way do hidden states travel; the head is computed here."""
    cost = CostModel(model(), DEMAND).stage(MACHINE, LayerRange(0, 4))
    assert cost.transfer_s == pytest.approx(2 * (FRAME_BYTES + TOKEN_BYTES) / 1e6)
    assert cost.compute_s == pytest.approx(4 * 0.002 + 5 * 0.002)


def test_an_unmeasured_head_takes_as_long_as_so_many_bytes_of_layers():
    """And a measured one what was measured."""
    measured = Machine(name="m", memory_bytes=10**6, decode_s_per_layer=0.002, head_s=0.5)
    costs = CostModel(model(), DEMAND)
    assert costs.head_s(MACHINE) == pytest.approx(5 * 0.002)
    assert costs.head_s(measured) == 0.5


def test_layers_weigh_by_what_a_step_reads_of_them():
    """A mixture-of-experts layer reads its chosen experts only."""
    sparse = LayerFacts(weight_bytes=9000, active_bytes=3000, slot=SlotFacts())
    costs = CostModel(model((LAYER, sparse)), DEMAND)
    assert [costs.layer_work(layer) for layer in (LAYER, sparse)] == [0.5, 1.5]


def test_a_slow_link_occupies_a_stage_longer_than_its_compute():
    """Round trips occupy nobody."""
    far = Machine(name="m", memory_bytes=10**6, decode_s_per_layer=0.00001, rtt_s=1.0, bytes_per_s=1000)
    cost = CostModel(model(), DEMAND).stage(far, LayerRange(1, 3))
    assert cost.busy_s == pytest.approx((FRAME_BYTES + 64) / 1000)
    assert cost.latency_s > 1.0


def test_a_prompt_travels_chunk_after_chunk():
    """300 tokens are 256 and 44; each chunk pays the hop, the last one the head."""
    cost = CostModel(model(), DEMAND).stage(MACHINE, LayerRange(2, 4))
    compute = 2 * 0.0001 * 300
    wire = (2 * 2 * FRAME_BYTES + 64 * 300 + 2 * TOKEN_BYTES) / 1e6
    assert cost.prefill_s == pytest.approx(2 * 0.011 + wire + compute + 5 * 0.002)


def test_a_chunk_is_no_faster_than_a_decode_step():
    """However fast the prefill was measured, weights are read once."""
    quick = Machine(name="m", memory_bytes=10**6, decode_s_per_layer=0.1, prefill_s_per_layer_token=1e-9, head_s=0.0)
    cost = CostModel(model(), Demand(prompt_len=1)).stage(quick, LayerRange(1, 2))
    assert cost.prefill_s == pytest.approx(0.1 + quick.hop_overhead_s)


def test_an_unknown_prefill_time_stays_unknown():
    """It is not made up."""
    unknown = Machine(name="m", memory_bytes=10**6, decode_s_per_layer=0.1)
    assert CostModel(model(), DEMAND).stage(unknown, LayerRange(0, 4)).prefill_s is None


@pytest.mark.parametrize(
    "fields", [{"memory_bytes": 0}, {"decode_s_per_layer": 0.0}, {"bytes_per_s": 0.0}, {"rtt_s": -1.0}]
)
def test_a_machine_that_cannot_be_is_our_own_bug(fields: dict[str, float]):
    """Readers of files and messages check before."""
    with pytest.raises(ValueError, match="m:"):
        Machine(**{"name": "m", "memory_bytes": 1, "decode_s_per_layer": 1.0, **fields})


def test_forbidden_cuts_lie_between_layers():
    """Both ends of a model are always boundaries."""
    with pytest.raises(ValueError, match="forbidden cuts"):
        ModelFacts(
            layers=(LAYER,),
            embedding_bytes=0,
            head_bytes=0,
            is_tied=False,
            shared_bytes=0,
            hidden_bytes=0,
            forbidden_cuts=frozenset({1}),
        )
