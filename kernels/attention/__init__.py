"""Kernels of Sinkhorn attention: one file per technology, all with the same five functions.

Every tier computes with one `Pairs` (the scores of many problems, never stored) and offers

=============== =====================================================================================
`lse`           (P, n): log-sum-exp over the columns of scores + column potential
`full_step`     a row half-step and the column reduction that follows it, reading the pairs once
`matvec`        (P, n): plan times one vector per problem
`apply`         (P, n, e): plan times values
`pull`          (P, n, d): gradient of the scores, contracted with the columns' features
=============== =====================================================================================

The column direction is the same function on `pairs.T`. A tier also has `applies(request) -> str | None`.
"""
