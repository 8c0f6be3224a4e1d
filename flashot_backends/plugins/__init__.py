'''Plugins: how kernels and adapters, ours and yours, come in.

A plugin is a module (or object) named by an entry point of the group ``flashot_backends``::

    [project.entry-points.flashot_backends]
    my_plugin = "my_package.plugin"

It implements one or both hooks and computes nothing: it returns descriptors whose ``target`` is imported later::

    from flashot_backends.plugins import AdapterSpec, KernelSpec, hookimpl

    @hookimpl
    def flashot_register_kernels():
        return [KernelSpec("sinkhorn", "mine", "my_package.kernel", arrays={"torch"}, priority=5)]

    @hookimpl
    def flashot_register_adapters():
        return [AdapterSpec("myhost", ("myhost.solver",), "my_package.adapter:adapt", "myhost", ">=1,<2")]

A kernel target has ``applies(request)``, which returns ``None`` or the reason why it cannot serve the request, and the
functions that its operation's contract asks for (read ``flashot_backends.ops.<operation>``). An adapter target is
``adapt(module, host)``, where ``host`` is a ``flashot_backends.hosts.Host``.

Names are unique. Ours win; a plugin that claims a taken name, that fails to import or that returns something else is
skipped as a whole, with one ``RuntimeWarning``. ``FLASHOT_DISABLE_PLUGINS=name,name`` blocks plugins by entry-point
name, and ``FLASHOT_TRACE_PLUGINS=1`` prints every hook call to standard error. ``examples/plugin/`` is a whole one.
'''

import pluggy

from .specs import PROJECT, AdapterSpec, KernelSpec

hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["AdapterSpec", "KernelSpec", "hookimpl"]
