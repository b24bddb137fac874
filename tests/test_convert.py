"""``ktft convert``: what the result holds, and that ktft, stock transformers and compressed-tensors read the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ktft import cli, formats
from ktft.checkpoint import Checkpoint, CheckpointError, read_config
from ktft.convert import convert, verify
from ktft.model import load_model
from ktft.train import run
from tests.quantised import SIZES, write
from tests.test_adapters_stock import BEYOND
from tests.test_quantised_writers import assert_the_same_model
from tests.tiny_chat import tiny_chat_model
from tests.tiny_models import tiny_checkpoint, tiny_input
from tests.tiny_train import recipe

SMALL: dict[str, dict[str, Any]] = SIZES["whole"] | {"mixtral": {"hidden_size": 256, "intermediate_size": 128}}
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def source(family: str, directory: Path, **fields: Any) -> Path:
    return tiny_checkpoint(family, directory, initializer_range=0.06, **{**SMALL[family], **fields})


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return source("qwen3_moe", tmp_path_factory.mktemp("convert") / "qwen", max_shard_size=300_000)


def decoded_copy(original: Path, converted: Path, encoding: formats.Encoding, directory: Path) -> Path:
    """The original with its experts, those that were converted, as they decode, plain, in fp32."""
    found, plain = tensors(converted), tensors(original)
    for name in plain:
        base = name.removesuffix(".weight")
        if encoding.names(base)["scales"] in found:
            roles = {role: found[tensor] for role, tensor in encoding.names(base).items()}
            plain[name] = formats.dequantize(encoding, roles, torch.float32)
    directory.mkdir()
    shutil.copy(original / "config.json", directory)
    save_file({name: tensor.float() for name, tensor in plain.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("qwen3_moe", name) for name in formats.WRITTEN), ("mixtral", "int4-g32"), ("deepseek_v3", "mxfp4")],
)
def test_the_result_is_the_decoded_model(tmp_path: Path, family: str, name: str) -> None:
    original, result = source(family, tmp_path / "source"), tmp_path / "result"
    summary = convert(original, result, name)
    encoding, before, after = formats.WRITTEN[name], tensors(original), tensors(result)
    experts = {key.removesuffix(".weight") for key in before if ".experts." in key}
    expected = {key for key in before if ".experts." not in key}
    expected |= {tensor for base in experts for tensor in encoding.names(base).values()}
    assert after.keys() == expected
    for key, tensor in before.items():
        assert ".experts." in key or torch.equal(after[key], tensor), key
    for base in experts:
        for role, tensor in formats.encode(before[f"{base}.weight"], encoding).items():
            assert torch.equal(after[encoding.names(base)[role]].view(torch.uint8), tensor.view(torch.uint8)), base
        stored = {role: after[tensor] for role, tensor in encoding.names(base).items()}
        error = formats.relative_error(before[f"{base}.weight"], formats.dequantize(encoding, stored, torch.float32))
        assert summary.errors[base] == pytest.approx(error)
    plain = decoded_copy(original, result, encoding, tmp_path / "plain")
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    ours = load_model(result, dtype=torch.float32)
    with torch.no_grad():
        found, wanted = (model(tiny_input()).logits for model in (ours, stock))
        original_logits = load_model(original, dtype=torch.float32)(tiny_input()).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert not torch.allclose(found, original_logits, rtol=1e-4)


def stock_model(directory: Path) -> Any:
    """As stock transformers reads it, decoded, in bf16."""
    more: dict[str, Any] = {}
    if read_config(directory)["quantization_config"]["quant_method"] != "fp8":
        pytest.importorskip("compressed_tensors")
        from transformers import CompressedTensorsConfig

        more["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, experts_implementation="eager", **more)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", formats.WRITTEN)
def test_stock_transformers_reads_the_same(tmp_path: Path, family: str, name: str) -> None:
    convert(source(family, tmp_path / "source"), tmp_path / "result", name)
    assert_the_same_model(tmp_path / "result", stock_model(tmp_path / "result"))


@pytest.mark.parametrize("name", ["fp8-block", "int4-g32"])
def test_some_layers_only(tmp_path: Path, qwen: Path, name: str) -> None:
    """The other layers' experts are plain, and the config says so."""
    result, encoding = tmp_path / "result", formats.WRITTEN[name]
    assert cli.main(["convert", str(qwen), str(result), "--format", name, "--layers", "1"]) == 0
    before, after = tensors(qwen), tensors(result)
    for key, tensor in before.items():
        assert ".layers.1.mlp.experts." in key or torch.equal(after[key], tensor), key
    model = load_model(result, dtype=torch.float32)
    found = [layer.mlp.experts.weights.gate.format for layer in model.model.layers]
    assert found == ["bf16", encoding.format]
    plain = decoded_copy(qwen, result, encoding, tmp_path / "plain")
    with torch.no_grad():
        ours, wanted = (m(tiny_input()).logits for m in (model, load_model(plain, dtype=torch.float32)))
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    if name == "fp8-block":
        assert_the_same_model(result, stock_model(result))
        return
    # transformers 5.24 decodes all layers' experts of compressed-tensors or none; its own rule of names is this
    match = pytest.importorskip("compressed_tensors.utils.match")
    ignore = read_config(result)["quantization_config"]["ignore"]
    ignored = {
        key: any(match.match_name(key.removesuffix(".weight"), pattern) for pattern in ignore)
        for key in before
        if key.endswith("_proj.weight")
    }
    assert ignored == {key: ".layers.1.mlp.experts." not in key for key in ignored}


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g128", "mxfp4"])
def test_compressed_tensors_writes_and_reads_the_same(qwen: Path, tmp_path: Path, name: str) -> None:
    """Its own scales and codes for these weights, its own config parser, its own decoder: bit for bit.

    Given fp32: of bf16 weights it divides in bf16, which makes some codes other than the nearest.
    """
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    theirs = pytest.importorskip("compressed_tensors.quantization.utils")
    convert(qwen, tmp_path / "result", name)
    config = quantization.QuantizationConfig(**read_config(tmp_path / "result")["quantization_config"])
    (scheme,) = config.config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    weight, found = tensors(qwen)[f"{EXPERT}.weight"], tensors(tmp_path / "result")
    groups = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
    scale, _ = theirs.calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    expected = compressor.compress({"weight": weight.float(), "weight_scale": scale.float()}, scheme)
    expected["weight_scale"] = expected["weight_scale"].to(found[f"{EXPERT}.weight_scale"].dtype)
    stored = {name: found[f"{EXPERT}.{name}"] for name in expected}
    for key, tensor in expected.items():
        # −0 and 0 are different codes of MXFP4, and it makes 0 of small negative weights
        equal = torch.equal(stored[key], tensor) if name != "mxfp4" else stored[key].shape == tensor.shape
        assert equal, key
    read, wanted = (compressor.decompress(dict(state), scheme)["weight"] for state in (stored, expected))
    assert torch.equal(read, wanted)
    encoding = formats.WRITTEN[name]
    roles = {tensor.role: stored[tensor.suffix[1:]] for tensor in encoding.tensors}
    assert torch.equal(read, formats.dequantize(encoding, roles, torch.bfloat16))


def fuse(directory: Path, transposed: bool) -> None:
    """Per-expert tensors to fused ones, in place."""
    found = load_file(directory / "model.safetensors")
    for module in sorted({key.split(".experts.")[0] + ".experts" for key in found if ".experts." in key}):
        count = len([key for key in found if key.startswith(module) and key.endswith("gate_proj.weight")])
        gate, up, down = (
            torch.stack([found.pop(f"{module}.{e}.{name}.weight") for e in range(count)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        for name, tensor in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            found[f"{module}.{name}"] = tensor.transpose(1, 2).contiguous() if transposed else tensor
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_taken_apart(tmp_path: Path, transposed: bool) -> None:
    original = source("qwen3_moe", tmp_path / "single")
    shutil.copytree(original, tmp_path / "fused")
    fuse(tmp_path / "fused", transposed)
    for name in ("single", "fused"):
        convert(tmp_path / name, tmp_path / f"{name}-int4", "int4-g32")
    files = [(tmp_path / f"{name}-int4" / "model.safetensors").read_bytes() for name in ("single", "fused")]
    assert files[0] == files[1]
    assert not verify(tmp_path / "fused", tmp_path / "single-int4").problems
    convert(tmp_path / "fused", tmp_path / "one-layer", "mxfp4", [0])  # layer 1 stays fused
    assert verify(tmp_path / "fused", tmp_path / "one-layer").equal == 20 + 18
    load_model(tmp_path / "one-layer")


def test_a_quantised_source_is_decoded_first(tmp_path: Path) -> None:
    """FP8 everywhere to int4 experts: attention is plain then, with the numbers that it had when it was loaded."""
    written = write("deepseek_v3", "fp8-block", tmp_path, "whole", activations=True)
    summary = convert(written.directory, tmp_path / "result", "int4-g128")
    before, after = load_model(written.directory), load_model(tmp_path / "result")
    theirs = dict(after.named_parameters())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in before.named_parameters())
    encoding, found = formats.WRITTEN["int4-g128"], tensors(tmp_path / "result")
    expected = formats.encode(written.decoded(EXPERT, torch.float32), encoding)
    assert torch.equal(found[f"{EXPERT}.weight_packed"], expected["codes"])
    assert found["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert summary.decoded == sum(".experts." not in base for base in written.matrices)
    assert "model.layers.1.self_attn.o_proj.input_scale" in summary.left_out
    assert not any("scale_inv" in name or "input_scale" in name for name in found)
    result = verify(written.directory, tmp_path / "result")
    result.raise_if_wrong()
    assert len(result.coded) == len(summary.errors) == 2 * 8 * 3


@pytest.mark.parametrize("name", ["fp8-block", "int4-g32", "mxfp4", "nvfp4-modelopt", "gptq-g32", "awq-g32"])
@pytest.mark.parametrize("inter", [256, 128], ids=["square", "wide"])
def test_experts_are_decoded_from_what_they_are_stored_in(tmp_path: Path, name: str, inter: int) -> None:
    """Against the writer's own numbers: with as many rows as columns no shape tells a matrix from its transpose."""
    written = write("qwen3_moe", name, tmp_path, "whole", moe_intermediate_size=inter)
    convert(written.directory, tmp_path / "result", "int8")
    found = tensors(tmp_path / "result")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        base = f"model.layers.1.mlp.experts.2.{projection}"
        expected = formats.encode(written.decoded(base, torch.float32), formats.WRITTEN["int8"])
        assert torch.equal(found[f"{base}.weight_packed"], expected["codes"]), base


def test_files_config_and_index(tmp_path: Path, qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original, result = Path(shutil.copytree(qwen, tmp_path / "source")), tmp_path / "result"
    for name in ("tokenizer.json", "extra/notes.txt", ".git/HEAD", "pytorch_model.bin", "consolidated.safetensors"):
        (original / name).parent.mkdir(exist_ok=True)
        (original / name).write_text(name)
    assert cli.main(["convert", str(original), str(result), "--format", "int4-g32"]) == 0
    out = capsys.readouterr().out
    assert f"{EXPERT}  relative error 0.09" in out
    assert "36 expert matrices as int4-g32" in out and "20 tensors as they were" in out
    assert "left out: consolidated.safetensors, pytorch_model.bin" in out
    assert all(word in out for word in (" s, peak memory ", ", read ", ", wrote ", ", temporary disk "))
    shards = sorted(path.name for path in original.glob("model-*.safetensors"))
    assert len(shards) > 3
    index = json.loads((result / "model.safetensors.index.json").read_text())
    files = [path.relative_to(result).as_posix() for path in result.rglob("*") if path.is_file()]
    others = ["config.json", "generation_config.json", "tokenizer.json", "extra/notes.txt"]
    assert sorted(files) == sorted([*shards, "model.safetensors.index.json", *others])
    found = tensors(result)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()
    for tensor in Checkpoint(result, read_config(result)).tensors.values():
        assert tensor.begin % (formats.DTYPE_BITS[tensor.dtype] // 8) == 0, tensor
    config, before = (read_config(path) for path in (result, original))
    quantization = config.pop("quantization_config")
    assert config == before
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"} <= set(quantization["ignore"])
    assert not any("experts" in name for name in quantization["ignore"])


def nan(found: dict[str, torch.Tensor]) -> None:
    found[f"{EXPERT}.weight"][3, 5] = float("nan")


@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        (["--format", "q4"], None, "--format q4 is not one that ktft writes; valid: fp8-block, int8"),
        ([], None, "--format is needed: fp8-block, int8, int4-g32, int4-g128 or mxfp4"),
        (["--format", "int8", "--layers", "1-2"], None, "layer 2 has no routed experts; layers that have: 0, 1"),
        (["--format", "int4-g128"], None, "cannot become int4-g128: int4 .* needs columns in multiples of 128"),
        (["--format", "int8"], nan, r"up_proj.weight', for .*up_proj: the matrix has weights that are not finite"),
        (["--format", "int8", "--verify"], None, "--verify takes two directories and neither --format"),
    ],
)
def test_refused(
    tmp_path: Path,
    arguments: list[str],
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = tiny_checkpoint("qwen3_moe", tmp_path / "source", **SIZES["edges"]["qwen3_moe"])
    if change is not None:
        found = load_file(original / "model.safetensors")
        change(found)
        save_file(found, original / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert cli.main(["convert", str(original), str(tmp_path / "result"), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ktft: error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "result").exists()


def test_directories_that_cannot_be(tmp_path: Path, qwen: Path) -> None:
    written = write("qwen3_moe", "int4-g32", tmp_path, "edges")
    granite = tmp_path / "granite"
    AutoModelForCausalLM.from_config(BEYOND["granitemoe"], dtype=torch.bfloat16).save_pretrained(granite)
    (tmp_path / "there").mkdir()
    for a, b, name, layers, message in (
        (qwen, tmp_path / "there", "int8", None, "there exists; remove it"),
        (qwen, qwen, "int8", None, "exists"),
        (qwen, qwen / "inside" / "deep", "int8", None, "lies in SRC"),
        (tmp_path / "none", tmp_path / "out", "int8", None, "none is not a directory"),
        (written.directory, tmp_path / "out", "int4-g32", None, "are stored as int4 .* already; nothing to convert"),
        (written.directory, tmp_path / "out", "int8", [0], "--layers leaves out model.layers.1.* one config cannot"),
        (granite, tmp_path / "out", "fp8-block", None, "granitemoe has no published names .* of single experts"),
    ):
        with pytest.raises((ValueError, CheckpointError), match=message):
            convert(a, b, name, layers)
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_layer_numbers() -> None:
    assert cli._numbers("0-3,7, 2") == [0, 1, 2, 3, 7]
    for text in ("", "3-1", "a", "1-", "-1", "1,,2"):
        with pytest.raises(Exception, match="numbers and ranges"):
            cli._numbers(text)


def test_training_on_the_result(tmp_path: Path, data: Path) -> None:
    original = tiny_chat_model(tmp_path / "source", hidden_size=64, intermediate_size=32)
    convert(original, tmp_path / "result", "int4-g32")
    run(recipe(tmp_path / "result", data, tmp_path / "out", max_steps=2))
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2]
