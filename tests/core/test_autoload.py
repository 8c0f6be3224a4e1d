"""``flashot autoload`` in throw-away environments, and the finder that it starts."""

import importlib.metadata
import re
import subprocess
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from flashot_backends import _imports, autoload
from tests.core.conftest import ROOT, FakeHost, Python

ENABLED = "('flash', 1, 2)"
ASK = "import fakehost; print(fakehost.solve(1, 2, method='flash'))"
COMMAND = ("-c", "from flashot_backends.cli import main; main()", "autoload")


class Environment(Python):
    """A virtual environment that sees this checkout, as if installed, and the packages of the running Python."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder)
        del self.environment["PYTHONPATH"]
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        self.python = str(folder / scripts / "python")
        self.site = Path(self("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        borrowed = [str(ROOT), *(path for path in sys.path if "site-packages" in path)]
        (self.site / "borrowed.pth").write_text("\n".join(borrowed))
        FakeHost(self.site, "fakehost").plugin()
        self.install()

    def __call__(self, *arguments, **options):
        return super().__call__(*arguments, executable=self.python, **options)

    def install(self) -> None:
        folder = self.site / "flashot_backends-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashot-backends\nVersion: 0.1.0\n")

    def files(self) -> list[Path]:
        return sorted(path for path in self.site.iterdir() if path.name != "__pycache__")

    def asked(self, *options: str, **variables: str) -> str:
        """What a fresh process answers that knows nothing of us: our answer, or the host's refusal."""
        done = self(*options, "-c", ASK, check=False, **variables)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


REFUSED = "ValueError: Unknown method"


def test_on_off_status(environment):
    assert environment(*COMMAND, "status").stdout == "off\n"
    assert environment.asked() == REFUSED
    before = environment.files()
    out = environment(*COMMAND, "on").stdout
    (written,) = set(environment.files()).difference(before)
    assert written.name in ("flashot_backends_autoload.pth", "flashot_backends_autoload.start")
    assert out.splitlines()[0] == f"on: {written}"
    assert {"fakehost", "ot"} <= set(out.splitlines()[1].removeprefix("watches for: ").split(", "))
    assert environment(*COMMAND, "status").stdout == f"on: {written}\n"
    assert environment.asked() == ENABLED
    environment(*COMMAND, "on")
    assert environment.asked() == ENABLED
    assert environment(*COMMAND, "off").stdout == f"removed: {written}\n"
    assert environment.files() == before
    assert environment.asked() == REFUSED
    assert environment(*COMMAND, "off").stdout == "off already\n"


def test_variants_of_python(environment):
    environment(*COMMAND, "on")
    assert environment.asked("-I") == ENABLED
    assert environment.asked(FLASHOT_ENABLE="0") == REFUSED
    assert environment.asked(FLASHOT_ENABLE="1") == ENABLED
    if sys.version_info >= (3, 11):
        assert environment.asked("-P") == ENABLED


def test_starting_costs_little_and_says_nothing(environment):
    code = "import sys; print(sorted(sys.modules), file=sys.stderr)"
    before = environment("-c", code)
    environment(*COMMAND, "on")
    after = environment("-c", code)
    assert after.stdout == ""
    new = set(re.findall(r"'([\w.]+)'", after.stderr)).difference(re.findall(r"'([\w.]+)'", before.stderr))
    assert new == {"flashot_backends", "flashot_backends._imports", "flashot_backends.autoload"}


def test_other_imports_do_not_wake_it(environment):
    environment(*COMMAND, "on")
    ask = "print('flashot_backends.hosts' in sys.modules)"
    code = f"import json, numpy, sys; {ask}; import fakehost; {ask}"
    assert environment("-c", code).stdout.split() == ["False", "True"]


def test_uninstalled_while_on(environment):
    """The start-up file outlives the package: Python starts as if it were not there."""
    environment(*COMMAND, "on")
    (environment.site / "borrowed.pth").write_text("")
    done = environment("-c", "print('fine')")
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_broken_while_on(environment):
    """Whatever fails in us while a host is imported, the host is there."""
    environment(*COMMAND, "on")
    (environment.site / "pluggy.py").write_text("raise OSError('broken')\n")
    (environment.site / "borrowed.pth").write_text(f"{ROOT}\n")
    done = environment("-c", "import fakehost; print(fakehost.solve(1, 2))")
    assert done.stdout == "3\n"
    assert "could not enable" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_installed_later_is_reported(environment):
    environment(*COMMAND, "on")
    FakeHost(environment.site, "newhost").plugin()
    assert "not watched yet: newhost" in environment(*COMMAND, "status").stdout
    environment(*COMMAND, "on")
    assert "not watched" not in environment(*COMMAND, "status").stdout


def test_refused_where_it_would_have_no_effect(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(RuntimeError, match="not installed in this environment"):
        autoload.turn_on(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_unwritable(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="nowhere"):
        monkeypatch.setattr("importlib.metadata.distribution", lambda name: None)
        autoload.turn_on(str(tmp_path / "nowhere"))


# Without an environment


def test_forms_by_version(tmp_path, monkeypatch):
    for version, endings in {(3, 14, 2): [".pth", ".start"], (3, 15, 0): [".start", ".pth"]}.items():
        monkeypatch.setattr(autoload.sys, "version_info", version)
        assert [Path(path).suffix for path in autoload.paths(str(tmp_path))] == endings
    start = autoload.content(["ot", "geomloss"], "x.start").splitlines()
    assert start[-1] == "flashot_backends.autoload:start"
    assert "# hosts: ot geomloss" in start
    pth = autoload.content(["ot"], "x.pth").splitlines()
    assert [line for line in pth if not line.startswith("#")] == pth[-1:]
    assert pth[-1].startswith("import ")


def test_switching_on_replaces_the_other_form(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: None)
    preferred, other = map(Path, autoload.paths(str(tmp_path)))
    other.write_text("# of another Python version\n")
    assert autoload.turn_on(str(tmp_path)) == str(preferred)
    assert list(tmp_path.iterdir()) == [preferred]


@pytest.fixture
def finders(monkeypatch):
    """A finder that knows no name, and no real enabling; return how often it was done."""
    calls = []
    monkeypatch.setattr(autoload, "_enable_quietly", lambda module=None: calls.append(module))
    monkeypatch.setattr(_imports, "FINDER", _imports._Finder())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("FLASHOT_ENABLE", raising=False)
    return calls


def test_starting_twice_watches_once(finders, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "host_of_twice.py").write_text("x = 1\n")
    monkeypatch.setenv("FLASHOT_WATCH", "host_of_twice no_such_host")
    autoload.start()
    autoload.start()
    assert sys.meta_path.count(_imports.FINDER) == 1
    assert finders == []
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_host")
    module = importlib.import_module("host_of_twice")
    assert finders == [module]
    importlib.reload(module)
    assert finders == [module]
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader


def test_a_host_loaded_already_is_enabled_at_once(finders, monkeypatch):
    monkeypatch.setenv("FLASHOT_WATCH", "host_that_is_loaded")
    monkeypatch.setitem(sys.modules, "host_that_is_loaded", types.ModuleType("host_that_is_loaded"))
    autoload.start()
    assert finders == [None]


@pytest.mark.parametrize("off", ["0", "false", " No ", "OFF"])
def test_switched_off_by_the_variable(finders, monkeypatch, off):
    monkeypatch.setenv("FLASHOT_WATCH", "json")
    monkeypatch.setenv("FLASHOT_ENABLE", off)
    autoload.start()
    assert finders == []
    assert _imports.FINDER.before == {}


def test_a_host_that_is_its_own_leaf_is_adapted_too(environment):
    """The import that wakes the finder is the one that the hook waits for."""
    environment_site = environment.site
    (environment_site / "fakehost_plugin.py").write_text(
        "from flashot_backends.plugins import AdapterSpec, hookimpl\n"
        "@hookimpl\n"
        "def flashot_register_adapters():\n"
        "    return [AdapterSpec('fakehost', ('fakehost',), 'fakehost_adapter:adapt', 'fakehost', '>=1,<2')]\n"
    )
    core = (environment_site / "fakehost" / "_core.py").read_text()
    (environment_site / "fakehost" / "__init__.py").write_text(core)
    environment(*COMMAND, "on")
    assert environment.asked() == ENABLED
