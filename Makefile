# Drafter pipeline. `make` lists what can be asked for. Needs: make, Python 3.11 or newer with venv, and a package index.

PYTHON ?= python3
# torch: cpu, or cuda where an NVIDIA GPU is found. TORCH_INDEX names a package index for it (see requirements/README.md).
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ' | grep -v '^0$$'),cuda,cpu)
TORCH_INDEX ?=
TORCH_CPU_FALLBACK := https://download.pytorch.org/whl/cpu
# Parameters of the demo's Dag run as a JSON object: make demo CONF='{"epochs": 2}'
CONF ?= {}

BOOT := .venv/boot
# uv does not read pip's configuration: hand it the index that the user has set for pip.
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(BOOT)/bin/pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}}" $(BOOT)/bin/uv
AIRFLOW := .venv/airflow
TASKS := .venv/tasks
# stop, clean and status use the standard library only, so that they work without the environments, too.
EMBEDDED = $(if $(wildcard $(AIRFLOW)/bin/python),$(AIRFLOW)/bin/python,$(PYTHON)) -m operators.embedded

export UV_PYTHON_DOWNLOADS := never
export UV_SYSTEM_CERTS := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests run tiny models: more threads only wait for each other, on a loaded machine for seconds at a time.
lint test test-quick test-full: export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install install-dev lock demo up stop status clean distclean lint test test-quick test-full

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- environments ---------------------------------------------------------------------------------------------------

install: $(AIRFLOW)/.installed $(TASKS)/.installed $(TASKS)/.torch-$(TORCH) ## Both environments, from the locks

install-dev: $(AIRFLOW)/.dev $(TASKS)/.dev

$(BOOT)/.installed: requirements/boot.txt
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) must be Python 3.11 or newer with venv (Debian: apt-get install python3-venv); or make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(BOOT)
	$(BOOT)/bin/pip install --quiet --require-hashes -r requirements/boot.txt
	@touch $@

$(AIRFLOW)/.installed: requirements/airflow.txt $(BOOT)/.installed
	@test -x $(AIRFLOW)/bin/python || $(UV) venv --quiet --no-project --python $(PYTHON) $(AIRFLOW)
	@echo "Installing $(AIRFLOW)"
	@$(UV) pip sync --quiet --compile-bytecode --python $(AIRFLOW)/bin/python --require-hashes requirements/airflow.txt
	@touch $@

$(TASKS)/.installed: requirements/tasks.txt requirements/demo-target.txt $(BOOT)/.installed
	@test -x $(TASKS)/bin/python || $(UV) venv --quiet --no-project --python $(PYTHON) $(TASKS)
	@rm -f $(TASKS)/.torch-*
	@echo "Installing $(TASKS)"
	@$(UV) pip sync --quiet --compile-bytecode --python $(TASKS)/bin/python --require-hashes requirements/tasks.txt
	@$(UV) pip install --quiet --python $(TASKS)/bin/python --no-deps --require-hashes -r requirements/demo-target.txt
	@touch $@

PIP_TORCH = $(BOOT)/bin/pip --python $(TASKS)/bin/python install --progress-bar off

# Its dependencies are in the lock. The +cpu build is on no plain PyPI: hence the second index, if the first has none.
$(TASKS)/.torch-cpu: requirements/torch-cpu.txt $(TASKS)/.installed
	@rm -f $(TASKS)/.torch-*
	$(PIP_TORCH) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch-cpu.txt \
	$(if $(TORCH_INDEX),,|| { echo "No CPU build of torch at the configured index; trying $(TORCH_CPU_FALLBACK)"; \
		$(PIP_TORCH) --no-deps --index-url $(TORCH_CPU_FALLBACK) -r requirements/torch-cpu.txt; })
	@touch $@

$(TASKS)/.torch-cuda: requirements/torch-cuda.txt $(TASKS)/.installed
	@rm -f $(TASKS)/.torch-*
	$(PIP_TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch-cuda.txt
	@touch $@

$(AIRFLOW)/.dev $(TASKS)/.dev: %/.dev: requirements/dev.txt %/.installed
	@$(UV) pip install --quiet --python $*/bin/python --require-hashes -r requirements/dev.txt
	@touch $@

# torch and what it brings differ between the CPU and the CUDA build, so the lock of tasks leaves them out.
OUTSIDE_LOCK := torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti \
	nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver \
	nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate

lock: $(BOOT)/.installed ## Compile requirements/*.in again
	$(COMPILE) requirements/airflow.in -o requirements/airflow.txt
	$(COMPILE) requirements/tasks.in -c requirements/torch-cuda.txt $(OUTSIDE_LOCK:%=--no-emit-package %) -o requirements/tasks.txt
	$(COMPILE) requirements/dev.in -c requirements/airflow.txt -c requirements/tasks.txt -o requirements/dev.txt

# ---- the services and the demo --------------------------------------------------------------------------------------

demo: install ## Train a real drafter here, from the raw chats to its acceptance length
	@$(AIRFLOW)/bin/python -m operators.embedded demo --conf '$(CONF)'

up: install ## Start S3, MLflow and Airflow
	@$(AIRFLOW)/bin/python -m operators.embedded up

status: ## What runs, and where
	@$(EMBEDDED) status

stop: ## End everything that `up` and `demo` started, and nothing else
	@$(EMBEDDED) stop

clean: ## Stop, then remove data, databases, logs and caches (not the environments)
	@$(EMBEDDED) clean
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find dags operators plugins tasks tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and the environments too
	rm -rf .venv

# ---- tests ----------------------------------------------------------------------------------------------------------

CODE := $(wildcard dags operators plugins tasks tests)
TASKS_TESTS := $(wildcard tests/tasks tests/contract)
# tests/tasks/storage runs a real S3 server, which stands in Airflow's environment.
AIRFLOW_TESTS := $(wildcard tests/operators tests/dags tests/plugins tests/tasks/storage tests/test_*.py)
# Processes for the tests of the tasks side; the other side starts servers, which have the machine for themselves.
JOBS ?= 2
PYTEST_TASKS = $(TASKS)/bin/python -m pytest $(TASKS_TESTS) --ignore=tests/tasks/storage -n $(JOBS)
PYTEST_AIRFLOW = $(AIRFLOW)/bin/python -m pytest $(AIRFLOW_TESTS)

lint: install install-dev ## Format, lint, types
	$(TASKS)/bin/ruff format --check $(CODE)
	$(TASKS)/bin/ruff check $(CODE)
	$(TASKS)/bin/mypy tasks
	$(AIRFLOW)/bin/mypy operators dags plugins

test-quick: install install-dev ## Unit tests, about 3 minutes
	$(PYTEST_TASKS) -m "not slow and not services and not full"
	$(PYTEST_AIRFLOW) -m "not slow and not services and not full"

test: lint ## Everything that needs nothing but Python packages
	$(PYTEST_TASKS) -m "not full"
	$(PYTEST_AIRFLOW) $(wildcard tests/end_to_end) -m "not full"

test-full: lint ## Also what needs a container engine, a browser or a cluster
	$(PYTEST_TASKS)
	$(PYTEST_AIRFLOW) $(wildcard tests/end_to_end)
