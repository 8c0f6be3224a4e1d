"""The example plugin, installed into a fresh environment beside this package, and used by an unchanged script."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.core.conftest import ROOT, Python

pytestmark = pytest.mark.slow
pytest.importorskip("torch", reason="the operation that the plugin extends needs torch")


def pip(*arguments):
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def copy(source: Path, target: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".*", "*.egg-info", "build", "dist")
    return shutil.copytree(source, target, ignore=ignored)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = copy(ROOT, folder / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_holds_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"flashot_backends", "flashot_backends-0.1.0.dist-info"}
    wanted = {f"flashot_backends/{name}" for name in ("py.typed", "startup/sitecustomize.py", "adapters/pot.py")}
    wanted |= {f"flashot_backends/{file.relative_to(ROOT)}" for file in (ROOT / "kernels").rglob("*.json")}
    wanted |= {f"flashot_backends/{file.relative_to(ROOT)}" for file in (ROOT / "kernels").rglob("*.py")}
    wanted |= {str(file.relative_to(ROOT)) for file in (ROOT / "flashot_backends").rglob("*.py")}
    assert wanted <= set(names)
    assert not any(name.startswith("flashot_backends/tests") for name in names)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with this package and the plugin; frameworks are borrowed through a path file."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
    scripts = folder / "environment" / ("Scripts" if sys.platform == "win32" else "bin")
    python = Python(folder, folder)
    del python.environment["PYTHONPATH"]
    executable = str(scripts / "python")
    site = python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", executable=executable).stdout.strip()
    Path(site, "borrowed.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    plugin = copy(ROOT / "examples" / "plugin", folder / "plugin")
    install = ("--python", executable, "install", "--no-deps", "--no-build-isolation", "--ignore-installed")
    pip(*install, wheel)
    pip(*install, plugin)

    def run(*arguments, **options):
        program = executable if arguments[0] != "flashot" else str(scripts / "flashot")
        return python(*arguments[arguments[0] == "flashot" :], executable=program, **options)

    return run


def test_everything_comes_from_the_environment(installed):
    out = installed("-c", "import flashot_backends as f, flashot_example as e; print(f.__file__, e.__file__)").stdout
    assert out.count("installed") == 2
    assert str(ROOT) not in out


def test_status_lists_the_kernel_and_the_host(installed):
    rows = [" ".join(line.split()) for line in installed("flashot", "status").stdout.splitlines()]
    assert "toyhost flashot-example 1.0.0 >=1,<2 no ready" in rows
    assert "double torch any -1 example available" in rows


def test_the_adapter_serves_an_unchanged_script(installed):
    script = ROOT / "examples" / "plugin" / "use.py"
    assert "unknown method 'flash'" in installed(script, check=False).stderr
    out = installed("flashot", "run", script).stdout
    assert float(out.split(":")[1]) < 1e-4


def test_the_adapter_substitutes(installed):
    code = "import numpy, toyhost; x = numpy.eye(3); print(toyhost.soft_match(x, x, 1e-3).round(3).tolist())"
    ours = installed("flashot", "run", "--substitute=toyhost", "-c", code).stdout
    assert ours.strip() == "[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]"


def test_the_kernel_is_chosen_by_name_and_gives_its_reason(installed):
    out = installed(
        "-c",
        """
import torch
from flashot_backends.ops.sinkhorn import PointCloud, solve
x, y = torch.randn(30, 3), torch.randn(20, 3)
fixed = dict(epsilon=0.3, tolerance=0.0, max_iterations=40, acceleration=None)
ours = solve(PointCloud(x, y), **fixed, backend="double")
theirs = solve(PointCloud(x.double(), y.double()), **fixed, backend="reference")
print(float((ours.f - theirs.f).abs().max()), ours.f.dtype)
try:
    solve(PointCloud(x.double(), y.double()), **fixed, backend="double")
except ValueError as error:
    print(error)
import flashot_backends
with flashot_backends.use(backend=["double", "reference"]):
    print(solve(PointCloud(x.double(), y.double()), **fixed).f.dtype)
""",
    ).stdout.splitlines()
    difference, dtype = out[0].split()
    assert float(difference) < 1e-5
    assert dtype == "torch.float32"
    assert "the points are float64 already" in out[1]
    assert out[2] == "torch.float64"


def test_the_plugin_can_be_blocked(installed):
    out = installed("flashot", "status", FLASHOT_DISABLE_PLUGINS="example").stdout
    assert "toyhost" not in out
    assert "sinkhorn" in out


def test_autoload_watches_the_plugins_host(installed):
    script = ROOT / "examples" / "plugin" / "use.py"
    out = installed("flashot", "autoload", "on").stdout
    assert "toyhost" in out
    try:
        assert "largest difference" in installed(script).stdout
    finally:
        installed("flashot", "autoload", "off")
    assert "unknown method" in installed(script, check=False).stderr
