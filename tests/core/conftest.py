"""A fake host with a plugin of its own, and fresh Python processes to meet it in."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flashot_backends import config, hosts
from flashot_backends.plugins import AdapterSpec
from flashot_backends.plugins.manager import registry

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()

CORE = '''
"""The leaf module."""
routines = {"plain": "host"}

def solve(a, b, method="plain", *, scale=1):
    """Add, the host's way."""
    if method != "plain":
        raise ValueError("Unknown method")
    return scale * (a + b)

class Solver:
    def run(self, a):
        return ("host", a)
'''
PLUGIN = '''
from flashot_backends.plugins import AdapterSpec, KernelSpec, hookimpl

@hookimpl
def flashot_register_adapters():
    return [AdapterSpec("{name}", ("{name}._core",), "{name}_adapter:adapt", "{name}", ">=1,<2")]
'''
ADAPTER = '''
def adapt(module, host):
    def factory(original):
        def replacement(a, b, method="plain", **kwargs):
            if method == "flash" or host.substituted:
                return ("flash", a, b)
            return original(a, b, method, **kwargs)
        return replacement

    host.wrap(module, "solve", factory, ("a", "b", "method"))
    host.register(module.routines, "flash", "ours")
'''


class FakeHost:
    """A package ``name`` with a leaf ``name._core`` that ``name`` and ``name.user`` import from, and our adapter."""

    def __init__(self, folder: Path, name: str, version: str = "1.4") -> None:
        self.folder, self.name = folder, name
        self.write(f"{name}/_core.py", CORE)
        self.write(f"{name}/__init__.py", "from ._core import solve, routines, Solver\n")
        self.write(f"{name}/user.py", "from ._core import solve\nkept = [solve]\n")
        self.write(f"{name}_adapter.py", ADAPTER)
        self.distribution(name, version)
        self.spec = AdapterSpec(name, (f"{name}._core",), f"{name}_adapter:adapt", name, ">=1,<2")

    def write(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def distribution(self, name: str, version: str, entry_points: str = "") -> None:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{folder}/entry_points.txt", entry_points)

    def plugin(self) -> None:
        """Let fresh processes find the adapter through an entry point."""
        self.write(f"{self.name}_plugin.py", PLUGIN.format(name=self.name))
        entry = f"[flashot_backends]\n{self.name}_plugin = {self.name}_plugin\n"
        self.distribution(f"{self.name}-plugin", "0.1", entry)


class Python:
    """Runs Python in a folder of its own, with this checkout and ``folder`` importable and no FLASHOT_ variables."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        ours = ("FLASHOT_", "PYTHON")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        self.environment.update(
            PYTHONPATH=os.pathsep.join([str(ROOT), str(folder)]),
            XDG_CONFIG_HOME=str(work / "config"),
            OMP_NUM_THREADS="1",
            NO_COLOR="1",
        )

    def __call__(self, *arguments: str, executable: str = sys.executable, check: bool = True, **variables: str):
        done = subprocess.run(
            [executable, *map(str, arguments)],
            cwd=self.work,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if check and done.returncode:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def code(self, text: str, *options: str, **variables: str) -> str:
        """Run a piece of code and return what it printed."""
        return self(*options, "-c", textwrap.dedent(text), **variables).stdout

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script and return its path."""
        file = self.work / name
        file.write_text(textwrap.dedent(text))
        return str(file)


@pytest.fixture
def python(tmp_path):
    """A caller of fresh processes that know the fake host ``fakehost`` and its plugin."""
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    FakeHost(site, "fakehost").plugin()
    return Python(site, work)


@pytest.fixture
def clean_settings(tmp_path, monkeypatch):
    """No variables, no files, nothing configured; the current folder is ``tmp_path``."""
    for variable in [name for name in os.environ if name.startswith("FLASHOT_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for name, value in {"_outside": None, "_configured": {}, "_base": None}.items():
        monkeypatch.setattr(config, name, value)


@pytest.fixture
def make_host(tmp_path, monkeypatch, clean_settings):
    """A maker of fake hosts for this process, each under a name of its own; the switch is off when the test begins."""
    was_enabled, made = hosts.is_enabled(), []
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(folder)

    def make(version: str = "1.4", register: bool = True) -> FakeHost:
        host = FakeHost(folder, f"fakehost{next(_numbers)}", version)
        if register:
            registry().add([host.spec], "test")
        made.append(host)
        return host

    hosts.disable()
    yield make
    for host in made:
        if host.spec in registry().adapters():
            registry().remove(host.spec)
    (hosts.enable if was_enabled else hosts.disable)()
