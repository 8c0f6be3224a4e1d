"""The command ``flashot``: run, status, demo, bench, autoload."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, NoReturn

import typer

from .config import SettingsError

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    name="flashot",
    help="Fused kernels inside the libraries you already use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
autoload = typer.Typer(help="Enable at start-up, in every Python of this environment.", no_args_is_help=True)
app.add_typer(autoload, name="autoload")


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:  # everything after it belongs to the program that is run
        from .__main__ import main as run_program

        return run_program(sys.argv[2:])
    try:
        app()
    except SettingsError as error:
        _stop(str(error))
    return None


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _options(version: _Version = False) -> None: ...


@app.command(context_settings=_PASS_ON, add_help_option=False)
def run(context: typer.Context) -> None:
    """Run a script (or -m MODULE, or -c CODE) with the hosts adapted. `flashot run --help` says more."""
    from .__main__ import main as run_program

    run_program(context.args)


@app.command()
def status(
    check: Annotated[bool, typer.Option("--check", help="Import every installed host and adapt it.")] = False,
) -> None:
    """Print each setting with its source, each host and each kernel with the reason when it does not serve."""
    from . import report
    from .config import settings

    settings()  # a misspelt one is said at once
    _try_import("torch")  # to say whether it sees a card
    if check:
        _check_hosts()
    report.show()


@app.command(context_settings=_PASS_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Solve an optimal-transport problem that people know, three ways, and draw a picture."""
    from .demo import main as run_demo

    run_demo(context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Run the benchmarks of a checkout."""
    try:
        benchmarks = importlib.import_module("flashot_backends.benchmarks.__main__")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("flashot_backends.benchmarks"):
            raise
        _stop("the benchmarks are not part of an installed package: run this in a checkout of the repository")
    benchmarks.main(context.args)


@autoload.command()
def on() -> None:
    """Write the start-up file into the active environment."""
    from .autoload import turn_on, watched

    try:
        path = turn_on()
    except (OSError, RuntimeError) as error:
        _stop(f"autoload stays as it is: {error}")
    typer.echo(f"on: {path}\nwatches for: {', '.join(watched())}")


@autoload.command()
def off() -> None:
    """Remove the start-up file."""
    from .autoload import turn_off

    try:
        removed = turn_off()
    except OSError as error:
        _stop(f"autoload stays as it is: {error}")
    typer.echo("\n".join(f"removed: {path}" for path in removed) or "off already")


@autoload.command(name="status")
def autoload_status() -> None:
    """Say whether the start-up file is there, and what it watches for."""
    from .autoload import state

    path, unwatched = state()
    typer.echo(f"on: {path}" if path is not None else "off")
    if unwatched:
        typer.echo(f"not watched yet: {', '.join(unwatched)}; run `flashot autoload on` again")


def _check_hosts() -> None:
    from .hosts import enable
    from .plugins.manager import registry

    enable()
    for spec in registry().adapters():
        for module in spec.modules:
            _try_import(module)


def _try_import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            typer.echo(f"import {module} failed: {type(error).__name__}: {error}", err=True)


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise SystemExit(2)
