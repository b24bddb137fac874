"""The README's figures: ktft beside stock transformers (+ PEFT) on this machine, in one run.

    python scripts/measure.py layer    one experts layer, forward and forward+backward, the two sides in turn
    python scripts/measure.py train    training steps of a four-layer model, each side in a process of its own, in turn

Shape: Qwen3-30B-A3B's layer (hidden 2048, intermediate 768, 128 experts, top 8), random bf16 weights in a real file.
Stock transformers gets the better of its eager and grouped_mm implementations. Prints one JSON object a line;
medians, and ratios taken pair by pair. Needs about 14 GB of RAM and 6 GB of disk for `train`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As `ktft` on the command line does, for both sides: torch's OpenMP threads otherwise spin on the cores that the
# experts' threads want next. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, RANK = 2048, 768, 128, 8, 8
ROTATION = 16  # different routings in turn, so that a cache as large as one token's experts does not flatter anybody


def config(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        norm_topk_prob=True,
    )


def write_checkpoint(directory: Path, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(layers), dtype=torch.bfloat16).save_pretrained(directory)


def interleaved(sides: dict[str, Callable[[], None]], repeat: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(repeat + 1):
        for name, function in sides.items():
            start = time.perf_counter()
            function()
            if run:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return times


def best_of_stock(times: dict[str, list[float]]) -> str:
    return min((n for n in times if n != "ktft"), key=lambda n: statistics.median(times[n]))


def report(kind: str, tokens: int, times: dict[str, list[float]], flop: float) -> None:
    stock = best_of_stock(times)
    ratios = [s / k for s, k in zip(times[stock], times["ktft"], strict=True)]
    print(
        json.dumps(
            {
                "measure": kind,
                "tokens": tokens,
                "ktft_ms": round(statistics.median(times["ktft"]) * 1e3, 2),
                "ktft_gflops": round(flop / statistics.median(times["ktft"]) / 1e9, 1),
                "transformers_ms": round(statistics.median(times[stock]) * 1e3, 2),
                "transformers_impl": stock,
                "ratio": round(statistics.median(ratios), 2),
                "ratio_min_max": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        ),
        flush=True,
    )


def layer(tokens: list[int]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import ktft
    from ktft import ops
    from ktft.weights import lora_shapes

    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), 1)
        mapped = ktft.load_model(directory).model.layers[0].mlp.experts
        stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).model.layers[0].mlp.experts
        stock.requires_grad_(False)
        lora = [(torch.randn(s) * 0.02).requires_grad_() for s in lora_shapes(EXPERTS, HIDDEN, INTERMEDIATE, RANK)]
        for count in tokens:
            x = torch.randn(count, HIDDEN).bfloat16()
            routings = []
            for _ in range(ROTATION):
                weights, index = torch.topk(torch.randn(count, EXPERTS).softmax(-1), TOP_K)
                routings.append((index, (weights / weights.sum(-1, keepdim=True)).bfloat16()))
            turn = {"n": 0}

            def routing(turn: dict[str, int] = turn, routings: list[Any] = routings) -> Any:
                turn["n"] += 1
                return routings[turn["n"] % ROTATION]

            def run_stock(implementation: str, backward: bool, x: torch.Tensor = x, routing: Any = routing) -> None:
                stock.config._experts_implementation = implementation
                index, weights = routing()
                if not backward:
                    with torch.no_grad():
                        stock(x, index, weights)
                    return
                leaf, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
                out = stock(leaf, index, weights)
                out.backward(torch.ones_like(out))

            def run_ktft(backward: bool, x: torch.Tensor = x, routing: Any = routing) -> None:
                index, weights = routing()
                if not backward:
                    with torch.no_grad():
                        mapped(x, index, weights)
                    return
                leaf, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
                out = ops.moe_experts(leaf, index, weights, mapped.weights, lora=lora, scaling=[2.0])
                out.backward(torch.ones_like(out))
                for tensor in lora:
                    tensor.grad = None

            flop = count * TOP_K * 6 * HIDDEN * INTERMEDIATE
            repeat = 40 if count <= 16 else 5
            for backward in (False, True):
                sides: dict[str, Callable[[], None]] = {
                    name: (lambda name=name, backward=backward: run_stock(name, backward))
                    for name in ("eager", "grouped_mm")
                }
                sides["ktft"] = lambda backward=backward: run_ktft(backward)
                kind = f"layer forward+backward, LoRA r={RANK} (ktft), none (stock)" if backward else "layer forward"
                report(kind, count, interleaved(sides, 5 if backward else repeat), flop * (2 if backward else 1))


def train_side(side: str, directory: str, layers: int, tokens: int, lora: str, implementation: str) -> None:
    """One side's steps in this process; prints its JSON."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if side == "ktft":
        import ktft

        model = ktft.load_model(directory, dtype=torch.bfloat16)
        model = ktft.get_peft_model(
            model,
            LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules=[*attention, *(["experts"] if lora == "experts" else [])]
            ),
        )
    else:
        # Made in place: loading the file as well needs half as much memory again, and this machine then runs short
        # of it.
        model = AutoModelForCausalLM.from_config(
            config(layers), dtype=torch.bfloat16, experts_implementation=implementation
        )
        experts = (
            {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if lora == "experts" else {}
        )
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=attention, **experts))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, 32000, (1, tokens))
    steps = []
    for _ in range(4):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
    step = statistics.median(steps[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"step_s": round(step, 2), "tok_s": round(tokens / step, 1), "peak_rss_gb": round(peak, 2)}))


def train(layers: int, tokens: int, lora: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, __file__, "write", "--directory", directory, "--layers", str(layers)], check=True
        )
        results: dict[str, list[dict[str, float]]] = {"ktft": [], "stock": []}
        for _ in range(rounds):
            for side in results:
                command = [
                    sys.executable,
                    __file__,
                    "train-side",
                    "--side",
                    side,
                    "--directory",
                    directory,
                    "--layers",
                    str(layers),
                    "--train-tokens",
                    str(tokens),
                    "--lora",
                    lora,
                ]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                results[side].append(json.loads(output.strip().splitlines()[-1]))
                print(json.dumps({"measure": "train", "side": side, "lora": lora, **results[side][-1]}), flush=True)
        speed = [k["tok_s"] / s["tok_s"] for k, s in zip(results["ktft"], results["stock"], strict=True)]
        memory = [k["peak_rss_gb"] / s["peak_rss_gb"] for k, s in zip(results["ktft"], results["stock"], strict=True)]
        summary = {"speed_ratio": round(statistics.median(speed), 2), "rss_ratio": round(statistics.median(memory), 2)}
        print(json.dumps({"measure": f"train, {layers} layers, {tokens} tokens, {lora} LoRA", **summary}))


def machine() -> None:
    import torch

    from ktft import ops

    name = next(
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    big = torch.ones(2**27)
    rates: dict[str, float] = {}
    for key, work, function in (
        ("peak_bf16_gflops", 2 * 2048**3, lambda: torch.nn.functional.linear(a, b)),
        ("read_gbs", big.numel() * 4, big.sum),
    ):
        times = interleaved({"x": function}, 10)["x"]
        rates[key] = round(work / min(times) / 1e9, 1)
    report = ops.cpu_report()
    facts = {
        "cpu": name,
        "cores": os.cpu_count(),
        "isa": report["chosen"],
        "threads": report["threads"],
        "torch": torch.__version__,
    }
    print(json.dumps({"measure": "machine", "date": time.strftime("%Y-%m-%d"), **facts, **rates}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layer", "train", "train-side", "write"])
    parser.add_argument("--tokens", default="1,2048", help="token counts of `layer`")
    parser.add_argument("--train-tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lora", choices=["experts", "attention"], default="experts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--implementation", default="grouped_mm", help="transformers' experts implementation in `train`"
    )
    parser.add_argument("--side", choices=["ktft", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "write":
        write_checkpoint(Path(arguments.directory), arguments.layers)
    elif arguments.what == "train-side":
        train_side(
            arguments.side,
            arguments.directory,
            arguments.layers,
            arguments.train_tokens,
            arguments.lora,
            arguments.implementation,
        )
    elif arguments.what == "layer":
        machine()
        layer([int(t) for t in arguments.tokens.split(",")])
    else:
        machine()
        train(arguments.layers, arguments.train_tokens, arguments.lora, arguments.rounds)


if __name__ == "__main__":
    main()
