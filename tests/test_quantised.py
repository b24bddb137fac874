"""load_model on quantised checkpoints: experts in place, all else decoded, the logits of the dequantised model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktft import cli
from ktft.experts import CpuExperts
from ktft.model import load_model
from tests.described import decoded
from tests.quantised import CASES, Written, write
from tests.tiny_chat import tiny_tokenizer
from tests.tiny_models import assert_same_function, tiny_input
from tests.tiny_train import tiny_data

FAMILIES = ("qwen3_moe", "deepseek_v3")
MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Written]:
    """Written when first asked for; not to be changed."""
    root = tmp_path_factory.mktemp("quantised")

    class Lazily(dict[tuple[str, str, str], Written]):
        def __missing__(self, key: tuple[str, str, str]) -> Written:
            family, name, size = key
            self[key] = write(family, name, root / "-".join(key), size, activations=True)
            return self[key]

    return Lazily()


def experts_of(model: PreTrainedModel) -> dict[str, CpuExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, CpuExperts)}


def assert_experts_are_the_files(model: PreTrainedModel, written: Written) -> None:
    seen = set()
    for path, experts in experts_of(model).items():
        assert experts.weights is not None
        for e in range(experts.num_experts):
            for name, suffix in MATRICES.items():
                base = f"{path}.{e}.{suffix}"
                seen.add(base)
                assert torch.equal(decoded(experts.weights, name, e), written.decoded(base, torch.float32)), base
    assert seen == {base for base in written.matrices if ".experts." in base}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_experts_lie_where_they_are_said_to(
    checkpoints: dict[tuple[str, str, str], Written], family: str, name: str, size: str
) -> None:
    written = checkpoints[family, name, size]
    model = load_model(written.directory, check_weights=True)
    assert_experts_are_the_files(model, written)
    formats_found = {m.weights.gate.format for m in experts_of(model).values() if m.weights is not None}
    assert formats_found == {"int8_plain" if name == "int8-plain" else written.encoding.format}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_everything_else_is_the_dequantised_weight(
    checkpoints: dict[tuple[str, str, str], Written], family: str, name: str, size: str, dtype: torch.dtype
) -> None:
    """Rounded once: to bf16 from the fp32 value of code and scale, whatever the tensors are stored as."""
    written = checkpoints[family, name, size]
    model = load_model(written.directory, dtype=dtype)
    stock = AutoModelForCausalLM.from_pretrained(written.plain, dtype=dtype)
    inside = tuple(f"{name}." for name in experts_of(model))
    expected = {n: t for n, t in (*stock.named_parameters(), *stock.named_buffers()) if not n.startswith(inside)}
    found = dict((*model.named_parameters(), *model.named_buffers()))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    for base in written.matrices:
        if ".experts." not in base:
            assert torch.equal(found[f"{base}.weight"], written.decoded(base, dtype)), base
    assert model.generation_config.to_dict() == stock.generation_config.to_dict()
    assert "quantization_config" not in model.config.to_dict()
    assert model.name_or_path == model.config._name_or_path == str(written.directory)
    assert not model.training
    assert model.config.dtype == dtype


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_and_gradients_equal_the_dequantised_model_in_stock_transformers(
    checkpoints: dict[tuple[str, str, str], Written], family: str, name: str, size: str
) -> None:
    written = checkpoints[family, name, size]
    stock = AutoModelForCausalLM.from_pretrained(written.plain, dtype=torch.float32, experts_implementation="eager")
    assert_same_function(load_model(written.directory, dtype=torch.float32), stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bf16_step_falls_where_it_does_with_plain_weights(
    checkpoints: dict[tuple[str, str, str], Written], family: str
) -> None:
    """Experts decoded in the kernels, in bf16, are the bits of the experts of a bf16 checkpoint of the decoded ones."""
    written = checkpoints[family, "int4-g32", "edges"]
    model = load_model(written.directory)
    assert model.dtype == torch.bfloat16
    stock = AutoModelForCausalLM.from_pretrained(written.plain, dtype=torch.bfloat16)
    stock.save_pretrained(written.plain.parent / "bf16")
    again = load_model(written.plain.parent / "bf16")
    with torch.no_grad():
        assert torch.equal(model(tiny_input()).logits, again(tiny_input()).logits)


def test_the_command_line_checks_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """generate, chat and train pass it on; the error is one line that names the tensor."""
    written = write("qwen3_moe", "fp8-block", tmp_path)
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    written.edit(lambda tensors: tensors[key].view(torch.uint8)[3, 5].fill_(0x7F))
    tiny_tokenizer().save_pretrained(written.directory)
    load_model(written.directory)
    directory = str(written.directory)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {directory}\nstage: sft\nfinetuning_type: lora\nlora_target: all\n"
        f"dataset: {tiny_data(tmp_path)}\noutput_dir: {tmp_path / 'out'}\nmax_steps: 1\ndevice: cpu\n"
    )
    for command in (["generate", directory, "--prompt", "x"], ["chat", directory], ["train", str(recipe)]):
        more = [] if command[0] == "train" else ["--device", "cpu"]
        assert cli.main([*command, *more, "--check-weights"]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("ktft: error: tensor"), error
        assert f"'{key}': the weight at row 3, column 5 decodes to nan" in error
