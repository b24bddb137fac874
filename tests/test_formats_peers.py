"""Decoders and encoders against those of transformers and compressed-tensors.

Equality is exact wherever the other side multiplies in fp32, or in bf16 two numbers that bf16 holds, which rounds the
same exact product once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ktft import formats
from ktft.formats import Encoding, Role

Tensors = dict[Role, torch.Tensor]
BF16 = torch.bfloat16


def weights(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Columns of very different sizes, so that every group has a scale of its own."""
    generator = torch.Generator().manual_seed(rows * cols)
    sizes = torch.logspace(-4, 1, cols)[torch.randperm(cols, generator=generator)]
    return (torch.randn(rows, cols, generator=generator) * sizes).to(dtype)


@dataclass(frozen=True)
class Header:
    dtype: str
    shape: tuple[int, ...]


def header(tensor: torch.Tensor) -> Header:
    return Header(formats.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [torch.float32, BF16, torch.uint8, torch.float8_e8m0fnu])
def test_fp8_blocks_decode_as_in_transformers(scale_dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = (weights(256, 384) * 30).clamp(-448, 448).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)
    if scale_dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = torch.randint(100, 150, (2, 3), generator=generator).to(torch.uint8).view(scale_dtype)
    else:
        scales = torch.rand(2, 3, generator=generator).to(scale_dtype)
    tensors: Tensors = {"codes": codes, "scales": scales}
    for dtype in (torch.float32, BF16):
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
        assert torch.equal(formats.dequantize(formats.fp8_block(), tensors, dtype), expected)


def test_fp8_blocks_are_what_transformers_writes_up_to_the_last_bit_of_a_scale() -> None:
    """It divides twice (1 / (448 / largest)), so scales differ by a rounding, and codes where that moves a tie."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    weight = weights(256, 256)
    weight[:128, :128] = 0
    theirs = Fp8Quantize(Quantizer())._quantize_one("x.weight", weight)
    ours = formats.encode(weight, formats.fp8_block())
    torch.testing.assert_close(ours["scales"], theirs["x.weight_scale_inv"], rtol=2**-22, atol=0)
    assert ours["scales"][0, 0] == theirs["x.weight_scale_inv"][0, 0] == 1
    same = ours["codes"].view(torch.uint8) == theirs["x.weight"].view(torch.uint8)
    assert same.float().mean() > 0.9999
    out = formats.dequantize(formats.fp8_block(), {"codes": theirs["x.weight"], "scales": ours["scales"]}, BF16)
    assert formats.relative_error(weight, out) < 0.03


def test_mxfp4_decodes_as_in_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 6, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 40, 6), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, cols, rows]
    for expert in range(3):
        tensors: Tensors = {"codes": blocks[expert], "scales": scales[expert]}
        out = formats.dequantize(formats.mxfp4_blocks(), tensors, torch.float32)
        assert torch.equal(out, expected[expert].t())


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def scheme(**arguments: Any) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**({"symmetric": True} | arguments))
    )


def compressor(name: str) -> Any:
    base = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    return base.get_value_from_registry(name)


def scale_of(weight: torch.Tensor, quantization: Any, shape: tuple[int, ...], **more: Any) -> torch.Tensor:
    """Scales by its own observer's formula; ``shape`` breaks the weight into groups along the last dimension."""
    theirs = pytest.importorskip("compressed_tensors.quantization.utils")
    groups = weight.reshape(*shape)
    scale, _ = theirs.calculate_qparams(groups.amin(-1), groups.amax(-1), quantization.weights, **more)
    return scale


INTEGERS: list[tuple[str, Encoding, dict[str, Any]]] = [
    ("pack-quantized", formats.int_packed(4, 32), {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ("pack-quantized", formats.int_packed(4, 128), {"num_bits": 4, "strategy": "group", "group_size": 128}),
    ("pack-quantized", formats.int_packed(4, 0), {"num_bits": 4, "strategy": "channel"}),
    ("pack-quantized", formats.int_packed(8, 0), {"num_bits": 8, "strategy": "channel"}),
    ("pack-quantized", formats.int_packed(8, 64), {"num_bits": 8, "strategy": "group", "group_size": 64}),
    ("int-quantized", formats.int8(), {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", formats.int8(32), {"num_bits": 8, "strategy": "group", "group_size": 32}),
]


@pytest.mark.parametrize(("name", "encoding", "arguments"), INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_integers_equal_compressed_tensors(
    name: str, encoding: Encoding, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    """What it writes, we decode to what it decodes; what we write, it decodes to what we decode."""
    quantization, weight = scheme(**arguments), weights(48, 256, dtype)
    scale = scale_of(weight, quantization, (48, -1, encoding.group or 256))
    state = compressor(name).compress({"weight": weight, "weight_scale": scale}, quantization)
    assert {encoding.names("")[tensor.role] for tensor in encoding.tensors} == {f".{key}" for key in state}
    tensors: Tensors = {tensor.role: state[tensor.suffix[1:]] for tensor in encoding.tensors}
    expected = compressor(name).decompress(state, quantization)["weight"]
    assert expected.dtype == dtype
    assert torch.equal(formats.dequantize(encoding, tensors, dtype), expected)

    ours = formats.encode(weight, encoding)
    for tensor in encoding.tensors:
        assert ours[tensor.role].shape == state[tensor.suffix[1:]].shape
        assert tensor.role == "scales" or ours[tensor.role].dtype == state[tensor.suffix[1:]].dtype
    torch.testing.assert_close(ours["scales"].float(), scale.float(), rtol=2**-7, atol=0)
    state = {tensor.suffix[1:]: ours[tensor.role] for tensor in encoding.tensors}
    decompressed = compressor(name).decompress(state, quantization)["weight"]
    assert torch.equal(formats.dequantize(encoding, ours, BF16), decompressed)
    state = compressor(name).compress({"weight": weight.float(), "weight_scale": ours["scales"].float()}, quantization)
    assert torch.equal(state[encoding.codes.suffix[1:]], ours["codes"])


@pytest.mark.parametrize(
    ("encoding", "arguments", "shape"),
    [
        (formats.fp8_tensor(), {"strategy": "tensor"}, (1, -1)),
        (formats.fp8_channel(), {"strategy": "channel"}, (48, 1, -1)),
    ],
)
def test_fp8_equals_compressed_tensors(encoding: Encoding, arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    quantization, weight = scheme(num_bits=8, type="float", **arguments), weights(48, 256, BF16)
    scale = scale_of(weight, quantization, shape)
    state = compressor("float-quantized").compress({"weight": weight, "weight_scale": scale}, quantization)
    expected = compressor("float-quantized").decompress(state, quantization)["weight"]
    tensors: Tensors = {"codes": state["weight"], "scales": state["weight_scale"]}
    assert torch.equal(formats.dequantize(encoding, tensors, BF16), expected)


def test_fp8_blocks_equal_compressed_tensors_at_the_edges() -> None:
    quantization = scheme(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    weight, scale = weights(130, 300), torch.rand(2, 3) + 0.1
    state = compressor("float-quantized").compress({"weight": weight, "weight_scale": scale}, quantization)
    expected = compressor("float-quantized").decompress(state, quantization)["weight"]
    tensors: Tensors = {"codes": state["weight"], "scales": scale}
    encoding = formats.fp8_block((128, 128), scale=".weight_scale")
    assert torch.equal(formats.dequantize(encoding, tensors, torch.float32), expected)


def test_nvfp4_equals_compressed_tensors() -> None:
    theirs = pytest.importorskip("compressed_tensors.quantization.utils")
    quantization = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    weight = weights(48, 256, BF16)
    divisor = theirs.generate_gparam(weight.amin(), weight.amax())
    groups = weight.reshape(48, -1, 16).float()
    scale = (groups.abs().amax(-1) / 6 * divisor).clamp(max=448).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": divisor}
    state = compressor("nvfp4-pack-quantized").compress(state, quantization)
    expected = compressor("nvfp4-pack-quantized").decompress(state, quantization)["weight"]
    encoding = formats.nvfp4_compressed()
    tensors: Tensors = {tensor.role: state[tensor.suffix[1:]] for tensor in encoding.tensors}
    assert torch.equal(formats.dequantize(encoding, tensors, BF16), expected)
    assert formats.relative_error(weight, expected) < 0.13


def test_mxfp4_equals_compressed_tensors() -> None:
    quantization = scheme(num_bits=4, type="float", strategy="group", group_size=32)
    weight = weights(48, 256)
    ours = formats.encode(weight, formats.mxfp4())
    state = {"weight_packed": ours["codes"], "weight_scale": ours["scales"]}
    name = "mxfp4-pack-quantized"
    expected = compressor(name).decompress(state, quantization)["weight"]
    assert torch.equal(formats.dequantize(formats.mxfp4(), ours, BF16), expected)
    scale = torch.exp2(ours["scales"].float() - 127)
    state = compressor(name).compress({"weight": weight, "weight_scale": scale}, quantization)
    assert torch.equal(state["weight_scale"], ours["scales"])
    assert torch.equal(state["weight_packed"] & 0x77, ours["codes"] & 0x77)  # it may store −0 as 0


def test_mxfp8_equals_compressed_tensors() -> None:
    quantization = scheme(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    state = {
        "weight": (weights(48, 256) * 30).clamp(-448, 448).to(torch.float8_e4m3fn),
        "weight_scale": torch.arange(48 * 8).view(48, 8).remainder(60).add(100).to(torch.uint8),
    }
    tensors: Tensors = {"codes": state["weight"], "scales": state["weight_scale"]}
    expected = compressor("mxfp8-quantized").decompress(state, quantization)["weight"]
    assert torch.equal(formats.dequantize(formats.mxfp8(), tensors, BF16), expected)


@pytest.mark.parametrize("name", [name for name in formats.WRITTEN if name != "fp8-block"])
def test_a_written_checkpoint_is_what_compressed_tensors_reads(name: str) -> None:
    """By the config alone it finds the layout, and decompresses what was written to what we decode."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = formats.written_config(name, ["lm_head", "model.layers.0.mlp.gate"])
    parsed = quantization.QuantizationConfig.model_validate(config)
    group = parsed.config_groups["group_0"]
    encoding, base = formats.WRITTEN[name], "model.layers.0.mlp.experts.0.up_proj"
    ours = formats.encode(weights(48, 256), encoding)
    state = {tensor.suffix[1:]: ours[tensor.role] for tensor in encoding.tensors}
    out = compressor(parsed.format).decompress(state, group)["weight"]
    assert torch.equal(formats.dequantize(encoding, ours, BF16), out.to(BF16))
    assert compressor(parsed.format).can_compress(torch.nn.Linear, group)
    # What it writes out again is a config that means the same to us.
    for again in (config, parsed.model_dump(mode="json")):
        found = formats.detect(again, {encoding.names(base)[role]: header(tensor) for role, tensor in ours.items()})
        assert found.matrices[base].encoding == encoding
