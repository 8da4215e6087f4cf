# Two commands matter: `make serve` and `make test`. Both do all their set-up in .venv and redo only what changed.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m
NATIVE := CMakeLists.txt pyproject.toml $(shell find csrc -type f 2>/dev/null)

.PHONY: serve test check parity wheel lock clean

serve: .venv/.built ## install, fetch the default model, serve it
	$(BIN)/headrace serve $(MODEL)

test: check ## everything that needs no PyTorch: lint, types, layers, kernels, unit, simulation, goldens, http
	$(BIN)/python scripts/check_spills.py build
	$(BIN)/pytest

check: .venv/.test ## the fast part: lint, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

parity: .venv/.test .venv-parity/.installed ## recompute the goldens with transformers and compare
	.venv-parity/bin/python tests/parity/make_goldens.py --check
	HEADRACE_PARITY=1 $(BIN)/pytest tests/parity

wheel: .venv/.test ## a wheel in dist/
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings=build-dir=dist/.build -w dist .

lock: ## renew the hash-pinned locks from the ranges in pyproject.toml
	$(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install -q uv
	.venv-lock/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  pyproject.toml requirements/build.in -o requirements/default.lock
	.venv-lock/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  pyproject.toml --extra test requirements/build.in -o requirements/test.lock

clean:
	rm -rf .venv .venv-parity .venv-lock build dist

.venv/.installed: requirements/default.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements/default.lock
	touch $@

.venv/.built: .venv/.installed $(NATIVE)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Builds for tests offer the AVX-512 kernels in emulation too, so that every machine checks them.
.venv/.test: requirements/test.lock .venv/.built tests/native/emulate_avx512.h
	$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements/test.lock
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings=cmake.define.HEADRACE_EMULATE_AVX512=ON -e .
	touch $@

.venv-parity/.installed: requirements/parity.txt
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/pip install -q --disable-pip-version-check -r requirements/parity.txt
	touch $@
