"""A host adapted at its import or after it, switched off and on, and left whole whatever goes wrong on our side."""

import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import pickle
import sys
import threading
import types
import warnings

import pytest

import flashot_backends
from flashot_backends import config, hosts
from flashot_backends._versions import release, within
from flashot_backends.config import use
from flashot_backends.plugins import AdapterSpec
from flashot_backends.plugins.manager import registry


def load(host, module=""):
    return importlib.import_module(host.name + module)


def state(host):
    return {spec.name: text for spec, _, text in hosts.report()}[host.name]


def test_nothing_is_touched_before_enable(make_host):
    host = make_host()
    module = load(host)
    assert not hasattr(module.solve, "__wrapped__")
    assert state(host) == "ready"


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_name_holds_the_wrapper(make_host, when):
    host = make_host()
    if when == "after":
        load(host, ".user")
    flashot_backends.enable()
    module, user, core = load(host), load(host, ".user"), load(host, "._core")
    assert module.solve is user.solve is core.solve
    assert module.solve(1, 2, method="flash") == ("flash", 1, 2)
    assert module.solve(1, 2, "flash") == ("flash", 1, 2)
    assert module.solve(1, 2) == 3
    assert module.solve(1, 2, scale=2) == 6
    assert module.routines == {"plain": "host", "flash": "ours"}
    assert state(host) == "adapted"


def test_late_enabling_says_what_is_out_of_reach(make_host, caplog):
    host = make_host()
    kept = load(host, ".user").kept
    caplog.set_level(logging.INFO, "flashot_backends")
    hosts.enable()
    assert any("default arguments" in record.getMessage() for record in caplog.records)
    with pytest.raises(ValueError, match="Unknown method"):
        kept[0](1, 2, method="flash")


def test_late_enabling_wakes_no_lazy_module_and_spares_our_side(make_host):
    host = make_host()
    original = load(host).solve
    adapter = importlib.import_module(host.name + "_adapter")
    adapter.kept = original

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"woken by {name}")

    sys.modules["lazy_of_" + host.name] = Lazy("lazy")
    try:
        hosts.enable()
    finally:
        del sys.modules["lazy_of_" + host.name]
    assert load(host).solve is not original
    assert adapter.kept is original


def test_disable_reaches_captured_functions_and_enable_comes_back(make_host):
    host = make_host()
    hosts.enable()
    solve, routines = load(host).solve, load(host).routines
    flashot_backends.disable()
    with pytest.raises(ValueError, match="Unknown method"):
        solve(1, 2, method="flash")
    assert routines == {"plain": "host"}
    assert state(host) == "adapted, switched off"
    flashot_backends.enable()
    assert solve(1, 2, method="flash") == ("flash", 1, 2)
    assert load(host).solve is solve
    assert routines["flash"] == "ours"


def test_imported_while_switched_off(make_host):
    host = make_host()
    hosts.enable()
    hosts.disable()
    module = load(host)
    with pytest.raises(ValueError, match="Unknown method"):
        module.solve(1, 2, method="flash")
    assert "flash" not in module.routines
    hosts.enable()
    assert module.solve(1, 2, method="flash") == ("flash", 1, 2)
    assert module.routines["flash"] == "ours"


def test_enabling_again_wraps_once(make_host):
    host = make_host()
    hosts.enable()
    solve = load(host).solve
    for _ in range(3):
        hosts.enable()
    assert load(host).solve is solve
    assert not hasattr(solve.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("attempt", range(10))
def test_enabling_from_threads_gives_one_wrapper(make_host, attempt):
    host = make_host()
    barrier, failures = threading.Barrier(8), []

    def work(index):
        try:
            barrier.wait()
            if index % 2:
                hosts.enable()
                assert load(host).solve(1, 2, method="flash") == ("flash", 1, 2)
            else:
                load(host, ".user")
                hosts.enable()
                assert load(host).solve(1, 2, method="flash") == ("flash", 1, 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    solve = load(host).solve
    assert solve is load(host, ".user").solve is load(host, "._core").solve
    assert not hasattr(solve.__wrapped__, "__wrapped__")


def test_enabling_while_another_thread_is_importing(make_host):
    host = make_host()
    slow = "import time\nfrom . import gate\ngate.started.set()\ntime.sleep(0.3)\ndef solve(a, b): return 0\n"
    host.write(f"{host.name}/slow.py", slow)
    host.write(f"{host.name}/gate.py", "import threading\nstarted = threading.Event()\n")
    adapter = "def adapt(module, host):\n    host.wrap(module, 'solve', lambda old: lambda a, b: 1)\n"
    host.write("slow_adapter.py", adapter)
    spec = AdapterSpec(f"{host.name}-slow", (f"{host.name}.slow",), "slow_adapter:adapt", host.name, ">=1")
    registry().add([spec], "test")
    thread = threading.Thread(target=load, args=(host, ".slow"))
    try:
        thread.start()
        load(host, ".gate").started.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hosts.enable()
        assert load(host, ".slow").solve(0, 0) == 1
    finally:
        thread.join()
        registry().remove(spec)


def test_a_reloaded_module_is_adapted_again(make_host):
    host = make_host()
    hosts.enable()
    core = load(host, "._core")
    before = core.solve
    assert importlib.reload(core).solve is not before
    assert core.solve(1, 2, method="flash") == ("flash", 1, 2)
    assert core.routines["flash"] == "ours"


def test_a_module_that_is_imported_anew_is_adapted_again(make_host):
    host = make_host()
    hosts.enable()
    before = load(host, "._core")
    for name in [name for name in sys.modules if name.split(".")[0] == host.name]:
        del sys.modules[name]
    core = load(host, "._core")
    assert core is not before
    assert core.solve(1, 2, method="flash") == ("flash", 1, 2)
    hosts.disable()
    assert core.routines == {"plain": "host"}


def test_a_loader_of_ours_shows_only_while_the_host_is_found(make_host):
    host = make_host()
    hosts.enable()
    spec = importlib.util.find_spec(host.name + "._core")
    assert spec.loader.get_source(spec.name) == (host.folder / host.name / "_core.py").read_text()
    core = load(host, "._core")
    assert type(core.__loader__) is type(core.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_the_wrapper_looks_like_the_original(make_host):
    host = make_host()
    core = load(host, "._core")
    before = (inspect.signature(core.solve), inspect.getsource(core.solve), core.solve.__doc__, core.solve.__qualname__)
    hosts.enable()
    solve = core.solve
    assert hasattr(solve, "__wrapped__")
    assert before == (inspect.signature(solve), inspect.getsource(solve), solve.__doc__, solve.__qualname__)
    assert solve.__module__ == core.__name__
    assert inspect.isfunction(solve)
    assert pickle.loads(pickle.dumps(solve)) is solve


def test_substitution_is_read_at_each_call(make_host):
    host = make_host()
    hosts.enable()
    solve = load(host).solve
    assert solve(1, 2) == 3
    with use(substitute=[host.name]):
        assert solve(1, 2) == ("flash", 1, 2)
        hosts.disable()
        assert solve(1, 2) == 3
        hosts.enable()
    assert solve(1, 2) == 3


def test_methods_can_be_wrapped(make_host):
    host = make_host()
    host.write(
        f"{host.name}_adapter.py",
        """
        def adapt(module, host):
            host.wrap(module, "Solver.run", lambda original: lambda self, a: ("ours", original(self, a)), ("self", "a"))
        """,
    )
    hosts.enable()
    assert load(host).Solver().run(3) == ("ours", ("host", 3))
    hosts.disable()
    assert load(host).Solver().run(3) == ("host", 3)


def test_two_adapters_of_one_function(make_host):
    host = make_host()
    host.write(
        f"{host.name}_second.py",
        """
        def adapt(module, host):
            def factory(original):
                def second(*args, method="plain", **kw):
                    return "second" if method == "2" else original(*args, method=method, **kw)
                return second
            host.wrap(module, "solve", factory)
        """,
    )
    spec = AdapterSpec(f"{host.name}-2", host.spec.modules, f"{host.name}_second:adapt", host.name, ">=1")
    registry().add([spec], "test")
    try:
        hosts.enable()
        hosts.enable()
        solve = load(host).solve
        assert solve(1, 2, method="2") == "second"
        assert solve(1, 2, method="flash") == ("flash", 1, 2)
        assert solve(1, 2) == 3
    finally:
        registry().remove(spec)


# Left whole


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_untested_version_is_left_alone_with_one_warning(make_host, when):
    host = make_host(version="2.0")
    if when == "after":
        load(host)
    with pytest.warns(RuntimeWarning, match=r"version 2\.0 is outside the tested range >=1,<2") as caught:
        hosts.enable()
        module = load(host)
        hosts.enable()
    assert len(caught) == 1
    assert not hasattr(module.solve, "__wrapped__")
    assert module.routines == {"plain": "host"}
    assert "outside the tested range" in state(host)


def test_an_untested_version_is_not_mentioned_to_those_who_do_not_import_it(make_host):
    host = make_host(version="2.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hosts.enable()
    assert "outside the tested range" in state(host)


def test_a_host_without_a_distribution_is_left_alone(make_host):
    host = make_host(register=False)
    spec = AdapterSpec(host.name, host.spec.modules, host.spec.target, "no-such-distribution", ">=1")
    registry().add([spec], "test")
    try:
        hosts.enable()
        assert state(host) == "not installed"
        with pytest.warns(RuntimeWarning, match="no installed distribution 'no-such-distribution'"):
            assert not hasattr(load(host).solve, "__wrapped__")
    finally:
        registry().remove(spec)


def test_another_signature_is_left_alone_with_one_warning(make_host):
    host = make_host()
    core = "routines = {}\nSolver = None\ndef solve(b, a, method='plain'):\n    return a\n"
    host.write(f"{host.name}/_core.py", core)
    words = r"_core\.solve takes \(b, a, method\), and we know \(a, b, method\)"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        hosts.enable()
        module = load(host)
        hosts.enable()
    assert len(caught) == 1
    assert module.solve(1, 2) == 2
    assert not hasattr(module.solve, "__wrapped__")


@pytest.mark.parametrize("missing", ["pass", "solve = 3", "class solve: pass"])
def test_a_missing_function_is_left_alone(make_host, missing):
    host = make_host()
    host.write(f"{host.name}/_core.py", f"routines = {{}}\nSolver = None\n{missing}\n")
    host.write(f"{host.name}/__init__.py", "")
    with pytest.warns(RuntimeWarning, match=r"_core\.solve is not there, or is no plain function"):
        hosts.enable()
        load(host, "._core")


BROKEN = {
    "import": "raise OSError('broken at import')",
    "syntax": "def adapt(",
    "missing": "x = 1",
    "adapt": "def adapt(module, host):\n    raise ZeroDivisionError('broken when called')",
    "factory": "def adapt(module, host):\n    host.wrap(module, 'solve', lambda original: 1 / 0)",
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
@pytest.mark.parametrize("when", ["before", "after"])
def test_our_failure_is_one_warning_and_the_host_works(make_host, kind, when):
    host = make_host()
    host.write(f"{host.name}_adapter.py", BROKEN[kind])
    if when == "after":
        load(host)
    with pytest.warns(RuntimeWarning, match=f"its adapter {host.name}_adapter:adapt failed") as caught:
        hosts.enable()
        module = load(host)
        hosts.enable()
    assert len(caught) == 1
    assert module.solve(1, 2) == 3
    assert "failed" in state(host)


def test_our_failure_is_survived_where_warnings_are_errors(make_host, caplog):
    host = make_host()
    host.write(f"{host.name}_adapter.py", BROKEN["adapt"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hosts.enable()
        module = load(host)
    assert module.solve(1, 2) == 3
    assert any("broken when called" in record.getMessage() for record in caplog.records)


def test_a_host_that_fails_to_import_fails_as_ever(make_host):
    host = make_host()
    host.write(f"{host.name}/_core.py", "raise LookupError('the host is broken')")
    hosts.enable()
    with pytest.raises(LookupError, match="the host is broken"):
        load(host)


def test_the_hosts_own_errors_pass_through(make_host):
    host = make_host()
    hosts.enable()
    with pytest.raises(TypeError, match="unexpected keyword"):
        load(host).solve(1, 2, colour=3)


def test_a_key_of_the_hosts_own_stays(make_host):
    host = make_host()
    core = host.folder / host.name / "_core.py"
    core.write_text(core.read_text() + 'routines["flash"] = "the host has one"\n')
    with pytest.warns(RuntimeWarning, match="has its own 'flash' already"):
        hosts.enable()
        module = load(host)
    assert module.routines["flash"] == "the host has one"
    hosts.disable()
    assert module.routines["flash"] == "the host has one"


def test_bad_settings_surface_at_the_call_not_at_the_import(make_host, monkeypatch):
    host = make_host()
    monkeypatch.setenv("FLASHOT_PRECISION", "hgih")
    hosts.enable()
    module = load(host)
    with pytest.raises(config.SettingsError, match="Did you mean 'high'"):
        module.solve(1, 2)


# Versions


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.9.7.post1", ">=0.9,<0.10", True),
        ("0.9", ">=0.9,<0.10", True),
        ("0.8.2", ">=0.9,<0.10", False),
        ("0.10.0rc1", ">=0.9,<0.10", False),
        ("0.10.0", ">=0.9,<0.10", False),
        ("1.0", "==1.0.0", True),
        ("1.2.3+local", "==1.2.*", True),
        ("1.3", "!=1.2.*", True),
        ("1.5.1", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("1.4.9", "~=1.4.5", True),
        ("1.5", "~=1.4.5", False),
        ("1!2.0", "> 1.9 , <= 2", True),
        ("3", "", True),
    ],
)
def test_within(version, specifier, expected):
    assert within(version, specifier) is expected


def test_within_agrees_with_packaging():
    packaging = pytest.importorskip("packaging.specifiers")
    for version in ("0.8", "0.9", "0.9.0.post3", "0.9.7", "0.10", "0.10.1", "1", "1.2.3"):
        for specifier in (">=0.9,<0.10", "<1", ">0.9", "==0.9", "!=0.9.*", "~=0.9", "~=0.9.1", "<=0.10"):
            if "post" not in version:
                expected = packaging.SpecifierSet(specifier).contains(version)
                assert within(version, specifier) == expected, (version, specifier)


@pytest.mark.parametrize("bad", [">=x", "=1", "1.2"])
def test_bad_specifiers(bad):
    with pytest.raises(ValueError, match="version clause"):
        within("1.0", bad)
    with pytest.raises(ValueError, match="not a version"):
        release("unknown")


# POT, where it is installed


def test_pot_is_met_in_every_module_that_binds_it(python):
    pytest.importorskip("ot")
    out = python.code(
        """
        import inspect, pickle, sys
        import ot
        captured, kept = ot.sinkhorn, [ot.sinkhorn]
        import flashot_backends
        flashot_backends.enable()
        holders = [name for name, module in sorted(sys.modules.items())
                   if name.split(".")[0] == "ot" and "sinkhorn" in vars(module) and callable(vars(module)["sinkhorn"])]
        assert len(holders) >= 8, holders
        assert all(sys.modules[name].sinkhorn is ot.sinkhorn for name in holders), holders
        assert captured is ot.sinkhorn is not kept[0]
        assert pickle.loads(pickle.dumps(ot.sinkhorn)) is ot.sinkhorn
        assert "Unknown method" in inspect.getsource(ot.sinkhorn)
        print({spec.name: state for spec, _, state in flashot_backends.hosts.report()}["pot"])
        """
    )
    assert out.strip() == "adapted"
