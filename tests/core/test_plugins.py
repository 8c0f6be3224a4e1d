"""Descriptors, and a loader that survives broken plugins."""

import sys

import pytest

from flashot_backends.plugins import AdapterSpec, KernelSpec, manager

GOOD = """
    from flashot_backends.plugins import KernelSpec, hookimpl

    @hookimpl
    def flashot_register_kernels():
        return [KernelSpec("sinkhorn", "{name}", "{name}.kernel", arrays={{"torch"}})]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Write plugins with entry points, then load everything anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(manager, "_registry", None)
    for variable in ("FLASHOT_DISABLE_PLUGINS", "FLASHOT_TRACE_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)

    def write(name, text):
        import textwrap

        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[flashot_backends]\n{name} = {name}\n")

    yield write
    for name in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[name]


def names():
    return {spec.name for spec in manager.registry().kernels("sinkhorn")}


def test_ours_come_first_and_a_plugin_adds(site):
    site("plug_good", GOOD.format(name="plug_good"))
    assert names() >= {"triton", "torch", "reference", "plug_good"}
    specs = manager.registry().kernels("sinkhorn")
    assert specs[0].name == "triton"
    assert [manager.registry().owner(spec) for spec in specs if spec.name == "plug_good"] == ["plug_good"]
    assert "pot" in {spec.name for spec in manager.registry().adapters()}


BROKEN = {
    "raises": "raise OSError('no disk')",
    "syntax": "def (",
    "exits_not": "import no_such_module_at_all",
    "hook_raises": """
        from flashot_backends.plugins import hookimpl
        @hookimpl
        def flashot_register_kernels():
            raise KeyError("inside")
    """,
    "wrong_type": """
        from flashot_backends.plugins import hookimpl
        @hookimpl
        def flashot_register_kernels():
            return [("sinkhorn", "x")]
    """,
    "no_list": """
        from flashot_backends.plugins import hookimpl
        @hookimpl
        def flashot_register_adapters():
            return 3
    """,
    "bad_spec": """
        from flashot_backends.plugins import hookimpl, KernelSpec
        @hookimpl
        def flashot_register_kernels():
            return [KernelSpec("sinkhorn", "has space", "x", arrays={"torch"})]
    """,
    "unknown_hook": """
        from flashot_backends.plugins import hookimpl
        @hookimpl
        def flashot_register_kernel():
            return []
    """,
    "wrong_arguments": """
        from flashot_backends.plugins import hookimpl
        @hookimpl
        def flashot_register_kernels(what):
            return []
    """,
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_a_broken_plugin_warns_once_and_the_others_load(site, kind):
    site(f"plug_{kind}", BROKEN[kind])
    site("plug_zgood", GOOD.format(name="plug_zgood"))
    with pytest.warns(RuntimeWarning, match=f"plugin 'plug_{kind}.*is skipped") as caught:
        loaded = names()
    assert len(caught) == 1
    assert loaded >= {"torch", "plug_zgood"}


def test_a_broken_plugin_is_silent_where_warnings_are_errors(site):
    import warnings

    site("plug_broken", "raise OSError('no disk')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "torch" in names()


def test_ours_win_a_name_and_the_message_names_both(site):
    site("plug_thief", GOOD.format(name="torch"))
    with pytest.warns(RuntimeWarning, match="kernel 'torch' of operation 'sinkhorn'.*'builtin' and 'plug_thief'"):
        specs = manager.registry().kernels("sinkhorn")
    assert [spec.target for spec in specs if spec.name == "torch"] == ["flashot_backends.kernels.sinkhorn.blocks"]


def test_two_plugins_with_one_name(site):
    site("plug_a", GOOD.format(name="same"))
    site("plug_b", GOOD.format(name="same"))
    with pytest.warns(RuntimeWarning, match="'plug_a' and 'plug_b'"):
        assert "same" in names()


def test_blocked_by_name(site, monkeypatch):
    site("plug_bad", "raise OSError('never imported')")
    site("plug_good", GOOD.format(name="plug_good"))
    monkeypatch.setenv("FLASHOT_DISABLE_PLUGINS", "plug_bad, builtin")
    loaded = names()
    assert "plug_good" in loaded
    assert "torch" not in loaded
    assert "plug_bad" not in sys.modules


def test_traced(site, monkeypatch, capsys):
    site("plug_good", GOOD.format(name="plug_good"))
    monkeypatch.setenv("FLASHOT_TRACE_PLUGINS", "1")
    names()
    assert "flashot_register_kernels" in capsys.readouterr().err


def test_not_traced(site, capsys):
    names()
    assert capsys.readouterr().err == ""


def test_a_plugin_may_ask_while_it_is_loaded(site):
    site("plug_asks", "from flashot_backends.plugins.manager import registry\nregistry().kernels()\n")
    assert "torch" in names()


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "Sinkhorn"},
        {"name": ""},
        {"target": "a b"},
        {"target": "a:"},
        {"arrays": "torch"},
        {"devices": "cuda"},
        {"requires": "triton"},
        {"priority": "high"},
    ],
)
def test_kernel_specs_are_checked(fields):
    good = {"operation": "sinkhorn", "name": "x", "target": "a.b:c", "arrays": {"torch"}}
    KernelSpec(**good)
    with pytest.raises((TypeError, ValueError)):
        KernelSpec(**{**good, **fields})


@pytest.mark.parametrize("fields", [{"modules": "ot"}, {"modules": ()}, {"target": "no.function"}, {"name": "No"}])
def test_adapter_specs_are_checked(fields):
    good = {"name": "x", "modules": ("a.b",), "target": "a:b", "distribution": "A", "versions": ">=1"}
    AdapterSpec(**good)
    with pytest.raises((TypeError, ValueError)):
        AdapterSpec(**{**good, **fields})


def test_specs_hash_and_compare():
    one, two = (KernelSpec("sinkhorn", "x", "a", arrays={"torch"}, devices=["cuda"]) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
