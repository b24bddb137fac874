"""load_model on GGUF files: the experts where they lie, all else decoded, the logits of the decoded model in stock
transformers."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, RopeScalingType
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktft import gguf_file
from ktft.experts import CpuExperts
from ktft.model import load_model
from tests.gguf_files import ARCHITECTURES, LARGE, SMALL, Written, write
from tests.tiny_models import assert_same_function

KINDS = {
    "BF16": ("bf16", SMALL),
    "F16": ("fp16", SMALL),
    "Q8_0": ("q8_0", SMALL),
    "Q4_0": ("q4_0", SMALL),
    "Q4_1": ("q4_1", SMALL),
    "MXFP4": ("gguf_mxfp4", SMALL),
    "Q4_K": ("q4_k", LARGE),
    "Q6_K": ("q6_k", LARGE),
}


def formats_of(model: PreTrainedModel) -> set[tuple[str, str, str]]:
    weights = [module.weights for module in model.modules() if isinstance(module, CpuExperts)]
    return {(w.gate.format, w.up.format, w.down.format) for w in weights if w is not None}


def assert_same_parameters(model: PreTrainedModel, stock: PreTrainedModel, dtype: torch.dtype) -> None:
    """Everything but the experts, bit for bit; rounded once where it is narrower than fp32."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, CpuExperts))
    expected = {n: t for n, t in (*stock.named_parameters(), *stock.named_buffers()) if not n.startswith(inside)}
    found = dict((*model.named_parameters(), *model.named_buffers()))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if "inv_freq" not in name:
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
            assert tensor.dtype == dtype or "e_score_correction_bias" in name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_families(family: str, tmp_path: Path) -> None:
    written = write(family, tmp_path)
    model = load_model(written.path)
    assert formats_of(model) == {("fp32", "fp32", "fp32")}
    assert_same_parameters(model, written.stock, torch.float32)
    assert_same_function(model, written.stock)
    # What initialises weights, and which class made them, is not in the file.
    ours, theirs = model.config.to_dict(), written.stock.config.to_dict()
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert differing <= {"initializer_range", "architectures", "_name_or_path", "dtype", "transformers_version"}
    assert not model.training
    assert model.name_or_path == str(written.path)
    assert model.generation_config.eos_token_id == written.stock.config.eos_token_id


@pytest.mark.parametrize("kind", KINDS)
def test_types(kind: str, tmp_path: Path) -> None:
    name, sizes = KINDS[kind]
    written = write("qwen3_moe", tmp_path, kind, **sizes)
    model = load_model(written.path, dtype=torch.float32, check_weights=True)
    assert formats_of(model) == {(name, name, name)}
    assert_same_parameters(model, written.stock, torch.float32)
    assert_same_function(model, written.stock)
    by_default = load_model(written.path)
    assert by_default.dtype == (torch.float16 if kind == "F16" else torch.bfloat16)
    assert_same_parameters(by_default, written.stock, by_default.dtype)


def test_types_as_they_are_mixed(tmp_path: Path) -> None:
    """down in another type than gate and up, as llama.cpp has it; attention in types that experts cannot have."""
    types = {"ffn_down_exps": "Q6_K", "attn_v": "Q6_K", "attn_q": "Q5_K", "attn_k": "IQ4_XS", "attn_output": "Q3_K"}
    types |= {"token_embd": "Q2_K"}
    written = write("qwen3_moe", tmp_path, "Q4_K", types=types, **LARGE)
    model = load_model(written.path, dtype=torch.float32, check_weights=True)
    assert formats_of(model) == {("q4_k", "q4_k", "q6_k")}
    assert_same_parameters(model, written.stock, torch.float32)
    assert_same_function(model, written.stock)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gate_and_up_in_one_tensor(kind: str, tmp_path: Path) -> None:
    written = write("qwen3_moe", tmp_path, kind, fused=True, **SMALL)
    assert "blk.1.ffn_gate_up_exps.weight" in written.types
    assert_same_function(load_model(written.path, dtype=torch.float32), written.stock)


def test_key_and_value_in_one_tensor(tmp_path: Path) -> None:
    """As older files of DeepSeek have them."""
    written = write("deepseek_v3", tmp_path, fused=True)
    assert "blk.0.attn_kv_b.weight" in written.types
    assert_same_function(load_model(written.path), written.stock)


def test_rows_of_q_and_k_in_blocks(tmp_path: Path) -> None:
    """llama.cpp's order of rows, and DeepSeek's key and value apart, of quantised matrices."""
    mixtral = write("mixtral", tmp_path / "mixtral", "Q8_0", hidden_size=64, intermediate_size=32)
    assert_same_function(load_model(mixtral.path, dtype=torch.float32), mixtral.stock)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32}
    sizes |= {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "initializer_range": 0.1}
    deepseek = write("deepseek_v3", tmp_path / "deepseek", "Q8_0", **sizes)
    assert deepseek.types["blk.0.attn_k_b.weight"] == "Q8_0"
    model = load_model(deepseek.path, dtype=torch.float32)
    assert_same_parameters(model, deepseek.stock, torch.float32)
    assert_same_function(model, deepseek.stock)


def test_stock_transformers_reads_the_same(tmp_path: Path) -> None:
    """It is given the config, because it leaves the size of the experts unread."""
    written = write("qwen3_moe", tmp_path, "Q8_0", **SMALL)
    config = copy.deepcopy(written.stock.config)
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32, experts_implementation="eager"
    )
    assert_same_function(load_model(written.path, dtype=torch.float32), stock.eval())


def test_several_files_and_directories(tmp_path: Path) -> None:
    written = write("qwen3_moe", tmp_path / "parts", "Q8_0", parts=7, **SMALL)
    files = sorted(path.name for path in written.path.parent.iterdir())
    assert len(files) > 2
    assert files[0] == written.path.name == f"m-00001-of-{len(files):05d}.gguf"
    for path in (written.path, written.path.with_name(files[1]), written.path.parent):
        assert_same_function(load_model(path, dtype=torch.float32), written.stock)
    joined = write("qwen3_moe", tmp_path / "joined", "Q8_0", edit=lambda w: w.add_uint16("split.count", 0), **SMALL)
    assert_same_function(load_model(joined.path, dtype=torch.float32), written.stock)
    write("qwen3_moe", written.path.parent, name="other.gguf")
    with pytest.raises(gguf_file.CheckpointError, match=rf"several GGUF models: {files[0]}, other\.gguf"):
        load_model(written.path.parent)


def test_config_and_generation_config_beside_the_file(tmp_path: Path) -> None:
    """They are taken; metadata that it is not known what to make of is then no matter."""
    written = write("qwen3_moe", tmp_path, edit=lambda w: w.add_uint32("qwen3moe.wavelength", 3))
    written.stock.config.update({"initializer_range": 0.123})
    written.stock.config.save_pretrained(tmp_path)
    written.stock.generation_config.update(max_new_tokens=77)
    written.stock.generation_config.save_pretrained(tmp_path)
    model = load_model(written.path)
    assert model.config.initializer_range == 0.123
    assert model.generation_config.max_new_tokens == 77
    assert_same_function(model, written.stock)


def test_scaled_rotation(tmp_path: Path) -> None:
    def scale(writer) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_finetuned(True)
        for name, value in (("attn", 1.25), ("beta_fast", 24.0), ("beta_slow", 2.0)):
            writer.add_float32(f"qwen3moe.rope.scaling.yarn_{name}{'_factor' if name == 'attn' else ''}", value)

    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"attention_factor": 1.25, "beta_fast": 24.0, "beta_slow": 2.0}
    written = write("qwen3_moe", tmp_path, edit=scale, rope_parameters=rope)
    model = load_model(written.path)
    assert model.config.rope_parameters == written.stock.config.rope_parameters
    assert_same_function(model, written.stock)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    def predicting(writer) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", torch.zeros(4, 32).numpy())

    written = write("deepseek_v3", tmp_path, edit=predicting)
    assert_same_function(load_model(written.path), written.stock)


def test_headers_are_what_the_package_reads(tmp_path: Path) -> None:
    def more(writer) -> None:
        writer.add_array("qwen3moe.floats", [0.5, 1.5])
        writer.add_array("some.strings", ["a", "bc", ""])
        writer.add_bool("some.truth", True)
        writer.add_int64("some.long", -(2**40))
        writer.add_float64("some.double", 1e-300)

    written = write("qwen3_moe", tmp_path, "Q8_0", edit=more, **SMALL)
    model, theirs = gguf_file.read_gguf(written.path), GGUFReader(written.path)
    assert {t.name: (t.type, t.begin, t.size, list(t.shape)) for t in model.tensors.values()} == {
        t.name: (GGMLQuantizationType(t.tensor_type).name, t.data_offset, t.n_bytes, list(reversed(t.shape.tolist())))
        for t in theirs.tensors
    }
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert model.metadata.keys() == fields.keys()
    for key, field in fields.items():
        expected = field.contents()
        if key == "some.strings":
            expected = 3
        assert model.metadata[key] == (pytest.approx(expected) if isinstance(expected, float) else expected), key


@pytest.fixture
def small(tmp_path: Path) -> Written:
    return write("qwen3_moe", tmp_path / "small", "Q8_0", **SMALL)


def test_safetensors_files_come_first(small: Written) -> None:
    shutil.copy(small.path, small.path.with_name("again.gguf"))
    small.stock.save_pretrained(small.path.parent)
    model = load_model(small.path.parent)
    assert formats_of(model) == {("fp32", "fp32", "fp32")}
