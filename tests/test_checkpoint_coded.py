"""Addresses, strides and scales of coded experts in every layout: what lies there decodes to what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ktft import formats, ops
from ktft.checkpoint import Checkpoint, CheckpointError, ExpertTensor
from ktft.formats import Encoding, Role
from ktft.weights import ExpertWeights
from tests.described import decoded
from tests.quantised import WRITERS, encode

E, H, I = 3, 320, 96  # noqa: E741
PREFIX = "model.layers.0.mlp.experts"
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4: dict[str, Any] = {"quant_method": "mxfp4"}
Tensors = dict[str, torch.Tensor]
PARTS = {"gate_up_proj": "gate_up", "down_proj": "down"}


def open_weights(
    directory: Path,
    tensors: Tensors,
    config: dict[str, Any] | None,
    *,
    h: int = H,
    i: int = I,
    interleaved: bool = False,
) -> ExpertWeights:
    """The fused parameters gate_up_proj and down_proj of these tensors, mapped."""
    if not (directory / "model.safetensors").exists():
        save_file(tensors, directory / "model.safetensors")
    checkpoint = Checkpoint(directory, None if config is None else {"quantization_config": config})
    parts = [ExpertTensor(f"{PREFIX}.{name}", part, None) for name, part in PARTS.items()]  # type: ignore[arg-type]
    assert set(checkpoint.parameters) == {part.key for part in parts}
    return checkpoint.expert_weights(
        PREFIX, parts, num_experts=E, hidden_size=H, intermediate_size=i, interleaved=interleaved
    )


def fused(encoding: Encoding, shapes: dict[str, tuple[int, int]]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Tensors of E matrices of each shape, one after another, and the matrices that they decode to, in fp32."""
    generator = torch.Generator().manual_seed(3)
    tensors: Tensors = {}
    truth = {}
    for name, (rows, cols) in shapes.items():
        sizes = torch.logspace(-2, 0, rows)[torch.randperm(rows, generator=generator)][:, None]
        one: list[dict[Role, torch.Tensor]] = [
            formats.encode(torch.randn(rows, cols, generator=generator) * sizes, encoding) for _ in range(E)
        ]
        for role, tensor_name in encoding.names(f"{PREFIX}.{name}").items():
            tensors[tensor_name] = torch.stack([tensors_of[role] for tensors_of in one])
        truth[name] = torch.stack([formats.dequantize(encoding, tensors_of, torch.float32) for tensors_of in one])
    return tensors, truth


def assert_same(weights: ExpertWeights, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    """Each [E, rows, cols]: decoded as described, and in the kernels."""
    for name, expected in (("gate", gate), ("up", up), ("down", down)):
        for e in range(E):
            assert torch.equal(decoded(weights, name, e), expected[e]), (name, e)
    generator = torch.Generator().manual_seed(4)
    index = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(20)])
    route_weights = torch.rand(20, 2, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        x = (torch.randn(20, weights.hidden_size, generator=generator) / 8).to(dtype).requires_grad_()
        transposed = weights.gate.transposed  # the order of additions is another then
        stored = [m.transpose(1, 2) if transposed else m for m in (gate, up, down)]
        plain = ExpertWeights.from_tensors(*(m.to(dtype).contiguous() for m in stored), transposed=transposed)
        outputs = [ops.moe_experts(x, index, route_weights, experts) for experts in (weights, plain)]
        gradients = [torch.autograd.grad(out.float().square().sum(), x)[0] for out in outputs]
        assert torch.equal(*outputs)
        assert torch.equal(*gradients)


SHAPES = {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}
FUSED_FP8 = formats.fp8_block((128, 128), "", "_scale_inv")


def test_up_begins_inside_a_block_of_scales(tmp_path: Path) -> None:
    """I = 96: rows 96 to 127 of gate_up share their scales with gate's last rows."""
    tensors, truth = fused(FUSED_FP8, SHAPES)
    weights = open_weights(tmp_path, tensors, FP8)
    gate_up = truth["gate_up_proj"]
    assert_same(weights, gate_up[:, :I], gate_up[:, I:], truth["down_proj"])
    assert weights.gate.scales is not None
    assert weights.up.scales is not None
    assert (weights.gate.scales.first_row, weights.up.scales.first_row) == (0, 96)


@pytest.mark.parametrize("i", [128, 192, 320])
def test_up_begins_in_a_later_block(tmp_path: Path, i: int) -> None:
    tensors, truth = fused(FUSED_FP8, {"gate_up_proj": (2 * i, H), "down_proj": (H, i)})
    weights = open_weights(tmp_path, tensors, FP8, i=i)
    gate_up = truth["gate_up_proj"]
    assert_same(weights, gate_up[:, :i], gate_up[:, i:], truth["down_proj"])
    assert weights.up.scales is not None
    assert weights.up.scales.first_row == i % 128


@pytest.mark.parametrize("interleaved", [False, True])
def test_gpt_oss_blocks_are_what_transformers_makes_of_them(tmp_path: Path, interleaved: bool) -> None:
    """gpt-oss has gate in the even rows, up in the odd ones; transformers turns blocks into [E, cols, rows]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, truth = fused(formats.mxfp4_blocks(), SHAPES)
    theirs = {
        name: convert_moe_packed_tensors(
            tensors[f"{PREFIX}.{name}_blocks"], tensors[f"{PREFIX}.{name}_scales"], dtype=torch.float32
        ).transpose(1, 2)
        for name in PARTS
    }
    assert torch.equal(theirs["gate_up_proj"], truth["gate_up_proj"])
    weights = open_weights(tmp_path, tensors, MXFP4, interleaved=interleaved)
    gate_up = theirs["gate_up_proj"]
    halves = (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else (gate_up[:, :I], gate_up[:, I:])
    assert_same(weights, *halves, theirs["down_proj"])
    assert weights.gate.row_stride == (2 if interleaved else 1) * H // 2


@pytest.mark.parametrize("block", [(2, 64), (4, 64), (128, 128), (1, 160)])
def test_interleaved_rows_under_scales_of_several_rows(tmp_path: Path, block: tuple[int, int]) -> None:
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors, truth = fused(formats.fp8_block(block, "", "_scale_inv"), SHAPES)
    weights = open_weights(tmp_path, tensors, config, interleaved=True)
    gate_up = truth["gate_up_proj"]
    assert_same(weights, gate_up[:, ::2], gate_up[:, 1::2], truth["down_proj"])


def test_interleaved_rows_that_no_stride_can_tell_are_refused(tmp_path: Path) -> None:
    tensors, _ = fused(formats.fp8_block((3, 64), "", "_scale_inv"), SHAPES)
    config = {"quant_method": "fp8", "weight_block_size": [3, 64]}
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scale_inv.* holds gate and up interleaved along its rows"):
        open_weights(tmp_path, tensors, config, interleaved=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_interleaved_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    gate_up, down = (torch.randn(E, *shape, generator=generator).to(dtype) for shape in SHAPES.values())
    tensors = {f"{PREFIX}.gate_up_proj": gate_up, f"{PREFIX}.down_proj": down}
    weights = open_weights(tmp_path, tensors, None, interleaved=True)
    assert_same(weights, gate_up[:, ::2].float(), gate_up[:, 1::2].float(), down.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_interleaved_columns(tmp_path: Path, dtype: torch.dtype) -> None:
    """gpt-oss as transformers saves it."""
    generator = torch.Generator().manual_seed(3)
    gate_up, down = (torch.randn(E, *shape[::-1], generator=generator).to(dtype) for shape in SHAPES.values())
    tensors = {f"{PREFIX}.gate_up_proj": gate_up, f"{PREFIX}.down_proj": down}
    weights = open_weights(tmp_path, tensors, None, interleaved=True)
    assert weights.gate.transposed
    assert (weights.gate.column_step, weights.down.column_step) == (2, 1)
    gate_up, down = (tensor.float().transpose(1, 2) for tensor in (gate_up, down))
    assert_same(weights, gate_up[:, ::2], gate_up[:, 1::2], down)


def test_coded_interleaved_columns_are_refused(tmp_path: Path) -> None:
    tensors, _ = fused(FUSED_FP8, {"gate_up_proj": (H, 2 * I), "down_proj": (I, H)})
    with pytest.raises(CheckpointError, match=r"gate_up_proj.* holds gate and up interleaved along its columns"):
        open_weights(tmp_path, tensors, FP8, interleaved=True)


def test_the_transpose_with_blocks_of_scales(tmp_path: Path) -> None:
    i = 256
    tensors, truth = fused(FUSED_FP8, {"gate_up_proj": (H, 2 * i), "down_proj": (i, H)})
    weights = open_weights(tmp_path, tensors, FP8, i=i)
    assert weights.gate.transposed
    gate_up, down = (truth[name].transpose(1, 2) for name in PARTS)
    assert_same(weights, gate_up[:, :i], gate_up[:, i:], down)


def test_the_transpose_where_up_begins_inside_a_block_is_refused(tmp_path: Path) -> None:
    tensors, _ = fused(FUSED_FP8, {"gate_up_proj": (H, 2 * I), "down_proj": (I, H)})
    with pytest.raises(CheckpointError, match="gate and up beginning inside a block along its columns"):
        open_weights(tmp_path, tensors, FP8)


def test_one_scale_for_each_expert_of_a_fused_tensor(tmp_path: Path) -> None:
    codes = {name: torch.randint(0, 0x7F, (E, *shape)).to(torch.uint8) for name, shape in SHAPES.items()}
    scales = {name: torch.rand(E, 1) for name in SHAPES}
    tensors = {f"{PREFIX}.{name}.weight": value.view(torch.float8_e4m3fn) for name, value in codes.items()}
    tensors |= {f"{PREFIX}.{name}.weight_scale": value for name, value in scales.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    parts = [ExpertTensor(f"{PREFIX}.{name}.weight", part, None) for name, part in PARTS.items()]  # type: ignore[arg-type]
    weights = Checkpoint(tmp_path, config).expert_weights(
        PREFIX, parts, num_experts=E, hidden_size=H, intermediate_size=I
    )
    values = {name: tensors[f"{PREFIX}.{name}.weight"].float() * scales[name][:, :, None] for name in SHAPES}
    assert_same(weights, values["gate_up_proj"][:, :I], values["gate_up_proj"][:, I:], values["down_proj"])


@pytest.mark.parametrize("name", ["gptq-g32", "awq-g32"])
def test_zero_points_of_fused_experts_are_refused(tmp_path: Path, name: str) -> None:
    encoding, config, _ = WRITERS[name]
    tensors: Tensors = {}
    for part, shape in SHAPES.items():
        one = [encode(torch.randn(shape), encoding) for _ in range(E)]
        for role, tensor_name in encoding.names(f"{PREFIX}.{part}").items():
            tensors[tensor_name] = torch.stack([tensors_of[role] for tensors_of in one])
    save_file(tensors, tmp_path / "model.safetensors")
    parts = [ExpertTensor(f"{PREFIX}.{part}.weight", what, None) for part, what in PARTS.items()]  # type: ignore[arg-type]
    message = rf"gate_up_proj\.qweight' \({name[:-4]} .*holds those of 3 experts"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path, {"quantization_config": config}).expert_weights(
            PREFIX, parts, num_experts=E, hidden_size=H, intermediate_size=I
        )


# --- where files put them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 1, 3, 6])
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_codes_and_scales_may_begin_anywhere(tmp_path: Path, name: str, pad: int) -> None:
    encoding, config = (FUSED_FP8, FP8) if name == "fp8" else (formats.mxfp4_blocks(), MXFP4)
    tensors, truth = fused(encoding, SHAPES)
    header: dict[str, Any] = {}
    data = b""
    for key, tensor in reversed(tensors.items()):
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[key] = {
            "dtype": formats.DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    weights = open_weights(tmp_path, tensors, config)
    gate_up = truth["gate_up_proj"]
    assert int(weights.down.addresses[0]) % 8 == pad % 8 or name == "fp8"
    assert_same(weights, gate_up[:, :I], gate_up[:, I:], truth["down_proj"])


def test_the_encoding_of_one_expert_is_that_of_all(tmp_path: Path) -> None:
    """Scales of another dtype are another decoder's."""
    encoding = formats.fp8_block()
    tensors: Tensors = {}
    parts = []
    for part, (rows, cols) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
        for e in range(E):
            base = f"{PREFIX}.{e}.{part}_proj"
            stored = formats.encode(torch.randn(rows, cols), encoding)
            tensors |= {encoding.names(base)[role]: tensor for role, tensor in stored.items()}
            parts.append(ExpertTensor(f"{base}.weight", part, e))  # type: ignore[arg-type]
    scale = f"{PREFIX}.1.up_proj.weight_scale_inv"
    tensors[scale] = tensors[scale].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, {"quantization_config": FP8})
    with pytest.raises(CheckpointError, match=r"1\.up_proj\.weight_scale_inv.: expected dtype F32 like .*0\.up_proj"):
        checkpoint.expert_weights(PREFIX, parts, num_experts=E, hidden_size=H, intermediate_size=I)
