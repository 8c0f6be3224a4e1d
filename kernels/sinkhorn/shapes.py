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
