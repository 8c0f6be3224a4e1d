"""Loops over every pair of an entropic transport problem.

Each file here serves the operation "sinkhorn" with one technology. It offers

``applies(request) -> str | None``
    why it cannot serve a request (attributes ``array``, ``device``, ``kind``, ``dtype``, ``metric``), or None;
``operator(cost, epsilon, precision) -> Operator``
    the cost of a batch of problems, ready to be reduced (see ``operator.py`` for what it must answer).
"""
