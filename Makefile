# The commands of Makeway; `make` alone lists them. README.md and CONTRIBUTING.md tell more.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# What set-up installed comes first: the environment, then the node it chose, then the npm parts.
export PATH := $(CURDIR)/.venv/bin:$(CURDIR)/.venvs/bin:$(CURDIR)/node_modules/.bin:$(PATH)
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
# Without bytecode every Hub, service and notebook compiles what it imports at each start: half of its start.
unexport PYTHONDONTWRITEBYTECODE

QUICK := not slow and not long and not e2e and not browser and not mutations
PYTEST := .venv/bin/python -m pytest
# The tests over random worlds and histories; `make test` runs a part of each.
RANDOM := invariants booting reference pools hosts changing_worlds holds shortcuts second_opinion tight_worlds victim_bounds
# More arguments for pytest: make test ARGS='-k reclaim -x'
ARGS ?=

comma := ,
# Without MACHINES, a demo that is new has a pool that grows, and a later start is as the last one was.
BACKEND = $(if $(MACHINES),MAKEWAY_BACKEND=$(or $(BACKEND_$(strip $(MACHINES))),$(error Use MACHINES=1 or MACHINES=0)) )
BACKEND_0 := local
BACKEND_1 := local$(comma)machines
.PHONY: help setup run test check test-frameworks jupyterhub kube run-kube kube-test images coverage invariants mutations faults requests lint format bench screenshots docs takeover wheel clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## Install everything from the lock files (again: nothing to do, at once)
	@python=$$(sh scripts/find-python) && "$$python" scripts/set_up.py

run: setup ## Start the portal on this machine; KEEP=1 leaves work running after Ctrl-C, MACHINES=0 starts no machines
	@$(if $(KEEP),MAKEWAY_KEEP=1 )$(BACKEND)exec .venv/bin/python -m makeway_hub.embedded

test: setup ## Run every test, the browser's and Kubernetes' too; installs what is missing; BUILD_MINUTES=n limits the build
	@.venv/bin/python scripts/set_up_kube.py --tests
	@.venv/bin/python scripts/set_up.py --browser --containers
	@.venv/bin/python scripts/set_up_frameworks.py $(if $(CI),,--if-possible)
	@.venv/bin/python scripts/run_tests.py $(if $(CI),--slowest 40) --build-minutes $(or $(BUILD_MINUTES),60) -- $(ARGS)

check: setup ## Run the quick tests only (under 90 seconds)
	@$(PYTEST) -n auto --dist loadgroup -q -m "$(QUICK)" $(ARGS)

test-frameworks: setup ## Train with PyTorch, Lightning, Transformers and accelerate, preempted ten times each; SEED=n
	@.venv/bin/python scripts/set_up_frameworks.py
	@NOTICES=all SEED=$(or $(SEED),1) $(PYTEST) -n auto --dist loadgroup -q -m frameworks tests/frameworks $(ARGS)

jupyterhub: setup ## Run the tests of the Hub and the spawners with another JupyterHub; VERSION=5.5
	@.venv/bin/python scripts/other_jupyterhub.py $(or $(VERSION),5.5) $(ARGS)

kube: setup ## Start a Kubernetes cluster on this machine until Ctrl-C; SIMULATED=n adds n nodes of 8 GPUs, GPUS=n virtual GPUs
	@.venv/bin/python scripts/set_up_kube.py
	@exec .venv/bin/python -m kube_cluster up --simulated $(or $(SIMULATED),0) --gpus $(or $(GPUS),4)

run-kube: setup ## Start the portal on a Kubernetes cluster of this machine, as root, until Ctrl-C; GPUS=n virtual GPUs
	@.venv/bin/python scripts/set_up_kube.py
	@exec .venv/bin/python -m kube_cluster run --gpus $(or $(GPUS),10)

kube-test: setup ## Run only the tests on a Kubernetes cluster; the first time, it is built (a quarter of an hour)
	@.venv/bin/python scripts/set_up_kube.py
	@.venv/bin/python -m kube_cluster build
	@$(PYTEST) -q -rs -m kube tests/kube $(ARGS)

images: setup ## Build the container images of helm/images as root; IMAGES="hub notebook" only these, BASE=image on another base
	@.venv/bin/python scripts/set_up_kube.py
	@.venv/bin/python -m kube_cluster images $(if $(BASE),--base $(BASE)) $(IMAGES)

coverage: setup ## Check that the engine's own quick tests reach 98 % of its branches
	@.venv/bin/python -m coverage run --branch --source=makeway_quota.engine -m pytest -q -m "$(QUICK)" tests/engine $(ARGS)
	@.venv/bin/python -m coverage report --skip-covered --show-missing --fail-under=98

invariants: setup ## Live through 3,000 random worlds × histories, fast engine and reference, on all processors (half an hour and more); HISTORIES=n
	@HISTORIES=$(or $(HISTORIES),3000) $(PYTEST) -n logical --dist worksteal -q $(addprefix tests/engine/test_,$(RANDOM:=.py)) \
		tests/autoscale/test_histories.py $(ARGS)

mutations: setup ## Break the engine's rules one by one; each must be noticed by some test (minutes)
	@$(PYTEST) -q -m mutations tests/engine/test_mutations.py $(ARGS)

faults: setup ## Kill service, Hub and replicas, cut off replicas, disturb a node (minutes); KILLS=n HUB_KILLS=n FAULTS=n NODE_FAULTS=n
	@KILLS=$(or $(KILLS),25) HUB_KILLS=$(or $(HUB_KILLS),5) FAULTS=$(or $(FAULTS),60) \
		$(PYTEST) -q -s -m "slow or long" tests/e2e/test_faults.py tests/e2e/test_replicas.py tests/e2e/test_machine_faults.py $(ARGS)
	@.venv/bin/python scripts/set_up_kube.py
	@.venv/bin/python -m kube_cluster build
	@KILLS=$(or $(KILLS),25) FREEZES=$(or $(FREEZES),5) NODE_FAULTS=$(or $(NODE_FAULTS),25) \
		$(PYTEST) -q -s -m kube tests/kube/test_killed_service.py $(ARGS)

requests: setup ## Send thousands of valid and invalid requests to every route of the API; REQUESTS=n of each kind
	@REQUESTS=$(or $(REQUESTS),100) $(PYTEST) -q -m slow tests/web/test_schemathesis.py $(ARGS)

lint: setup ## Check format, style, types, import contracts and templates
	@$(PYTEST) -q tests/house/test_tools.py $(ARGS)

format: setup ## Put the code into the project's format
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

bench: setup ## Measure what users wait for, print it beside its goal and write docs/benchmarks.md
	@.venv/bin/python -m benchmarks

screenshots: setup ## Make the pictures of README.md and the documentation from runs of the stories
	@.venv/bin/python scripts/set_up.py --browser
	@$(PYTEST) -q tests/e2e/test_story.py --screenshots docs/pictures $(ARGS)
	@$(PYTEST) -q -m kube tests/kube/portal/test_story.py --screenshots docs/pictures $(ARGS)

docs: setup ## Make the generated pages: docs/features.md and docs/reference/
	@.venv/bin/python scripts/make_docs.py

takeover: setup ## Record what a killed service of COMMIT leaves, for the test that the code of today takes it over
	@.venv/bin/python scripts/record_takeover.py $(or $(COMMIT),$(error which commit? make takeover COMMIT=…))

wheel: setup ## Build the wheel and the source distribution into dist/
	@.venv/bin/python -m build --no-isolation

clean: ## Remove what was built and cached; keeps the environment and the portal's state in var/
	@rm -rf dist build htmlcov test-results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	@find hub_config spawner quota_service widgets device_plugin kube_cluster tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +
