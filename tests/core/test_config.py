"""Settings: precedence, checks, suggestions, scopes."""

import os
import subprocess
import sys
import threading

import pytest

from flashot_backends import config
from flashot_backends.config import Settings, SettingsError, configure, settings, sources, use

pytestmark = pytest.mark.usefixtures("clean_settings")


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "config" / "flashot" / "flashot.toml"
    file.parent.mkdir(parents=True)
    return file


def test_defaults():
    assert settings() == Settings(None, "high", "auto", (), "cpu", False)
    assert set(sources().values()) == {(value, "default") for value in (None, "high", "auto", (), "cpu", False)}


def test_each_source_beats_the_one_below(tmp_path, monkeypatch, user_file):
    def now():
        config.reload()
        value, source = sources()["backend"]
        assert settings().backend == value
        return value, source

    user_file.write_text('backend = ["user"]')
    assert now() == (("user",), str(user_file))
    (tmp_path / "pyproject.toml").write_text('[tool.flashot]\nbackend = ["project"]')
    assert now() == (("project",), "./pyproject.toml [tool.flashot]")
    (tmp_path / "flashot.toml").write_text('backend = ["local", "second"]')
    assert now() == (("local", "second"), "./flashot.toml")
    monkeypatch.setenv("FLASHOT_BACKEND", "variable, other")
    assert now() == (("variable", "other"), "environment")
    configure(backend="configured")
    assert now() == (("configured",), "configure()")
    with use(backend=["used"]):
        assert now() == (("used",), "use()")
        with use(backend=["inner"]):
            assert now() == (("inner",), "use()")
        assert now() == (("used",), "use()")
    assert now() == (("configured",), "configure()")
    configure(backend=None)
    assert now() == (("variable", "other"), "environment")


def test_a_source_leaves_the_other_keys_alone(tmp_path, monkeypatch):
    (tmp_path / "flashot.toml").write_text('precision = "fast"\nlog = true')
    monkeypatch.setenv("FLASHOT_NUMPY_DEVICE", "cuda")
    assert settings() == Settings(precision="fast", numpy_device="cuda", log=True)
    assert sources()["fallback"] == ("auto", "default")


def test_a_pyproject_without_our_table_says_nothing(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.other]\nbackend = 3')
    assert settings() == Settings()


def test_empty_variables_count_as_unset(monkeypatch):
    monkeypatch.setenv("FLASHOT_BACKEND", "")
    monkeypatch.setenv("FLASHOT_SUBSTITUTE", "")
    assert settings() == Settings()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bakend": ["torch"]}, ["configure(bakend=...)", "Did you mean 'backend'?"]),
        ({"colour": 1}, ["configure(colour=...)", "Known: 'backend', 'fallback'"]),
        ({"_env_file": "x"}, ["configure(_env_file=...)", "not a setting"]),
        ({"fallback": "eror"}, ["'eror'", "'auto', 'warn', 'error'", "Did you mean 'error'?"]),
        ({"precision": "High"}, ["'High'", "Did you mean 'high'?"]),
        ({"numpy_device": "gpu"}, ["'gpu'", "'cpu', 'cuda'"]),
        ({"log": "true"}, ["'true' is not a boolean"]),
        ({"log": 1}, ["1 is not a boolean"]),
        ({"backend": []}, ["name at least one kernel"]),
        ({"backend": ["torch", 3]}, ["['torch', 3] is not a list of names"]),
        ({"backend": "torch,,triton"}, ["is not a list of names"]),
        ({"substitute": ["pott"]}, ["no adapter is named 'pott'", "Did you mean 'pot'?"]),
        ({"fallback": "x", "precision": "y"}, ["fallback", "precision"]),
    ],
)
@pytest.mark.parametrize("door", ["configure", "use"])
def test_bad_settings_are_refused_and_change_nothing(given, words, door):
    configure(fallback="warn")
    with pytest.raises(SettingsError) as caught:
        if door == "configure":
            configure(**given)
        else:
            with use(**given):
                pytest.fail("entered")
    for word in words:
        assert word.replace("configure(", f"{door}(") in str(caught.value)
    assert settings() == Settings(fallback="warn")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FLASHOT_FALLBACK", "atuo", ["FLASHOT_FALLBACK: 'atuo'", "Did you mean 'auto'?"]),
        ("FLASHOT_BAKCEND", "torch", ["FLASHOT_BAKCEND is not a setting", "Did you mean 'FLASHOT_BACKEND'?"]),
        ("FLASHOT_LOG", "maybe", ["FLASHOT_LOG: 'maybe' is not a boolean"]),
        ("FLASHOT_SUBSTITUTE", "pot,geomlos", ["FLASHOT_SUBSTITUTE: no adapter is named 'geomlos'"]),
    ],
)
def test_bad_variables_are_named(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        settings()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("ON", True), ("no", False), ("0", False)])
def test_booleans_in_variables(monkeypatch, text, value):
    monkeypatch.setenv("FLASHOT_LOG", text)
    assert settings().log is value


def test_switches_are_no_misspelt_settings(monkeypatch):
    for name in ("ENABLE", "WATCH", "DISABLE_PLUGINS", "TRACE_PLUGINS", "PLAIN_LAUNCH"):
        monkeypatch.setenv(f"FLASHOT_{name}", "0")
    assert settings() == Settings()
    monkeypatch.setenv("FLASHOT_LOG", "0")  # so that what checks them is asked
    config.reload()
    assert settings() == Settings()


def test_nothing_is_imported_where_nothing_is_set(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'another'\n")
    code = "import sys; from flashot_backends.config import settings; settings(); print('pydantic' in sys.modules)"
    for text, expected in (("", "False"), ("[tool]\nflashot = {log = false}", "True")):
        with (tmp_path / "pyproject.toml").open("a") as file:
            file.write(text)
        environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("FLASHOT_")}
        environment |= {"XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == expected, done.stderr


def test_variables_in_small_letters(monkeypatch):
    monkeypatch.setenv("flashot_precision", "fast")
    assert settings().precision == "fast"


def test_without_a_home(monkeypatch):
    """As in a container whose user is a number."""
    for name in ("XDG_CONFIG_HOME", "HOME", "APPDATA", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert settings() == Settings()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("flashot.toml", "backend = [", ["./flashot.toml cannot be read"]),
        ("flashot.toml", 'substitue = ["pot"]', ["./flashot.toml: substitue", "Did you mean 'substitute'?"]),
        ("flashot.toml", 'log = "true"', ["./flashot.toml: log", "not a boolean"]),
        ("pyproject.toml", '[tool.flashot]\nfallback = "none"', ["[tool.flashot]: fallback", "'none'"]),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError) as caught:
        settings()
    for word in words:
        assert word in str(caught.value)


def test_use_ends_with_its_block_also_when_it_raises():
    with pytest.raises(ZeroDivisionError), use(precision="fast"):
        raise ZeroDivisionError
    assert settings().precision == "high"


def test_use_decorates():
    @use(precision="fast")
    def inside():
        return settings().precision

    assert (inside(), inside(), settings().precision) == ("fast", "fast", "high")


def test_configure_inside_use_shows_where_use_is_silent():
    with use(precision="fast"):
        configure(fallback="warn", precision="high")
        assert settings()[1:3] == ("fast", "warn")
    assert settings()[1:3] == ("high", "warn")


def test_use_stays_in_its_thread_and_configure_does_not():
    seen = {}

    def look(key):
        seen[key] = settings()[1:3]

    with use(precision="fast"):
        configure(fallback="warn")
        thread = threading.Thread(target=look, args=("other",))
        thread.start()
        thread.join()
        look("here")
    assert seen == {"other": ("high", "warn"), "here": ("fast", "warn")}


def test_log_prints_to_standard_error(capsys):
    config.logger.info("before")
    with use(log=True):
        config.logger.info("what ran %s", "where")
    config.logger.info("after")
    assert capsys.readouterr().err == "flashot: what ran where\n"
