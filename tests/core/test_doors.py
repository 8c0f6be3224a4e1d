"""The doors, in fresh processes, with scripts that know nothing of us."""

import sys

import pytest

SCRIPT = """
    import sys
    import fakehost
    print(fakehost.solve(1, 2, method="flash"), sys.argv[1:])
"""
ENABLED = "('flash', 1, 2)"
CHILD = """
    import subprocess, sys
    print(subprocess.run(
        [sys.executable, *{options!r}, "-c", "import fakehost; print(fakehost.solve(1, 2, method='flash'))"],
        capture_output=True, text=True).stdout, end="")
"""
safe_path = pytest.param(("-P",), marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is of Python 3.11"))
RUN = ["-m", "flashot_backends"], ["-c", "from flashot_backends.cli import main; main()", "run"]


@pytest.fixture(params=RUN, ids=["module", "command"])
def run(request):
    return request.param


def test_without_a_door_nothing_happens(python):
    done = python(python.script(SCRIPT), check=False)
    assert "Unknown method" in done.stderr


@pytest.mark.parametrize("options", [(), safe_path])
@pytest.mark.parametrize("order", ["enable, host", "host, enable", "captured, enable"])
def test_enable(python, options, order):
    lines = {"enable": "import flashot_backends; flashot_backends.enable()", "host": "import fakehost"}
    lines["captured"] = "import fakehost; from fakehost import solve"
    text = "\n".join(lines[step] for step in order.split(", "))
    call = "solve" if "captured" in order else "fakehost.solve"
    assert python.code(f"{text}\nprint({call}(1, 2, method='flash'))", *options).strip() == ENABLED


@pytest.mark.parametrize("options", [(), safe_path])
def test_run_a_script(python, run, options):
    out = python(*options, *run, python.script(SCRIPT), "--help", "-m", "x").stdout
    assert out.strip() == f"{ENABLED} ['--help', '-m', 'x']"


def test_run_a_piece_of_code(python, run):
    code = "import sys, fakehost; print(fakehost.solve(1, 2, method='flash'), sys.argv, [sys.path[0]])"
    assert python(*run, "-c", code, "a").stdout.strip() == f"{ENABLED} ['-c', 'a'] ['']"


def test_run_a_module(python, run):
    (python.work / "package").mkdir()
    python.script("import sys\nprint(sys.argv[1:], __package__, __name__)", "package/__main__.py")
    python.script(SCRIPT, "single.py")
    assert python(*run, "-m", "single", "-c").stdout.strip() == f"{ENABLED} ['-c']"
    assert python(*run, "-m", "package", "-v").stdout.strip() == "['-v'] package __main__"


def test_run_a_folder(python, run):
    (python.work / "folder").mkdir()
    python.script("import beside, fakehost; print(fakehost.solve(1, 2, 'flash'))", "folder/__main__.py")
    python.script("", "folder/beside.py")
    assert python(*run, "folder").stdout.strip() == ENABLED


def test_a_script_finds_what_it_always_finds(python, run):
    """The same main module, path, arguments and traceback as under plain Python."""
    folder = python.work / "deep"
    folder.mkdir()
    python.script("here = __name__", "deep/beside.py")
    path = python.script(
        """
        import __main__, pickle, sys
        import beside
        class Thing: pass
        x: "annotation" = 1
        print(__name__, __file__, __spec__, __package__, __doc__, sys.argv, sys.path[0], beside.here)
        print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, __main__.Thing is Thing, __annotations__)
        import atexit; atexit.register(lambda: print(sys.modules["__main__"] is __main__))
        sys.exit(7)
        """,
        "deep/main.py",
    )
    plain, ours = python(path, "a", check=False), python(*run, path, "a", check=False)
    assert plain.returncode == ours.returncode == 7
    assert plain.stdout == ours.stdout


def test_future_flags_of_ours_do_not_leak(python, run):
    path = python.script("def f(x: 1 + 1): pass\nprint(f.__annotations__['x'])")
    assert python(*run, path).stdout.strip() == "2"


def test_a_failing_script_fails(python, run):
    done = python(*run, python.script("1 / 0"), check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage:"),
        (["-m"], "-m needs an argument"),
        (["no_such_file.py"], "cannot open 'no_such_file.py'"),
        (["--backed=torch", "x.py"], "Did you mean 'backend'?"),
        (["--substitute=fakehots", "x.py"], "Did you mean 'fakehost'?"),
    ],
)
def test_bad_command_lines(python, run, arguments, words):
    done = python(*run, *arguments, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version(python, run):
    assert "usage:" in python(*run, "--help").stdout
    assert python(*run, "--version").stdout.strip() == "0.1.0"


def test_settings_on_the_command_line_reach_children(python, run):
    script = python.script(
        """
        import fakehost, os, sys
        print(fakehost.solve(1, 2))
        if len(sys.argv) == 1:
            os.execv(sys.executable, [sys.executable, __file__, "again"])
        """
    )
    out = python(*run, "--substitute=fakehost", script, PYTHONUNBUFFERED="1").stdout
    assert out.split("\n")[:2] == [ENABLED, ENABLED]


@pytest.mark.parametrize(("options", "expected"), [([], ENABLED), (["-I"], ""), (["-S"], "")])
def test_child_processes(python, run, options, expected):
    script = python.script(CHILD.format(options=options))
    assert python(*run, script).stdout.strip() == expected


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing(python, run, method):
    if sys.platform == "win32" and method != "spawn":
        pytest.skip("this platform has spawn only")
    script = python.script(
        f"""
        import multiprocessing
        import fakehost

        def work(x):
            return fakehost.solve(x, 2, method="flash")

        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print(pool.map(work, [1, 2]))
        """
    )
    assert python(*run, script).stdout.strip() == "[('flash', 1, 2), ('flash', 2, 2)]"


def test_children_still_get_the_sitecustomize_that_ours_hides(python, run):
    (python.folder / "sitecustomize.py").write_text("import builtins, sys\nbuiltins.customized = __name__, __file__\n")
    script = python.script(CHILD.format(options=[]).replace("print(fakehost", "print(customized[0], fakehost"))
    assert python(*run, script).stdout.strip() == f"sitecustomize {ENABLED}"


def test_a_child_in_a_foreign_environment_is_left_in_peace(python, run):
    script = python.script(
        """
        import os, subprocess, sys
        from flashot_backends.__main__ import _STARTUP
        done = subprocess.run([sys.executable, "-c", "print('fine')"], env={**os.environ, "PYTHONPATH": _STARTUP},
                              cwd="/", capture_output=True, text=True)
        print(done.stdout.strip(), done.stderr.strip())
        """
    )
    assert python(*run, script).stdout.strip() == "fine"


def test_threads(python):
    out = python.code(
        """
        import threading
        import flashot_backends
        results = []

        def work():
            flashot_backends.enable()
            import fakehost
            results.append(fakehost.solve(1, 2, method="flash"))

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(results), set(results))
        """
    )
    assert out.strip() == f"16 {{{ENABLED}}}"


def test_a_checkout_that_is_not_installed(python):
    """From the root of a checkout the package is found there, with its adapters and kernels."""
    from tests.core.conftest import ROOT

    python.work = ROOT
    python.environment["PYTHONPATH"] = str(python.folder)
    code = "import fakehost; print(fakehost.solve(1, 2, 'flash'))"
    assert python("-m", "flashot_backends", "-c", code).stdout.strip() == ENABLED
    found = python.code("import flashot_backends.adapters, flashot_backends.kernels as k; print(list(k.__path__))")
    assert str(ROOT / "kernels") in found


# IPython and Jupyter


def test_ipython(python):
    pytest.importorskip("IPython")
    out = python.code(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        import fakehost
        shell.run_line_magic("load_ext", "flashot_backends")
        print(fakehost.solve(1, 2, method="flash"))
        shell.run_line_magic("unload_ext", "flashot_backends")
        shell.run_line_magic("load_ext", "flashot_backends")
        print(fakehost.solve(1, 2, method="flash"))
        shell.run_line_magic("unload_ext", "flashot_backends")
        try:
            fakehost.solve(1, 2, method="flash")
        except ValueError as error:
            print(error)
        """,
        IPYTHONDIR=str(python.work),
    )
    assert out.splitlines()[-3:] == [ENABLED, ENABLED, "Unknown method"]


def test_the_extension_hooks_without_ipython(python):
    out = python.code(
        """
        import fakehost, flashot_backends
        flashot_backends.load_ipython_extension(None)
        print(fakehost.solve(1, 2, method="flash"))
        flashot_backends.unload_ipython_extension(None)
        print(fakehost.solve.__wrapped__ is not None, flashot_backends.hosts.is_enabled())
        """
    )
    assert out.splitlines() == [ENABLED, "True False"]


# pytest


@pytest.fixture
def suite(python):
    """The host's own test-suite, whose conftest captures a function early."""
    python.script("import fakehost\nEARLY = {'solve': fakehost.solve}", "conftest.py")
    python.script(
        """
        import conftest
        import fakehost

        def test_flash(): assert fakehost.solve(1, 2, method="flash") == ("flash", 1, 2)
        def test_captured(): assert conftest.EARLY["solve"](1, 2, method="flash") == ("flash", 1, 2)
        def test_default(): assert fakehost.solve(1, 2) == 3
        """,
        "test_host.py",
    )

    def run(*arguments):
        return python("-m", "pytest", "-p", "no:cacheprovider", *arguments, check=False).stdout

    return run


def test_the_pytest_plugin_enables_before_the_conftest(suite):
    assert "2 failed, 1 passed" in suite()
    out = suite("-p", "flashot_backends.pytest_plugin")
    assert "3 passed" in out
    assert "flashot-backends 0.1.0: substitute: none; backend: by priority" in out


def test_the_pytest_plugin_substitutes(suite):
    out = suite("-p", "flashot_backends.pytest_plugin", "--flashot-substitute=fakehost", "--flashot-backend=torch")
    assert "1 failed, 2 passed" in out
    assert "substitute: fakehost; backend: torch" in out


def test_the_pytest_plugin_refuses_a_misspelt_host(suite, python):
    arguments = ("-m", "pytest", "-p", "flashot_backends.pytest_plugin", "--flashot-substitute=fakehots")
    done = python(*arguments, check=False)
    assert done.returncode == 4
    assert "Did you mean 'fakehost'?" in done.stderr


def test_the_pytest_plugin_in_workers(suite):
    pytest.importorskip("xdist")
    out = suite("-p", "flashot_backends.pytest_plugin", "--flashot-substitute=fakehost", "-n", "1")
    assert "1 failed, 2 passed" in out


def test_the_pytest_plugin_is_not_registered_by_itself(suite):
    assert "flashot-backends 0.1.0" not in suite()
