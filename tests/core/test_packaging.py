"""What is shipped, how light it is to import, and which way its imports point."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashot_backends
from tests.core.conftest import ROOT

HEAVY = ("torch", "jax", "pydantic", "pydantic_settings", "numpy", "typer", "rich", "tqdm", "triton", "ot")


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_import_is_light(python):
    out = python.code(
        f"""
        import sys, time
        start = time.perf_counter()
        import flashot_backends
        print(time.perf_counter() - start)
        print([name for name in {HEAVY} + ("pluggy", "importlib.metadata") if name in sys.modules])
        """
    )
    seconds, loaded = out.splitlines()
    assert float(seconds) < 0.060  # measured: 0.001
    assert loaded == "[]"


def test_enabling_imports_no_framework(python):
    out = python.code(f"import flashot_backends as f, sys; f.enable(); print([n for n in {HEAVY} if n in sys.modules])")
    assert out.strip() == "[]"


def test_dispatch_and_adapters_import_no_framework(python):
    code = "import sys, flashot_backends.dispatch, flashot_backends.hosts, flashot_backends.pytest_plugin as p"
    assert python.code(f"{code}; print([n for n in ('torch', 'jax', 'ot') if n in sys.modules])").strip() == "[]"


def tree():
    """The packages that the folders hold, by the mapping in ARCHITECTURE."""
    found = {"flashot_backends.adapters", "flashot_backends.examples", "flashot_backends.kernels"}
    for top, name in {"flashot_backends": "flashot_backends", "adapters": "", "kernels": ""}.items():
        for file in (ROOT / top).rglob("*.py"):
            parts = file.parent.relative_to(ROOT).parts
            found.add(".".join(parts if name else ("flashot_backends", *parts)))
    return found


def test_packages_are_those_of_the_tree(project):
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == listed
    assert set(listed) == tree()


def test_no_top_level_names_of_others():
    for folder in ("adapters", "kernels"):
        assert not (ROOT / folder / "__init__.py").exists()
    for file in (ROOT / "kernels").rglob("*.py"):
        assert file.parent == ROOT / "kernels" or (file.parent / "__init__.py").exists(), file


def test_extras(project):
    extras = project["project"]["optional-dependencies"]
    wanted = ["torch", "triton", "jax", "pot", "geomloss", "pylate", "equinox", "flax", "ott", "all", "test"]
    assert set(wanted) <= set(extras)
    assert {"torch", "POT"} <= {re.split(r"\W", requirement)[0] for requirement in extras["pot"]}
    every = re.search(r"\[(.*)\]", extras["all"][0])[1].split(",")
    assert set(every) == set(extras) - {"all", "test"}


def test_the_pytest_plugin_has_no_entry_point(project):
    assert set(project["project"]["entry-points"]) == {"flashot_backends"}


def test_version():
    assert flashot_backends.__version__ == "0.1.0"
    assert "## [" in (ROOT / "CHANGELOG.md").read_text()


def test_supported_pot_versions_agree(project):
    from flashot_backends.plugins.manager import registry

    (spec,) = [spec for spec in registry().adapters() if spec.name == "pot"]
    (requirement,) = [r for r in project["project"]["optional-dependencies"]["pot"] if r.startswith("POT")]
    assert requirement == f"POT{spec.versions}"


# Direction of the imports


@pytest.fixture
def staged(tmp_path):
    """The tree as it is when installed, with the two namespace portions made packages so that grimp sees them."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flashot_backends", tmp_path / "flashot_backends", ignore=ignored)
    for folder in ("adapters", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / "flashot_backends" / folder, ignore=ignored)
        (tmp_path / "flashot_backends" / folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess:
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_imports_go_one_way(staged):
    pytest.importorskip("importlinter")
    done = lint(staged)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/sinkhorn/problem.py", "import flashot_backends.adapters.pot"),
        ("kernels/sinkhorn/reference.py", "from flashot_backends.ops import sinkhorn"),
        ("kernels/sinkhorn/reference.py", "from flashot_backends import dispatch"),
        ("kernels/sinkhorn/reference.py", "import flashot_backends.kernels.maxsim.reference"),
        ("dispatch.py", "from flashot_backends.kernels.sinkhorn import reference"),
        ("dispatch.py", "from flashot_backends.ops import sinkhorn"),
    ],
)
def test_an_import_the_other_way_is_found(staged, file, line):
    pytest.importorskip("importlinter")
    path = staged / "flashot_backends" / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = lint(staged)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


@pytest.mark.parametrize("name", ["kernels", "adapters"])
def test_ruff_refuses_the_names_of_others(name):
    pytest.importorskip("ruff")
    file = str(ROOT / "flashot_backends" / "x.py")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename", file, "-"]
    done = subprocess.run(command, input=f'"""Doc."""\n\nimport {name}\n', capture_output=True, text=True)
    assert "TID251" in done.stdout
