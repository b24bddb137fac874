"""The command line: help, errors in one line, chat with scripted input, generate, doctor, version."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import ktft
from ktft import chat as chat_module
from ktft import cli
from tests.tiny_adapter import random_adapter
from tests.tiny_chat import CHATML, chat, tiny_chat_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
COMMANDS = ("train", "chat", "generate", "convert", "doctor", "version", "bench")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(base, tmp_path_factory.mktemp("adapter"), rank=4)


def expected_answer(base: Path, messages: list[dict[str, str]], count: int) -> str:
    """The base's greedy answer, token by token, without a cache."""
    model, tokenizer = ktft.load_model(base), tiny_tokenizer()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < count and (not answer or answer[-1] != tokenizer.eos_token_id):
            answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return tokenizer.decode(answer, skip_special_tokens=True)


def test_help_reads_well_and_loads_nothing_heavy():
    code = (
        "import sys; from ktft import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith("usage: ktft")
        assert all(len(line) <= 100 for line in ran.stdout.splitlines())
        if arguments == ["--help"]:
            assert all(f"    {name}" in ran.stdout for name in COMMANDS)


def test_every_option_is_explained():
    (commands,) = (action for action in cli._parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    assert set(commands.choices) == set(COMMANDS)
    for command in commands.choices.values():
        assert command.description
        assert all(action.help for action in command._actions)


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 2
    assert "commands" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: m\ndataset: d\noutput_dir: o\n", encoding="utf-8")
    recipe = str(tmp_path / "recipe.yaml")
    for arguments, complaint in (
        (["train", str(tmp_path / "none.yaml")], "cannot read recipe"),
        (["train", recipe, "learning_rat=1"], "did you mean 'learning_rate'"),
        (["train", recipe, "stage=dpo"], "stage: dpo is not offered"),
        (["generate", str(tmp_path / "none"), "--prompt", "x"], "none is not a directory"),
        (["generate", str(base), "--adapter", str(tmp_path), "--prompt", "x"], "adapter"),
        (["generate", str(base), "--prompt", "x", "--raw", "--system", "y"], "--system and --raw conflict"),
        (["generate", str(base), "--prompt", "", "--raw"], "the prompt is empty"),
    ):
        assert cli.main(arguments) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("ktft: error: ") and captured.err.count("\n") == 1
        assert complaint in captured.err
    assert cli.main(["train", recipe, "stage=dpo", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    for arguments, complaint in (
        (["generate", "m", "--prompt", "x", "--max-new-tokens", "0"], "0 must be 1 or more"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], "-1 must be 0 or more"),
        (["chat", "m", "--top-p", "1.5"], "1.5 must be above 0 and at most 1"),
        (["generate", "m"], "--prompt"),
        (["tain"], "invalid choice: 'tain'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2 and complaint in capsys.readouterr().err


def test_interrupt_has_its_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_version", interrupt)
    assert cli.main(["version"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_generate(base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    limit = ["--max-new-tokens", "8", "--device", "cpu"]
    expected = expected_answer(base, chat("Which quay?"), 8)
    assert cli.main(["generate", str(base), "--prompt", "Which quay?", *limit]) == 0
    assert capsys.readouterr().out == expected + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Which quay?"))
    assert cli.main(["generate", str(base), "--prompt", "-", *limit]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert cli.main(["generate", str(base), "--prompt", "Which quay?", "--adapter", str(adapter), *limit]) == 0
    assert capsys.readouterr().out != expected + "\n"
    with_system = expected_answer(base, chat("Which quay?", system="Shout."), 8)
    assert cli.main(["generate", str(base), "--prompt", "Which quay?", "--system", "Shout.", *limit]) == 0
    assert capsys.readouterr().out == with_system + "\n"
    assert cli.main(["generate", str(base), "--prompt", "Which quay?", "--raw", *limit]) == 0
    assert capsys.readouterr().out != expected + "\n"


def test_sampling_repeats_with_its_seed(base: Path, capsys: pytest.CaptureFixture[str]):
    def answer(*options: str) -> str:
        assert cli.main(["generate", str(base), "--prompt", "x", "--max-new-tokens", "12", *options]) == 0
        return capsys.readouterr().out

    hot = ["--temperature", "3"]
    assert answer(*hot, "--seed", "1") == answer(*hot, "--seed", "1") != answer(*hot, "--seed", "2")
    assert answer(*hot, "--top-p", "1e-6", "--seed", "3") == answer()


def test_chat_with_scripted_input(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = [
        "first",
        "",
        "/adapter",
        "/adapter off",
        "/reset",
        "first",
        "second",
        "/adapter on",
        "/reset",
        "first",
        "/frob",
        "/quit",
        "never",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.main(["chat", str(base), "--adapter", str(adapter), "--max-new-tokens", "6"]) == 0
    out = capsys.readouterr().out
    plain = expected_answer(base, chat("first"), 6)
    followed = expected_answer(base, chat("first", plain, "second"), 6)
    tuned, rest = out.split("(adapter on)\n", 1)[0].rstrip("\n"), out.split("(adapter off)\n", 1)[1]
    assert tuned and tuned != plain
    assert rest == (
        f"(new conversation)\n{plain}\n{followed}\n(adapter on)\n(new conversation)\n{tuned}\n"
        "(/frob: not a command; /adapter on|off, /reset, /quit)\n"
    )


def test_chat_ends_with_its_input_and_says_when_there_is_no_adapter(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/adapter off\n/adapter maybe\n"))
    assert cli.main(["chat", str(base)]) == 0
    out = capsys.readouterr().out
    assert "there is no adapter" in out and "/adapter maybe: not a command" in out


def test_an_interrupted_answer_is_forgotten(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    session = chat_module.Session.load(str(base), None, "cpu", chat_module.Sampling(max_new_tokens=5))
    asked: list[list[dict[str, str]]] = []

    def answer(messages):
        asked.append([dict(message) for message in messages])
        if len(asked) == 1:
            raise KeyboardInterrupt
        return "fine"

    monkeypatch.setattr(session, "answer", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    assert chat_module.loop(session, system="Be kind.") == 0
    assert asked[1:] == [chat("two", system="Be kind."), chat("two", "fine", "three", system="Be kind.")]
    assert "this exchange is forgotten" in capsys.readouterr().out


def test_a_refused_message_does_not_end_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    picky = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if 'tar' in m.content %}{{ raise_exception('no tar, please') }}{% endif %}",
        1,
    )
    base = tiny_chat_model(tmp_path / "picky", picky)
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\ntar\nsecond\n"))
    assert cli.main(["chat", str(base), "--max-new-tokens", "5"]) == 0
    plain = expected_answer(base, chat("first"), 5)
    followed = expected_answer(base, chat("first", plain, "second"), 5)
    assert capsys.readouterr().out == (
        f"{plain}\n"
        "(the chat template refuses this conversation: no tar, please; this message is forgotten)\n"
        f"{followed}\n"
    )
    assert cli.main(["generate", str(base), "--prompt", "tar"]) == 1
    assert "error: the chat template refuses this conversation: no tar, please" in capsys.readouterr().err


def test_answers_are_streamed(base: Path):
    session = chat_module.Session.load(str(base), None, "cpu", chat_module.Sampling(max_new_tokens=12))
    writes: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    session.output = Recorder()
    answer = session.answer(chat("the ship the quay"))
    assert "".join(writes) == answer + "\n" and len(writes) > 1


def test_a_tokenizer_without_template_is_refused(base: Path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; use ktft generate --raw"):
        chat_module.Session(ktft.load_model(base), tokenizer).answer(chat("x"))


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"ktft": "1.2.3"}[name])
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == "ktft 1.2.3\n"

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert cli.main(["version"]) == 0
    assert "not installed" in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"]["chosen"] in report["kernels"]["levels"]
    assert report["cpu"]["usable_cores"] >= 1 and report["memory_gb"]["total"] > 0
    assert report["versions"]["torch"] == torch.__version__
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        "CPU",
        "Kernels",
        "chosen",
        report["kernels"]["chosen"],
        "NUMA nodes",
        "CUDA",
        "transformers",
        "build",
    ):
        assert word in text
