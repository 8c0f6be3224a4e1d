"""The constants of over-relaxation and annealing, for every framework: ``acceleration`` explains the rules."""

# A cycle at the start divides every error that it can by this: a problem that is easy does not wait for acceleration.
FIRST_FACTOR = 1e6
# However slow the rest, a cycle divides most errors by this at least, so that too large a λ costs little.
LEAST_FACTOR = 2.0
# A cycle grows up to this many iterations and half of those run, and shrinks when half of it divides errors by this.
LONGEST_CYCLE = 32
ENOUGH_FACTOR = 10.0
# How much the gap √(1 − λ) grows at a look that showed no slower mode.
GROWTH = 1.4
WIDEST_GAP = 1 - 1e-6

# Annealing: ε falls by this factor from stage to stage, and stays for this many iterations.
STAGE_FACTOR = 4.0
STAGE_ITERATIONS = 10
MOST_STAGES = 20


def most_stages(max_iterations: int) -> int:
    """At most half of the iterations are spent on stages."""
    return min(MOST_STAGES, max_iterations // (2 * STAGE_ITERATIONS))
