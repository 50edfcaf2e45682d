"""What is in the wheel, what it asks of pip, and that pip leaves the user's torch alone.

Builds the wheel from a copy of the sources and installs it where a stand-in distribution called torch lies,
without a package index. Knows nothing of what the package does.
"""

import email.message
import email.parser
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from package import MODULES, ROOT

SOURCES = ("lucid", "pyproject.toml", "README.md", "LICENSE")


def quietly(*command: str | Path, cwd: Path) -> str:
    """Run a command without the machine's pip settings; its output, or a failure that shows it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**ours, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs to it."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    quietly(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", copy / "dist", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def stand_in(folder: Path, version: str) -> Path:
    """A wheel of an empty distribution called torch."""
    path = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def install(wheel: Path, folder: Path, has: str, offered: str, *options: str) -> str:
    """Which torch a user has after ``pip install`` of the wheel, who had one and was offered another."""
    venv.create(folder / "env")
    python = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--find-links", folder)
    stand_in(folder, offered)
    quietly(*pip, stand_in(folder, has), cwd=folder)
    quietly(*pip, *options, wheel, cwd=folder)
    version = "import importlib.metadata as m; print(m.version('torch'), m.version('lucid-amp'))"
    torch, _ = quietly(python, "-c", version, cwd=folder).split()
    return torch


def lower_bound(metadata: email.message.Message) -> str:
    """The oldest torch that the wheel accepts."""
    (bound,) = (line for line in metadata.get_all("Requires-Dist", []) if line.startswith("torch"))
    return bound.removeprefix("torch>=")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module is in the wheel, the mark that it is typed and the licence too; tests and docs are not."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    modules = {str(file.relative_to(ROOT)) for file in MODULES.values()}
    assert modules | {"lucid/py.typed"} <= inside
    assert all(name.startswith("lucid/") for name in inside)
    assert any(name.endswith("LICENSE") for name in names - inside)


def test_the_wheel_needs_torch_alone_and_sets_it_no_upper_bound(metadata: email.message.Message) -> None:
    """Without an extra there is one requirement: torch, from some version on, with no end."""
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == [f"torch>={lower_bound(metadata)}"]
    assert metadata["Name"] == "lucid-amp"
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_wheel_brings_the_command(wheel: Path) -> None:
    """``lucid-amp`` is a command after the installation."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "lucid-amp = lucid.amp.cli:main" in archive.read(name).decode()


@pytest.mark.parametrize("options", [(), ("--upgrade",)], ids=["install", "upgrade"])
def test_an_older_torch_stays(
    wheel: Path, metadata: email.message.Message, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The oldest torch that the wheel accepts X."""
    oldest = lower_bound(metadata)
    assert install(wheel, tmp_path, oldest, "99.0", *options) == oldest


def test_a_torch_that_is_too_old_is_replaced(wheel: Path, tmp_path: Path) -> None:
    """What the wheel cannot run with does not stay: so the test above would notice a bound set too high."""
    assert install(wheel, tmp_path, "1.0", "99.0") == "99.0"
