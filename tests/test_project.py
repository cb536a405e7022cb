"""The project keeps its own word: README, CI, metadata and the command line agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import workbench
from blockattn.errors import UnsupportedError
from workbench import cli, lab, paths
from workbench.doctor import lanes
from workbench.doctor.versions import MINIMUMS, OPTIONAL_PACKAGES, REQUIRED_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def readme_blocks() -> list[list[str]]:
    """Commands of each shell block of the README, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    stripped = [[line.partition("#")[0].strip() for line in b.splitlines()] for b in blocks]
    return [[line for line in block if line] for block in stripped]


def test_ci_runs_the_test_command_that_the_readme_prints():
    (block,) = [block for block in readme_blocks() if "workbench tune" in block]
    tune, test = block
    assert tune == "workbench tune"
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert [line for line in lines if "pytest" in line] == [test]


def test_ci_installs_under_the_constraints_that_the_readme_names():
    readme = (ROOT / "README.md").read_text()
    script = (ROOT / ".ci/run").read_text()
    assert "pip install -c constraints/cpu.txt -e '.[test]'" in readme
    assert "-c constraints/cpu.txt -e '.[test,dev]'" in script
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_version_is_written_once_in_metadata_and_package():
    assert workbench.__version__ == PROJECT["version"]


def test_doctor_knows_every_base_dependency_and_its_minimum():
    wanted = {
        requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])
    }
    assert set(wanted) == set(REQUIRED_PACKAGES)
    for name, minimum in MINIMUMS.items():
        if name != "python":
            assert str(wanted[name].specifier) == f">={minimum}"


@pytest.mark.parametrize("extra", ["dask", "voila", "diffusers"])
def test_doctor_lists_the_packages_of_an_extra(extra: str):
    wanted = {Requirement(line).name for line in PROJECT["optional-dependencies"][extra]}
    assert wanted <= set(OPTIONAL_PACKAGES)


@pytest.mark.parametrize("lane", lanes.LANES)
def test_each_cute_lane_is_an_extra_with_the_versions_that_were_tried(lane: str):
    extra = [line.partition(";")[0] for line in PROJECT["optional-dependencies"][lane]]
    assert extra == list(lanes.LANES[lane])
    pins = lanes.pins(lane)
    assert tuple(pins[name] for name in lanes.CUTE_PACKAGES) in lanes.TRIED_SETS


def test_kernels_is_a_source_root_and_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_bundled_folders_are_those_of_the_checkout():
    assert paths.checkout_dir() == ROOT
    assert paths.data_dir() == ROOT / "data"
    assert paths.notebooks_dir() == ROOT / "notebooks"


def test_bundled_folders_of_an_installed_wheel_are_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "workbench"
    (package / "data").mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert paths.checkout_dir() is None
    assert paths.data_dir() == package / "data"
    with pytest.raises(FileNotFoundError, match="'notebooks' is missing"):
        paths.notebooks_dir()


@pytest.fixture
def installed_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as a wheel installs it, with one notebook; the current folder is empty."""
    notebook = tmp_path / "site" / "workbench" / "notebooks" / "01_tune_tau.ipynb"
    notebook.parent.mkdir(parents=True)
    notebook.write_text("bundled")
    monkeypatch.setattr(paths, "_PACKAGE", notebook.parent.parent)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return notebook


def test_lab_opens_a_copy_of_an_installed_notebook_and_keeps_the_users_work(
    installed_notebook: Path,
):
    copy = lab.working_copy()
    assert copy == Path.cwd() / installed_notebook.name
    assert copy.read_text() == "bundled"
    copy.write_text("edited")
    assert lab.working_copy().read_text() == "edited"


def test_lab_names_the_notebooks_that_exist(installed_notebook: Path):
    with pytest.raises(FileNotFoundError, match=r"'x\.ipynb' does not exist.*01_tune_tau"):
        lab.working_copy("x.ipynb")


def test_lab_passes_its_options_to_jupyterlab():
    argv = lab.lab_argv(Path("a.ipynb"), port=8890, browser=False, extra=("--debug",))
    assert argv[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={Path.cwd()}" in argv
    assert "--LabApp.default_url=/lab/tree/a.ipynb" in argv
    assert "--port=8890" in argv
    assert "--no-browser" in argv
    assert argv[-1] == "--debug"
    assert "--no-browser" not in lab.lab_argv(Path("a.ipynb"))


DEFAULT_PAGE = f"--LabApp.default_url=/lab/tree/{lab.DEFAULT_NOTEBOOK}"


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_lab_refuses_a_port_that_cannot_be(port: int):
    with pytest.raises(ValueError, match=f"port={port}: must be in 1..65535"):
        lab.lab_argv(Path("a.ipynb"), port=port)


def test_the_lab_command_hands_over_to_jupyterlab(
    installed_notebook: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[list[str]] = []
    monkeypatch.setattr(lab, "open_lab", started.append)
    result = CliRunner().invoke(cli.app, ["lab", "--no-browser", "--ServerApp.token=x"])
    assert result.exit_code == 0, result.output
    (argv,) = started
    assert (Path.cwd() / installed_notebook.name).is_file()
    assert {f"--ServerApp.root_dir={Path.cwd()}", DEFAULT_PAGE} <= set(argv)
    assert {"--no-browser", "--ServerApp.token=x"} <= set(argv)


def test_where_no_browser_can_be_opened_the_printed_address_is_the_notebook(tmp_path: Path):
    """A real start: JupyterLab names the page that it would have opened."""
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = {**os.environ, **{name: str(tmp_path / name) for name in folders}}
    argv = lab.lab_argv(tmp_path / lab.DEFAULT_NOTEBOOK, browser=False)
    server = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = next(line for line in server.stderr if "http://127.0.0.1" in line)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert f"/lab/tree/{lab.DEFAULT_NOTEBOOK}?token=" in address


def test_doctor_prints_json_and_its_exit_status_says_ready():
    done = run_cli("doctor", "--json")
    assert json.loads(done.stdout)["ok"] is (done.returncode == 0)


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "WORKBENCH_DEBUG": "", **environment},
    )


def test_a_user_error_is_one_clear_line_and_exit_status_2():
    done = run_cli("lab", "--port", "70000")
    assert done.returncode == 2
    assert "workbench: error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_call_that_no_implementation_serves_is_a_user_error_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse() -> None:
        raise UnsupportedError("impl='cute' cannot serve this call")

    monkeypatch.setattr(cli, "app", refuse)
    monkeypatch.delenv("WORKBENCH_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "impl='cute' cannot serve this call" in capsys.readouterr().err


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def break_down() -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(cli, "app", break_down)
    with pytest.raises(AttributeError, match="a bug"):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--debug", "lab", "--port", "70000"), ""), (("lab", "--port", "70000"), "1")],
)
def test_debug_shows_the_traceback(arguments: tuple[str, ...], environment: str):
    done = run_cli(*arguments, WORKBENCH_DEBUG=environment)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_version_and_help_are_there():
    assert run_cli("--version").stdout == f"workbench {workbench.__version__}\n"
    assert "doctor" in run_cli("--help").stdout
