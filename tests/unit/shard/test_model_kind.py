"""Which class a config asks for, and what is served of a model that has other parts beside text."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard.model_kind import read_kind
from shared.errors import LoadFailed
from tests.support.architectures import tiny_config


@pytest.mark.parametrize(
    ("model_type", "class_name", "is_part"),
    [
        ("llama", "LlamaForCausalLM", False),
        ("gemma3", "Gemma3ForCausalLM", True),  # mapped to a class with a vision tower, which is left out
        ("qwen3_5", "Qwen3_5ForCausalLM", True),  # mapped to its text part by transformers itself
        ("mllama", "MllamaForCausalLM", True),  # whose text config is mapped to nothing
        ("fuyu", "FuyuForCausalLM", False),  # one model, though its text config is another's
        ("gemma4_unified_assistant", "Gemma4UnifiedAssistantForCausalLM", False),
    ],
)
def test_the_class_is_the_text_models(model_type: str, class_name: str, is_part: bool, tmp_path: Path) -> None:
    """With the config that it takes."""
    tiny_config(model_type).save_pretrained(tmp_path)
    kind = read_kind(tmp_path)
    assert (kind.model_class.__name__, kind.is_part) == (class_name, is_part)
    assert isinstance(kind.config, kind.model_class.config_class)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    """By its type's name."""
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(LoadFailed, match="model type 'vit' has no causal language model in transformers") as caught:
        read_kind(tmp_path)
    assert caught.value.code == "model_unsupported"


def test_custom_code_is_refused(tmp_path: Path) -> None:
    """A type that only code in the folder would know is an error that says so; the code is not run."""
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "own.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(LoadFailed, match="custom code") as caught:
        read_kind(tmp_path)
    assert caught.value.code == "model_unsupported"


def test_a_config_that_transformers_rejects_names_its_field(tmp_path: Path) -> None:
    """Whatever kind of error its own checks raise."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(LoadFailed, match="hidden_size") as caught:
        read_kind(tmp_path)
    assert caught.value.code == "model_unsupported"
