"""Problem sizes that tests and benchmarks share: (queries, their tokens, documents, their tokens, d)."""

SHAPES = [
    (1, 1, 1, 1, 1),
    (3, 5, 4, 7, 8),
    (2, 33, 5, 17, 7),
    (5, 3, 2, 65, 33),
    (4, 16, 6, 130, 3),
    (1, 130, 3, 9, 16),
]
SHAPE_IDS = ["x".join(map(str, shape)) for shape in SHAPES]

SCORING = [(1, 32, 10000, 180, 128), (1, 32, 10000, 300, 128), (1, 1024, 10000, 1024, 128), (32, 32, 1000, 300, 128)]
SCORING += [(1, 32, 100, 180, 128)]
TRAINING = [(32, 32, 32, 180, 128), (64, 32, 256, 300, 128), (16, 512, 16, 1024, 128), (1024, 32, 1024, 180, 128)]
