"""Which of transformers' causal language models a folder's config asks for, or why none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from shard.custom_code import load_classes, needs_code, read_auto_map, read_config_file, refusal
from shard.weight_file import as_load_failed
from shared.errors import LoadFailed
from shared.models.stored import PLAIN, StoredFormat
from shared.models.stored_formats import read_stored_format


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What is built.

    Args:
        config: Of the model that is built.
        model_class: The model's own class.
        is_part: The folder holds a larger model (with vision or audio), of which only the text part is served.
        has_other_parts: It is that larger model's class, since transformers has none for its text part: the others are
            left out of it.
        stored: How the folder's weights are stored; the config says nothing of it any more.
    """

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    is_part: bool
    has_other_parts: bool = False
    stored: StoredFormat = PLAIN


def read_kind(model_dir: Path, code_dir: Path | None = None) -> ModelKind:
    """Read a folder's config.

    Args:
        model_dir: The folder.
        code_dir: Where the model's own code may be run from (`shard.custom_code.find_code`); None runs none.

    Raises:
        LoadFailed: `model_not_found`; `model_unsupported`, with the reason; `code_not_trusted`.
    """
    with as_load_failed():
        stored = read_stored_format(read_config_file(model_dir))
    kind = _find_kind(model_dir, code_dir)
    _forget_quantization(kind.config)
    return replace(kind, stored=stored)


def _find_kind(model_dir: Path, code_dir: Path | None) -> ModelKind:
    if code_dir is not None and read_auto_map(model_dir):
        config, model_class = load_classes(model_dir, code_dir)
        return ModelKind(config, model_class, is_part=False)
    if needs_code(model_dir):
        raise refusal(model_dir)
    config = _read_config(model_dir)
    if config.is_encoder_decoder:
        raise _unsupported(config, "is an encoder-decoder; only decoders are served")
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", True) is False:
        raise _unsupported(config, "is an encoder (its config says is_decoder: false), whose tokens see later ones")
    text_class, whole_class = _mapped(text), _mapped(config)
    if text is config or text_class is None:
        text_class = whole_class
    if text_class is None and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        with_vision = cast(type[PreTrainedModel], MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])
        return ModelKind(config, with_vision, is_part=True, has_other_parts=True)
    if text_class is None:
        raise _unsupported(config, "has no causal language model in transformers")
    if whole_class is not None and whole_class is not text_class and whole_class.config_class is type(config):
        is_own_kind = whole_class.__name__.endswith("ForCausalLM")  # and not the text model with other parts beside it
        text_class = whole_class if is_own_kind else text_class
    takes_text = text is not config and text_class.config_class is not type(config)
    return ModelKind(text if takes_text else config, text_class, is_part=takes_text)


def _mapped(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]) if known else None


def _read_config(model_dir: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise LoadFailed("model_unsupported", f"cannot read {model_dir}/config.json: {error}") from error


def _forget_quantization(config: PreTrainedConfig) -> None:
    """Weights come to transformers as floats, whatever they are stored as (`shard.dequantize`)."""
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def _unsupported(config: PreTrainedConfig, why: str) -> LoadFailed:
    message = f"model type {config.model_type!r} {why}"
    return LoadFailed("model_unsupported", message, model_type=config.model_type)
