# `make demo` and `make test` install everything into .venv; they need only Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

SITE := $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html --conf-dir docs/site . build/site

FUZZ := .venv-fuzz

# A worker runs whole files, so that tests that share a fixture share its cost.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

TF25 := .venv-tf25
PYTHON38 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.8.*/bin/python) $(shell command -v python3.8))

.PHONY: demo shop test test-all test-night durations test-pycoral check static fuzz docs bench bench-recipes bench-others bench-detectors wheel constraints clean

demo: $(READY)  ## train, prune, distil, quantize, check, package and measure a real model; then open runs/digits/report.html
	$(BIN)/python -m compress pipeline.yaml

shop: $(READY)  ## train on your photos, then recognize them on a web page: make shop PHOTOS=FOLDER [MODEL=FILE] [LABEL=COLUMN]
	@test -n "$(PHOTOS)" || { echo "make shop PHOTOS=FOLDER: it has a folder of photos for each product, or a table" >&2; exit 2; }
	@test ! -e shop.yaml || echo "shop.yaml exists, and is used as it is"
	test -e shop.yaml || $(BIN)/python -m compress init "$(PHOTOS)" --learn $(if $(MODEL),--model "$(MODEL)") \
		$(if $(LABEL),--label "$(LABEL)") -o shop.yaml
	$(BIN)/python -m compress shop.yaml
	$(BIN)/python examples/retail/shop.py runs/shop/shop.coralline "$(PHOTOS)"

test: $(READY)  ## before a commit, in minutes: the main job, each importer, task and command once, and all tests that are fast
	$(PYTEST) -m "not long and not night"

test-all: $(READY)  ## all tests that need no device and no compiler
	$(PYTEST)

test-night: $(READY) $(if $(PYTHON38),$(TF25)/ready)  ## fuzzing, faults, interpreters from Python 3.8, TensorFlow 2.5 (needs Python 3.8)
	$(PYTEST) -m night
	$(BIN)/python benchmarks/fuzz.py --seconds $(or $(SECONDS),600)
	$(BIN)/python benchmarks/faults.py --cases $(or $(CASES),200)

durations: $(READY)  ## `make test-all` that writes which tests are long to tests/durations.json
	$(PYTEST) --record-durations

test-pycoral: $(READY)  ## the tests of google-coral/pycoral on ours: make test-pycoral CHECKOUT=its folder, with test_data in it
	CORALLINE_PYCORAL_CHECKOUT=$(CHECKOUT) $(BIN)/python -m pytest -q tests/coralline_pycoral/test_vendor_tests.py

check: static  ## style, types, import rules, links of the manuals, tests of the architecture
	$(BIN)/python -m pytest -q tests/architecture

static: $(READY)  ## `check` without tests: what `make test-all` does not cover
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/mypy --python-version 3.10 deploy coralline_pycoral
	$(BIN)/vermin --no-tips --violations -t=3.7- deploy coralline_pycoral
	$(BIN)/lint-imports
	$(SITE)

fuzz: $(READY) $(if $(COVERAGE),$(FUZZ)/ready)  ## damaged and hostile files of every format: make fuzz [SECONDS=60] [TARGET=tflite]; COVERAGE=1 guides it (atheris)
	$(if $(COVERAGE),$(FUZZ)/bin/python benchmarks/fuzz_coverage.py,$(BIN)/python benchmarks/fuzz.py) --seconds $(or $(SECONDS),60) \
		$(addprefix --target ,$(TARGET))

docs: $(READY)  ## build the manuals as a site in build/site; a broken link is an error
	$(SITE)

bench: $(READY)  ## measure the figures in the README
	$(BIN)/python benchmarks/main_job.py

bench-recipes: $(READY)  ## run the recipes in models/ that are not measured yet; needs the shared test data
	$(BIN)/python benchmarks/recipes.py $(if $(ONLY),--only $(ONLY))

bench-others: $(READY)  ## compare with other tools, each in its own environment; needs the shared test data and a network
	$(BIN)/python benchmarks/other_tools.py $(if $(MODELS),--models $(MODELS))

bench-detectors: $(READY)  ## export detectors and list what becomes of each: make bench-detectors [FILES="a.onnx b.tflite"]
	$(BIN)/python benchmarks/detectors.py $(FILES)

wheel: $(READY)  ## build dist/: coralline, coralline-deploy (the device side), coralline-darwinn (compiled programs), the bill of materials
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/python -m build --wheel --no-isolation --outdir dist packaging/deploy
	$(BIN)/python -m build --wheel --no-isolation --outdir dist packaging/darwinn
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file dist/coralline.cdx.json \
		$(BIN)/python

constraints:  ## pin all packages again by version and hash, the present versions first; needs uv
	uv pip compile --quiet pyproject.toml --extra dev --python-version 3.11.7 --generate-hashes --no-annotate \
		--custom-compile-command "make constraints" --output-file constraints.txt

clean:  ## delete environments, builds and caches; runs/ is kept
	rm -rf $(VENV) $(TF25) $(FUZZ) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

$(TF25)/ready:
	@test -n "$(PYTHON38)" || { echo "TensorFlow 2.5 needs Python 3.8: PYTHON38=/path/to/python3.8" >&2; exit 2; }
	$(PYTHON38) -m venv $(TF25)
	$(TF25)/bin/python -m pip install --quiet --disable-pip-version-check tensorflow-cpu==2.5.3 "numpy~=1.19.2" "protobuf<3.21"
	touch $@

$(FUZZ)/ready: $(READY)
	$(BIN)/python -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(FUZZ)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/coralline.pth"
	touch $@
