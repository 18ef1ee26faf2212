# Every command of the project; `make help` lists them.
#
# One virtual environment (.venv) holds the Python tools, one target folder what cargo builds.
# Each target depends on what it needs, and nothing is built twice.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := $(abspath .venv)
BIN := $(VENV)/bin
DOCS_VENV := $(abspath .venv-docs)
ARCHITECTURE := $(shell uname -m)
WHEEL_TARGET := $(ARCHITECTURE)-unknown-linux-gnu
GLIBC := 2.28
# Cargo's name for the linker of one target: capitals, and _ for -.
WHEEL_LINKER := CARGO_TARGET_$(shell echo $(WHEEL_TARGET) | tr 'a-z-' 'A-Z_')_LINKER

export VIRTUAL_ENV := $(VENV)
export PYO3_PYTHON := $(BIN)/python
export PYTHONDONTWRITEBYTECODE := 1

# Cargo cannot link tests of the extension, whose symbols come from the interpreter. Its tests are those
# in tests/python. The checks that are Rust tests select the same crates: cargo chooses the features of
# dependencies by the selection, and would build most of them once more for another one.
RUST_TESTED := --workspace --exclude mooncake-python --features mooncake-transfer-engine/rdma,mooncake-verbs/test-util --locked
# With it the extension shares the compiled libraries of the tests: docs/decisions/0042-features-of-libraries.md.
SHARED := --features mooncake-python/library-features
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find crates -name '*.rs' -o -name Cargo.toml -o -name '*.proto' -o -name '*.html')
PYTHON_SOURCES := $(wildcard python tests/python tests/engines scripts benches examples docs/_extensions)

##@ Start here

.PHONY: help
help: ## List every command
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.tools ## Install what building needs (system packages as root) and the tools into .venv

$(VENV)/.tools: scripts/setup.sh scripts/tools.txt
	@bash scripts/setup.sh $(VENV)
	@touch $@

.PHONY: test-tools
test-tools: $(VENV)/.test-tools ## Install what the Python tests import into .venv

$(VENV)/.test-tools: $(VENV)/.tools scripts/test-tools.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r scripts/test-tools.txt
	@touch $@

.PHONY: dev
dev: $(VENV)/.extension ## Build the extension and install it into .venv for work

$(VENV)/.extension: $(VENV)/.tools $(NATIVE_SOURCES)
	@scripts/run-quietly.sh "building the extension (minutes, the first time)" $(BIN)/maturin develop --locked --quiet $(SHARED)
	@touch $@

.PHONY: demo
demo: dev ## Put and get from two processes, and report what happened
	@$(BIN)/mooncake demo

##@ Before you commit

.PHONY: check
check: check-format check-words check-rust check-shape check-fresh check-docs check-python check-deploy ## Check format, lints, types, spelling, dependencies, generated files, deploy/

.PHONY: check-format
check-format: setup ## Check the formatting
	cargo fmt --all --check
	$(BIN)/ruff format --check $(PYTHON_SOURCES)

.PHONY: check-words
check-words: setup ## Check the spelling
	$(BIN)/typos

.PHONY: check-shape
check-shape: setup ## Check dependencies, file sizes and the rules of docs/architecture.md
	cargo test $(RUST_TESTED) --quiet --test code --test dependencies --test docs --test files --test vocabulary --test types
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check bans licenses sources; \
	  else echo "cargo-deny is not installed: only licences were checked"; fi

.PHONY: check-fresh
check-fresh: setup ## Check that generated files are up to date
	cargo test $(RUST_TESTED) --quiet --test fresh
	@$(BIN)/python scripts/generate_native_calls.py --check
	@$(BIN)/python scripts/generate_blocking_api.py --check
	@$(BIN)/python scripts/generate_engine_versions.py --check

.PHONY: check-rust
check-rust: setup ## Lint Rust, with and without RDMA
	cargo clippy --workspace --all-targets --features mooncake-transfer-engine/rdma,mooncake-verbs/test-util --locked -- -D warnings
	cargo clippy -p mooncake-transfer-engine -p mooncake-python --all-targets --no-default-features $(SHARED) --locked -- -D warnings
	cargo clippy -p mooncake-verbs --all-targets --locked -- -D warnings

.PHONY: check-docs
check-docs: setup ## Build the documentation of the crates without warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --workspace --no-deps --locked --quiet

.PHONY: check-python
check-python: dev ## Lint Python, check its types, compare the stubs with the module
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/mypy --strict $(filter-out tests/% examples docs/%,$(PYTHON_SOURCES))
	@# The configuration leaves out torch and others, which stubtest reads whole otherwise.
	$(BIN)/python -m mypy.stubtest mooncake._native --mypy-config-file pyproject.toml $(addprefix --allowlist ,$(wildcard tests/python/stubtest-allowlist.txt))

.PHONY: format
format: setup ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff check --fix-only --quiet $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)

.PHONY: generate
generate: setup ## Write the wire code, the reference pages, the Python API that is generated
	cargo run --locked --quiet -p mooncake-codegen
	@$(BIN)/python scripts/generate_native_calls.py
	@$(BIN)/python scripts/generate_blocking_api.py
	@$(BIN)/python scripts/generate_engine_versions.py

$(DOCS_VENV)/.tools: scripts/docs-tools.txt
	@python3 -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/docs-tools.txt
	@touch $@

.PHONY: docs
docs: dev $(DOCS_VENV)/.tools ## Build the documentation site into docs/_build/html
	@# -E: nothing tells Sphinx that a docstring of the extension changed since its last run.
	@$(DOCS_VENV)/bin/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html
	@echo "docs: open docs/_build/html/index.html"

.PHONY: hooks
hooks: ## Run the fast half of `make check` before each commit
	git config core.hooksPath .githooks

$(VENV)/.deploy-tools: $(VENV)/.tools scripts/deploy-tools.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r scripts/deploy-tools.txt
	@touch $@

.PHONY: check-deploy
check-deploy: $(VENV)/.deploy-tools ## Check deploy/ with systemd-analyze, promtool and kubectl, where installed, and kubernetes-validate
	@scripts/check-deploy.sh

##@ Tests

.PHONY: test
test: test-rust test-counts test-python ## Rust tests, doc tests, instruction counts, Python tests

.PHONY: test-rust
test-rust: setup ## Rust tests and doc tests
	if cargo nextest --version >/dev/null 2>&1; then \
	  cargo nextest run $(RUST_TESTED) --no-fail-fast --status-level skip --test-threads $$(($$(nproc) + 1)) && \
	  cargo test --doc $(RUST_TESTED); \
	else \
	  cargo test $(RUST_TESTED) --no-fail-fast; \
	fi

# Our crates are built once more, optimised; the dependencies are those of the other tests.
COUNTED := CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=0 cargo test $(RUST_TESTED) --test instructions
.PHONY: test-counts
test-counts: setup ## Compare the instructions of hot calls with benches/instructions.txt
	$(COUNTED)

# The tests for the virtual machine come first, so that it runs while the others are built.
.PHONY: build-tests
build-tests: build-rdma-tests ## Build what `make test-rust` and `make test-counts` run
	nice cargo test $(RUST_TESTED) --no-run --quiet
	nice env $(COUNTED) --no-run --quiet

.PHONY: counts
counts: setup ## Write benches/instructions.txt, after a change that is meant or with another compiler
	MOONCAKE_WRITE_COUNTS=1 $(COUNTED)

# Many tests wait for other processes, so that more run at a time than there are cores.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile tests/python

# Tests start hundreds of interpreters, some on an emulated processor: each would compile our modules again.
.PHONY: compile-python
compile-python: setup
	@$(BIN)/python -m compileall -q python/mooncake

.PHONY: test-python
test-python: dev $(VENV)/.test-tools compile-python ## Python tests against the extension that `make dev` built
	$(PYTEST)

.PHONY: build-rdma-tests
build-rdma-tests: setup
	@scripts/test-rdma.sh --build

.PHONY: test-rdma
test-rdma: build-rdma-tests dev $(VENV)/.test-tools compile-python ## Tests of RDMA in a virtual machine with Soft-RoCE
	@scripts/test-rdma.sh

ROUNDS ?= 3
CASES ?= 5000
.PHONY: check-packages
check-packages: setup ## The long tier: package the crates, and build and run a program with the packages alone
	$(BIN)/python scripts/check_packages.py

.PHONY: soak
soak: dev $(VENV)/.test-tools ## The long tier: every test ROUNDS times, CASES cases per property; with MOONCAKE_LONG_TESTS=1 also the tests that take minutes
	$(BIN)/python scripts/check_packages.py
	$(MAKE) check-oldest-rust
	$(MAKE) check-torch-versions
	$(MAKE) test-engines
	for round in $$(seq $(ROUNDS)); do \
	  echo "round $$round of $(ROUNDS), $(CASES) cases a property"; \
	  PROPTEST_CASES=$(CASES) cargo test $(RUST_TESTED) --no-fail-fast; \
	  $(PYTEST); \
	done

.PHONY: test-engines
test-engines: dev ## The long tier: tests with vLLM and LMCache on CPUs, in .venv-engines or MOONCAKE_ENGINES_VENV (7 GB)
	@scripts/test-engines.sh $(ENGINE_TESTS)

.PHONY: check-torch-versions
check-torch-versions: dev ## The long tier: tests of process groups with old versions of torch, 5 GB of downloads each (TORCH_VERSIONS=...)
	$(BIN)/python scripts/check_torch_versions.py $(TORCH_VERSIONS)

OLDEST_RUST := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
.PHONY: check-oldest-rust
check-oldest-rust: ## The long tier: check the crates with the oldest Rust that Cargo.toml promises
	@cargo +$(OLDEST_RUST).0 --version >/dev/null 2>&1 || \
	  { echo "needs Rust $(OLDEST_RUST): rustup toolchain install --profile minimal $(OLDEST_RUST).0"; exit 1; }
	CARGO_TARGET_DIR=target/oldest-rust cargo +$(OLDEST_RUST).0 check --workspace --locked

MEMCHECKED ?= tests/python/test_native_parts.py tests/python/test_compat_pointers.py
.PHONY: memcheck
memcheck: dev $(VENV)/.test-tools ## The long tier: tests of raw memory under valgrind (MEMCHECKED=files of tests/python)
	scripts/memcheck.sh $(BIN)/python $(MEMCHECKED)

.PHONY: bench
bench: setup ## Micro-benchmarks
	cargo bench -p mooncake-benches --locked

##@ Ship

# Only the wheel's target uses this linker: docs/decisions/0002-wheel.md.
.PHONY: wheel
wheel: setup ## Build the wheel into dist/, and try it in clean environments
	@rm -f dist/*.whl
	@ZIG="$$($(BIN)/python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')" \
	ZIG_TARGET=$(ARCHITECTURE)-linux-gnu.$(GLIBC) \
	$(WHEEL_LINKER)=$(CURDIR)/scripts/link-for-wheel.sh \
	scripts/run-quietly.sh "building the wheel (about 8 minutes on 2 cores)" $(BIN)/maturin build --release --locked --target $(WHEEL_TARGET) \
	  --compatibility manylinux_$(subst .,_,$(GLIBC)) --out dist
	@$(BIN)/python scripts/check_wheel.py dist/*.whl

.PHONY: ci
ci: ## Everything that CI runs, as on a fresh machine
	bash .ci/run

.PHONY: clean
clean: ## Remove everything that was built
	rm -rf target dist .venv .venv-docs .venv-engines docs/_build .mypy_cache .pytest_cache .ruff_cache python/mooncake/_native*.so
