"""The command line itself: its table, its one-line errors, what it imports and whom it shares a name with.

Knows no command's own work; each command has tests of its own.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lucid
from lucid.amp import cli


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command of the name ``refusing`` that takes ``--why TEXT`` and refuses for that reason."""
    command = ModuleType("lucid.amp.cli.refusing")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--why", default="")
        parser.add_argument("--status", type=int, default=0)

    def run(args: argparse.Namespace) -> int:
        if args.why:
            raise cli.Refusal(args.why)
        return args.status

    command.add_arguments, command.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, command.__name__, command)
    monkeypatch.setattr(cli, "COMMANDS", {"refusing": "refuses to work"})
    return command


def distribution(place: Path, name: str, files: list[str], top_level: str = "") -> None:
    """Leave in a folder what pip leaves of an installed distribution."""
    metadata = place / f"{name.replace('-', '_')}-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:  # from Python 3.12 on only those that are there are told
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).touch()
    if top_level:
        (metadata / "top_level.txt").write_text(top_level)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_of_the_table_is_a_module_that_takes_arguments_and_runs(name: str) -> None:
    """What the help offers can be typed."""
    command = importlib.import_module(f"lucid.amp.cli.{name}")
    assert callable(command.run)
    command.add_arguments(argparse.ArgumentParser())


def test_version_names_lucid_torch_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints one line with the three versions that a bug report needs."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    python = ".".join(map(str, sys.version_info[:3]))
    out = capsys.readouterr().out
    assert out.startswith(f"lucid-amp {lucid.__version__} (torch {torch.__version__}, Python {python}")
    assert out.count("\n") == 1


def test_no_command_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """``lucid-amp`` alone lists the commands and is no failure."""
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if name not in out] == []


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is no command is named, with what there is, in one line and status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["dmeo"])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "'dmeo'" in shown.err
    assert "demo" in shown.err.replace("dmeo", "")


def test_a_refusal_is_one_line_and_status_2(refusing: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """What a command refuses to start with reaches the user as a line that names the command."""
    assert cli.main(["refusing", "--why", "the moon is full"]) == 2
    assert capsys.readouterr() == ("", "lucid-amp refusing: the moon is full\n")


def test_a_commands_own_status_is_handed_on(refusing: ModuleType) -> None:
    """The exit status of a command is that of the process."""
    assert cli.main(["refusing", "--status", "7"]) == 7


def test_a_wrong_argument_of_a_command_is_one_line(refusing: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option is one line that says where to find what there is."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["refusing", "--hwy"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "lucid-amp: unrecognized arguments: --hwy (lucid-amp --help tells what there is)"
    ]


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All missing packages stand in one refusal, by their names on PyPI."""
    for module in ("sklearn", "rich"):
        monkeypatch.setitem(sys.modules, module, None)
    packages = {"rich": "rich", "argparse": "argparse", "sklearn": "scikit-learn"}
    with pytest.raises(cli.Refusal) as refused:
        cli.require(packages, extra="demo")
    assert str(refused.value) == (
        "needs rich and scikit-learn, not installed here: pip install 'lucid-amp[demo]' "
        "(in a checkout: pip install '.[demo]')"
    )


def test_nothing_is_refused_where_all_is_there() -> None:
    """A package that can be imported is not asked for."""
    cli.require({"argparse": "argparse"}, extra="demo")
    with pytest.raises(cli.Refusal, match=r"^needs no-such, "):
        cli.require({"argparse": "argparse", "no_such_module": "no-such"}, extra="demo")


@pytest.mark.parametrize("name", ["lucid", "lucid-dl"])
@pytest.mark.parametrize(
    ("files", "top_level"),
    [([], "lucid\n"), (["lucid/__init__.py", "lucid/nn/__init__.py"], "")],
    ids=["told by top_level.txt", "told by its files"],
)
def test_a_rival_that_owns_the_package_is_told_in_one_line(
    name: str,
    files: list[str],
    top_level: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another distribution with a package ``lucid`` is named, with its version and the way out."""
    distribution(tmp_path, name, files, top_level)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main([]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"the distribution {name} 2.5 " in err
    assert f"pip uninstall {name}," in err


def test_a_distribution_that_only_shares_the_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution ``lucid`` whose package is called something else is no rival."""
    distribution(tmp_path, "lucid", ["lucid_dreams/__init__.py", "README.md"], "lucid_dreams\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.rival_installed() is None


# Asks for the help in a fresh process and prints what was imported for it.
PROBE = """
import json, sys
from lucid.amp import cli
cli.main([])
extras = {"rich", "matplotlib", "sklearn"}
print(json.dumps([name for name in sys.modules if name in extras or name.startswith("lucid.amp.cli.")]))
"""


def test_the_help_imports_no_command_and_no_extra() -> None:
    """A command is imported when it is typed, not before: its extras may be missing."""
    out = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout
    assert json.loads(out.splitlines()[-1]) == []


def test_python_m_lucid_amp_is_the_command_line() -> None:
    """``python -m lucid.amp`` takes the same words as ``lucid-amp``."""
    done = subprocess.run([sys.executable, "-m", "lucid.amp", "--version"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["lucid-amp", lucid.__version__])
