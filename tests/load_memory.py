"""Memory that loading a quantised checkpoint takes, in a process of its own: run by test_quantised_memory.py.

    python -m tests.load_memory DIRECTORY

Prints a JSON object: the bytes of anonymous memory that are added at the peak, those of the model's parameters, and of
its largest one; and of resident file pages at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.gguf_files import write
from tests.tiny_models import tiny_checkpoint, tiny_config

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_experts": 8,
    "tie_word_embeddings": False,
}


def write_large(directory: Path) -> None:
    """A Qwen3-MoE of random int4 codes in groups of 32: 70 M weights outside the experts, 38 M in them."""
    tiny_checkpoint("qwen3_moe", directory)
    config = tiny_config("qwen3_moe", **SIZES)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    for key, tensor in state.items():
        shape = tuple(tensor.shape)
        if key.endswith("gate_up_proj"):
            for name in ("gate_proj", "up_proj"):
                shapes |= {
                    key.replace("gate_up_proj", f"{e}.{name}.weight"): (shape[1] // 2, shape[2]) for e in range(8)
                }
        elif key.endswith("experts.down_proj"):
            shapes |= {key.replace("down_proj", f"{e}.down_proj.weight"): shape[1:] for e in range(8)}
        else:
            shapes[key] = shape
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for key, shape in shapes.items():
        if len(shape) == 1 or key.endswith(("mlp.gate.weight", "embed_tokens.weight", "lm_head.weight")):
            tensors[key] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        base, (rows, cols) = key.removesuffix(".weight"), shape
        codes = torch.randint(-(2**31), 2**31, (rows, cols // 8), generator=generator)
        tensors[f"{base}.weight_packed"] = codes.to(torch.int32)
        tensors[f"{base}.weight_scale"] = torch.full((rows, cols // 32), 0.01, dtype=torch.bfloat16)
        tensors[f"{base}.weight_shape"] = torch.tensor([rows, cols])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    from ktft.formats import written_config

    config.quantization_config = written_config("int4-g32", ["lm_head", "model.embed_tokens", "re:.*mlp.gate$"])
    config.save_pretrained(directory)


def write_large_gguf(directory: Path) -> None:
    """The same of Q8_0 blocks."""
    write("qwen3_moe", directory, "Q8_0", **SIZES)


def main(directory: str) -> None:
    from ktft.bench.memory import Watch, release_freed, resident
    from ktft.model import load_model

    tiny = tiny_checkpoint("qwen3_moe", Path(directory) / "tiny")
    load_model(tiny)  # what transformers and torch load when they are first used
    release_freed()
    before = resident()
    with Watch() as watch:
        model = load_model(directory, dtype=torch.bfloat16)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    after = resident()
    added = {"added": watch.anon_peak - before.anon, "files": (after.rss - after.anon) - (before.rss - before.anon)}
    print(json.dumps(added | {"result": sum(sizes), "largest": max(sizes)}))


if __name__ == "__main__":
    main(sys.argv[1])
