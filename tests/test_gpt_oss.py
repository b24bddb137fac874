"""gpt-oss as it is published (MXFP4 experts) and as transformers saves it (plain), against stock transformers and PEFT.

What its experts compute is test_kernels.py's and test_families.py's; plain checkpoints in bf16 also go through
test_model.py, adapters of them through test_adapters_stock.py, with the other families.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

import ktft
from ktft import formats
from ktft.activation import clamped_swiglu
from ktft.adapters.layout import unpack_fused
from ktft.checkpoint import CheckpointError
from ktft.convert import convert
from ktft.expert_layout import fused_rows
from ktft.lora import ExpertLora
from ktft.train import run
from tests.described import decoded
from tests.test_model import GRADIENTS, LOGITS, assert_close, assert_within_the_rounding_of_bf16, experts_of
from tests.tiny_chat import tiny_chat_model
from tests.tiny_models import tiny_checkpoint, tiny_input
from tests.tiny_train import recipe, tiny_data

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # blocks of 32 divide both
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The quantization_config of openai/gpt-oss-20b."""
EXPERTS = "model.layers.{}.mlp.experts"
KINDS = ["mxfp4", "bf16", "fp16", "fp32"]


def to_mxfp4(directory: Path) -> Path:
    """Rewrite a plain checkpoint as OpenAI publishes it: blocks and scales of [E, out, in], biases beside them.

    transformers' own writer of these needs Triton; its reader is what the tests compare with.
    """
    encoding = formats.mxfp4_blocks()
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = tensor
            continue
        matrices = [formats.encode(matrix.t().contiguous(), encoding) for matrix in tensor]
        for role, name in encoding.names(key).items():
            tensors[name] = torch.stack([matrix[role] for matrix in matrices])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=PUBLISHED)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit(directory: Path, target: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """A copy with other tensors; None takes one out."""
    shutil.copytree(directory, target)
    tensors = {**load_file(target / "model.safetensors"), **changes}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Not to be changed."""
    root = tmp_path_factory.mktemp("gpt_oss")
    dtypes = {"mxfp4": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    found = {kind: tiny_checkpoint("gpt_oss", root / kind, dtype=dtypes[kind], **SIZES) for kind in KINDS}
    to_mxfp4(found["mxfp4"])
    return found


def stock_model(directory: Path) -> PreTrainedModel:
    """In fp32, dequantised by transformers."""
    coded = {"quantization_config": Mxfp4Config(dequantize=True)} if directory.name == "mxfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager", **coded
    )
    return model.float()  # before 5.24 what was dequantised is bf16 whatever was asked for, and exact in it


@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_all_else_are_what_transformers_makes_of_the_files(checkpoints: dict[str, Path], kind: str) -> None:
    stock, ours = stock_model(checkpoints[kind]), ktft.load_model(checkpoints[kind], dtype=torch.float32)
    theirs = dict((*stock.named_parameters(), *stock.named_buffers()))
    for path, module in experts_of(ours).items():
        weights = module.weights
        assert weights is not None
        assert weights.activation == clamped_swiglu(1.702, vars(stock.get_submodule(path))["limit"])
        assert weights.gate.format == kind
        assert (weights.gate.transposed, weights.gate.column_step) == ((False, 1) if kind == "mxfp4" else (True, 2))
        gate_up, down = (theirs.pop(f"{path}.{name}").transpose(1, 2) for name in ("gate_up_proj", "down_proj"))
        gate_up_bias, down_bias = (theirs.pop(f"{path}.{name}_bias") for name in ("gate_up_proj", "down_proj"))
        for e in range(module.num_experts):
            for name, matrix in (("gate", gate_up[e, ::2]), ("up", gate_up[e, 1::2]), ("down", down[e])):
                assert torch.equal(decoded(weights, name, e), matrix), (path, e, name)
                if kind != "mxfp4":
                    assert torch.equal(weights.matrix(name, e).float(), matrix), (path, e, name)
        assert weights.biases is not None
        for bias, expected in zip(
            weights.biases, (gate_up_bias[:, ::2], gate_up_bias[:, 1::2], down_bias), strict=True
        ):
            assert torch.equal(bias, expected)
    found = dict((*ours.named_parameters(), *ours.named_buffers()))
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.items())


def gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits; and the gradients of a fixed random functional of them with respect to the input embeddings and every
    parameter that wants one."""
    embeddings = model.get_input_embeddings()(tiny_input()).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    wanted = {"embeddings": embeddings, **{n: p for n, p in model.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad((logits * direction).sum(), list(wanted.values()))
    return logits.detach(), dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_the_stock_model(checkpoints: dict[str, Path], kind: str) -> None:
    """Gradients of the input and of all parameters that are there in both: router, attention and its sinks, norms."""
    stock, ours = stock_model(checkpoints[kind]), ktft.load_model(checkpoints[kind], dtype=torch.float32)
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(".experts." not in name and "embed_tokens" not in name)
    ours.get_input_embeddings().requires_grad_(False)
    logits, expected = gradients(stock)
    found_logits, found = gradients(ours)
    assert_close(found_logits, logits, LOGITS)
    assert found.keys() == expected.keys()
    assert {"model.layers.0.mlp.router.bias", "model.layers.1.self_attn.sinks"} < found.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert_close(found[name], gradient, GRADIENTS)


def test_limits_and_biases_are_a_visible_part(checkpoints: dict[str, Path]) -> None:
    """Without them the tests above have to fail."""
    model = ktft.load_model(checkpoints["mxfp4"], dtype=torch.float32)
    whole, _ = gradients(model.requires_grad_(False))
    for module in experts_of(model).values():
        weights = module.weights
        assert weights is not None
        limit = weights.activation.gate_max
        changes: list[dict[str, Any]] = [{"biases": None}, {"activation": clamped_swiglu(1.7, limit)}]
        if limit < 7:  # some versions of transformers take no limit from the config, and 7 is far from what comes here
            changes.append({"activation": clamped_swiglu(1.702, 7.0)})
        for change in changes:
            before = dict(vars(weights))
            vars(weights).update(change)
            part, _ = gradients(model)
            vars(weights).update(before)
            assert (whole - part).abs().max() > 10 * LOGITS * whole.abs().max(), change


@pytest.mark.parametrize("kind", ["mxfp4", "fp16"])
def test_bf16_experts_are_within_the_rounding_of_bf16(checkpoints: dict[str, Path], kind: str) -> None:
    assert_within_the_rounding_of_bf16(ktft.load_model(checkpoints[kind], dtype=torch.bfloat16))


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mxfp4", "bf16"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapters_gradients_equal_those_in_stock_peft(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, use_rslora: bool
) -> None:
    """On attention and experts: logits and every gradient of what stock PEFT makes of the saved adapter, whose fused B
    has gate's and up's rows in turn."""
    config = LoraConfig(
        r=3,
        lora_alpha=4,
        use_rslora=use_rslora,
        target_modules=["q_proj", "o_proj", "experts"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    ours = ktft.get_peft_model(ktft.load_model(checkpoints[kind], dtype=torch.float32), config)
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(stock_model(checkpoints[kind]), tmp_path, is_trainable=True)
    logits, expected = gradients(stock)
    found_logits, found = gradients(ours)
    assert_close(found_logits, logits, LOGITS)
    assert_close(found.pop("embeddings"), expected["embeddings"], GRADIENTS)
    checked = 0
    for path, layer in ours.named_modules():
        if not isinstance(layer, ExpertLora):
            continue
        e, inter = layer.base_layer.num_experts, layer.base_layer.intermediate_size
        fused = {}
        for name, inner in (("gate_up", ".base_layer"), ("down", "")):
            sides = (expected[f"{path}{inner}.lora_{side}.default.weight"] for side in "AB")
            fused[name] = unpack_fused(*sides, e)
        (a, b), (of_gate, of_up) = fused["gate_up"], fused_rows(inter, interleaved=True)
        assert (of_gate, of_up) == (slice(0, None, 2), slice(1, None, 2))
        theirs = (a[:, :3], b[:, of_gate, :3], a[:, 3:], b[:, of_up, 3:], *fused["down"])
        names = [(part, side) for part in ("gate", "up", "down") for side in "AB"]
        for (part, side), gradient in zip(names, theirs, strict=True):
            assert gradient.abs().max() > 0
            assert_close(found.pop(f"{path}.lora_{side}.default.{part}"), gradient, GRADIENTS)
            checked += 1
    assert checked == 12
    for name, gradient in found.items():
        assert_close(gradient, expected[name], GRADIENTS)


def test_parameter_counts_are_those_of_the_stock_model(checkpoints: dict[str, Path]) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = ktft.get_peft_model(ktft.load_model(checkpoints["mxfp4"]), config)
    trainable, everything = model.get_nb_trainable_parameters()
    assert everything - trainable == sum(p.numel() for p in stock_model(checkpoints["mxfp4"]).parameters())


@pytest.mark.parametrize(("version", "fits"), [("0.18.1", True), ("0.19.0", False), ("0.19.1", True)])
def test_adapters_of_earlier_peft(checkpoints: dict[str, Path], tmp_path: Path, version: str, fits: bool) -> None:
    """Of parameters [E, in, out] PEFT has always written today's layout, but for 0.19.0."""
    model = ktft.load_model(checkpoints["bf16"])
    layer, r = "base_model.model.model.layers.{}.mlp.experts", 2
    e, h, i = 5, SIZES["hidden_size"], SIZES["intermediate_size"]
    tensors = {}
    for n in range(2):
        for inner, inputs, outputs in ((".base_layer", h, 2 * i), ("", i, h)):
            inputs, outputs = (inputs, outputs) if fits else (outputs, inputs)
            tensors[f"{layer.format(n)}{inner}.lora_A.weight"] = torch.randn(r * e, inputs)
            tensors[f"{layer.format(n)}{inner}.lora_B.weight"] = torch.randn(outputs, r * e)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    LoraConfig(r=r, target_modules=[], target_parameters=names).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "peft_version": version}))
    if fits:
        ktft.load_adapter(model, tmp_path)
    else:
        with pytest.raises(ktft.adapters.AdapterError, match=r"the layout of PEFT 0\.19\.0 \(PEFT 0\.19\.0 wrote it\)"):
            ktft.load_adapter(model, tmp_path)


def test_training_interrupted_and_resumed_is_training(tmp_path: Path) -> None:
    """On the published form, attention and experts: from the checkpoint in the middle to the same bits."""
    base = to_mxfp4(tiny_chat_model(tmp_path / "base", family="gpt_oss", **SIZES))
    settings = recipe(base, tiny_data(tmp_path), tmp_path / "out", max_steps=4, save_steps=2, lora_dropout=0.2)
    assert run(settings).steps == 4
    whole = load_file(tmp_path / "out/adapter_model.safetensors")
    assert any(tensor.count_nonzero() for key, tensor in whole.items() if "experts.lora_B" in key)
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    again = recipe(
        base, tmp_path / "chats.jsonl", tmp_path / "out", max_steps=4, save_steps=2, lora_dropout=0.2,
        resume_from_checkpoint=True,
    )  # fmt: skip
    assert run(again).steps == 4
    resumed = load_file(tmp_path / "out/adapter_model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    ktft.load_adapter(ktft.load_model(base), tmp_path / "out")


# --- files that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mxfp4", "bf16"])
def test_biases_that_are_missing_misshapen_or_not_finite_are_named(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    name = f"{EXPERTS.format(1)}.gate_up_proj_bias"
    bias = load_file(checkpoints[kind] / "model.safetensors")[name]
    missing = edit(checkpoints[kind], tmp_path / "missing", {name: None})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts: expected 1 tensors for gate_up_bias, found 0"):
        ktft.load_model(missing)
    short = edit(checkpoints[kind], tmp_path / "short", {name: bias[:, :-1].contiguous()})
    with pytest.raises(CheckpointError, match=rf"'{name}': expected shape \[5, 192\] by the config, found \[5, 191\]"):
        ktft.load_model(short)
    codes = edit(checkpoints[kind], tmp_path / "codes", {name: bias.to(torch.int32)})
    with pytest.raises(CheckpointError, match=rf"'{name}': expected dtype .*found I32"):
        ktft.load_model(codes)
    broken = bias.clone()
    broken[2, 5] = float("nan")
    damaged = edit(checkpoints[kind], tmp_path / "damaged", {name: broken})
    ktft.load_model(damaged)
    with pytest.raises(CheckpointError, match=rf"'{name}': the weight at row 2, column 5 decodes to nan"):
        ktft.load_model(damaged, check_weights=True)


@pytest.mark.parametrize("kind", ["mxfp4", "bf16"])
def test_conversion_is_refused(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """There are no names for the matrices and biases of single experts."""
    with pytest.raises(CheckpointError, match="gpt_oss cannot be converted"):
        convert(checkpoints[kind], tmp_path / "converted", "int4-g32")
    assert not (tmp_path / "converted").exists()
