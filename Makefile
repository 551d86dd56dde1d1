# Every target sets up what it needs in .venv/ and works from a fresh clone; nothing has to be activated.
# `make test TORCH=2.14.1 PYTHON=python3.13`: a torch or a Python that the command names has an environment of its own.
# Another torch may want another setuptools, so the pin of that gives way as well.
chosen_python := $(if $(filter undefined default,$(origin PYTHON)),,-python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
VENV := .venv$(if $(TORCH),-torch$(TORCH))$(chosen_python)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes that share the tests, whose time is mostly waiting.
TEST_WORKERS ?= 4
# For each decoder of `make fuzz`.
FUZZ_S ?= 300
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: setup demo test check fmt proto bench docs conformance clients engines stress fuzz gpu clean

setup: $(READY)

$(BIN)/python:
	$(if $(PYTHON),,$(error no Python 3.11 or newer with venv was found; install one, or name it: make PYTHON=/path/to/python))
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt tools/generate_proto.py tools/link_for_type_checkers.py | $(BIN)/python
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/; /^setuptools==/d)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[examples,dev]' -c $(VENV)/constraints.txt
	$(BIN)/python tools/link_for_type_checkers.py
	$(BIN)/python tools/generate_proto.py --install
	touch $@

demo: $(READY)  ## trains the parameter-server example
	$(BIN)/python examples/parameter_server.py --min-accuracy 95

# The tests start hundreds of processes, each of which would compile the package.
test: export PYTHONDONTWRITEBYTECODE :=
test: check  ## every check there is
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

check: $(READY)  ## the checks that run no test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_proto.py --check

fmt: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(READY)  ## rpcdist/_proto/ from proto/
	$(BIN)/python tools/generate_proto.py

bench: $(READY)  ## compares with torch, Gloo and, with RAY=/path/to/python, Ray; BENCH=--write keeps the tables
	$(BIN)/python benchmarks/rpc.py $(BENCH)
	$(BIN)/python benchmarks/rpc.py --channels tcp $(BENCH)
	$(BIN)/python benchmarks/rpc.py --channels grpc $(BENCH)
	$(BIN)/python benchmarks/rpc.py --unsuspecting $(BENCH)
	$(if $(RAY),$(BIN)/python benchmarks/rpc.py --ray $(RAY) $(BENCH))
	$(BIN)/python benchmarks/scale.py $(BENCH)
	$(BIN)/python benchmarks/scale.py --live-view 100 $(BENCH)
	$(BIN)/python benchmarks/inspection.py $(BENCH)
	$(BIN)/python benchmarks/floors.py $(BENCH)
	$(BIN)/python benchmarks/call_cost.py
	$(BIN)/python benchmarks/collectives.py $(BENCH)
	$(BIN)/python benchmarks/autograd.py $(BENCH)
	$(BIN)/python benchmarks/autograd.py --channels grpc $(BENCH)
	$(BIN)/python benchmarks/ddp.py $(BENCH)
	$(BIN)/python benchmarks/torch_engines.py $(BENCH)
	$(BIN)/python benchmarks/slow_link.py $(BENCH)
	$(BIN)/python benchmarks/elastic.py $(BENCH)
	$(BIN)/python benchmarks/pipeline.py $(BENCH)
	$(BIN)/python benchmarks/parameter_server.py $(BENCH)
	$(BIN)/python benchmarks/weights.py $(BENCH)

# Twenty small packages, which nothing else here needs; once they are installed, the site is built offline.
$(VENV)/.docs-ready: $(READY)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c $(VENV)/constraints.txt
	touch $@

docs: $(VENV)/.docs-ready  ## the site, in out/site/: no dead link, and every public name
	$(BIN)/zensical build --strict --clean
	$(BIN)/python tools/site_names.py

conformance: $(READY)  ## torch's own tests against rpcdist
	$(BIN)/python tests/conformance/run_conformance.py --write; rpc=$$?; \
	$(BIN)/python tests/conformance/run_c10d_conformance.py --write && exit $$rpc

# Beside .venv/: the libraries bring a hundred packages, which nothing else here needs. The source package of Accelerate
# has its tests.
CLIENTS_READY := out/clients/.ready
$(CLIENTS_READY): pyproject.toml constraints.txt tests/clients/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv out/clients
	out/clients/bin/python -m pip install --quiet -e . -r tests/clients/requirements.txt -c constraints.txt
	rm -rf out/clients/sources
	out/clients/bin/python -m pip download --quiet --no-deps --no-binary accelerate --dest out/clients/sources \
		$$(grep '^accelerate==' tests/clients/requirements.txt)
	tar -xzf out/clients/sources/accelerate-*.tar.gz -C out/clients/sources
	touch $@

# The clients have limits of seconds for processes that they start, in which each would compile the package.
clients: export PYTHONDONTWRITEBYTECODE :=
clients: $(CLIENTS_READY)  ## libraries on torch and on rpcdist; CLIENTS=--write keeps the table, CLIENTS=Fabric runs one
	out/clients/bin/python tests/clients/run_clients.py $(CLIENTS)

# Ray and its trainer go into .venv/, where nothing else needs them; Slurm and Open MPI are Debian's.
engines: export RPCDIST_ENGINES := 1
engines: $(READY)  ## jobs on Ray, Slurm and MPI, which this installs where they are missing; takes root for Slurm
	$(BIN)/python -m pip install --quiet 'ray[train]>=2.40'
	which srun slurmctld munged mpirun >/dev/null || apt-get install -y --no-install-recommends slurm-wlm munge openmpi-bin
	$(BIN)/pytest tests/engines tests/launch/test_steps.py

stress: $(READY)  ## random load, and the full sets of the tests that vary dtypes, sizes and faults
	RPCDIST_TEST_FULL=1 $(BIN)/pytest -m stress
	RPCDIST_TEST_FULL=1 $(BIN)/pytest -m "not stress"

fuzz: $(READY)  ## the decoders by atheris, FUZZ_S seconds each, and a living worker by hypothesis
	$(BIN)/python -m pip install --quiet --no-deps atheris==3.0.0
	for target in envelopes values compact_values passes messages handshakes membership failures facts store \
			store_files groups group_messages layouts; do \
		$(BIN)/python tools/fuzz_decoders.py $$target -max_total_time=$(FUZZ_S) || exit 1; done
	RPCDIST_TEST_FULL=1 $(BIN)/pytest tests/attacks/test_live_fuzzing.py

# What CuPy is for depends on torch's CUDA. Each command has a limit, so that a GPU that hangs ends the target.
CUPY ?= cupy-cuda$(shell $(BIN)/python -c 'import torch; print((torch.version.cuda or "12").partition(".")[0])')x
gpu: $(READY)  ## what needs a GPU: tests, torch's own tests of RPC, and the comparison with torch and NCCL
	$(BIN)/python -m pip install --quiet '$(CUPY)>=14'
	timeout --foreground -k 60 3600 $(BIN)/pytest -m gpu -rs; tests=$$?; \
	timeout --foreground -k 60 3600 $(BIN)/python tests/conformance/run_conformance.py --category gpu; torchs=$$?; \
	timeout --foreground -k 60 3600 $(BIN)/python benchmarks/gpu.py && exit $$((tests + torchs))

clean:
	rm -rf .venv .venv-torch* .venv-python* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
