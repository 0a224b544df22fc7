# Needs make and Python 3.11 or later; everything else is installed into .venv (tests) and .venv-run (serving only).
PYTHON ?= python3

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help run envoy test coverage check format demo sandbox bench soak compiled docs proto lock hashes sbom audit clean

# Builds of this package use the pinned backend too.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := .venv/bin
PINS := pyproject.toml constraints.txt

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

run: .venv-run/.stamp .run/admin-token ## serve descriptors/ on the embedded store, on the usual ports
	@echo 'Once it says "serving", try in another terminal, six times within a minute:'
	@echo '  .venv-run/bin/ratelimit-rls ask --domain demo --descriptor user=alice'
	@echo 'or look at http://localhost:6070/rlconfig and http://localhost:8080/healthcheck. Tiers, users and keys:'
	@echo '  curl -H "Authorization: Bearer $$(cat .run/admin-token)" localhost:8082/api/v1/tiers'
	@echo 'and what else there is at http://localhost:8082/docs. Ctrl-C stops it.'
	@RLS_RULES=descriptors RLS_DRAIN_DELAY=0s RLS_DATABASE_URL=sqlite:///.run/records.db \
	  RLS_ADMIN_TOKEN=$$(cat .run/admin-token) exec .venv-run/bin/ratelimit-rls serve

# What administrators made is kept in .run until it is removed by hand; `make clean` does not.
.run/admin-token: | .venv-run/.stamp
	@mkdir -p -m 700 .run
	@(umask 077 && .venv-run/bin/python -c 'import secrets; print(secrets.token_urlsafe(32))' > $@)

envoy: .venv/.stamp ## a real Envoy in front of `make run`, on port 10000
	@$(BIN)/python envoy/front.py

test: check ## everything: the checks, then every test, the quick ones first
	$(BIN)/python -m tests.run_all

# Tests that count time or memory may fail while they are traced; `make test` judges them.
coverage: .venv/.stamp ## branch coverage of the package over all tests, at least 90 %; build/coverage/html shows it
	rm -rf build/coverage && mkdir -p build/coverage
	-PYTEST_ADDOPTS=--timeout=300 $(BIN)/coverage run -m tests.run_all
	$(BIN)/coverage combine -q
	$(BIN)/coverage html -q
	$(BIN)/coverage report

check: .venv/.stamp ## lint, format, types and layers; no tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.stamp ## write the code the way `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: .venv/.stamp ## a real Envoy in front: watch 200s turn into 429s
	@$(BIN)/python envoy/demo.py

sandbox: .venv/.stamp ## NAME=shadow: run that folder of envoy/ and verify it; without a name, all of them
	@$(BIN)/python envoy/run.py $(NAME)

bench: .venv/.stamp ## calls per second and CPU per call, service and Redis apart
	$(BIN)/python -m bench

soak: .venv/.stamp ## two hours of load, of faults and of a million keys, watching memory and errors
	$(BIN)/python -m bench.fault_soak
	$(BIN)/python -m bench.fault_soak --cluster
	$(BIN)/python -m bench.keys_soak
	$(BIN)/python -m bench.distinct_callers
	$(BIN)/python -m bench.series_soak
	$(BIN)/python -m bench.accounts_soak
	$(BIN)/python -m bench.soak
	$(BIN)/python -m bench.simulate_soak
	$(BIN)/python -m bench.attack_soak --addresses different
	$(BIN)/python -m bench.attack_soak --addresses same
	$(BIN)/python -m tests.fuzz --minutes 10
	$(BIN)/python -m tests.support.readers

compiled: .venv/.stamp ## dist/: a wheel whose hot path is compiled to C, for this version of Python and this platform
	RATELIMIT_RLS_COMPILE=1 $(BIN)/python -m build --wheel --outdir dist .

docs: proto ## write reference pages, pictures, dashboards and the schema of the chart anew from the code
	$(BIN)/python -m tools.reference.generate
	$(BIN)/python -m tools.pictures
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.chart_schema

PROTOS := ratelimit_rls/protos
SERVICES := envoy/service/ratelimit/v3/rls envoy/service/auth/v3/external_auth kuadrant/service/ratelimit/v1/service \
  ratelimit_rls/v1/rate_limiter envoy/service/discovery/v3/ads ratelimit/config/ratelimit/v3/rls_conf
proto: .venv/.stamp ## compile the .proto files to the descriptor set in the package
	$(BIN)/python -m grpc_tools.protoc -I $(PROTOS) --include_imports \
	  --descriptor_set_out=$(PROTOS)/descriptors.binpb $(SERVICES:%=$(PROTOS)/%.proto)

lock: ## pin the newest versions of everything in constraints.txt and requirements/
	@$(MAKE) --no-print-directory .python-is-new-enough
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= build/lock/bin/pip install -q --upgrade pip hatchling
	PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= build/lock/bin/pip install -q --group test --group lint --group audit '.[archive]'
	echo '# Every version this is built and tested with; `make lock` writes it.' > constraints.txt
	build/lock/bin/pip freeze --all --exclude ratelimit-rls >> constraints.txt
	rm -rf build/lock
	$(MAKE) --no-print-directory hashes

hashes: .venv/.stamp ## write requirements/ from constraints.txt: what the image installs, with hashes
	PIP_CONSTRAINT= $(BIN)/python tools/lock.py

sbom: .venv/.stamp ## dist/sbom.cdx.json: the packages of the image, as CycloneDX
	@rm -rf build/sbom && mkdir -p dist && $(PYTHON) -m venv --without-pip build/sbom
	@PIP_CONSTRAINT= $(BIN)/python -m pip --python build/sbom/bin/python install -q --require-hashes \
	  --only-binary :all: --report build/sbom/dependencies.json -r requirements/image.txt
	@$(BIN)/python -m pip --python build/sbom/bin/python install -q --no-deps --report build/sbom/project.json .
	@build/sbom/bin/python tools/sbom.py build/sbom --report build/sbom/dependencies.json \
	  --report build/sbom/project.json > dist/sbom.cdx.json
	@rm -rf build/sbom
	@echo 'dist/sbom.cdx.json'

audit: .venv/.stamp ## known vulnerabilities of what the image installs; SERVICE=pypi or osv is asked
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
	  $(BIN)/python -m pip --python build/audit/bin/python install -q --group audit; }
	build/audit/bin/pip-audit --strict --disable-pip --require-hashes --vulnerability-service $(or $(SERVICE),pypi) \
	  -r requirements/image.txt -r requirements/build.txt

clean: ## remove what the other targets made
	rm -rf .venv .venv-run dist build bench/out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: .python-is-new-enough
.python-is-new-enough:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ratelimit-rls needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }

# A stamp is as new as the pins it was made from, so nothing is installed twice.
.venv/.stamp: $(PINS) | .python-is-new-enough
	@echo 'Installing what the tests need into .venv …'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q pip
	@$(BIN)/python -m pip install -q --group test --group lint --editable '.[archive]'
	@touch $@

.venv-run/.stamp: $(PINS) | .python-is-new-enough
	@echo 'Installing what serving needs into .venv-run …'
	@test -x .venv-run/bin/python || $(PYTHON) -m venv .venv-run
	@.venv-run/bin/python -m pip install -q pip
	@.venv-run/bin/python -m pip install -q --editable .
	@touch $@
