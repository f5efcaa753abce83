"""A folder with a tiny model of its own kind: weights, and the code without which they mean nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from tests.support.custom_code.configuration_odd import OddConfig
from tests.support.custom_code.modeling_odd import OddForCausalLM
from tests.support.tiny_models import build_tokenizer

CODE = Path(__file__).parent / "custom_code"
CODE_FILES = ("configuration_odd.py", "modeling_odd.py")
AUTO_MAP = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}


def save_custom_model(folder: Path, *, auto_map: dict[str, str] | None = None) -> OddForCausalLM:
    """Write the folder; gives the whole model.

    Args:
        folder: Where to.
        auto_map: What config.json says of the code.
    """
    build_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    model = OddForCausalLM(OddConfig(**sizes, **heads, eos_token_id=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(10.0)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": AUTO_MAP if auto_map is None else auto_map}))
    for name in CODE_FILES:
        shutil.copy(CODE / name, folder)
    return model
