"""Be called right before or right after a chosen module is executed. Imports nothing but ``sys``.

Finders run under the interpreter's one import lock, so ours must neither import anything nor wait for a module: the
thread that executes it may be waiting for the lock. (Hooks that look a submodule up anew wait for its parent module.)
"""

import sys


class _Loader:
    """Runs another loader, with our callbacks before and after. For the rest of the world it is that other loader."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        spec = module.__spec__
        spec.loader = module.__loader__ = self.loader
        _call(FINDER.before.pop(spec.name, ()), module)
        self.loader.exec_module(module)
        _call(FINDER.after.get(spec.name, ()), module)


class _Finder:
    """Lets the other finders find a watched module, and puts our loader before theirs."""

    def __init__(self):
        self.before = {}  # module name: callbacks, called once
        self.after = {}  # module name: callbacks, called at each execution, that of a reload too

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.before and fullname not in self.after:
            return None
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


FINDER = _Finder()


def before(name, callback):
    """Call ``callback(module)`` once, before the module is executed for the first time."""
    _add(FINDER.before, name, callback)


def after(name, callback):
    """Call ``callback(module)`` whenever the module has been executed."""
    _add(FINDER.after, name, callback)


def _add(table, name, callback):
    if callback not in table.get(name, ()):
        table[name] = (*table.get(name, ()), callback)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def _call(callbacks, module):
    for callback in callbacks:
        callback(module)
