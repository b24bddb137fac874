"""load_model on checkpoints that the ecosystem's own writers quantised: transformers' fp8, compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from ktft import formats
from ktft.experts import CpuExperts
from ktft.model import load_model
from tests.described import decoded
from tests.quantised import LINEAR, SIZES, WRITERS, compressed, write
from tests.tiny_models import tiny_checkpoint, tiny_input

FAMILIES = ("qwen3_moe", "deepseek_v3")
NOT_CONVERTED = ["lm_head", "model.embed_tokens", "mlp.gate"]


def stock_experts(model: PreTrainedModel, path: str, e: int) -> dict[str, torch.Tensor]:
    """Gate, up and down of one expert of the stock model."""
    gate, up = model.get_parameter(f"{path}.gate_up_proj")[e].chunk(2)
    return {"gate": gate, "up": up, "down": model.get_parameter(f"{path}.down_proj")[e]}


def assert_the_same_model(directory: Path, stock: PreTrainedModel) -> None:
    """Experts and everything else, bit for bit in the stock model's dtype, and the logits in fp32; some are coded."""
    dtype = stock.dtype
    coded = False
    model = load_model(directory, dtype=dtype)
    found = dict((*model.named_parameters(), *model.named_buffers()))
    theirs = dict((*stock.named_parameters(), *stock.named_buffers()))
    for name, module in model.named_modules():
        if not isinstance(module, CpuExperts):
            continue
        assert module.weights is not None
        coded |= module.weights.gate.scales is not None
        for e in range(module.num_experts):
            for part, expected in stock_experts(stock, name, e).items():
                assert torch.equal(decoded(module.weights, part, e, dtype), expected), (name, e, part)
        del theirs[f"{name}.gate_up_proj"], theirs[f"{name}.down_proj"]
    assert coded
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    with torch.no_grad():
        ours, expected = (m(tiny_input()).logits for m in (model, stock))
    if dtype == torch.float32:
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


# --- transformers' FP8 ------------------------------------------------------------------------------------------------


class Quantizer:
    quantization_config = FineGrainedFP8Config(modules_to_not_convert=NOT_CONVERTED)


def quantise_fp8(family: str, directory: Path, *, fuse: bool = False) -> Path:
    """Its quantise function on each published tensor (``fuse``: on its own fused parameters), and its config."""
    path = tiny_checkpoint(family, directory, initializer_range=0.06, **SIZES["whole"][family])
    tensors = load_file(path / "model.safetensors")
    if fuse:
        modules = sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key})
        for module in modules:
            experts = len({key.split(".")[5] for key in tensors if key.startswith(f"{module}.experts.")})
            gate, up, down = (
                torch.stack([tensors.pop(f"{module}.experts.{e}.{name}.weight") for e in range(experts)])
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{module}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{module}.experts.down_proj"] = down
    out: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        quantised = tensor.dim() == 3 or (tensor.dim() == 2 and LINEAR.fullmatch(key))
        out |= Fp8Quantize(Quantizer())._quantize_one(key, tensor) if quantised else {key: tensor}
    save_file(out, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = Quantizer.quantization_config.to_dict()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_by_transformers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Without a GPU transformers dequantises as it loads; the two must agree."""
    directory = quantise_fp8(family, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, experts_implementation="eager")
    assert_the_same_model(directory, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_of_fused_experts_by_transformers(tmp_path: Path, family: str) -> None:
    """Blocks divide I, so the scales are those of the experts one by one, which is what transformers can load: of fused
    experts it dequantises none, and leaves their scales out."""
    fused = quantise_fp8(family, tmp_path / "fused", fuse=True)
    assert [key for key in load_file(fused / "model.safetensors") if key.endswith("gate_up_proj_scale_inv")]
    separate = quantise_fp8(family, tmp_path / "separate")
    stock = AutoModelForCausalLM.from_pretrained(separate, dtype=torch.float32, experts_implementation="eager")
    assert_the_same_model(fused, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_saved_by_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its save path, of a model whose layers hold fp8. It only lacks a GPU to run on."""
    first = quantise_fp8(family, tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
        quantised = AutoModelForCausalLM.from_pretrained(first)
        quantised.save_pretrained(tmp_path / "second", max_shard_size=200_000)
    shards = sorted((tmp_path / "second").glob("*.safetensors"))
    saved = {key: tensor for shard in shards for key, tensor in load_file(shard).items()}
    assert len(shards) > 1
    assert saved["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    if saved["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"].dim() != 2:
        pytest.skip("this transformers drops dimensions of 1 of the scales it writes, and cannot read them itself")
    stock = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32, experts_implementation="eager")
    assert_the_same_model(tmp_path / "second", stock)


# --- compressed-tensors -----------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-g32": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int8-plain": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "nvfp4-compressed": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_compressed_tensors(tmp_path: Path, family: str, name: str) -> None:
    """Its compressor writes every matrix, and decompresses what stock transformers is then given."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    theirs = pytest.importorskip("compressed_tensors.quantization.utils")
    layout, settings = LAYOUTS[name]
    arguments = quantization.QuantizationArgs(symmetric=True, **settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    encoding = WRITERS[name][0]
    decompressed: dict[int, torch.Tensor] = {}

    def write_one(weight: torch.Tensor) -> dict[formats.Role, torch.Tensor]:
        groups = weight.float().unflatten(1, (-1, settings.get("group_size") or weight.shape[1]))
        state = {"weight": weight}
        if "nvfp4" in name:
            state["weight_global_scale"] = theirs.generate_gparam(weight.amin(), weight.amax())
            scale = groups.abs().amax(2) / 6 * state["weight_global_scale"]
            state["weight_scale"] = scale.clamp(max=448).to(torch.float8_e4m3fn).float()
        elif name == "mxfp4":
            state["weight_scale"] = torch.exp2((torch.frexp(groups.abs().amax(2)).exponent - 3).float())
        else:
            state["weight_scale"], _ = theirs.calculate_qparams(groups.amin(2), groups.amax(2), arguments)
        state = compressor.compress(state, scheme)
        tensors = {tensor.role: state[tensor.suffix[1:]].contiguous() for tensor in encoding.tensors}
        decompressed[len(decompressed)] = compressor.decompress(dict(state), scheme)["weight"]
        return tensors

    written = write(family, name, tmp_path, writer=write_one)
    config = compressed(layout, **settings)
    written.edit_config(lambda c: c.update(quantization_config=config))
    for base, weight in zip(written.matrices, decompressed.values(), strict=True):
        assert torch.equal(written.decoded(base, weight.dtype), weight), base
    stock = AutoModelForCausalLM.from_pretrained(written.plain, dtype=torch.float32, experts_implementation="eager")
    assert_the_same_model(written.directory, stock)
