"""MaxSim kernels: the loops that touch every pair of tokens, one file per technology."""
