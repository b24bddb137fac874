"""Adapters cross between ktft and stock transformers + stock PEFT, which runs in a process that never imports ktft.

Run as a script (``python -m tests.test_adapters_stock JOBS.json``) this file *is* that process, so nothing of ktft is
imported at module level.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_input

ATTENTION = {
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
    "qwen2_moe": ["q_proj", "v_proj"],
    "olmoe": ["q_proj", "k_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
    "gpt_oss": ["q_proj", "v_proj", "o_proj"],
}
BEYOND = {
    "granitemoe": GraniteMoeConfig(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.15,
    )
}
"""Families beyond tests.tiny_models."""
FUSED_FILES = ("granitemoe", "gpt_oss")
"""Families that PEFT converts no per-expert names of."""
DENSE = ["gate_proj", "up_proj", "down_proj"]
"""Shared experts (Qwen2-MoE, DeepSeek-V3) and dense layers (DeepSeek-V3)."""

# name -> (family, fields of the training config)
CASES: dict[str, tuple[str, dict[str, Any]]] = {}
for _family in FAMILIES:
    _dense = DENSE if _family in ("qwen2_moe", "deepseek_v3") else []
    _all = [*ATTENTION[_family], *_dense, "experts"]
    CASES[f"{_family}-plain"] = (_family, {"r": 4, "lora_alpha": 6, "target_modules": _all})
    CASES[f"{_family}-rslora"] = (
        _family,
        {
            "r": 5,
            "lora_alpha": 3,
            "target_modules": _all,
            "use_rslora": True,
            "lora_dropout": 0.2,
            "rank_pattern": {"experts": 3},
            "alpha_pattern": {"experts": 2},
        },
    )
CASES["granitemoe-plain"] = ("granitemoe", {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "experts"]})
CASES["granitemoe-rslora"] = (
    "granitemoe",
    {
        "r": 5,
        "lora_alpha": 3,
        "target_modules": ["o_proj", "experts"],
        "use_rslora": True,
        "rank_pattern": {"experts": 3, r"layers\.1\..*experts": 2},
        "alpha_pattern": {"experts": 2},
    },
)
CASES["experts-only"] = ("olmoe", {"r": 2, "lora_alpha": 2, "target_modules": ["experts"]})
CASES["attention-only"] = ("qwen2_moe", {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]})
CASES["one-layer"] = (
    "mixtral",
    {"r": 2, "lora_alpha": 4, "target_modules": ["experts", "q_proj"], "layers_to_transform": [1]},
)
CASES["all-linear"] = ("qwen2_moe", {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"})
CASES["layer-ranks"] = (
    "deepseek_v3",
    {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["experts", "o_proj", *DENSE],
        "rank_pattern": {r"model\.layers\.1\.mlp\.experts": 2, "o_proj": 6, "shared_experts.gate_proj": 1},
        "alpha_pattern": {r"layers\.2\.self_attn\.o_proj": 9},
    },
)

# name -> (family, fields of the stock config)
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fused-qwen3_moe": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    ),
    "fused-mixtral": (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "use_rslora": True,
        },
    ),
    "fused-ranks": (
        "olmoe",
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {".*gate_up_proj": 2},
            "alpha_pattern": {".*down_proj": 7},
        },
    ),
    "fused-gpt_oss": (
        "gpt_oss",
        {
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "fused-one-layer": (
        "gpt_oss",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
            "use_rslora": True,
        },
    ),
    "fused-gate-up": ("deepseek_v3", {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "fused-down": ("qwen2_moe", {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    "converted": ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "shared": (
        "deepseek_v3",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "shared_experts.up_proj.weight"],
        },
    ),
}


# name -> (dtype of the file, changes to the config): a per-expert file whose down projection has an alpha of its own
HALF: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "half-bf16-v4": (
        torch.bfloat16,
        {
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
            "target_parameters": None,
            "rank_pattern": {},
            "alpha_pattern": {"down_proj": 7},
        },
    ),
    "half-fp16": (torch.float16, {"alpha_pattern": {r".*\.gate_up_proj": 12, r".*\.down_proj": 7}}),
    "half-fused": (torch.bfloat16, {"alpha_pattern": {r".*\.gate_up_proj": 12, r".*\.down_proj": 7}}),
}


# --- the stock process ------------------------------------------------------------------------------------------------


def _stock_apply(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stock PEFT applies an adapter directory to the stock model: its logits, and that nothing in the file was left."""
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        warnings.filterwarnings("error", message=".*no (module|parameter) was matched")
        model = PeftModel.from_pretrained(model, job["adapter"])
    file = load_peft_weights(job["adapter"], device="cpu")
    result = set_peft_model_state_dict(model, file)
    left = [*result.unexpected_keys, *(key for key in result.missing_keys if "lora_" in key)]
    assert not left, f"{job['name']}: keys left over: {left}"
    # The stock tensors are the file's numbers and zeros beside them: as many numbers are not zero as the file holds.
    loaded = sum(int(p.count_nonzero()) for n, p in model.named_parameters() if "lora_" in n)
    held = sum(int(tensor.count_nonzero()) for tensor in file.values())
    assert loaded == held, f"{job['name']}: {held} numbers in the file, {loaded} in the model"
    with torch.no_grad():
        logits = model(tiny_input()).logits
        with model.disable_adapter():
            base = model(tiny_input()).logits
    return {"logits": logits, "base": base}


def _stock_train(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stock PEFT trains a fused adapter for two steps and saves it."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **job["config"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(tiny_input(), labels=tiny_input()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.save_pretrained(job["adapter"])
    with torch.no_grad():
        return {"logits": model(tiny_input()).logits}


def _stock_apply_two(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stock PEFT applies two adapters of one directory, alone and together."""
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    model = PeftModel.from_pretrained(model, job["adapter"])
    assert model.load_adapter(job["adapter"] + "/second", "second").missing_keys == []
    out = {}
    for name, active in TOGETHER.items():
        model.base_model.set_adapter(active)
        with torch.no_grad():
            out[name] = model(tiny_input()).logits
    return out


TOGETHER = {"first": ["default"], "second": ["second"], "both": ["default", "second"]}


def _stock_process(jobs: str) -> None:
    torch.set_num_threads(1)
    actions: dict[str, Callable[[dict[str, Any]], dict[str, torch.Tensor]]] = {
        "apply": _stock_apply,
        "apply_two": _stock_apply_two,
        "train": _stock_train,
    }
    for job in json.loads(Path(jobs).read_text()):
        save_file(actions[job["action"]](job), job["result"])
    assert not any(name.partition(".")[0] == "ktft" for name in sys.modules)


# --- the tests --------------------------------------------------------------------------------------------------------


def _randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_input()).logits


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """DESIGN: fp32 mode is held to 1e-5 of Hugging Face's logits."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def _half(name: str, source: Path, target: Path) -> None:
    """An adapter of ktft's as another tool may have written it: in half precision, without ktft's metadata."""
    dtype, changes = HALF[name]
    tensors = load_file(source / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    target.mkdir()
    save_file({key: value.to(dtype) for key, value in tensors.items()}, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Every case through one stock process: name -> what both sides computed."""
    import ktft.adapters
    from ktft.model import load_model

    root = tmp_path_factory.mktemp("stock")
    bases = {family: str(tiny_checkpoint(family, root / family)) for family in FAMILIES}
    for family, beyond in BEYOND.items():
        torch.manual_seed(0)
        bases[family] = str(root / family)
        AutoModelForCausalLM.from_config(beyond, dtype=torch.bfloat16).save_pretrained(bases[family])
    jobs, ours = [], {}
    for name, (family, fields) in CASES.items():
        model = load_model(bases[family], dtype=torch.float32)
        model = ktft.adapters.get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
        _randomise(model)
        model.eval()
        model.save_pretrained(root / name)
        with model.disable_adapter():
            base = _logits(model)
        ours[name] = {"logits": _logits(model), "base": base, "directory": root / name, "family": bases[family]}
        jobs.append({"action": "apply", "name": name, "base": bases[family], "adapter": str(root / name)})
    for name, (family, config) in FUSED.items():
        ours[name] = {"directory": root / name, "family": bases[family]}
        jobs.append(
            {"action": "train", "name": name, "base": bases[family], "adapter": str(root / name), "config": config}
        )
    model = load_model(bases["mixtral"], dtype=torch.float32)
    fields = {"target_modules": ["q_proj", "v_proj", "experts"], "task_type": "CAUSAL_LM"}
    model = ktft.adapters.get_peft_model(model, LoraConfig(r=3, lora_alpha=4, **fields))
    # stock PEFT wants the same parameters (the experts) under both; the modules beside them differ
    fields["target_modules"] = ["o_proj", "v_proj", "experts"]
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=5, use_rslora=True, **fields))
    _randomise(model)
    model.eval()
    model.save_pretrained(root / "two")
    ours["two"] = {}
    for name, active in TOGETHER.items():
        model.base_model.set_adapter(active)
        ours["two"][name] = _logits(model)
    jobs.append({"action": "apply_two", "name": "two", "base": bases["mixtral"], "adapter": str(root / "two")})
    for name in HALF:
        family = "granitemoe" if name == "half-fused" else "qwen3_moe"
        model = load_model(bases[family], dtype=torch.float32)
        model = ktft.adapters.get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["experts"]))
        _randomise(model)
        model.save_pretrained(root / f"{name}-source")
        _half(name, root / f"{name}-source", root / name)
        ours[name] = {"directory": root / name, "family": bases[family]}
        jobs.append({"action": "apply", "name": name, "base": bases[family], "adapter": str(root / name)})
    for job in jobs:
        job["result"] = str(root / f"{job['name']}.result")
    (root / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run([sys.executable, "-m", __name__, str(root / "jobs.json")], cwd=Path(__file__).parents[1], check=True)
    for job in jobs:
        ours[job["name"]]["stock"] = load_file(job["result"])
    yield ours


@pytest.mark.parametrize("name", CASES)
def test_stock_peft_applies_what_ktft_saved(crossed: dict[str, Any], name: str) -> None:
    case = crossed[name]
    _assert_close(case["base"], case["stock"]["base"])
    _assert_close(case["logits"], case["stock"]["logits"])
    assert (case["logits"] - case["base"]).abs().max() > 0.01 * case["base"].abs().max()


@pytest.mark.parametrize("name", CASES)
def test_ktft_loads_what_it_saved(crossed: dict[str, Any], name: str) -> None:
    from ktft.adapters import load_adapter
    from ktft.model import load_model

    case = crossed[name]
    model = load_adapter(load_model(case["family"], dtype=torch.float32), case["directory"])
    assert torch.equal(_logits(model), case["logits"])
    config = model.peft_config["default"]
    fields = CASES[name][1]
    assert config.lora_dropout == fields.get("lora_dropout", 0.0)
    assert config.base_model_name_or_path == case["family"]
    if fields["target_modules"] != "all-linear":
        assert config.target_modules == set(fields["target_modules"])
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in CASES if "experts" in CASES[name][1]["target_modules"]])
def test_files_are_fused_only_where_peft_converts_nothing(crossed: dict[str, Any], name: str) -> None:
    keys = list(load_file(crossed[name]["directory"] / "adapter_model.safetensors"))
    assert any("experts.base_layer.lora_A" in key for key in keys) == (CASES[name][0] in FUSED_FILES)
    assert any("experts.0." in key for key in keys) == (CASES[name][0] not in FUSED_FILES)


@pytest.mark.parametrize("active", TOGETHER)
def test_two_adapters_alone_and_together(crossed: dict[str, Any], active: str) -> None:
    _assert_close(crossed["two"][active], crossed["two"]["stock"][active])
    assert all((crossed["two"][a] - crossed["two"][active]).abs().max() > 0.1 for a in TOGETHER if a != active)


@pytest.mark.parametrize("name", FUSED)
def test_ktft_applies_what_stock_peft_trained(crossed: dict[str, Any], name: str, tmp_path: Path) -> None:
    from ktft.adapters import load_adapter
    from ktft.model import load_model

    case = crossed[name]
    model = load_adapter(load_model(case["family"], dtype=torch.float32), case["directory"], is_trainable=True)
    model.eval()
    logits = _logits(model)
    _assert_close(logits, case["stock"]["logits"])
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)
    # and on from there: what ktft then saves is the same adapter
    model.save_pretrained(tmp_path)
    again = load_adapter(load_model(case["family"], dtype=torch.float32), tmp_path)
    _assert_close(_logits(again), logits)


@pytest.mark.parametrize("name", HALF)
def test_half_precision_and_an_alpha_for_down(crossed: dict[str, Any], name: str) -> None:
    from ktft.adapters import load_adapter
    from ktft.model import load_model

    case = crossed[name]
    model = load_adapter(load_model(case["family"], dtype=torch.float32), case["directory"])
    _assert_close(_logits(model), case["stock"]["logits"])


if __name__ == "__main__":
    _stock_process(sys.argv[1])
