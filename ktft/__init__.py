"""ktft: LoRA fine-tuning of large Mixture-of-Experts language models with the routed experts in RAM, on the CPU.

    model = ktft.load_model("Qwen/Qwen3-30B-A3B")
    model = ktft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj", "experts"]))
    model = ktft.load_adapter(ktft.load_model(base), "my-adapter")

Names are imported on first use, so that ``import ktft`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktft.adapters import AdapterError, KtftPeftModel, get_peft_model, load_adapter
    from ktft.experts import CpuExperts
    from ktft.model import load_model

try:
    __version__ = version("ktft")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0.0.0"

_HOMES = {
    "AdapterError": "ktft.adapters",
    "CpuExperts": "ktft.experts",
    "KtftPeftModel": "ktft.adapters",
    "get_peft_model": "ktft.adapters",
    "load_adapter": "ktft.adapters",
    "load_model": "ktft.model",
}

__all__ = [
    "AdapterError",
    "CpuExperts",
    "KtftPeftModel",
    "__version__",
    "get_peft_model",
    "load_adapter",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ktft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
