"""Give ``toyhost.soft_match`` the method "flash": translate the arguments, call the operation, translate back."""

import inspect


def adapt(module, host):
    host.wrap(module, "soft_match", lambda original: _routed(original, host), ("x", "y", "width", "method"))


def _routed(original, host):
    signature = inspect.signature(original)

    def routed(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["method"] == "flash" or host.substituted:
            return _flash(call.arguments["x"], call.arguments["y"], call.arguments["width"])
        return original(*args, **kwargs)

    return routed


def _flash(x, y, width):
    from flashot_backends.ops.sinkhorn import PointCloud, solve

    return solve(PointCloud(x, y), epsilon=width, max_iterations=500, tolerance=1e-7).apply(y) * len(x)
