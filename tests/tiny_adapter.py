"""What the tests of adapter directories share: one training config, names of tensors, edits of the two files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

import ktft
from ktft.adapters import AdapterError
from tests.tiny_models import tiny_input

FIELDS: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "experts"], "task_type": "CAUSAL_LM"}
"""LoraConfig fields of the adapter that the fixtures ``good_adapter`` and ``adapter`` hold."""
EXPERT = "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_B.weight"
LINEAR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def random_adapter(base: Path, directory: Path, rank: int) -> Path:
    """An adapter of ``base`` on attention and experts that changes answers: random B, saved to ``directory``."""
    torch.manual_seed(0)
    config = LoraConfig(r=rank, target_modules=["q_proj", "experts"], task_type="CAUSAL_LM")
    model = ktft.get_peft_model(ktft.load_model(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(directory)
    return directory


def refused(adapter: Path, model: PreTrainedModel, changes: dict[str, Any], message: str) -> None:
    """With these changes of its config the adapter is refused with the message, and the model is left as it was."""
    edit_config(adapter, **changes)
    before = logits(model)
    with pytest.raises(AdapterError, match=message):
        ktft.load_adapter(model, adapter)
    assert torch.equal(logits(model), before)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_input()).logits


def edit_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object], metadata: bool = True) -> None:
    """Rewrite an adapter's tensors; without ``metadata`` also drop what ktft keeps beside them."""
    file = adapter / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as opened:
        kept = opened.metadata() if metadata else {"format": "pt"}
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=kept)


def edit_config(adapter: Path, remove: str = "", **changes: Any) -> None:
    """Rewrite an adapter's config, with ``changes`` and without the key ``remove``."""
    file = adapter / "adapter_config.json"
    values = {**json.loads(file.read_text()), **changes}
    values.pop(remove, None)
    file.write_text(json.dumps(values))
