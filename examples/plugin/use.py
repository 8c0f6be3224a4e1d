"""A script of toyhost's users: run it with `flashot run`, and the method "flash" is there."""

import numpy as np
import toyhost

generator = np.random.default_rng(0)
x, y = generator.normal(size=(40, 2)), generator.normal(size=(50, 2)) + 1
plain = toyhost.soft_match(x, y, width=0.5)
flash = toyhost.soft_match(x, y, width=0.5, method="flash")
print(f"largest difference: {np.abs(plain - flash).max():.1e}")
