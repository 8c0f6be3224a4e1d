"""Problem sizes of the benchmarks, as data: n points a side in d dimensions."""

GPU_POINTS = [(256, 2), (1024, 64), (4096, 64), (10_000, 3), (10_000, 64), (10_000, 512), (50_000, 64)]
GPU_BATCH = (64, 256, 64)  # problems, n, d
GPU_N = {3: [256, 1024, 4096, 16_384, 65_536], 64: [256, 1024, 4096, 16_384, 65_536]}  # d: n, for the plots
GPU_D = {10_000: [2, 3, 8, 16, 32, 64, 128, 256, 512, 1024]}  # n: d

CPU_DENSE = 2000
CPU_LAZY = (20_000, 3)
CPU_N = {3: [500, 1000, 2000, 4000, 8000, 16_000]}
CPU_D = {4000: [2, 3, 8, 32, 128, 512]}

EPSILON_PER_DIMENSION = 0.1  # for points of unit variance

# Tests: (rows, columns). Tiny ones for the interpreter, of one tile and of several; odd ones for a card, on both sides
# of every edge: tiles, padding, what fits in registers.
TEST_ONE_TILE = [(1, 1), (5, 7), (64, 128)]
TEST_TILES = [(70, 40), (3, 150)]
TEST_CARD = [(1, 1), (1, 1000), (1000, 1), (63, 129), (257, 255), (513, 511), (1024, 2000), (2049, 777), (3001, 5003)]
TEST_DIMENSIONS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 150]
TEST_CARD_DIMENSIONS = [1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 64, 100, 128, 129, 200, 300]
