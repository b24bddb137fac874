"""Count the held-out answers a model gets exactly right, with and without its adapter.

    python examples/score.py MODEL examples/data/harbour_heldout.jsonl [--adapter DIR] [--samples 40] [--show]

The same measure as the recipe key ``exact_match_samples``: greedy answers, compared character for character. Both are
asked with the tokenizer and chat template saved beside the adapter, if there are any.
"""

from __future__ import annotations

import argparse

import ktft
from ktft.chat import load_tokenizer
from ktft.data import read_chats
from ktft.train import exact_match


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count exactly right answers on held-out chats.")
    parser.add_argument("model", help="directory or hub id of the base model")
    parser.add_argument("data", help="a .json or .jsonl file of chats")
    parser.add_argument("--adapter", help="a LoRA adapter; the base is scored as well")
    parser.add_argument("--samples", type=int, default=40, help="how many chats, from the beginning (default 40)")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="longest answer (default 40)")
    parser.add_argument("--show", action="store_true", help="print every answer")
    arguments = parser.parse_args(argv)

    chats = read_chats([arguments.data], ".", arguments.samples)
    tokenizer = load_tokenizer(arguments.model, arguments.adapter)
    model = ktft.load_model(arguments.model)
    for name in ["base", "adapter"] if arguments.adapter else ["base"]:
        if name == "adapter":
            model = ktft.load_adapter(model, arguments.adapter)
        score = exact_match(model, tokenizer, chats, max_new_tokens=arguments.max_new_tokens)
        print(f"{name}: {score}")
        if arguments.show:
            for chat, answer in zip(chats, score.answers, strict=True):
                print(f"  {chat.messages[-2]['content']}\n    {answer}")


if __name__ == "__main__":
    main()
