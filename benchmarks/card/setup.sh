# Sourced on the card's machine, from the root of the checkout: ". benchmarks/card/setup.sh".
# Installs what was carried (.whl, .pot) into /tmp/site, what is new of it, and says where Python finds it and us.
mkdir -p /tmp/site
new=$(for wheel in .whl/*.whl .pot/*.whl; do [ -e "$wheel" ] && [ ! -e "/tmp/site/.${wheel##*/}" ] && echo "$wheel"; done)
if [ -n "$new" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site $new &&
    for wheel in $new; do touch "/tmp/site/.${wheel##*/}"; done
fi
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore::SyntaxWarning
export XLA_PYTHON_CLIENT_PREALLOCATE=false HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
