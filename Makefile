# Embergate's verbs. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Further arguments for pip, such as an index with torch's CPU build (see README.md).
PIP_ARGS ?=
# make up DETACH=1 returns when everything is ready.
DETACH ?=
# make logs FOLLOW=1 goes on with what is written; PROCESS="gateway" shows one process only.
FOLLOW ?=
PROCESS ?=
# make load: simulated agents, how many start in a second, and for how long.
USERS ?= 16
SPAWN_RATE ?= 4
RUN_TIME ?= 60s
# make load: classes of loadtest/locustfile.py (empty: all that any model can answer); processes of locust; its web page;
# a directory for CSV and HTML; further options, such as LOAD_ARGS="--affinity off --max-ttft-p95 2000".
SCENARIOS ?=
WORKERS ?=
UI ?=
REPORTS ?=
LOAD_ARGS ?=
# Options of make replay, make bill-check and make soak (python -m loadtest COMMAND --help says all).
REPLAY_ARGS ?=
BILL_ARGS ?=
SOAK_ARGS ?=
# make soak: seconds.
DURATION ?= 600
# make up MODEL=kimi-k2.5-tiny serves another model of config.yaml; set on make's own command line only.
WITH_MODEL = $(if $(filter command,$(origin MODEL)),EMBERGATE_MODEL='$(MODEL)')
# make simulate SIMULATE_ARGS="--replicas 64 --sessions 20000" (see embergate simulate run --help).
SIMULATE_ARGS ?=
# make verify-kimi: where to ask and how much, such as VERIFY_ARGS="--limit 0 --out card.json" (--help says all).
VERIFY_ARGS ?=
# make test-kernels KERNEL_ARGS="--write docs/reports/kernels.md"; make gpu-check GPU_ARGS="--write docs/reports/kernels-gpu.md".
KERNEL_ARGS ?=
GPU_ARGS ?=
# Further arguments for pytest, such as PYTEST_ARGS="-k routing"; how many processes make test and make test-fast use.
PYTEST_ARGS ?=
TEST_WORKERS ?= 2

# What clients need, from the development account.
RUNNING = test -f $(DATA_DIR)/dev.env || { echo "There is no $(DATA_DIR)/dev.env yet: run 'make up DETACH=1' first." >&2; exit 1; }; \
	set -a; . $(DATA_DIR)/dev.env; set +a

DATA_DIR := $(or $(EMBERGATE_DATA_DIR),.embergate)
FAST := not slow and not model and not e2e and not chaos and not gpu and not clients and not postgres
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Each process computes with one thread; compiled files are kept, because every process of a test would compile them anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q
IN_PARALLEL := -n $(TEST_WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install up down status logs model test test-fast fast-tests test-kernels gpu-check test-billing-million test-parallel test-postgres test-clients test-judges bench-engine bench-model bench-tiers \
        bench-disaggregation bench-gateway bench-simulator bench-million verify-kimi load replay bill-check soak \
        simulate fmt lint type arch docs

help: ## List the verbs.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- running -------------------------------------------------------------------------------------

up: $(VENV)/.installed ## Install what is needed, then start a gateway and two replicas (DETACH=1: in the background).
	@$(WITH_MODEL) $(BIN)/embergate up $(if $(filter-out 0,$(DETACH)),--detach)

down: $(VENV)/.installed ## Stop what runs.
	@$(BIN)/embergate down

status: $(VENV)/.installed ## Show which processes run.
	@$(BIN)/embergate status || test $$? -eq 1 -o $$? -eq 3

logs: $(VENV)/.installed ## Show what the processes wrote (FOLLOW=1, PROCESS="gateway replica-0").
	@$(BIN)/embergate logs $(if $(filter-out 0,$(FOLLOW)),--follow) $(PROCESS)

load: $(VENV)/.installed-dev ## Let simulated users loose on what runs (USERS, RUN_TIME, SCENARIOS, WORKERS, UI=1, REPORTS, LOAD_ARGS).
	@$(RUNNING); \
	$(BIN)/locust -f loadtest/locustfile.py --host "$$EMBERGATE_URL" --users $(USERS) --spawn-rate $(SPAWN_RATE) \
	    --run-time $(RUN_TIME) --stop-timeout 60 \
	    $(if $(filter-out 0,$(UI)),--web-host 127.0.0.1,--headless --only-summary) \
	    $(if $(filter-out 0,$(WORKERS)),--processes $(WORKERS)) \
	    $(if $(REPORTS),--csv $(REPORTS)/load --html $(REPORTS)/load.html) $(LOAD_ARGS) $(SCENARIOS)

replay: $(VENV)/.installed-dev ## Play a trace against what runs, open loop (REPLAY_ARGS="--trace FILE").
	@$(RUNNING); $(BIN)/python -m loadtest replay $(REPLAY_ARGS)

bill-check: $(VENV)/.installed-dev ## Compare what a client counts with what it is billed for (BILL_ARGS="--requests 100").
	@$(RUNNING); $(BIN)/python -m loadtest bill-check $(BILL_ARGS)

soak: $(VENV)/.installed-dev ## Load what runs for long, watch its memory, audit its books (DURATION=600, USERS).
	@$(RUNNING); $(BIN)/python -m loadtest soak --embergate $(BIN)/embergate --locust $(BIN)/locust \
	    --duration $(DURATION) --users $(USERS) $(SOAK_ARGS)

simulate: $(VENV)/.installed-dev ## Simulate a fleet under several routing policies, with a page of plots (SIMULATE_ARGS).
	@mkdir -p $(DATA_DIR)
	@$(BIN)/embergate simulate run --report $(DATA_DIR)/simulation.html $(SIMULATE_ARGS)

# --- installing ----------------------------------------------------------------------------------

install: $(VENV)/.installed ## Install what is needed to run.

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "Embergate needs Python 3.11 or newer, and there is no $(PYTHON) here: install it, or name it as in 'make up PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Embergate needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one as in 'make up PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -c 'import shutil, sys; sys.exit(shutil.disk_usage(".").free < 3 * 2**30)' || { \
	    echo "Embergate's packages need 3 GiB of free disk here (8 GiB with torch's CUDA build): make room and run it again." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "The virtual environment could not be made: install Python's venv module (on Debian: apt install python3-venv)." >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing Embergate's packages into $(VENV): about 300 MB to download (several GB where torch comes with CUDA)."
	@echo "This takes minutes, once; pip tells below how far it is."
	@$(PIP) install -c constraints.txt $(PIP_ARGS) -e . || { \
	    echo "The packages could not be installed; pip says why above. Mend that (network, disk space, index settings) and run it again." >&2; exit 1; }
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development packages into $(VENV): about 80 MB to download."
	@$(PIP) install -c constraints.txt $(PIP_ARGS) -e '.[dev]' || { \
	    echo "The packages could not be installed; pip says why above. Mend that (network, disk space, index settings) and run it again." >&2; exit 1; }
	@touch $@

model: $(VENV)/.installed ## Prepare the embedded model in both forms.
	@$(BIN)/embergate models prepare --form kimi --form llama

# --- testing -------------------------------------------------------------------------------------

test: $(VENV)/.installed-dev model ## Run every check and the whole test suite, installing what it needs.
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint arch type
	$(PYTEST) $(IN_PARALLEL) $(PYTEST_ARGS)

test-fast: ## Run the quick checks and tests, installing nothing.
	@test -x $(BIN)/pytest || { echo "The development packages are missing: run 'make test' once." >&2; exit 1; }
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint arch type fast-tests

fast-tests:
	$(PYTEST) $(IN_PARALLEL) -m "$(FAST)" $(PYTEST_ARGS)

test-kernels: $(VENV)/.installed-dev ## Check every kernel on the CPU, compile them for sm_90 and print what they take (KERNEL_ARGS).
	$(PYTEST) tests/kernels --deselect tests/kernels/test_triton.py $(PYTEST_ARGS)
	@$(BIN)/python -m kernels.report $(KERNEL_ARGS)

gpu-check: $(VENV)/.installed-dev ## Check and time every kernel on a GPU; without one, say what would be done (GPU_ARGS).
	@$(BIN)/python -m kernels.gpu_check $(GPU_ARGS)

test-billing-million: $(VENV)/.installed-dev ## Check prices, ledger, sums and statements of a million records in decimals.
	EMBERGATE_NUM_RECORDS=1000000 $(PYTEST) tests/unit/billing/test_million.py $(PYTEST_ARGS)

test-postgres: $(VENV)/.installed-dev ## Run everything about money and queues on a real PostgreSQL, which it starts.
	EMBERGATE_REQUIRE_POSTGRES=1 $(PYTEST) $(IN_PARALLEL) -m "postgres and not model" $(PYTEST_ARGS)

test-parallel: $(VENV)/.installed-dev model ## Run models shared out over several ranks, and kill some of these.
	$(PYTEST) tests/unit/backend/parallel $(PYTEST_ARGS)

test-clients: $(VENV)/.installed-dev model ## Run real clients, which it installs from npm and PyPI, against a gateway.
	@command -v npm >/dev/null || { echo "The clients need npm, which comes with Node.js: install it." >&2; exit 1; }
	$(PYTEST) -m clients tests/clients $(PYTEST_ARGS)

test-judges: $(VENV)/.installed-dev model ## Let aiperf and guidellm, which it installs, count what is billed (2.7 GB of disk).
	$(PYTEST) -m clients tests/judges $(PYTEST_ARGS)

bench-engine: $(VENV)/.installed-dev model ## Measure the engine.
	@$(BIN)/python -m tests.bench.bench_engine

bench-model: $(VENV)/.installed-dev ## Measure the parts of one layer, tiny and of Kimi's size.
	@$(BIN)/python -m tests.bench.bench_model

bench-tiers: $(VENV)/.installed-dev model ## Measure cache tiers: hit ratios of a trace, and a restart (two minutes).
	@$(BIN)/python -m tests.bench.bench_tiers

bench-gateway: $(VENV)/.installed-dev ## Measure the gateway.
	@$(BIN)/python -m tests.bench.bench_gateway

bench-disaggregation: $(VENV)/.installed-dev model ## Measure prefill and decode apart against replicas that do both (ten minutes).
	@$(BIN)/python -m tests.bench.bench_disaggregation

bench-simulator: $(VENV)/.installed-dev model ## Play a trace on two live replicas and in the simulator; compare (five minutes).
	@$(BIN)/python -m tests.bench.bench_simulator

bench-million: $(VENV)/.installed-dev ## Simulate a million sessions on 1,024 replicas (3 million requests, minutes of one core).
	@$(BIN)/embergate simulate run --replicas 1024 --policies rendezvous --fidelity flow --sessions 1000000 \
	    --rate 500 --turns 3 $(SIMULATE_ARGS)

verify-kimi: $(VENV)/.installed model ## Verify a served Kimi from outside: the tiny one, or VERIFY_ARGS="--url ... --token ... --model ...".
	@$(BIN)/python -m loadtest.verify_kimi $(VERIFY_ARGS)

# --- writing -------------------------------------------------------------------------------------

fmt: ## Format the code and mend what the linter can.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: ## Check types, strictly.
	$(BIN)/mypy

arch: ## Check who imports whom.
	$(BIN)/lint-imports

docs: $(VENV)/.installed ## Write the pages that are made from the code.
	$(BIN)/python -m embergate.config_reference config.yaml docs/config.md
	$(BIN)/python -m gateway.openapi docs/openapi.yaml
	{ echo '# Decisions'; echo; echo 'Choices that a reader would wonder about, half a page each.'; echo; \
	    for page in docs/decisions/[0-9]*.md; do \
	        sed -n "1s|^# \(.*\)|- [\1]($$(basename $$page))|p" $$page; \
	    done; } > docs/decisions/README.md
