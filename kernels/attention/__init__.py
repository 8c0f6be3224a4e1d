"""Kernels of Sinkhorn attention: one file per technology, all with the same functions.

Every tier computes with one `Pairs` (the scores of many problems, never stored) and offers

=============== =====================================================================================
`prepare`       the operands as the functions below want them: called once for all of a call's steps
`lse`           (P, n): log-sum-exp over the columns of scores + column potential
`half_step`     (P, n): the row potentials that follow from it
`full_step`     a row half-step and the column reduction that follows it, reading the pairs once
`matvec`        (P, n): plan times one vector per problem
`apply`         (P, n, e): plan times values
`pull`          (P, n, d): gradient of the scores, contracted with the columns' features
=============== =====================================================================================

The column direction is the same function on what `.T` gives. A tier also has `applies(request) -> str | None`, and says
whether it has a `full_step` (`one_pass`), how many base steps are worth writing out instead of a loop (`unroll`), and
whether it computes everything by itself (`whole`).
"""
