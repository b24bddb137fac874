"""Which encoding a checkpoint's matrices have, and every way in which config and tensors contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktft import formats
from ktft.checkpoint import Checkpoint
from ktft.formats import Encoding, detect
from ktft.mapping import CheckpointError


@dataclass(frozen=True)
class Header:
    dtype: str
    shape: tuple[int, ...]


Headers = dict[str, Header]
EXPERT = "model.layers.{}.mlp.experts.{}.{}"
PLAIN: Headers = {
    "model.embed_tokens.weight": Header("BF16", (100, 256)),
    "model.norm.weight": Header("BF16", (256,)),
    "model.layers.0.mlp.gate.weight": Header("F32", (4, 256)),
    "model.layers.0.mlp.gate.e_score_correction_bias": Header("F32", (4,)),
    "lm_head.weight": Header("BF16", (100, 256)),
}


def stored(encoding: Encoding, *bases: str, rows: int = 384, cols: int = 256, experts: int | None = None) -> Headers:
    """Headers of matrices in an encoding, every dtype and shape the first that it allows."""
    lead = () if experts is None else (experts,)
    return {
        base + tensor.suffix: Header(
            tensor.dtypes[0], (*lead, *(dimension.size(rows, cols) for dimension in tensor.shapes[0]))
        )
        for base in bases
        for tensor in encoding.tensors
    }


EXPERTS = [EXPERT.format(layer, expert, name) for layer in (0, 1) for expert in (0, 1) for name in ("up_proj",)]
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(layout: str | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.mlp.gate"]} | more


CASES: list[tuple[dict[str, Any], Encoding]] = [
    (FP8, formats.fp8_block()),
    ({**FP8, "weight_block_size": [64, 32]}, formats.fp8_block((64, 32))),
    ({**FP8, "scale_fmt": "ue8m0"}, formats.fp8_block(scale=".scale")),
    (FP8, formats.mxfp4(".weight", ".scale")),
    ({**FP8, "weight_block_size": None}, formats.fp8_tensor(scale=".weight_scale_inv")),
    ({**FP8, "weight_block_size": None}, formats.fp8_tensor()),
    (compressed("pack-quantized", strategy="group", group_size=32), formats.int_packed(4, 32)),
    (compressed("pack-quantized", strategy="group", group_size=128), formats.int_packed(4, 128)),
    (compressed("pack-quantized", strategy="channel"), formats.int_packed(4, 0)),
    (compressed("pack-quantized", num_bits=8, strategy="channel", group_size=-1), formats.int_packed(8, 0)),
    (compressed("int-quantized", num_bits=8, strategy="channel"), formats.int8()),
    (compressed("int-quantized", num_bits=8, strategy="tensor"), formats.int8_tensor()),
    (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), formats.fp8_channel()),
    (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), formats.fp8_tensor()),
    (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        formats.fp8_block(scale=".weight_scale"),
    ),
    (compressed("nvfp4-pack-quantized", type="float", group_size=16), formats.nvfp4_compressed()),
    (compressed("mxfp4-pack-quantized", type="float", group_size=32), formats.mxfp4()),
    (compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32), formats.mxfp8()),
    (modelopt("FP8"), formats.fp8_tensor()),
    (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), formats.fp8_channel()),
    (modelopt("FP8_PB_WO"), formats.fp8_block(scale=".weight_scale")),
    (modelopt("NVFP4", group_size=16), formats.nvfp4_modelopt()),
    (modelopt("W4A16_NVFP4"), formats.nvfp4_modelopt()),
    (modelopt("MXFP8"), formats.mxfp8()),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, formats.gptq(128)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}, formats.gptq(64, 2)),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, formats.gptq(0)),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, formats.awq(128)),
]


@pytest.mark.parametrize(("config", "encoding"), CASES)
def test_every_method(config: dict[str, Any], encoding: Encoding) -> None:
    found = detect(config, PLAIN | stored(encoding, *EXPERTS)).matrices
    for base in EXPERTS:
        matrix = found[base]
        assert matrix.encoding == encoding and (matrix.matrix.rows, matrix.matrix.cols) == (384, 256)
        assert matrix.matrix.experts is None
        assert matrix.names == encoding.names(base)
    assert found["lm_head"].encoding == formats.plain("BF16")
    assert found["model.layers.0.mlp.gate"].encoding == formats.plain("F32")
    assert set(found) == {*EXPERTS, "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"}


@pytest.mark.parametrize(
    ("config", "encoding"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}, formats.mxfp4_blocks()),
        (FP8, formats.fp8_block((128, 128), "", "_scale_inv")),
        (FP8, formats.mxfp4("", "_scale_inv")),
    ],
)
def test_fused_experts(config: dict[str, Any], encoding: Encoding) -> None:
    bases = [f"model.layers.{layer}.mlp.experts.{name}_proj" for layer in (0, 1) for name in ("gate_up", "down")]
    headers = PLAIN | stored(encoding, *bases, experts=4)
    headers["model.layers.0.mlp.experts.gate_up_proj_bias"] = Header("BF16", (4, 384))
    found = detect(config, headers).matrices
    for base in bases:
        assert found[base].encoding == encoding
        assert found[base].matrix == formats.Matrix(384, 256, 4)
    assert len(found) == len(bases) + 3


def test_without_a_config_everything_is_plain() -> None:
    headers = PLAIN | {"model.layers.0.mlp.experts.gate_up_proj": Header("BF16", (4, 64, 256))}
    headers |= {"x.conv1d.weight": Header("BF16", (4, 1, 3)), "x.k_scale": Header("F32", ())}
    found = detect(None, headers)
    fused = found.matrices["model.layers.0.mlp.experts.gate_up_proj"]
    assert fused.encoding == formats.plain("BF16", "") and fused.matrix == formats.Matrix(64, 256, 4)
    assert len(found.matrices) == 4 and not found.ignored


def test_scales_of_activations_and_caches_are_ignored() -> None:
    headers = PLAIN | stored(formats.nvfp4_modelopt(), *EXPERTS)
    extra = {f"{EXPERTS[0]}.input_scale", "model.layers.0.self_attn.k_proj.k_scale"}
    found = detect(modelopt("NVFP4"), headers | {name: Header("F32", ()) for name in extra})
    assert found.ignored == extra


def test_mixed_precision_by_module() -> None:
    layers = {EXPERTS[0]: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.1": {"quant_algo": "FP8"}}
    config = modelopt("MIXED_PRECISION", quantized_layers=layers)
    headers = PLAIN | stored(formats.nvfp4_modelopt(), EXPERTS[0]) | stored(formats.fp8_tensor(), *EXPERTS[2:])
    found = detect(config, headers).matrices
    assert found[EXPERTS[0]].encoding.format == "nvfp4" and found[EXPERTS[2]].encoding.format == "fp8"
    # On top of an fp8 checkpoint: what is not in the list is what it was, though modelopt calls it ignored.
    config = {**FP8, "quant_algo": "MIXED_PRECISION", "quantized_layers": {EXPERTS[0]: layers[EXPERTS[0]]}}
    headers = PLAIN | stored(formats.nvfp4_modelopt(), EXPERTS[0]) | stored(formats.fp8_block(), EXPERTS[2])
    found = detect({**config, "ignore": ["model.layers.1*"]}, headers).matrices
    assert found[EXPERTS[0]].encoding.format == "nvfp4" and found[EXPERTS[2]].encoding == formats.fp8_block()


def test_groups_that_name_modules_come_before_groups_of_classes() -> None:
    config = compressed("mixed-precision", strategy="group", group_size=32)
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.*"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    attention = "model.layers.0.self_attn.q_proj"
    headers = PLAIN | stored(formats.int_packed(4, 32), *EXPERTS) | stored(formats.fp8_channel(), attention)
    found = detect(config, headers).matrices
    assert found[attention].encoding == formats.fp8_channel()
    assert found[EXPERTS[0]].encoding == formats.int_packed(4, 32)


def test_modelopts_own_file() -> None:
    separate = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    headers = PLAIN | stored(formats.nvfp4_modelopt(), *EXPERTS)
    for config in (None, {"quant_method": "modelopt"}, {"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}):
        found = detect(config, headers, separate).matrices
        assert found[EXPERTS[0]].encoding == formats.nvfp4_modelopt()
    with pytest.raises(CheckpointError, match=r"config\.json says quant_algo 'FP8', hf_quant.* says 'NVFP4'"):
        detect(modelopt("FP8"), headers, separate)
    assert detect(None, PLAIN, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}).matrices


@pytest.mark.parametrize("name", list(formats.WRITTEN))
def test_a_checkpoint_in_files(tmp_path: Path, name: str) -> None:
    """Written, found by its own config and headers, read and decoded."""
    encoding, weight = formats.WRITTEN[name], torch.randn(130, 256)
    tensors = formats.encode(weight, encoding)
    stored_as = {encoding.names(X)[role]: tensor for role, tensor in tensors.items()}
    save_file(stored_as | {"lm_head.weight": torch.ones(2, 256).bfloat16()}, tmp_path / "model.safetensors")
    found = detect(formats.written_config(name, ["lm_head"]), Checkpoint(tmp_path).tensors).matrices
    assert found["lm_head"].encoding == formats.plain("BF16")
    assert found[X].encoding == encoding and found[X].matrix == formats.Matrix(130, 256)
    read = load_file(tmp_path / "model.safetensors")
    out = formats.dequantize(
        found[X].encoding, {role: read[key] for role, key in found[X].names.items()}, torch.bfloat16
    )
    assert torch.equal(out, formats.dequantize(encoding, tensors, torch.bfloat16))
    assert formats.relative_error(weight, out) < 0.13


def test_where_the_config_lies() -> None:
    assert formats.quantization_config({"quantization_config": FP8}) == FP8
    assert formats.quantization_config({"text_config": {"quantization_config": FP8}}) == FP8
    assert formats.quantization_config({"text_config": {}}) is None
    with pytest.raises(CheckpointError, match="expected an object, found 'fp8'"):
        formats.quantization_config({"quantization_config": "fp8"})


# --- contradictions ---------------------------------------------------------------------------------------------------

X = EXPERTS[0]
INT4 = compressed("pack-quantized", strategy="group", group_size=32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def change(headers: Headers, suffix: str, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Headers:
    """With the tensor of the first expert changed; without it if neither is given."""
    out = dict(headers)
    old = out.pop(X + suffix, Header("F32", ()))
    if dtype or shape is not None:
        out[X + suffix] = Header(dtype or old.dtype, old.shape if shape is None else shape)
    return out


FP8_HEADERS = PLAIN | stored(formats.fp8_block(), *EXPERTS)
INT4_HEADERS = PLAIN | stored(formats.int_packed(4, 32), *EXPERTS)
GPTQ_HEADERS = PLAIN | stored(formats.gptq(128), *EXPERTS)
NVFP4_HEADERS = PLAIN | stored(formats.nvfp4_modelopt(), *EXPERTS)

REFUSED: list[tuple[str, dict[str, Any] | None, Headers, str]] = [
    ("unknown method", {"quant_method": "bitsandbytes"}, PLAIN, "quant_method 'bitsandbytes' is not supported; .*awq"),
    ("no config", None, FP8_HEADERS, rf"has no quantization_config, but .*'{X}\.weight' \(F8_E4M3 \[384, 256\]\)"),
    ("no tensors", FP8, PLAIN, r"fp8 with weight_block_size \[128, 128\], but no tensor is stored so"),
    ("no scale", FP8, change(FP8_HEADERS, ".weight_scale_inv"), rf"'{X}\.weight_scale_inv' is missing: .*incomplete"),
    (
        "scale of another shape",
        FP8,
        change(FP8_HEADERS, ".weight_scale_inv", shape=(3, 3)),
        rf"'{X}\.weight_scale_inv': expected shape \[3, 2\].*found \[3, 3\]\. .* says fp8 with weight_block_size",
    ),
    (
        "another block size",
        {**FP8, "weight_block_size": [64, 64]},
        FP8_HEADERS,
        r"expected shape \[6, 4\].*found \[3, 2\].*weight_block_size \[64, 64\]",
    ),
    (
        "scale of another dtype",
        FP8,
        change(FP8_HEADERS, ".weight_scale_inv", "I32"),
        rf"'{X}\.weight_scale_inv': expected dtype F32 .*found I32",
    ),
    ("plain, with a scale", FP8, change(FP8_HEADERS, ".weight", "BF16"), rf"has '{X}\.weight' of dtype F8_E4M3.*BF16"),
    (
        "scale without codes",
        FP8,
        change(FP8_HEADERS, ".weight"),
        rf"has '{X}\.weight' of dtype .*found '{X}\.weight_scale_inv'",
    ),
    ("another float", FP8, change(FP8_HEADERS, ".weight", "F8_E5M2"), r"of dtype F8_E4M3.*found .*F8_E5M2"),
    ("e5m2", {**FP8, "fmt": "e5m2"}, FP8_HEADERS, "fmt is 'e5m2'; expected e4m3"),
    ("bad block size", {**FP8, "weight_block_size": [128]}, FP8_HEADERS, r"weight_block_size is \[128\]; expected two"),
    ("another method", FP8, INT4_HEADERS, rf"says fp8 .*found .*'{X}\.weight_packed' \(I32"),
    ("another method", INT4, FP8_HEADERS, rf"says pack-quantized of 4 bits.*'{X}\.weight_packed' of dtype I32; found"),
    (
        "listed, but quantised",
        {**FP8, "modules_to_not_convert": ["lm_head", X]},
        FP8_HEADERS,
        rf"lists it among the modules that are not converted: '{X}'; but these are tensors of a quantised",
    ),
    (
        "plain, but not listed",
        FP8,
        change(change(FP8_HEADERS, ".weight_scale_inv"), ".weight", "BF16"),
        rf"'{X}\.weight' is plain bf16, but '.*experts\.1.*' is fp8 .*does not list '{X}'",
    ),
    (
        "plain, but named",
        modelopt(
            "MIXED_PRECISION", ignore=[], quantized_layers={name: {"quant_algo": "FP8"} for name in ("lm_head", X)}
        ),
        PLAIN | stored(formats.fp8_tensor(), X),
        r"'lm_head\.weight' is plain bf16, but .* says quant_algo FP8 of 'lm_head'",
    ),
    (
        "not named",
        modelopt("MIXED_PRECISION", quantized_layers={X: {"quant_algo": "FP8"}}),
        PLAIN | stored(formats.fp8_tensor(), *EXPERTS),
        rf"says nothing of how it is stored: '{EXPERTS[1]}'",
    ),
    (
        "mixed, without a list",
        modelopt("MIXED_PRECISION"),
        PLAIN,
        "quantized_layers is None; expected a list of modules",
    ),
    ("unknown algorithm", modelopt("W4A8_AWQ"), PLAIN, "quant_algo is 'W4A8_AWQ'; expected FP8, .*MIXED_PRECISION"),
    ("other groups", modelopt("NVFP4", group_size=32), PLAIN, "group_size of NVFP4 is 32; expected 16"),
    (
        "no global scale",
        modelopt("NVFP4"),
        change(NVFP4_HEADERS, ".weight_scale_2"),
        rf"'{X}\.weight_scale_2' is missing",
    ),
    (
        "a global scale too many",
        modelopt("FP8"),
        change(PLAIN | stored(formats.fp8_tensor(), *EXPERTS), ".weight_scale_2", "F32", ()),
        rf"'{X}\.weight_scale_2' has no place in fp8",
    ),
    (
        "scaled inputs",
        modelopt("NVFP4"),
        change(NVFP4_HEADERS, ".pre_quant_scale", "F32", (256,)),
        rf"'{X}\.pre_quant_scale': scaling of a layer's input",
    ),
    (
        "groups that do not divide",
        compressed("pack-quantized", strategy="group", group_size=96),
        PLAIN | stored(formats.int_packed(4, 96), *EXPERTS),
        rf"'{X}\.weight_packed': the 256 columns of the matrix are no multiple of 96",
    ),
    (
        "other groups",
        compressed("pack-quantized", strategy="group", group_size=128),
        INT4_HEADERS,
        rf"'{X}\.weight_scale': expected shape \[384, 2\].*found \[384, 8\].*group_size 128",
    ),
    ("no shape", INT4, change(INT4_HEADERS, ".weight_shape"), rf"'{X}\.weight_shape' is missing"),
    (
        "zero points",
        INT4,
        change(INT4_HEADERS, ".weight_zero_point", "I32", (48, 8)),
        rf"'{X}\.weight_zero_point': zero points",
    ),
    ("act-order", INT4, change(INT4_HEADERS, ".weight_g_idx", "I32", (256,)), rf"'{X}\.weight_g_idx': .*act-order"),
    ("act-order", compressed("pack-quantized", group_size=32, actorder="group"), PLAIN, "actorder is 'group'; .*null"),
    ("asymmetric", compressed("pack-quantized", group_size=32, symmetric=False), PLAIN, "symmetric is False"),
    ("3 bits", compressed("pack-quantized", num_bits=3, group_size=32), PLAIN, r"of 3 bits .*is not supported; supp"),
    ("marlin", compressed("marlin-24", group_size=32), PLAIN, "marlin-24 of 4 bits .*is not supported"),
    ("no groups", {"quant_method": "compressed-tensors"}, PLAIN, "config_groups is None; expected groups"),
    ("bad pattern", {**FP8, "ignore": ["re:*x"]}, PLAIN, r"'re:\*x' is no regular expression"),
    ("8 bits", {**GPTQ, "bits": 8}, PLAIN, "bits is 8; expected 4"),
    (
        "marlin",
        {**GPTQ, "checkpoint_format": "marlin"},
        PLAIN,
        "checkpoint_format is 'marlin'; expected gptq or",
    ),
    ("settings by module", {**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, PLAIN, r"dynamic is .*\(-:\) only"),
    ("bad group", {**GPTQ, "group_size": 0}, PLAIN, "group_size is 0; expected a positive number, or -1"),
    (
        "act-order without an index",
        {**GPTQ, "desc_act": True},
        change(GPTQ_HEADERS, ".g_idx"),
        rf"'{X}\.g_idx' is missing",
    ),
    ("no zeros", GPTQ, change(GPTQ_HEADERS, ".qzeros"), rf"'{X}\.qzeros' is missing"),
    ("gemv", {"quant_method": "awq", "bits": 4, "version": "gemv"}, PLAIN, "version is 'gemv'; expected gemm"),
    ("no zero points", {"quant_method": "awq", "bits": 4, "zero_point": False}, PLAIN, "zero_point is False"),
    (
        "awq read as gptq",
        GPTQ,
        PLAIN | stored(formats.awq(128), *EXPERTS),
        rf"'{X}\.scales': expected shape .*found \[2, 384\]",
    ),
]


@pytest.mark.parametrize(("what", "config", "headers", "message"), REFUSED, ids=[entry[0] for entry in REFUSED])
def test_refusals(what: str, config: dict[str, Any] | None, headers: Headers, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        detect(config, headers)


def test_an_expert_that_is_listed_may_be_plain() -> None:
    headers = change(change(FP8_HEADERS, ".weight_scale_inv"), ".weight", "BF16")
    for pattern in (X, "model.layers.0.mlp.experts.0", "model.layers.0.*", r"re:.*layers\.0\."):
        config = {**FP8, "modules_to_not_convert": [pattern]}
        wanted = {name: header for name, header in headers.items() if "layers.0" not in name or X in name}
        assert detect(config, wanted).matrices[X].encoding == formats.plain("BF16")


def test_half_of_a_fused_matrix_is_refused() -> None:
    base = "model.layers.0.mlp.experts.gate_up_proj"
    other = "model.layers.1.mlp.experts.gate_up_proj"
    for config, encoding in (
        ({"quant_method": "mxfp4"}, formats.mxfp4_blocks()),
        (FP8, formats.fp8_block((128, 128), "", "_scale_inv")),
        (FP8, formats.mxfp4("", "_scale_inv")),
    ):
        whole = PLAIN | stored(encoding, base, other, experts=4)
        codes, scales = (base + tensor.suffix for tensor in encoding.tensors)
        with pytest.raises(CheckpointError, match=f"'{scales}' is missing"):
            detect(config, {name: header for name, header in whole.items() if name != scales})
        with pytest.raises(CheckpointError, match=f"which has '{codes}' of dtype"):
            detect(config, {name: header for name, header in whole.items() if name != codes})


def test_act_order_with_an_index_is_left_to_its_values() -> None:
    found = detect({**GPTQ, "desc_act": True}, GPTQ_HEADERS).matrices[X]
    assert found.names["group_index"] == f"{X}.g_idx"
    found = detect({**GPTQ, "group_size": -1, "desc_act": True}, PLAIN | stored(formats.gptq(0), X)).matrices[X]
    assert found.encoding == formats.gptq(0)


@pytest.mark.parametrize(
    ("pattern", "module", "covered"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.3.mlp", False),
        ("model.layers.*.self_attn", "model.layers.3.self_attn_norm", False),
        ("*.mlp.shared_expert.*", "model.layers.0.mlp.shared_expert.up_proj", True),
        ("*.mlp.shared_expert.*", "model.layers.0.mlp.shared_expert_gate", False),
        ("mtp*", "mtp.layers.0.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up)_proj.*", "model.layers.0.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up)_proj.*", "model.layers.0.mlp.experts.0.up_proj", False),
        ("re:mlp", "model.mlp", False),
    ],
)
def test_names_and_patterns_of_modules(pattern: str, module: str, covered: bool) -> None:
    from ktft.formats.schemes import Patterns

    assert (module in Patterns([pattern])) == covered
    assert (module in Patterns(["something", "re:else", "an*other", pattern])) == covered


def test_a_large_checkpoint_is_quick() -> None:
    """60 layers of 256 experts, and a list of 700 exceptions with wildcards: a second or two, not minutes."""
    bases = [EXPERT.format(layer, e, name) for layer in range(60) for e in range(256) for name in ("up_proj", "w1")]
    exceptions = [f"model.layers.{layer}.self_attn*" for layer in range(60)] + [f"model.n{i}" for i in range(640)]
    found = detect(modelopt("NVFP4", exclude_modules=exceptions), stored(formats.nvfp4_modelopt(), *bases))
    assert len(found.matrices) == 60 * 256 * 2
