"""Run a script, a module or a piece of code with the hosts adapted; the program itself stays as it is.

usage: python -m flashot_backends [--SETTING=VALUE ...] (SCRIPT | -m MODULE | -c CODE) [ARGUMENT ...]

SETTING is one of backend, precision, fallback, substitute, numpy-device and log, e.g. --backend=triton,torch.
Python processes that the program starts inherit both the adaptation and these settings, through environment variables
(FLASHOT_ENABLE, FLASHOT_WATCH, PYTHONPATH); those run with `python -I`, `-E` or `-S` do not.
"""

import os
import sys
from types import ModuleType

from . import __version__

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def main(arguments=None):
    """Run what ``arguments`` (default: ``sys.argv[1:]``) say, as the main program."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    while arguments and arguments[0].startswith("--"):
        _option(arguments.pop(0))
    if not arguments:
        _stop(__doc__)
    flag, *rest = arguments
    if flag not in ("-m", "-c"):
        return _run_script(flag, rest)
    if not rest:
        _stop(f"{flag} needs an argument\n\n{__doc__}")
    return _run_module(*rest) if flag == "-m" else _run_code(*rest)


def export_switch():
    """Let the Python processes that this one starts adapt their hosts too."""
    from .autoload import watched

    os.environ["FLASHOT_ENABLE"] = "1"
    os.environ["FLASHOT_WATCH"] = " ".join(watched())
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", _STARTUP)]
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *folders])


def _option(text):
    from .config import Settings, suggestion

    if text in ("--help", "--version"):
        print(__doc__ if text == "--help" else __version__)
        raise SystemExit(0)
    name, equals, value = text[2:].partition("=")
    key = name.replace("-", "_")
    if key not in Settings._fields or not equals:
        _stop(f"{text} is not an option.{suggestion(key, Settings._fields)} Write --backend=triton,torch, for example.")
    os.environ[f"FLASHOT_{key.upper()}"] = value


def _prepare(folder, arguments):
    from .config import SettingsError, settings
    from .hosts import enable

    try:
        if any(name.startswith("FLASHOT_") for name in os.environ):
            settings()  # a misspelt variable is said now, not in the middle of the program
    except SettingsError as error:
        _stop(str(error))
    enable()
    export_switch()
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    sys.argv[:] = arguments


def _run_script(path, rest):
    _prepare(os.path.dirname(os.path.realpath(path)), [path, *rest])
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        import runpy

        return runpy.run_path(path, run_name="__main__")
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        _stop(f"cannot open {path!r}: {error.strerror}")
    return _execute(source, path, path)


def _run_code(code, *rest):
    _prepare("", ["-c", *rest])
    _execute(code, "<string>", None)


def _run_module(name, *rest):
    import runpy

    _prepare(os.getcwd(), ["-m", *rest])
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _execute(source, filename, file):
    """Execute as ``__main__``, and leave that module in place: threads and exit handlers outlive the last line."""
    from importlib.machinery import SourceFileLoader

    module = ModuleType("__main__")
    if file is not None:
        module.__file__ = file
        module.__loader__ = SourceFileLoader("__main__", file)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)


def _stop(message):
    print(message.strip(), file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
