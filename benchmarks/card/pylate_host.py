"""PyLate on one CUDA card through its public functions: its torch path, the peers inside of it, and ours.

python benchmarks/card/pylate_host.py [functions] [rerank] [losses] [train] [peers] [big] [quick]   (default: all)

functions  colbert_scores, colbert_scores_pairwise, colbert_kd_scores, ColBERTScores and XTRScores: times, memory, and errors
           of scores and gradients against PyLate's torch path in float64, with masks; torch.compile of the torch path
rerank     rank.rerank over ragged candidates: times, and the order against float64's
big        20 000 documents of 1 024 tokens and 128 dimensions (2.6e9 numbers): scores, gradient, rank.rerank; ask for it last,
           since a peer that addresses with 32 bits may end the process
losses     one step of Contrastive, CachedContrastive and Distillation with a real model: loss and gradient, time, memory
train      hundreds of steps of Contrastive and tens of CachedContrastive: curves beside the torch path's, which is run
           twice to show what noise is; memory; kernels compiled as lengths change
peers      the same steps by flash-maxsim and late-interaction-kernels, as far as there is time

The model is all-MiniLM-L6-v2 in .model, made by prepare.py; the text is what Python says of itself.
"""

import contextlib
import functools
import os
import random

from facts import QUICK, fact, failed, free, relative, run, say, search_side_by_side, time_for, timed

import torch

import flashot_backends

flashot_backends.enable()


def without_datasets():
    """PyLate names classes of `datasets` in annotations; where it does not import, a stand-in has them."""
    try:
        import datasets
    except ImportError as problem:
        import importlib.machinery
        import sys
        import types

        stand_in = types.ModuleType("datasets")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("datasets", None)

        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        stand_in.__getattr__, stand_in.__version__ = attribute, "0"
        for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
            del sys.modules[name]
        sys.modules["datasets"] = stand_in
        fact("datasets does not import; a stand-in is used", reason=str(problem)[:200])


without_datasets()
from pylate import losses, models, rank, scores

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
VARIABLE = "PYLATE_SCORES_BACKEND"
SYSTEMS = ("torch", "flashot", "flash", "lik")


@contextlib.contextmanager
def backend(name):
    """PyLate's own switch, where there is no argument to ask with."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def size(many, few):
    return few if QUICK else many


# -------------------------------------------------------------------------------------------------------- functions


def tokens(*shape, dtype=HALF, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = torch.randn(*shape, device=DEVICE, generator=generator)
    return torch.nn.functional.normalize(made, dim=-1).to(dtype)


def mask(*shape, holes):
    """Real tokens: those before a length, or each with probability 0.7."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    if holes:
        return torch.rand(*shape, device=DEVICE, generator=generator) < 0.7
    lengths = torch.randint(1, shape[-1] + 1, shape[:-1], device=DEVICE, generator=generator)
    return torch.arange(shape[-1], device=DEVICE) < lengths[..., None]


def named(function, **options):
    return lambda system: lambda q, d: function(q, d, backend=system, **options)


def by_variable(function, **options):
    def call(system):
        def score(q, d):
            with backend(system):
                return function(q, d, **options)

        return score

    return call


def cases():
    """Name, a score function for each system, queries, documents, dtype, whether gradients are wanted."""
    few, many = size((32, 32), (3, 5)), size((1000, 300), (4, 9))
    sets, pairs = size((16, 32, 180), (2, 3, 7)), size(512, 4)
    for holes in (False, True):
        plain = named(scores.colbert_scores, documents_mask=mask(*many, holes=holes))
        name = f"colbert_scores, {'holes' if holes else 'padding'}"
        yield name, plain, (*few, 128), (*many, 128), HALF, False
    for dtype in (BRAIN, SINGLE):
        shape = size((256, 300), (4, 9))
        plain = named(scores.colbert_scores, documents_mask=mask(*shape, holes=False))
        yield "colbert_scores, training", plain, (*size((64, 32), (3, 5)), 128), (*shape, 128), dtype, True
    yield (
        "colbert_scores_pairwise",
        named(scores.colbert_scores_pairwise),
        (pairs, 32, 128),
        (pairs, 180, 128),
        HALF,
        False,
    )
    kd = named(scores.colbert_kd_scores, documents_mask=mask(*sets, holes=False))
    yield "colbert_kd_scores", kd, (sets[0], 32, 128), (*sets, 128), HALF, False
    yield "colbert_kd_scores, training", kd, (sets[0], 32, 128), (*sets, 128), BRAIN, True
    groups = size((64, 2, 180), (3, 2, 7))
    metric = scores.ColBERTScores()
    grouped = by_variable(metric, documents_mask=mask(*groups, holes=False))
    yield "ColBERTScores, training", grouped, (groups[0], 32, 128), (*groups, 128), BRAIN, True
    xtr = by_variable(scores.XTRScores(k=size(256, 8)), documents_mask=mask(*groups, holes=False))
    yield "XTRScores, training", xtr, (groups[0], 32, 128), (*groups, 128), SINGLE, True


def functions():
    for name, score_by, query_shape, document_shape, dtype, train in cases():
        if not time_for(12, name):
            continue
        q, d = tokens(*query_shape, dtype=dtype), tokens(*document_shape, dtype=dtype, seed=1)
        exact = outcome(score_by("torch"), q.double(), d.double(), train)
        systems = {system: score_by(system) for system in SYSTEMS[: 2 if "XTR" in name else None]}  # no peer scores XTR
        if name in ("colbert_scores, padding", "colbert_scores, training"):
            systems["torch.compile"] = torch.compile(score_by("torch"), dynamic=False) if CUDA else score_by("torch")
        for system, score in systems.items():
            try:
                found = outcome(score, q, d, train)
                errors = [relative(one, other) for one, other in zip(found, exact, strict=True)]
                fact(
                    name,
                    dtype=str(dtype)[6:],
                    system=system,
                    **timed(lambda: outcome(score, q, d, train)),
                    errors=errors,
                )
            except Exception as problem:
                failed(name, problem, dtype=str(dtype)[6:], system=system)
        del exact
        free()


def outcome(score, q, d, train):
    """Scores, and the gradients of a fixed mixture of them."""
    if not train:
        with torch.no_grad():
            return [score(q, d)]
    q, d = q.detach().requires_grad_(), d.detach().requires_grad_()
    found = score(q, d)
    return [found.detach(), *torch.autograd.grad((found.to(mixture(found).dtype) * mixture(found)).sum(), (q, d))]


@functools.cache
def _mixture(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)


def mixture(found):
    return _mixture(found.shape, torch.float64 if found.dtype == torch.float64 else torch.float32)


# ----------------------------------------------------------------------------------------------------------- rerank


def rerank():
    queries, candidates, longest = size((10, 1000, 300), (2, 5, 9))
    lengths = torch.randint(
        20 if not QUICK else 2, longest + 1, (queries, candidates), generator=torch.Generator().manual_seed(0)
    )
    q = tokens(queries, 32, 128)
    documents = [[tokens(int(n), 128, seed=7 * i) for i, n in enumerate(row)] for row in lengths]
    ids = [list(range(candidates))] * queries
    exact = ranked(ids, q.double(), [[d.double() for d in row] for row in documents], "torch")
    for system in SYSTEMS:
        if not time_for(10, f"rerank {system}"):
            return
        try:
            found = order(ids, q, documents, system)
            same, apart = 0, 0.0
            for row, wanted in zip(found, exact, strict=True):
                value = dict(wanted)
                same += sum(a == b for a, (b, _) in zip(row, wanted, strict=True))
                apart = max(apart, *(abs(value[a] - right) / abs(right) for a, (_, right) in zip(row, wanted, strict=True)))
            fact(
                "rank.rerank",
                system=system,
                **timed(lambda: order(ids, q, documents, system)),
                same=f"{same} of {queries * candidates} places",
                apart=apart,  # two documents that changed places, by float64
            )
        except Exception as problem:
            failed("rank.rerank", problem, system=system)
        free()


def ranked(ids, queries, documents, system):
    """(id, score) of the documents of each query, best first."""
    with backend(system), torch.no_grad():
        found = rank.rerank(ids, queries, documents)
    return [[(item["id"], float(item["score"])) for item in row] for row in found]


def order(ids, queries, documents, system):
    return [[name for name, _ in row] for row in ranked(ids, queries, documents, system)]


# -------------------------------------------------------------------------------------------------------------- big


def big():
    """More than 2**31 numbers of documents."""
    if not time_for(40, "big"):
        return
    count, length = size((20_000, 1024), (30, 10))
    q, d = tokens(1, 32, 128), torch.empty(count, length, 128, device=DEVICE, dtype=HALF)
    part = size(2000, 10)
    for first in range(0, count, part):
        d[first : first + part] = tokens(part, length, 128, seed=first)
    exact = torch.cat(
        [scores.colbert_scores(q.double(), d[k : k + part].double(), backend="torch") for k in range(0, count, part)], 1
    )

    def scored(system):
        try:
            with torch.no_grad():
                call = lambda: scores.colbert_scores(q, d, backend=system)
                off = (call().double() - exact).abs()
                worst = float((off / exact.abs()).max())
                fact("big, colbert_scores", numbers=float(d.numel()), system=system, **timed(call, 2.0), worst=worst)
        except Exception as problem:
            failed("big, colbert_scores", problem, system=system)
        free()

    scored("flashot")
    scored("torch")
    own = d.detach().requires_grad_()
    wide = torch.linspace(1, 2, count, device=DEVICE)
    for name, weights in (("the sum", torch.ones_like(wide)), ("a mixture", wide)):
        if not time_for(10, f"big, gradient of {name}"):
            return
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        (gradient,) = torch.autograd.grad((scores.colbert_scores(q, own, backend="flashot")[0] * weights).sum(), own)
        peak = torch.cuda.max_memory_allocated() / d.nbytes if CUDA else 0.0
        worst = 0.0
        for k in (0, count // 3, int(count * 0.83), count - 1):
            wanted = d[k].double().requires_grad_()
            (right,) = torch.autograd.grad(
                scores.colbert_scores(q.double(), wanted[None], backend="torch")[0, 0] * weights[k].double(), wanted
            )
            worst = max(worst, relative(gradient[k], right))
        fact(f"big, gradient of {name}", worst=worst, peak_over_documents=peak)
        del gradient
        free()
    ids, documents = [list(range(count))], [list(d.unbind())]
    wanted = exact[0].argsort(descending=True, stable=True).tolist()
    found = order(ids, q, documents, "flashot")[0]
    places, values = sum(a == b for a, b in zip(found, wanted, strict=True)), exact[0].cpu()
    apart = float(((values[found] - values[wanted]).abs() / values[wanted].abs()).max())  # two that changed places
    fact("big, rank.rerank", system="flashot", same=f"{places} of {count} places", first=found[0] == wanted[0], apart=apart)
    for system in SYSTEMS[2:]:  # last: an address that wraps around ends what a process can do on a card
        if time_for(20, f"big {system}"):
            scored(system)


# ------------------------------------------------------------------------------------------------- losses and train


@functools.cache
def pairs():
    """(first words, the rest) of paragraphs on Python's language, or of torch's docstrings where those are missing."""
    try:
        from pydoc_data.topics import topics

        texts = [text for _, text in sorted(topics.items())]
    except ImportError:
        texts = [getattr(torch, name).__doc__ or "" for name in sorted(dir(torch))]
    words = [paragraph.split() for text in texts for paragraph in text.split("\n\n")]
    found = [(" ".join(w[:8]), " ".join(w[8:])) for w in words if 25 <= len(w) <= 160]
    assert len(found) > 500, f"only {len(found)} paragraphs"
    return found


def colbert():
    """all-MiniLM-L6-v2 with a new projection, the same each time."""
    torch.manual_seed(0)
    model = models.ColBERT(
        ".model", embedding_size=size(128, 32), query_length=size(32, 8), document_length=size(180, 24), device=DEVICE
    )
    return model.float().to(DEVICE)


def batch(model, count, seed, negatives=1):
    """Tokenized queries, documents and further documents; only as long as the longest of them."""
    chosen = random.Random(seed).sample(pairs(), count * negatives)
    queries = model.tokenize([query for query, _ in chosen[:count]], is_query=True)
    documents = model.tokenize([document for _, document in chosen[:count]], is_query=False)
    sides = [queries, documents]
    return [{key: value.to(DEVICE) for key, value in side.items()} for side in sides]


def candidate_sets(model, queries, each, seed):
    chosen = random.Random(seed).sample(pairs(), queries * each)
    sides = [
        model.tokenize([q for q, _ in chosen[:queries]], is_query=True),
        model.tokenize([d for _, d in chosen], is_query=False),
    ]
    return [{key: value.to(DEVICE) for key, value in side.items()} for side in sides]


class Compiled:
    """Kernels that Triton compiled or read from its cache while this was listening."""

    def __init__(self):
        self.names = []

    def __enter__(self):
        try:
            from triton import knobs
        except ImportError:
            return self
        self._knobs, self._before = knobs, knobs.compilation.listener

        def listen(*, src, **rest):
            self.names.append(getattr(getattr(src, "fn", None), "__name__", "?"))
            return self._before(src=src, **rest) if self._before else None

        knobs.compilation.listener = listen
        return self

    def __exit__(self, *_):
        if hasattr(self, "_knobs"):
            self._knobs.compilation.listener = self._before


def one_step():
    """Loss, gradient of all weights, time and memory of one step."""
    model = colbert()
    wide, mini = size((256, 64), (6, 3))
    for name, loss, features, labels in (
        ("Contrastive", losses.Contrastive(model), batch(model, size(64, 4), 1), None),
        ("Contrastive, large", losses.Contrastive(model), batch(model, wide, 2), None),
        ("CachedContrastive", losses.CachedContrastive(model, mini_batch_size=mini), batch(model, wide, 2), None),
        (
            "Distillation",
            losses.Distillation(model),
            candidate_sets(model, size(16, 2), 8, 3),
            torch.rand(size(16, 2), 8, device=DEVICE),
        ),
    ):
        exact = None
        for precision in ("float32", "bfloat16")[
            : 1 if name == "CachedContrastive" else None
        ]:  # PyLate's own hook fails there
            for system in SYSTEMS[: 2 if QUICK or name != "Contrastive" else None]:
                if not time_for(12, f"{name} {system}"):
                    return
                step = functools.partial(stepped, model, loss, features, labels, system, precision)
                try:
                    value, gradient = step()
                    exact = exact or (value, gradient)  # PyLate's torch path in float32
                    off = [abs(value - exact[0]) / abs(exact[0]), relative(gradient, exact[1])]
                    fact(
                        f"{name}, {precision}", system=system, **timed(step, 3.0), loss=value, from_torch_in_float32=off
                    )
                except Exception as problem:
                    failed(f"{name}, {precision}", problem, system=system)
                free()


def stepped(model, loss, features, labels, system, precision):
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with backend(system), torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bfloat16"):
        value = loss(features, labels) if labels is not None else loss(features)
    with backend(system):
        value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(kind, system, steps, count, **options):
    """Losses of each step, the pairs of lengths seen, memory on the way and at the peak, and kernels by then."""
    model = colbert()
    model.train()
    loss = getattr(losses, kind)(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    curve, lengths, held, kernels, clocks = [], set(), [], [], []
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with Compiled() as compiled, backend(system.split()[0]):
        for number in range(steps):
            features = batch(model, count, number)
            torch.manual_seed(number)
            begin = clock()
            value = loss(features)
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            curve.append(value.item())
            clocks.append(clock() - begin)
            lengths.add(tuple(feature["input_ids"].shape[1] for feature in features))
            if (number + 1) % max(1, steps // 4) == 0:
                held.append(torch.cuda.memory_allocated() / 2**20 if CUDA else 0.0)
                kernels.append(len(compiled.names))
            if number % 20 == 19 and not time_for(3, f"more than {number + 1} steps of {kind} {system}"):
                break
    peak = torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0
    median = sorted(clocks)[len(clocks) // 2]
    fact(
        f"{kind} x {count}",
        system=system,
        steps=len(curve),
        first=curve[0],
        last50=mean(curve[-50:]),
        ms_a_step=1e3 * median,
        slowest_ms=1e3 * max(clocks[1:] or clocks),
        peak_mb=peak,
        held_mb=held,
        pairs_of_lengths=len(lengths),
        kernels_by_quarter=kernels,
    )
    del model, loss, optimizer
    free()
    return curve


def clock():
    import time

    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def mean(values):
    return sum(values) / len(values)


def train(systems=("torch", "torch again", "flashot")):
    say(len(pairs()), "pairs of texts")
    for kind, steps, count, options in (
        ("Contrastive", size(300, 3), size(64, 4), {}),
        ("CachedContrastive", size(60, 2), size(256, 6), {"mini_batch_size": size(64, 3)}),
    ):
        curves = {}
        for system in systems:
            if time_for(25, f"{kind} {system}"):
                try:
                    curves[system] = trained(kind, system, steps, count, **options)
                except Exception as problem:
                    failed(kind, problem, system=system)
        for system in systems[1:]:
            if system in curves and systems[0] in curves:
                apart = [abs(a - b) for a, b in zip(curves[systems[0]], curves[system], strict=False)]
                fact(
                    f"{kind}, {systems[0]} and {system} apart",
                    in_ten=max(apart[:10]),
                    at_most=max(apart),
                    mean=mean(apart),
                    curve=curves[system][:: max(1, steps // 12)],
                )


def peers():
    if CUDA:
        train(("torch", "flash", "lik"))


if __name__ == "__main__":
    say(torch.cuda.get_device_name() if CUDA else "no card", torch.__version__)
    search_side_by_side()
    run({"functions": functions, "rerank": rerank, "losses": one_step, "train": train, "peers": peers, "big": big})
