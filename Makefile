# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
STAMP := .venv/.installed

.PHONY: install locked lock demo test peers trust fuzz check matrix dist bench gpu docs site clean

install: $(STAMP)

# The package and what the demo draws with; everything else waits for `make test`.
$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $(DEMO)

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchtitan  # dev has what its tests need
	touch $(STAMP)

# The same from files whose hashes are known: all but torch and Triton, whose wheels differ by machine, and what they bring.
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch triton
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(DEMO) $(STAMP)

# Takes the hashes from the registry; needs uv.
lock:
	( uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header --constraint constraints.txt \
	    pyproject.toml --extra dev; \
	  echo 'torchtitan==$(shell sed -n s/^torchtitan==//p constraints.txt)' | uv pip compile --quiet --python-version 3.11 \
	    --generate-hashes --no-annotate --no-header --no-deps -; \
	  echo 'setuptools==$(shell sed -n s/^setuptools==//p constraints.txt)' | uv pip compile --quiet --python-version 3.11 \
	    --generate-hashes --no-annotate --no-header --no-deps - ) \
	| awk '/^[a-z]/ { skip = /^(nvidia|cuda)-|^(torch|triton)==/ || $$1 in seen; seen[$$1] } !skip' > requirements.lock

demo: $(DEMO)
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

# Two files at a time, whole files so that each shares what it prepares: one computes while ranks of the other wait.
# Files begin with the longest, as `tests/durations.json` has them: `make test WHICH=--record-durations` writes it.
# Bytecode is kept, whatever the environment says: else each of hundreds of processes would compile the package.
test: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(WHICH)

# What `make test` skips for want of a package: Megatron, DeepSpeed, peft, and the report in Debian's chromium (with its
# chromium-driver), in an environment of their own.  Megatron's packages ask for Python 3.12, run with 3.11 too, and bring
# more than is needed here; DeepSpeed compiles nothing for a CPU, but asks torch when it is built.
PEERS := .venv-peers
peers: $(PEERS)/.installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PEERS)/bin/python -m pytest -n 2 --dist loadfile tests/integrations/test_deepspeed.py \
	    tests/integrations/test_megatron.py tests/integrations/test_huggingface.py tests/layouts/test_megatron_layouts.py \
	    tests/store/test_torch_dist.py tests/lab/test_browser.py

$(PEERS)/.installed: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[browser,dev]' absl-py peft
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --ignore-requires-python emerging-optimizers megatron-core
	DS_BUILD_OPS=0 $(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	touch $@

# Tries to make it lose something, and prints one table: some minutes; TRUST=10 takes a night, SEED=… is another one.
TRUST ?= 1
SEED ?= 0
trust: install
	OMP_NUM_THREADS=1 MUONCKPT_TRUST=$(TRUST) MUONCKPT_SEED=$(SEED) $(BIN)/python -m pytest tests/trust tests/store/test_hostile_files.py tests/fuzz/test_commands.py

# Changes what parsers read, at random, for so many seconds; keeps what finds something in tests/data/fuzz, which every run tries.
FUZZ ?= 300
fuzz: install
	OMP_NUM_THREADS=1 MUONCKPT_FUZZ=$(FUZZ) $(BIN)/python -m pytest -s tests/fuzz

# The documentation as a site in build/site; open its index.html, with or without a network.  A broken link is an error.
site: .venv/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build
	@echo open build/site/index.html

.venv/.site: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

check: install .venv/.site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p muonckpt
	$(MAKE) test WHICH="-m 'exhaustive or not exhaustive'"

# The suite's core under every Python that is here and every torch from the lowest to the newest, one environment after the other:
# some gigabytes and minutes each.  MATRIX=3.12:2.10 tries that pair only.
matrix: install
	PYTHONPATH=tests $(BIN)/python -m support.matrix $(MATRIX)

# Wheel and sdist in dist/, checked: their contents and metadata, and the demo from the wheel, in an environment without the source.
dist: .venv/.release
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	OMP_NUM_THREADS=1 MUONCKPT_DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/test_packaging.py

.venv/.release: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	touch $@

bench: install
	for name in planner checkpoint reshard step step_alone step_plan padding layer_wise; do OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py || exit 1; done

# What only a GPU can show, in little more than eight minutes.  Nothing is installed: a bare machine with torch, Triton, NumPy and
# pytest will do, by its own Python.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --out out/gpu

# The examples in README.md and docs/ are run.
docs: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py

clean:
	rm -rf .venv $(PEERS) build dist *.egg-info src/*.egg-info out
