"""The command line: its options, its help, its first words."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ssdtrain
from ssdtrain.tools.cli import COMMANDS, build_parser, main

ROOT = Path(__file__).resolve().parents[4]

SUBJECT = """
--device --links --max-overhead --micro-batch --min-bytes --model --no-gpu --sequence
--target
"""

# Adding an option is a decision: it is written down here.
OPTIONS = """
train: --cfg --config --json --multirun --quiet -m -q overrides
graph: --damping --device --json --max-iterations --nodes --out --personalize
  --picture --predecessors --source --tolerance --undirected --weighted file question
env: --preload
paths: which
fits: --fsdp --gpu --gpus --json --loss --micro-batch --optimizer --tokens --train
  model
search: --batch --fabric --framework --gpu --gpus --host --json --loss --save --ssd
  --ssd-years --tokens model
report: --out runs
foresight: --chunks --device --fabric --family --graph --json --micro-batch
  --micro-batches --model --on --optimizer --ranks --save --seconds --seed --sequence
  --slower --spread --step --tables --times action
plan: SUBJECT --batch --device-memory --json --memory-budget --optimizer --profile
  --save --save-profile --stages --sweep
rok: SUBJECT --batches --json --plot
doctor: --directory --json --max-seconds --max-write-bytes --no-measure --plot --save
project: --assume --batch --cases --chunks --cost --end-to-end --gpu --gpu-price
  --gpus --heads --hidden --json --layers --list --micro-batch --model
  --pipeline --plot --sequence --sequence-parallel --ssd --ssds --tensor --tflops
  --years --zero3
"""


def written_down() -> dict[str, set[str]]:
    """The words and options of each command."""
    text = OPTIONS.replace("SUBJECT", SUBJECT.replace("\n", " ")).replace("\n  ", " ")
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name: set(words.split()) for name, _, words in lines}


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            yield from action.option_strings or [action.dest]


def test_options_are_frozen() -> None:
    parser = build_parser()
    assert set(options(parser)) == {"--local_rank", "--version"}
    found = commands(parser)
    written = written_down()
    assert set(found) == set(COMMANDS) == set(written)
    for name, expected in written.items():
        assert set(options(found[name])) == expected


def python(code: str) -> "subprocess.CompletedProcess[str]":
    """What a fresh interpreter says to this."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )


def test_help_and_version_need_no_torch() -> None:
    """Torch takes seconds to load; the first words come before it."""
    code = (
        "import sys\n"
        "from ssdtrain.tools.cli import main, parse\n"
        "assert main(['--version']) == 0\n"
        "assert main([]) == 2\n"
        "assert main(['paths', 'launch']) == 0\n"
        "assert parse(['train', '-q', 'a=1', '--json', 'b=2']).overrides == "
        "['a=1', 'b=2']\n"
        "assert 'torch' not in sys.modules\n"
        "main(['train', '--help'])\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert f"ssdtrain {ssdtrain.__version__}" in done.stdout
    assert "--config" in done.stdout
    assert COMMANDS["doctor"].help.split()[0] in done.stderr


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "ssdtrain", "paths"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.usefixtures("capfd")  # a file is no reader that can be gone
def test_a_broken_pipe_of_a_commands_own_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(args: argparse.Namespace) -> int:
        raise BrokenPipeError("of a rank")

    monkeypatch.setattr("ssdtrain.tools.cli.paths.run", broken)
    with pytest.raises(BrokenPipeError, match="of a rank"):
        main(["paths"])


@pytest.mark.parametrize(
    ("rank", "told"), [("0", "ssdtrain paths: interrupted\n"), ("1", "")]
)
def test_one_rank_says_that_all_were_interrupted(
    rank: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("ssdtrain.tools.cli.paths.run", interrupted)
    assert main(["paths"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == told


def test_a_missing_package_is_named_in_one_line() -> None:
    code = (
        "import sys\n"
        "sys.modules['rich'] = None\n"
        "from ssdtrain.tools.cli import main\n"
        "sys.exit(main(['train', '--cfg', 'job']))\n"
    )
    done = python(code)
    assert done.returncode == 2
    assert done.stderr.startswith("ssdtrain: the package rich")
    assert done.stderr.count("\n") == 1


def test_help_shows_choices_as_they_are_typed() -> None:
    """Not as members of an enum, nor as a list of a class."""
    for name, parser in commands(build_parser()).items():
        shown = parser.format_help()
        for word in ("Enum", "Kind.", "Spread.", "<", "None", "Family."):
            assert word not in shown, f"{name} --help shows {word}"


@pytest.mark.parametrize("words", [["-q"], ["train", "--steps", "3"]])
def test_unknown_words_are_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_a_refused_command_line_names_its_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where what is missing says little by its name."""
    with pytest.raises(SystemExit):
        main(["foresight"])
    told = "required: action; ssdtrain foresight --help has all of them, and examples\n"
    assert capsys.readouterr().err.endswith(told)
    with pytest.raises(SystemExit):
        main(["doctor", "activations"])
    told = "unrecognized arguments: activations; ssdtrain doctor --help has all"
    assert told in capsys.readouterr().err


def test_the_nearest_option_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--mulitrun", "model=gpt,bert"])
    error = capsys.readouterr().err
    assert "arguments: --mulitrun; did you mean '--multirun'?" in error
