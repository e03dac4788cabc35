# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test check bench gpu docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchtitan  # dev has what its tests need
	touch $(STAMP)

demo: install
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

# Two files at a time, whole files so that each shares what it prepares: one computes while ranks of the other wait.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# mypy reads files, not installed mappings: give it the package as one tree of links.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/muonckpt
	ln -s $(CURDIR)/muonckpt/* build/typed/muonckpt/
	ln -s $(CURDIR)/optimizer $(CURDIR)/converters $(CURDIR)/cli build/typed/muonckpt/
	cd build/typed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p muonckpt
	$(MAKE) test

bench: install
	for name in planner checkpoint reshard step step_plan padding layer_wise; do OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py || exit 1; done

# Kernels on a GPU: their tests, which run on it where there is one, and the benchmarks, which end in time.
gpu: install
	$(BIN)/python -m pytest tests/optimizer/test_kernels.py tests/optimizer/test_elementwise.py tests/optimizer/test_step_kernels.py tests/optimizer/test_capture.py tests/optimizer/test_products.py tests/optimizer/test_stacks.py tests/optimizer/test_scalar.py
	$(BIN)/python benchmarks/newton_schulz.py --limit 150 --out out/newton_schulz.json
	$(BIN)/python benchmarks/step_gpu.py --limit 60 --out out/step_gpu.json

# The examples in README.md and docs/ are run.
docs: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py

clean:
	rm -rf .venv build dist *.egg-info out
