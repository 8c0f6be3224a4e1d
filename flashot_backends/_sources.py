"""Read and check the settings' sources with pydantic-settings. Imported when the first setting is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StrictBool, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from .config import PREFIX, SWITCHES, Settings, SettingsError, suggestion, user_file

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _names(value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name.strip() for name in value):
        raise ValueError(f"{value!r} is not a list of names")
    return tuple(name.strip() for name in value)


def _some_names(value: Any) -> Any:
    names = _names(value)
    if not names:
        raise ValueError("the list is empty: name at least one kernel")
    return names


class Model(BaseSettings):
    """The keys and what each accepts. The sources are read one by one, so that an error can say where it comes from."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", validate_default=False)

    backend: Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(_some_names)] = None
    precision: Literal["high", "fast"] = "high"
    fallback: Literal["auto", "warn", "error"] = "auto"
    substitute: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = ()
    numpy_device: Literal["cpu", "cuda"] = "cpu"
    log: StrictBool = False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from the arguments only."""
        return (init_settings,)


class _Table(Model):
    """Where the keys are in a pyproject.toml. Only its source looks at this class."""

    model_config = SettingsConfigDict(pyproject_toml_table_header=("tool", "flashot"))


def read() -> list[tuple[str, dict[str, Any]]]:
    """Return (label, checked values) of each source outside the program, weakest first."""
    files = {
        str(user_file()): user_file(),
        "./pyproject.toml [tool.flashot]": Path("pyproject.toml"),
        "./flashot.toml": Path("flashot.toml"),
    }
    layers = [(label, check(_toml(label, path), label)) for label, path in files.items()]
    layers.append(("environment", check(_environment(), "environment")))
    return [(label, values) for label, values in layers if values]


def check(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return ``values`` in their final types, or raise ``SettingsError`` with every complaint."""
    if not values:
        return {}
    for key in values:
        if key not in Settings._fields:
            raise SettingsError(f"{_place(key, where)} is not a setting.{suggestion(key, Settings._fields)}")
    try:
        model = Model(**values)
    except ValidationError as error:
        complaints = [_complaint(details, where) for details in error.errors()]
        raise SettingsError("\n".join(complaints)) from None
    checked = {key: getattr(model, key) for key in values}
    _check_hosts(checked.get("substitute", ()), where)
    return checked


def _toml(label: str, path: Path) -> dict[str, Any]:
    try:
        if path.name == "pyproject.toml":
            return PyprojectTomlConfigSettingsSource(_Table, path)()
        return TomlConfigSettingsSource(Model, path)()
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingsError(f"{label} cannot be read: {error}") from None


def _environment() -> dict[str, Any]:
    known = {PREFIX + key.upper() for key in Settings._fields}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known and variable not in SWITCHES:
            raise SettingsError(f"{variable} is not a setting.{suggestion(variable, known.union(SWITCHES))}")
    values = dict(EnvSettingsSource(Model)())
    if isinstance(values.get("log"), str):
        values["log"] = _BOOLEANS.get(values["log"].strip().lower(), values["log"])
    return values


def _complaint(details: Any, where: str) -> str:
    key = str(details["loc"][0])
    given = details["input"]
    if details["type"] == "literal_error":
        choices = _choices(key)
        return f"{_place(key, where)}: {given!r} is not one of {', '.join(map(repr, choices))}.{_near(given, choices)}"
    if key == "log":
        return f"{_place(key, where)}: {given!r} is not a boolean; write true or false."
    reason = details.get("ctx", {}).get("error", details["msg"])
    return f"{_place(key, where)}: {reason}."


def _place(key: str, where: str) -> str:
    if where == "environment":
        return PREFIX + key.upper()
    if where in ("configure", "use"):
        return f"{where}({key}=...)"
    return f"{where}: {key}"


def _choices(key: str) -> tuple[str, ...]:
    return Model.model_fields[key].annotation.__args__  # type: ignore[union-attr]


def _near(given: object, choices: tuple[str, ...]) -> str:
    text = suggestion(given, choices)
    return text if "mean" in text else ""


def _check_hosts(names: tuple[str, ...], where: str) -> None:
    if not names:
        return
    from .plugins.manager import registry

    known = [spec.name for spec in registry().adapters()]
    for name in names:
        if name not in known:
            place = _place("substitute", where)
            raise SettingsError(f"{place}: no adapter is named {name!r}.{suggestion(name, known)}")
