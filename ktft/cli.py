"""The command line: parse, dispatch, report errors in one line. Every command's work is elsewhere, and imported when
it is needed.

Exit status: 0 done, 1 an error (one line on standard error; ``--debug`` shows where), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

DESCRIPTION = (
    "Fine-tune Mixture-of-Experts language models with LoRA, their experts in RAM and on the CPU; talk to the result."
)

TRAIN_EPILOG = """\
The recipe is a YAML file; its keys carry LLaMA-Factory's names. Overrides come after it:

  ktft train recipes/quickstart.yaml output_dir=saves/try max_steps=20 learning_rate=5e-4

Ctrl-C finishes the step and saves a checkpoint. To go on, give the same command once more with
overwrite_output_dir=false resume_from_checkpoint=true added.
"""

BENCH_EPILOG = """\
Each first measures this machine and prints what a reader must know of it; figures are medians
(decode: means) over repetitions in which the sides take turns. What every field means:
python -m pydoc ktft.bench.experts, and likewise ktft.bench.overheads, .train and .decode.
Let nothing else run meanwhile, and set the threads to the number of physical cores.
"""

CONVERT_EPILOG = """\
Only routed experts change; everything else is copied. DST is there when all of it is; until then
its files lie in DST.partial, and the same command goes on after an interruption. Formats:

  fp8-block             one scale for 128x128 weights, as DeepSeek publishes
  int8                  8 bits packed, one scale for a row, as compressed-tensors writes
  int4-g32, int4-g128   one scale for 32 or 128 weights of a row, as compressed-tensors writes
  mxfp4                 one exponent for 32 weights of a row, as compressed-tensors writes

  ktft convert Qwen3-30B-A3B Qwen3-30B-A3B-int4 --format int4-g32
  ktft convert --verify Qwen3-30B-A3B Qwen3-30B-A3B-int4
"""

CHAT_EPILOG = """\
While chatting:
  /adapter on|off   answer with the adapter, or as the base model does
  /reset            forget the conversation
  /quit             leave (so do Ctrl-D and Ctrl-C; Ctrl-C during an answer only stops the answer)
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; default those of the process.

    Returns:
        The exit status, see the module.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    # Torch's OpenMP threads spin while they wait, by default, and so take the cores from the experts' threads and every
    # other process. Measured on the quickstart, two cores, three other busy processes: from 20-85 tokens/s to 75-187;
    # on a quiet machine 1 % less. Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        else:
            message = " ".join(str(error).split()) or type(error).__name__
            known = isinstance(error, ValueError | RuntimeError | OSError | NotImplementedError)
            print(f"ktft: error: {message if known else f'{type(error).__name__}: {message}'}", file=sys.stderr)
        return 1


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="where all but the experts runs: cpu, cuda, … (default: CUDA if there is a GPU)",
    )


def _add_check_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check-weights",
        action="store_true",
        help="first read all of the experts, and refuse NaN codes and scales that are not finite",
    )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id of the base model")
    model.add_argument("--adapter", metavar="DIR", help="a LoRA adapter to put on it")
    _add_device(model)
    _add_check_weights(model)
    model.add_argument(
        "--max-new-tokens", metavar="N", type=_positive, default=512, help="longest answer (default %(default)s)"
    )
    model.add_argument(
        "--temperature",
        metavar="T",
        type=_not_negative,
        default=0.0,
        help="0 takes the likeliest token (default); above 0 samples",
    )
    model.add_argument(
        "--top-p",
        metavar="P",
        type=_share,
        default=1.0,
        help="sample from the likeliest tokens that make up P (default %(default)s)",
    )
    model.add_argument(
        "--seed", metavar="N", type=int, default=None, help="of the sampling; default a new one each time"
    )
    model.add_argument("--system", metavar="TEXT", help="system prompt (default: the chat template's own, if any)")

    parser = argparse.ArgumentParser(prog="ktft", description=DESCRIPTION)
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        *parents: argparse.ArgumentParser,
        epilog: str = "",
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=epilog,
            parents=[*parents, common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    train = add("train", _train, "train an adapter as a recipe says", epilog=TRAIN_EPILOG)
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, e.g. recipes/quickstart.yaml")
    train.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="recipe keys to set or replace")
    _add_check_weights(train)

    add("chat", _chat, "chat with a model in the terminal", model, epilog=CHAT_EPILOG)
    generate = add("generate", _generate, "answer one prompt and print the answer", model)
    generate.add_argument(
        "--prompt", metavar="TEXT", required=True, help="what the user says; - reads it from standard input"
    )
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text, without the chat template"
    )
    convert = add("convert", _convert, "store the routed experts of a checkpoint in fewer bits", epilog=CONVERT_EPILOG)
    convert.add_argument("source", metavar="SRC", help="directory of the checkpoint")
    convert.add_argument("target", metavar="DST", help="the new directory; with --verify the one to check")
    convert.add_argument("--format", metavar="FORMAT", help="what the experts become, see below")
    convert.add_argument(
        "--layers",
        metavar="N-N,N,…",
        type=_numbers,
        help="layers whose experts are converted, e.g. 0-3,7 (default: all)",
    )
    convert.add_argument(
        "--verify",
        action="store_true",
        help="write nothing; compare DST with SRC, and fail if a weight is off by more than half a step",
    )
    doctor = add("doctor", _doctor, "say what this machine offers and what ktft makes of it")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    add("version", _version, "print the version")
    _add_bench(add("bench", _bench, "measure the experts, training steps or decoding", epilog=BENCH_EPILOG), common)
    return parser


def _add_bench(bench: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """The three benchmarks and their options."""
    kinds = bench.add_subparsers(
        dest="bench", metavar="WHAT", title="benchmarks", required=True, help="experts, train or decode"
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--vs", choices=["hf"], help="measure stock transformers (train, decode: with PEFT) as well")
    shared.add_argument("--isa", metavar="LEVEL", default="auto", help="kernel level (default: the best there is)")
    shared.add_argument("--threads", metavar="N", type=_positive, help="of the kernels and of torch (default: torch's)")
    shared.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")

    layer = argparse.ArgumentParser(add_help=False)
    for option, metavar, default, text in (
        ("--hidden", "H", 2048, "hidden size"),
        ("--intermediate", "I", 768, "intermediate size of an expert"),
        ("--experts", "E", 128, "experts of a layer"),
        ("--topk", "K", 8, "experts per token"),
    ):
        layer.add_argument(
            option, metavar=metavar, type=_positive, default=default, help=f"{text} (default %(default)s)"
        )
    layer.add_argument(
        "--directory",
        metavar="DIR",
        help="where the weights are put for the time being (default: among temporary files)",
    )
    layer.add_argument(
        "--lora-rank", metavar="R", type=_not_negative_int, default=8, help="rank of the LoRA (default %(default)s)"
    )

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return kinds.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", parents=[*parents, shared, common]
        )

    experts = add("experts", "one experts layer on mapped weights, forward and backward", layer)
    experts.add_argument(
        "--tokens",
        metavar="T,T,…",
        type=_counts,
        default=(1, 4, 16, 128, 512, 2048),
        help="token counts (default 1,4,16,128,512,2048)",
    )
    experts.add_argument(
        "--format",
        metavar="FORMAT,…",
        type=lambda text: tuple(part.strip() for part in text.split(",")),
        default=("bf16",),
        help="of the weights on disk; several are measured in turns (default bf16)",
    )
    experts.add_argument(
        "--routing", choices=["uniform", "zipf"], default="uniform", help="how tokens choose (default %(default)s)"
    )
    experts.add_argument(
        "--repeat", metavar="N", type=_positive, help="timed rounds (default 21 up to 16 tokens, 7 above)"
    )
    experts.add_argument(
        "--overheads",
        action="store_true",
        help="also what a call costs besides its kernels, idle threads, and turns with torch's attention",
    )

    train = add("train", "whole training steps on random weights", layer)
    train.add_argument("--config", metavar="FILE", help="a model's config.json, instead of sizes")
    train.add_argument("--layers", metavar="N", type=_positive, help="layers (default: the config's, or 4)")
    train.add_argument("--vocab", metavar="N", type=_positive, default=32000, help="vocabulary (default %(default)s)")
    train.add_argument(
        "--tokens", metavar="T", type=_positive, default=1024, help="tokens of a step (default %(default)s)"
    )
    train.add_argument(
        "--lora",
        choices=["experts", "attention"],
        default="experts",
        help="LoRA on attention and experts, or on attention only (default %(default)s)",
    )
    train.add_argument(
        "--steps", metavar="N", type=_positive, default=3, help="timed steps of a process (default %(default)s)"
    )
    train.add_argument(
        "--rounds", metavar="N", type=_positive, default=3, help="processes of a side, in turns (default %(default)s)"
    )

    decode = add("decode", "reading a prompt and writing an answer, tokens a second")
    decode.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id of the base model")
    decode.add_argument("--adapter", metavar="DIR", help="measure with this LoRA adapter as well")
    _add_device(decode)
    decode.add_argument(
        "--prompt", metavar="N", type=_positive, default=512, help="tokens read at once (default %(default)s)"
    )
    decode.add_argument("--new", metavar="N", type=_positive, default=128, help="tokens written (default %(default)s)")
    decode.add_argument(
        "--repeat", metavar="N", type=_positive, default=5, help="timed repetitions (default %(default)s)"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def _not_negative_int(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return number


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers of 1 or more, separated by commas")
    return tuple(int(part) for part in parts)


def _numbers(text: str) -> list[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers and ranges of them, such as 0-3,7")
        numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return number


def _train(arguments: argparse.Namespace) -> int:
    from ktft.config import load_recipe

    more = ["check_weights=true"] if arguments.check_weights else []
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *more])
    from ktft.train import run

    return 130 if run(recipe).interrupted else 0


def _chat(arguments: argparse.Namespace) -> int:
    from ktft import chat

    session = chat.Session.load(
        arguments.model, arguments.adapter, arguments.device, chat.sampling(arguments), arguments.check_weights
    )
    return chat.loop(session, system=arguments.system)


def _generate(arguments: argparse.Namespace) -> int:
    from ktft import chat

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.raw and arguments.system is not None:
        raise ValueError("--system and --raw conflict: a plain text has no system prompt")
    session = chat.Session.load(
        arguments.model, arguments.adapter, arguments.device, chat.sampling(arguments), arguments.check_weights
    )
    if arguments.raw:
        session.continue_text(prompt)
    else:
        session.answer([*chat.opening(arguments.system), {"role": "user", "content": prompt}])
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.verify and (arguments.format is not None or arguments.layers is not None):
        raise ValueError("--verify takes two directories and neither --format nor --layers: B itself says what it is")
    if not arguments.verify and arguments.format is None:
        raise ValueError("--format is needed: fp8-block, int8, int4-g32, int4-g128 or mxfp4")
    from ktft import convert

    if arguments.verify:
        found = convert.verify(arguments.source, arguments.target)
        print(found.text())
        found.raise_if_wrong()
    else:
        summary = convert.convert(arguments.source, arguments.target, arguments.format, arguments.layers)
        print(summary.text(arguments.format))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from ktft import doctor

    print(doctor.as_json() if arguments.json else doctor.as_text())
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from ktft.bench.report import Report

    given, report = vars(arguments), Report(arguments.json)

    def options(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    shared = options("vs", "isa", "threads")
    if arguments.bench == "experts":
        from ktft.bench import experts
        from ktft.bench.layer import Shape

        first, *beside = arguments.format
        shape = Shape(format=first, **options("hidden", "intermediate", "experts", "topk", "lora_rank"))
        work = options("tokens", "routing", "repeat", "directory", "overheads")
        experts.run(experts.Settings(shape, beside=tuple(beside), **work, **shared), report)
    elif arguments.bench == "train":
        from ktft.bench import train

        sizes = options("config", "layers", "hidden", "intermediate", "experts", "topk", "vocab", "directory")
        work = options("tokens", "lora", "lora_rank", "steps", "rounds")
        train.run(train.Settings(**sizes, **work, **shared), report)
    else:
        from ktft.bench import decode

        work = options("model", "adapter", "prompt", "new", "repeat", "device")
        decode.run(decode.Settings(**work, **shared), report)
    return 0


def _version(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    try:
        print(f"ktft {metadata.version('ktft')}")
    except metadata.PackageNotFoundError:
        print("ktft, from a source tree that is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
