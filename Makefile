# The single door: `make demo` shows the tool on a sample, `make test` tests it quickly, `make check` is the gate.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SAMPLE := sample_ckpts/map-location-dragged-all.pth

.PHONY: help demo test cover crash fleet check format lint types samples docs bench bugs growth fuzz clean

help:
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ckptmove needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## inspect, convert and verify a sample; nothing is needed before it
	@rm -f mended.pth
	$(BIN)/ckptmove inspect $(SAMPLE) || test $$? -eq 1
	$(BIN)/ckptmove convert $(SAMPLE) --to cuda:0 --output mended.pth
	$(BIN)/ckptmove verify mended.pth --to cuda:0

test: $(STAMP) ## the quick set: the same tests every time, minutes
	$(BIN)/python -m pytest -q --quick -n auto --maxprocesses 8 --dist worksteal

cover: $(STAMP) ## every test, with branch coverage of ckptmove/ at 100 %
	@rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --cov --cov-report=term

crash: $(STAMP) ## kill conversions at every call and at 200 instants, and have every call fail: minutes
	CRASHES=all $(BIN)/python -m pytest -n 2 --dist worksteal tests/crash

fleet: $(STAMP) ## inspect a bucket of 200 checkpoints, and count the requests
	FLEET=all $(BIN)/python -m pytest -n 0 tests/cli/test_fleet.py

check: $(STAMP) lint types cover ## the gate: format, lint, types, every test with coverage

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP) ## put the source into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

samples: $(STAMP) ## write sample_ckpts/ again from its recipe
	$(BIN)/python sample_ckpts/make_samples.py

docs: $(STAMP) ## write docs/rules.md again from the catalogue of findings, and the man page from the commands
	$(BIN)/python docs/make_rules.py > docs/rules.md
	$(BIN)/python docs/make_man.py > docs/ckptmove.1

bench: $(STAMP) ## speed and memory, side by side with torch and cp, in one run
	$(BIN)/python benchmarks/side_by_side.py

bugs: $(STAMP) ## device bugs in training scripts, named and fixed by verify --script: half an hour
	$(BIN)/python benchmarks/device_bugs.py

fuzz: $(STAMP) ## every fuzzer for a minute, on one core; Linux only
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[fuzz]'
	for target in $$($(BIN)/python -m fuzz --list); do $(BIN)/python -m fuzz $$target -max_total_time=60 || exit 1; done

growth: $(STAMP) ## how time and memory grow up to a million tensors, and 3 GB in 1.5 GB of memory: half an hour
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/limited_memory.py

clean:
	rm -rf $(VENV) fuzz/corpus fuzz/found mended.pth device_bugs.tsv build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache
