"""load_model against stock transformers: the same model, the same logits and gradients, the experts never in memory."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktft import reference
from ktft.experts import CpuExperts, ExpertNames, check_sources
from ktft.families import UnsupportedModelError
from ktft.model import load_model
from tests.described import decoded
from tests.tiny_models import FAMILIES, FUSED, tiny_checkpoint, tiny_config, tiny_input

# Two fp32 implementations that differ in the order of additions only; the project's promise for fp32 mode.
LOGITS, GRADIENTS = 1e-5, 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    shard_sizes = {"qwen2_moe": 20_000, "deepseek_v3": 40_000}
    return {name: tiny_checkpoint(name, root / name, max_shard_size=shard_sizes.get(name, "5GB")) for name in FAMILIES}


def stock_model(directory: Path, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, experts_implementation="eager")


def experts_of(model: nn.Module) -> dict[str, CpuExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, CpuExperts)}


def logits_and_gradient(model: PreTrainedModel, *, training: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of a fixed random functional of them with respect to the input embeddings.

    Every parameter is frozen, the router's too: the gradient still has to come through the routing weights.
    """
    model.requires_grad_(False).train(training)
    embeddings = model.get_input_embeddings()(tiny_input()).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (gradient,) = torch.autograd.grad((logits.float() * direction).sum(), embeddings)
    return logits.detach(), gradient


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    assert (found - expected).abs().max() <= relative * expected.abs().max()


# --- the same model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_input_gradients_equal_the_stock_model(checkpoints: dict[str, Path], family: str) -> None:
    stock, ours = stock_model(checkpoints[family]), load_model(checkpoints[family], dtype=torch.float32)
    assert type(ours) is type(stock)
    assert not ours.training
    logits, gradient = logits_and_gradient(stock)
    found_logits, found_gradient = logits_and_gradient(ours)
    assert_close(found_logits, logits, LOGITS)
    assert_close(found_gradient, gradient, GRADIENTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_through_the_routing_weights_is_a_visible_part(checkpoints: dict[str, Path], family: str) -> None:
    """Without it the test above has to fail: cutting it changes the gradient by far more than the tolerance."""
    model = load_model(checkpoints[family], dtype=torch.float32)
    _, whole = logits_and_gradient(model)
    for experts in experts_of(model).values():
        experts.register_forward_pre_hook(lambda _, args: (args[0], args[1], args[2].detach()))
    _, cut = logits_and_gradient(model)
    assert (whole - cut).abs().max() > 100 * GRADIENTS * whole.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family], dtype=torch.float32)
    logits, gradient = logits_and_gradient(model, training=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again_logits, again_gradient = logits_and_gradient(model, training=True)
    assert torch.equal(again_logits, logits)
    assert torch.equal(again_gradient, gradient)


def test_recompute_is_passed_on_and_changes_nothing(checkpoints: dict[str, Path]) -> None:
    keep, again = (load_model(checkpoints["mixtral"], recompute=flag) for flag in (False, True))
    assert all(experts.recompute for experts in experts_of(again).values())
    for found, expected in zip(logits_and_gradient(again), logits_and_gradient(keep), strict=True):
        assert torch.equal(found, expected)


def assert_within_the_rounding_of_bf16(model: PreTrainedModel) -> None:
    """Inside a bf16 model, each experts module against float64 on the inputs it was given.

    bf16 rounds once (relative error u = 2^-8) gate, up, h, and the output; products of bf16 values are exact in fp32
    and their sums are off by less than u/100. To first order, with the second order in the factor 1.1:
    |dh| <= u (|gate dh/dgate| + |up dh/dup| + |h|), |d out| <= u |out| + sum over routes of |weight W_down| |dh|.
    """
    assert model.dtype == torch.bfloat16
    calls: list[tuple[CpuExperts, tuple[torch.Tensor, ...], torch.Tensor]] = []
    for experts in experts_of(model).values():
        experts.register_forward_hook(lambda module, args, out: calls.append((module, args, out)))
    with torch.no_grad():
        model(tiny_input())
    assert calls
    for module, (hidden, index, weights), out in calls:
        assert hidden.dtype == out.dtype == torch.bfloat16
        assert module.weights is not None
        gate, up, down = (
            torch.stack([decoded(module.weights, name, e, torch.bfloat16) for e in range(module.num_experts)]).double()
            for name in ("gate", "up", "down")
        )
        x, w = hidden.double(), weights.double()
        biases = None
        if module.weights.biases is not None:
            biases = [bias.double() for bias in module.weights.biases]
        activation = module.weights.activation
        expected = reference.moe_experts(x, index, w, gate, up, down, activation=activation, biases=biases)
        bound = torch.zeros_like(expected)
        for token, expert in enumerate(index):
            for slot, e in enumerate(expert.tolist()):
                g, v = gate[e] @ x[token], up[e] @ x[token]
                if biases is not None:
                    g, v = g + biases[0][e], v + biases[1][e]
                g, v = g.requires_grad_(), v.requires_grad_()
                h = reference.activate(activation, g, v)
                slopes = torch.autograd.grad(h.sum(), (g, v))
                rounding = (g * slopes[0]).abs() + (v * slopes[1]).abs() + h.abs()
                bound[token] += w[token, slot].abs() * (down[e].abs() @ rounding)
        bound = 1.1 * 2.0**-8 * (bound + expected.abs())
        assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_experts_are_within_the_rounding_of_bf16(checkpoints: dict[str, Path], family: str) -> None:
    assert_within_the_rounding_of_bf16(load_model(checkpoints[family]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float32, torch.float16])
def test_everything_but_the_experts_is_as_stock_loads_it(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype | str | None
) -> None:
    """Names, dtypes (fp32 biases, fp32 rotary tables) and bits of all parameters and buffers, and which are tied."""
    stock = stock_model(checkpoints[family], dtype or "auto")
    ours = load_model(checkpoints[family], dtype=dtype)
    inside = tuple(f"{name}." for name in experts_of(ours))
    expected = {n: t for n, t in (*stock.named_parameters(), *stock.named_buffers()) if not n.startswith(inside)}
    found = dict((*ours.named_parameters(), *ours.named_buffers()))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert ours.config.tie_word_embeddings == (family == "qwen3_moe")
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (family == "qwen3_moe")
    assert ours.state_dict().keys() == {name for name in stock.state_dict() if not name.startswith(inside)}
    assert ours.generation_config.to_dict() == stock.generation_config.to_dict()
    assert ours.name_or_path == ours.config._name_or_path == str(checkpoints[family])


def test_the_score_bias_of_deepseek_stays_fp32(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["deepseek_v3"])
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert [b.dtype for b in biases] == [torch.float32, torch.float32]
    assert all(b.abs().max() > 0 for b in biases)


def test_generation_gives_the_stock_tokens(checkpoints: dict[str, Path]) -> None:
    for family in FAMILIES:
        models = stock_model(checkpoints[family]), load_model(checkpoints[family], dtype=torch.float32)
        prompt = tiny_input(1, 5)
        mask = torch.ones_like(prompt)
        stock, ours = (
            m.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
            for m in models
        )
        assert torch.equal(ours, stock), family


@pytest.mark.parametrize(
    ("family", "overrides", "layers"),
    [
        ("deepseek_v3", {}, [1, 2]),
        ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, [0, 2]),
        ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, [1, 3]),
    ],
)
def test_dense_layers_stay_dense(tmp_path: Path, family: str, overrides: dict[str, object], layers: list[int]) -> None:
    directory = tiny_checkpoint(family, tmp_path, **overrides)
    model = load_model(directory, dtype=torch.float32)
    assert list(experts_of(model)) == [f"model.layers.{layer}.mlp.experts" for layer in layers]
    assert_close(logits_and_gradient(model)[0], logits_and_gradient(stock_model(directory))[0], LOGITS)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*FUSED}))
def test_names_are_those_in_the_files(checkpoints: dict[str, Path], family: str) -> None:
    keys = {key for file in checkpoints[family].glob("*.safetensors") for key in load_file(file)}
    model = load_model(checkpoints[family])
    for path, experts in experts_of(model).items():
        names = experts.names
        assert names is not None
        assert names.module == path
        for e in range(experts.num_experts):
            for matrix in (names.gate, names.up, names.down):
                keys.remove(f"{names.disk}.{e}.{matrix}.weight")
    assert not [key for key in keys if ".experts." in key]
    if family == "mixtral":
        assert experts.names == ExpertNames(
            "model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts", "w1", "w3", "w2"
        )


# --- layouts on disk --------------------------------------------------------------------------------------------------


def fuse(directory: Path, family: str, *, transposed: bool) -> None:
    """Rewrite a one-file checkpoint with fused experts under transformers' own parameter names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    for layer in range(2):
        prefix = f"model.layers.{layer}.{block}.experts"
        stacks = {}
        for matrix in (gate, up, down):
            keys = [key for key in tensors if key.startswith(f"{prefix}.") and f".{matrix}." in key]
            stacks[matrix] = torch.stack([tensors.pop(f"{prefix}.{e}.{matrix}.weight") for e in range(len(keys))])
        fused = {"gate_up_proj": torch.cat([stacks[gate], stacks[up]], dim=1), "down_proj": stacks[down]}
        for name, tensor in fused.items():
            tensors[f"{prefix}.{name}"] = (tensor.transpose(1, 2) if transposed else tensor).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_files_give_the_same_model(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, transposed: bool
) -> None:
    directory = tiny_checkpoint(family, tmp_path)
    fuse(directory, family, transposed=transposed)
    fused, separate = (load_model(d, dtype=torch.float32) for d in (directory, checkpoints[family]))
    for ours, theirs in zip(experts_of(fused).values(), experts_of(separate).values(), strict=True):
        assert ours.names == theirs.names
        assert ours.weights is not None
        assert theirs.weights is not None
        assert ours.weights.gate.transposed == transposed
        for name in ("gate", "up", "down"):
            for e in range(ours.num_experts):
                assert torch.equal(ours.weights.matrix(name, e), theirs.weights.matrix(name, e))
    for found, expected in zip(logits_and_gradient(fused), logits_and_gradient(separate), strict=True):
        assert_close(found, expected, LOGITS)


def test_fp32_experts_and_2i_equal_to_h(tmp_path: Path) -> None:
    directory = tiny_checkpoint("olmoe", tmp_path, dtype=torch.float32, intermediate_size=20)
    model = load_model(directory)
    assert model.dtype == torch.float32
    assert_close(logits_and_gradient(model)[0], logits_and_gradient(stock_model(directory))[0], LOGITS)


def test_layers_that_transformers_ignores_are_ignored(tmp_path: Path) -> None:
    """DeepSeek-V3 publishes a multi-token-prediction layer 61 with experts of its own."""
    directory = tiny_checkpoint("deepseek_v3", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    for key in [key for key in tensors if key.startswith("model.layers.2.")]:
        tensors[key.replace("layers.2.", "layers.61.")] = tensors[key].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert len(experts_of(load_model(directory))) == 2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_checkpoint_of_the_base_model(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Its names lack ``model.``; its head is tied, or has the name it has anyway."""
    directory = shutil.copytree(checkpoints[family], tmp_path / "base")
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    model = load_model(directory, dtype=torch.float32)
    expected = logits_and_gradient(load_model(checkpoints[family], dtype=torch.float32))
    for found, value in zip(logits_and_gradient(model), expected, strict=True):
        assert torch.equal(found, value)
    assert_close(logits_and_gradient(model)[0], logits_and_gradient(stock_model(directory))[0], LOGITS)


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_default_device_does_not_matter(checkpoints: dict[str, Path], everywhere: bool) -> None:
    expected = load_model(checkpoints["mixtral"])(tiny_input()).logits
    if everywhere:
        torch.set_default_device("meta")
        try:
            model = load_model(checkpoints["mixtral"])
        finally:
            torch.set_default_device(None)
    else:
        with torch.device("meta"):
            model = load_model(checkpoints["mixtral"])
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(model(tiny_input()).logits, expected)


# --- what may be done to it -------------------------------------------------------------------------------------------


def test_moving_and_casting_leaves_the_experts_alone(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["mixtral"], dtype=torch.float32)
    before = {name: (experts.weights, experts.weight) for name, experts in experts_of(model).items()}
    for cast, dtype in (
        (model.bfloat16, torch.bfloat16),
        (model.half, torch.float16),
        (lambda: model.to(torch.float32), torch.float32),
        (lambda: model.to("cpu", torch.bfloat16), torch.bfloat16),
    ):
        cast()
        assert model.dtype == dtype
        assert {name: (experts.weights, experts.weight) for name, experts in experts_of(model).items()} == before
        assert model(tiny_input()).logits.isfinite().all()


def test_the_base_cannot_be_saved_but_its_config_can(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(checkpoints["qwen3_moe"])
    for refused in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"PeftModel.*copy its directory"):
            refused.save_pretrained(tmp_path / "copy")
        with pytest.raises(RuntimeError, match="is refused"):
            refused.save_pretrained(checkpoints["qwen3_moe"])
    assert not (tmp_path / "copy").exists()
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_no_model_inside_can_be_saved_and_nothing_through_the_class(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Each of these would write weights without experts, and onto the source would truncate what is mapped."""
    directory = shutil.copytree(checkpoints["qwen3_moe"], tmp_path / "base")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    model = load_model(directory)
    inner = model.get_submodule(model.base_model_prefix)
    assert isinstance(inner, PreTrainedModel)
    for refused in (model, inner, copy.deepcopy(inner), model.base_model, model.get_decoder()):
        for target in (tmp_path / "new", directory):
            with pytest.raises(RuntimeError, match="is refused"):
                refused.save_pretrained(target)
            with pytest.raises(RuntimeError, match="is refused"):
                type(refused).save_pretrained(refused, target)
            with pytest.raises(RuntimeError, match="is refused"):
                PreTrainedModel.save_pretrained(refused, target, state_dict=model.state_dict())
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    check_sources(model)


def test_pickling_raises_and_deepcopy_shares(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen2_moe"], dtype=torch.float32)
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be pickled"):
            save(model)
    twin = copy.deepcopy(model)
    for ours, theirs in zip(experts_of(twin).values(), experts_of(model).values(), strict=True):
        assert ours is not theirs
        assert ours.weights is theirs.weights
    expected = model(tiny_input()).logits
    del model
    assert torch.equal(twin(tiny_input()).logits, expected)


def test_a_state_dict_of_the_rest_loads_and_one_with_experts_does_not(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["mixtral"])
    model.load_state_dict(model.state_dict())
    whole = stock_model(checkpoints["mixtral"]).state_dict()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"lie under 'model\.layers\.0\.mlp\.experts'"):
            model.load_state_dict(whole, strict=strict)


def test_backward_after_the_model_is_gone(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["mixtral"], dtype=torch.float32)
    _, expected = logits_and_gradient(model)
    embeddings = model.get_input_embeddings()(tiny_input()).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    del model
    (logits * direction).sum().backward()
    assert embeddings.grad is not None
    assert torch.equal(embeddings.grad, expected)


# --- memory, hub ------------------------------------------------------------------------------------------------------


def run_python(script: str, **environment: str) -> str:

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_and_running_takes_no_memory_for_experts(tmp_path: Path) -> None:
    """100 MB of experts: anonymous memory grows by the rest of the model, scratch and Python's own, not by them."""
    directory = tiny_checkpoint("mixtral", tmp_path, hidden_size=256, intermediate_size=4096, num_local_experts=8)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert size > 100e6
    script = f"""
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from ktft.model import load_model

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

load_model({str(checkpoint_for_warmup(tmp_path))!r})
before = anonymous()
model = load_model({str(directory)!r})
print(anonymous() - before)
model(torch.arange(64)[None])
print(anonymous() - before)
"""
    loaded, run = (int(line) for line in run_python(script).split())
    assert loaded < size / 10
    assert run < size / 4


def checkpoint_for_warmup(tmp_path: Path) -> Path:
    """Importing and first use of transformers takes memory of its own, which is not what is measured."""
    return tiny_checkpoint("mixtral", tmp_path / "warm-up")


def test_a_hub_id_is_found_in_the_cache_and_otherwise_one_line_says_so(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--somebody--tiny"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    for n, file in enumerate(checkpoints["qwen2_moe"].iterdir()):
        blob = repository / "blobs" / f"{n:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    script = """
import torch
from ktft.model import load_model
model = load_model("somebody/tiny", dtype="float32")
assert model.name_or_path == model.config._name_or_path == "somebody/tiny"
print(model(torch.arange(8)[None]).logits.sum().item())
try:
    load_model("somebody/else")
except ValueError as error:
    message = str(error)
print(message)
"""
    value, message = run_python(script, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1").strip().splitlines()
    expected = load_model(checkpoints["qwen2_moe"], dtype="float32")(torch.arange(8)[None]).logits.sum().item()
    assert float(value) == expected
    assert message.startswith("cannot load 'somebody/else': no such directory, not in the Hugging Face cache")


def test_only_what_a_load_reads_is_downloaded(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub by its own rules for patterns (``filter_repo_objects``); repositories hold other formats and folders."""
    commit, calls = "0123456789abcdef0123456789abcdef01234567", []
    repository, cache = tmp_path / "repository", tmp_path / "cache" / commit
    shutil.copytree(checkpoints["qwen2_moe"], repository)
    wanted = {path.name for path in repository.iterdir()}
    assert len(wanted) > 4  # several shards
    for name in (
        "consolidated.safetensors",
        "original/model.safetensors",
        "checkpoint-9/trainer_state.json",
        "onnx/model-00001-of-00009.safetensors",
        "pytorch_model.bin",
        "modeling_own.py",
    ):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("{}")

    def download(name: str, *, revision: str | None, **patterns: Any) -> str:
        calls.append((name, revision))
        files = [path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, **patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / file, cache / file)
        return str(cache)

    monkeypatch.setattr("ktft.model.snapshot_download", download)
    assert load_model("somebody/tiny", revision="branch").name_or_path == "somebody/tiny"
    assert {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()} == wanted
    assert calls == [("somebody/tiny", "branch"), ("somebody/tiny", commit)]
    load_model("somebody/tiny")
    assert calls[2:] == [("somebody/tiny", None)]  # the weights are there
    shutil.rmtree(cache)
    tiny_config("qwen2_moe", hidden_act="gelu").save_pretrained(repository)
    with pytest.raises(UnsupportedModelError, match="computes another function"):
        load_model("somebody/tiny")
    assert (cache / "config.json").exists()
    assert not list(cache.rglob("*.safetensors"))  # refused before the weights are fetched


def test_no_report_of_the_experts_as_unexpected(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    load_model(checkpoints["mixtral"])
    said = "".join(capfd.readouterr())
    assert "UNEXPECTED" not in said
    assert "experts" not in said
