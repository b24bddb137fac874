"""Memory that ``ktft convert`` takes, in a process of its own: run by test_convert_resume.py.

    python -m tests.convert_memory DIRECTORY

Prints a JSON object: bytes of the experts, and of anonymous memory that is added at the peak of a conversion and of its
verification.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.tiny_models import tiny_checkpoint, tiny_config

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 24, 512, 256


def write_source(directory: Path) -> int:
    """A Qwen3-MoE with a file for each layer's experts; their bytes."""
    config = tiny_config(
        "qwen3_moe",
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    rest = {
        name: torch.ones(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in state.items()
        if ".experts." not in name and name != "lm_head.weight"  # tied
    }
    weight_map, experts = {}, 0
    random = torch.randn(INTERMEDIATE, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer in range(LAYERS + 1):
        tensors = rest
        if layer < LAYERS:
            tensors = {
                f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": matrix.roll(e, 0).contiguous()
                for e in range(EXPERTS)
                for name, matrix in (("gate_proj", random), ("up_proj", -random), ("down_proj", random.t()))
            }
            experts += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, directory / f"{layer}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"{layer}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return experts


def main(directory: Path) -> None:
    from ktft.bench.memory import Watch, release_freed, resident
    from ktft.convert import convert, verify

    tiny = tiny_checkpoint("qwen3_moe", directory / "tiny", moe_intermediate_size=32, hidden_size=64)
    convert(tiny, directory / "tiny-int4", "int4-g32")  # what torch and transformers load when they are first used
    verify(tiny, directory / "tiny-int4")
    found = {"experts": write_source(directory)}
    for name, work in (
        ("convert", lambda: convert(directory, directory.with_name("int4"), "int4-g32")),
        ("verify", lambda: verify(directory, directory.with_name("int4"))),
    ):
        release_freed()
        before = resident()
        with Watch() as watch:
            work()
        found[name] = watch.anon_peak - before.anon
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
