"""What a Hugging Face model folder says about itself, read from its JSON files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from shared.models.errors import ModelUnavailable
from shared.models.progress import ProgressSink
from shared.models.spans import Span
from shared.models.tensors import parse_index

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
SIDE_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Everything beside the weights that a gateway or a node reads; the first and `tokenizer.json` must be there."""
PICKLE_ADVICE: Final = (
    "its pytorch_model.bin is not read (it can run code): where you trust it, write it as safetensors with "
    "transformers' AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)
_LAYER_COUNT_KEYS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_DTYPES: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}


class AbsentWeights(Protocol):
    """What fetches the weights that a folder does not have yet."""

    @property
    def reference(self) -> str:
        """Names the model exactly, for other machines: ``owner/name@commit``; empty when only this machine can."""
        ...

    def fetch(self, spans: Mapping[str, Sequence[Span]], progress: ProgressSink) -> None:
        """Make sure that these bytes of these files are there.

        Raises:
            ModelUnavailable: They cannot be had.
        """
        ...

    def missing_bytes(self, spans: Mapping[str, Sequence[Span]]) -> int:
        """How many of these bytes are not there."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that can be served.

    Args:
        path: The folder, with `config.json`, `tokenizer.json` and safetensors.
        name: What people call it; the API's model id.
        fingerprint: What tells it from every other model (`shared.models.fingerprint`).
        absent: Fetches weights that are not in the folder, whose files then have holes; None where it is whole.
    """

    path: Path
    name: str
    fingerprint: str
    absent: AbsentWeights | None = field(default=None, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether every weight is there."""
        return self.absent is None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The figures that a gateway and a planner need.

    Args:
        model_type: transformers' name of the architecture.
        num_layers: Decoder layers.
        hidden_size: Width of the hidden states; 0 when the config does not say.
        vocab_size: Entries of the vocabulary; 0 when the config does not say.
        context_len: Positions the model was trained for; 0 when the config does not say.
        eos_ids: Tokens that end an answer: the config's and the generation config's.
        dtype: Element type of the stored weights as frames name it; empty when the config does not say.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_len: int
    eos_ids: frozenset[int]
    dtype: str


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, where there is one, `generation_config.json`.

    A model with vision or audio keeps the decoder's part under `text_config`, which then wins.

    Raises:
        ModelUnavailable: `not_a_model`, if the config is missing, is no JSON, or names no layers.
    """
    config = read_json(folder / "config.json")
    text = text_config(config)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    num_layers = _first_int(text, _LAYER_COUNT_KEYS)
    if not num_layers:
        raise ModelUnavailable("not_a_model", f"{folder}/config.json names no number of layers", path=str(folder))
    stored = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "")
    return ModelConfig(
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        num_layers=num_layers,
        hidden_size=_first_int(text, ("hidden_size", "n_embd", "d_model")),
        vocab_size=_first_int(text, ("vocab_size",)),
        context_len=_first_int(text, _CONTEXT_KEYS),
        eos_ids=_eos_ids(config) | _eos_ids(text) | _eos_ids(generation),
        dtype=_DTYPES.get(stored, ""),
    )


def check_folder(folder: Path) -> None:
    """Whether everything that serving needs lies in the folder.

    Raises:
        ModelUnavailable: `not_a_model`, naming what is missing.
    """
    weights = weight_files(folder)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    missing += [path.name for path in weights if not path.is_file()] if weights else ["*.safetensors"]
    if missing:
        raise ModelUnavailable(
            "not_a_model",
            f"{folder} is no usable model folder: {', '.join(missing)} missing"
            + (f"; {PICKLE_ADVICE}" if any(folder.glob("pytorch_model*.bin")) else ""),
            path=str(folder),
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, as the index names them, sorted; without one, the single file.

    Raises:
        ModelUnavailable: `weights_corrupt`, if the index is none.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return sorted({folder / name for name in parse_index(index.read_text(encoding="utf-8")).values()})
    single = folder / SINGLE_FILE
    return [single] if single.exists() else []


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The decoder's part of a config: models with vision or audio keep it apart."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _first_int(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), 0)


def _eos_ids(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelUnavailable: `not_a_model`, if there is no such file or it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelUnavailable("not_a_model", f"{path} does not exist", path=str(path)) from error
    except (OSError, ValueError) as error:
        raise ModelUnavailable("not_a_model", f"{path} cannot be read: {error}", path=str(path)) from error
    if not isinstance(content, dict):
        raise ModelUnavailable("not_a_model", f"{path} is no JSON object", path=str(path))
    return content
