"""Models that bring their own code: config.json's `auto_map` names classes in Python files beside the weights.

Loading such a model runs those files with all that this process may do. So it is done only where whoever started the
node asked for it (`--trust-remote-code`), and otherwise refused from config.json alone, before a weight or the code is
read. The code is the folder's, or that of the hub's repository at the very commit that the weights are of; never a
gateway's, and never another repository's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import PreTrainedModel

from shared.errors import LoadFailed
from shared.models.folder import ModelFolder

CONFIG_CLASS, MODEL_CLASS = "AutoConfig", "AutoModelForCausalLM"
OTHER_REPOSITORY = "--"
"""In a reference, what stands between another repository's name and the file."""


def read_auto_map(model_dir: Path) -> Mapping[str, str]:
    """The code that a folder's config names for a causal language model; empty where there is none.

    Raises:
        LoadFailed: `model_not_found`; `model_unsupported`: the config is no JSON object.
    """
    found = read_config_file(model_dir).get("auto_map")
    found = found if isinstance(found, dict) else {}
    known = {name: found[name] for name in (CONFIG_CLASS, MODEL_CLASS) if isinstance(found.get(name), str)}
    return known if MODEL_CLASS in known else {}


def needs_code(model_dir: Path) -> bool:
    """Whether transformers has no model of its own for this config, and the config names code.

    Raises:
        LoadFailed: As `read_auto_map`.
    """
    return bool(read_auto_map(model_dir)) and read_config_file(model_dir).get("model_type") not in CONFIG_MAPPING


def refusal(model_dir: Path) -> LoadFailed:
    """The error for code that nobody has asked to be run."""
    files = ", ".join(sorted({_file_of(reference) for reference in read_auto_map(model_dir).values()}))
    return LoadFailed(
        "code_not_trusted",
        f"the model is of a kind that transformers does not know and brings its own code ({files}), which is not run: "
        "where you trust it, start the node with --trust-remote-code",
        files=files,
    )


def find_code(folder: ModelFolder) -> Path:
    """The folder with the code: the model's own, else, for a model of the hub, what its repository has at that commit.

    Raises:
        LoadFailed: `code_unavailable`: the code is of another repository, is not there, or cannot be fetched.
    """
    references = read_auto_map(folder.path)
    foreign = [reference for reference in references.values() if OTHER_REPOSITORY in reference]
    if foreign:
        raise _unavailable(f"{foreign[0]} is code of another repository, which is not fetched: put it into a folder")
    missing = [name for name in map(_file_of, references.values()) if not (folder.path / name).is_file()]
    if not missing:
        return folder.path
    repo, _, commit = _reference_of(folder).partition("@")
    if not commit:
        raise _unavailable(f"{folder.path} has no {missing[0]}")
    try:
        return Path(snapshot_download(repo, revision=commit, allow_patterns=["*.py"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _unavailable(f"the code of {repo}@{commit} cannot be fetched: {error}") from error


def load_classes(model_dir: Path, code_dir: Path) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Run the code: the model's config and class.

    Raises:
        LoadFailed: `model_unsupported`, with what the code raised.
    """
    references = read_auto_map(model_dir)
    try:
        config_class: Any = AutoConfig
        if CONFIG_CLASS in references:
            config_class = get_class_from_dynamic_module(references[CONFIG_CLASS], code_dir)
        config = config_class.from_pretrained(model_dir, local_files_only=True)
        return config, get_class_from_dynamic_module(references[MODEL_CLASS], code_dir)
    except Exception as error:  # a model's own code may raise anything
        message = f"the model's own code failed: {type(error).__name__}: {error}"
        raise LoadFailed("model_unsupported", message) from error


def read_config_file(model_dir: Path) -> dict[str, Any]:
    """A folder's config as it is written.

    Raises:
        LoadFailed: `model_not_found`; `model_unsupported`: it is no JSON object.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise LoadFailed("model_not_found", f"{model_dir} has no config.json", path=str(model_dir))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadFailed("model_unsupported", f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise LoadFailed("model_unsupported", f"cannot read {path}: it is no JSON object")
    return config


def _file_of(reference: str) -> str:
    return f"{reference.rpartition(OTHER_REPOSITORY)[2].rpartition('.')[0].replace('.', '/')}.py"


def _reference_of(folder: ModelFolder) -> str:
    """``owner/name@commit`` of a model of the hub, whole in huggingface_hub's cache or in parts in ours; else empty."""
    if folder.absent is not None:
        return folder.absent.reference
    path = folder.path
    if path.parent.name != "snapshots":
        return ""
    repo = path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return f"{repo}@{path.name}"


def _unavailable(message: str) -> LoadFailed:
    return LoadFailed("code_unavailable", message)
