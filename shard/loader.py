"""Building a stage: a model's own class, one layer range of it, and only that range's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import Any, cast

import structlog
import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from shard.attention import choose_attention
from shard.dequantize import read_weight
from shard.device import choose_device, choose_dtype
from shard.head import watch_head
from shard.layer_flow import LayerFlow, follow_layers
from shard.layer_takeover import take_over_layers
from shard.linear.choice import choose_kernels
from shard.linear.packing import (
    Packing,
    kept_in_float32,
    pack_model,
    packable_embedding,
    packable_weights,
    plan_packing,
)
from shard.model_kind import ModelKind, read_kind
from shard.model_outline import ModelOutline, select_names
from shard.probe import probe_stage
from shard.stage import Stage
from shard.weight_file import TORCH_DTYPES, WeightReader, as_load_failed, list_tensors, locate, require_present
from shard.weight_map import majority_float, range_bytes
from shard.window import PassState, describe_model, open_window, watch_layers, windowed_class
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.stored import Weight, join_all
from shared.models.tensors import TensorEntry
from shared.options import QUANTIZE_NONE

log = structlog.get_logger(__name__)

NAMES_SHOWN_MAX = 5
"""How many missing tensors an error names."""


@dataclass(frozen=True, slots=True)
class RangePlan:
    """What loading a range will read, known before any weight is.

    Args:
        config: The model's.
        model_class: The model's own class.
        outline: How it names its parts.
        flow: What its layers need of each other.
        layers: The range.
        entries: The weights that will be read, by the names of the parameters they become.
        stored_type: The element type that most of them have, as files write it, or that the config of a quantized
            checkpoint names.
        linears: Names of the weights that only linear layers use.
        table: Name of the input embedding's weight, where nothing else uses it.
    """

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    outline: ModelOutline
    flow: LayerFlow
    layers: LayerRange
    entries: dict[str, Weight]
    stored_type: str
    linears: frozenset[str]
    table: str | None

    @property
    def stored(self) -> list[TensorEntry]:
        """The tensors of the files that will be read: the weights, or what they are made of."""
        return [part for weight in self.entries.values() for part in weight.parts]

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes the range takes in memory; without a dtype, in the file."""
        return range_bytes(self.entries.values(), dtype.itemsize if dtype else None)


def plan_range(model_dir: Path, layers: LayerRange, code_dir: Path | None = None) -> RangePlan:
    """Find out which tensors a range needs, from the config and the files' headers alone.

    Args:
        model_dir: Folder with config.json and safetensors.
        layers: The range.
        code_dir: Where the model's own code may be run from; None runs none.

    Raises:
        LoadFailed: `model_not_found`, `model_unsupported`, `code_not_trusted`, `range_outside_model`, `cut_refused`,
            `weights_missing`, `weights_corrupt`.
    """
    kind = read_kind(model_dir, code_dir)
    model, outline, flow = _build_outline(kind)
    _check_range(layers, outline, flow)
    files = list_tensors(model_dir)
    parts = kind.stored.group(files)
    if kind.is_part:  # the larger model's config says in its own way whether they are tied
        outline = outline.tied_as_stored(parts)
    load_as = select_names(parts, outline, layers, is_part=kind.is_part)
    stored = locate(model_dir, [part for name in load_as for part in parts[name]], files)
    with as_load_failed():
        entries = {load_as[weight.name]: weight for weight in join_all(kind.stored, stored)}
    stored_type = kind.stored.dtype or majority_float(entries.values()) or "F32"
    with torch.device("meta"):
        open_window(model, outline, layers, PassState())
    linears, table = packable_weights(model, outline), packable_embedding(model, outline)
    return RangePlan(kind.config, kind.model_class, outline, flow, layers, entries, stored_type, linears, table)


def read_refused_cuts(model_dir: Path) -> Mapping[int, str]:
    """Layers of a model before which no range may begin, and why: for whoever plans ranges.

    Raises:
        LoadFailed: As `plan_range`, for what concerns the model alone.
    """
    return _build_outline(read_kind(model_dir))[2].refused_cuts


def _build_outline(kind: ModelKind) -> tuple[PreTrainedModel, ModelOutline, LayerFlow]:
    try:
        with torch.device("meta"):
            model = kind.model_class(kind.config)
    except Exception as error:  # a model's own code may raise anything
        message = f"transformers cannot build {kind.model_class.__name__}: {type(error).__name__}: {error}"
        raise LoadFailed("model_unsupported", message, architecture=kind.model_class.__name__) from error
    outline = describe_model(model, kind.config, has_other_parts=kind.has_other_parts)
    with _quiet_transformers():
        flow = follow_layers(model, outline)
    return model, replace(outline, embeds_everywhere=flow.needs_embedding), flow


def _check_range(layers: LayerRange, outline: ModelOutline, flow: LayerFlow) -> None:
    if layers.end > outline.num_layers:
        message = f"layer range {layers} reaches past the model's {outline.num_layers} layers"
        raise LoadFailed("range_outside_model", message, layers=str(layers), num_layers=outline.num_layers)
    for cut in (layers.start, layers.end):
        if cut in flow.refused_cuts:
            message = f"layer range {layers} cuts the model before layer {cut}, but {flow.refused_cuts[cut]}"
            raise LoadFailed("cut_refused", message, layers=str(layers), refused_cuts=sorted(flow.refused_cuts))


def load_stage(
    model_dir: Path,
    layers: LayerRange,
    *,
    device: str = "auto",
    dtype: str = "auto",
    code_dir: Path | None = None,
    fetch: Callable[[Iterable[TensorEntry]], None] | None = None,
    quantize: str = QUANTIZE_NONE,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    before_reading: Callable[[int, torch.device], None] | None = None,
    check_memory: Callable[[torch.device, str, int], None] | None = None,
) -> Stage:
    """Load a layer range of the model in a Hugging Face folder.

    Args:
        model_dir: Folder with config.json and safetensors.
        layers: Which layers; the first range gets the embedding, the last final norm and head.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        dtype: ``auto`` or a key of `shard.device.DTYPES`.
        code_dir: Where the model's own code may be run from; None runs none.
        fetch: Called with the range's tensors before they are read, to fetch those that the folder lacks.
        quantize: ``none``, ``int8`` or ``int4``: how weights are held.
        cache_dir: Where it is kept which kernel is the fastest here; None measures anew.
        progress: Called with (bytes read, bytes in all) from whichever thread reads.
        check_memory: Called before anything is fetched, with the device, the element type's name and the bytes that
            the weights will take; raises `LoadFailed` where the range would not fit.
        before_reading: Called with the bytes that the weights will take, and where; may wait, or refuse by raising.

    Raises:
        LoadFailed: See there for the codes.
    """
    plan = plan_range(model_dir, layers, code_dir)
    where = choose_device(device)
    kind = choose_dtype(dtype, where.device, TORCH_DTYPES[plan.stored_type])
    if kind.warning:
        log.warning("dtype.slow", dtype=dtype, reason=kind.warning)
    choice = choose_kernels(quantize, where.device, kind.dtype, cache_dir)
    packing = plan_packing(choice, plan.linears, plan.table)
    packed_bytes = plan.weight_bytes(kind.dtype) - packing.saves_bytes(plan.entries, kind.dtype)
    if check_memory is not None:
        check_memory(where.device, str(kind.dtype).removeprefix("torch."), packed_bytes)
    if fetch is not None:
        fetch(plan.stored)
    require_present(model_dir, plan.stored)
    if before_reading is not None:
        before_reading(packed_bytes, where.device)
    state = PassState(plan.flow.tuple_len)
    with WeightReader(model_dir, plan.stored, progress) as reader, _quiet_transformers():
        model, saved_bytes = _load_model(plan, packing, state, reader, device=where.device, dtype=kind.dtype)
    row_layers = take_over_layers(model, plan.outline, layers, kind.dtype)
    watch_layers(model, plan.outline, layers, state)
    if plan.outline.is_last(layers):
        watch_head(model, plan.outline, state)
    weight_bytes = plan.weight_bytes(kind.dtype) - saved_bytes
    stage = Stage(
        model,
        plan.outline,
        layers,
        state,
        flow=plan.flow,
        device=where.device,
        dtype=kind.dtype,
        weight_bytes=weight_bytes,
        quantize=quantize,
    )
    probe_stage(stage)
    log.info(
        "stage.loaded",
        layers=str(layers),
        device=str(where.device),
        device_reason=where.reason,
        dtype=str(kind.dtype).removeprefix("torch."),
        dtype_reason=kind.reason,
        quantize=quantize,
        kernel=choice.name,
        kernel_reason=choice.reason,
        row_layers=row_layers,
        weight_bytes=weight_bytes,
    )
    return stage


class _LazyTensor:
    """A tensor that transformers reads when it comes to it, one at a time, already converted."""

    def __init__(self, reader: WeightReader, weight: Weight, dtype: torch.dtype | None) -> None:
        self._reader, self._weight, self._dtype = reader, weight, dtype

    def __getitem__(self, _: EllipsisType) -> torch.Tensor:
        return read_weight(self._reader, self._weight, self._dtype)


def _load_model(
    plan: RangePlan,
    packing: Packing,
    state: PassState,
    reader: WeightReader,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, int]:
    windowed: Any = windowed_class(plan.model_class, plan.outline, plan.layers, state)
    kept = kept_in_float32(windowed)

    def read_as(name: str, weight: Weight) -> torch.dtype | None:
        """Models may keep some modules in float32: then transformers itself converts, tensor by tensor."""
        if isinstance(weight, TensorEntry):
            return None if kept else dtype
        return torch.float32 if any(pattern.search(name) for pattern in kept) else dtype

    packed = packing.names
    tensors = {
        name: torch.zeros((), dtype=dtype).expand(entry.shape)  # takes no memory; read when it is packed
        if name in packed
        else _LazyTensor(reader, entry, read_as(name, entry))
        for name, entry in plan.entries.items()
    }
    try:
        model, info = windowed.from_pretrained(
            None,
            config=plan.config,
            state_dict=tensors,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            attn_implementation=choose_attention(plan.model_class),
            output_loading_info=True,
            local_files_only=True,
        )
        _check_complete(info)
        saved_bytes = pack_model(model, packing, lambda name: _read_plain(model, name, plan, reader, dtype))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LoadFailed("out_of_memory", f"layer range {plan.layers} does not fit into memory") from error
    except (RuntimeError, ValueError) as error:
        if reader.failure is not None:
            raise reader.failure from error
        raise LoadFailed("weights_mismatch", f"the weights do not fit the config: {error}") from error
    return cast(PreTrainedModel, model), saved_bytes


def _read_plain(
    model: PreTrainedModel, name: str, plan: RangePlan, reader: WeightReader, dtype: torch.dtype
) -> torch.Tensor:
    """A weight about to be packed: from the file, or what transformers has made of several tensors."""
    entry = plan.entries.get(name)
    return model.get_parameter(name).detach() if entry is None else read_weight(reader, entry, dtype)


def _check_complete(info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:NAMES_SHOWN_MAX]) + (", …" if len(missing) > NAMES_SHOWN_MAX else "")
        raise LoadFailed("weights_missing", f"the checkpoint lacks {len(missing)} tensors: {shown}", missing=missing)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading shows its own progress, and tensors of other ranges are no news."""
    messages: Any = transformers_logging
    verbosity, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if bars:
            messages.enable_progress_bar()
