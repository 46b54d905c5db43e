# make demo    installs, then runs the block-sparsity study
# make test    installs, then runs every test that this machine can run
# make gallery installs, then runs the quick form of the experiments of docs/experiments.md, into build/results
# make interop installs JAX and PyTorch for the CPU into .venv-interop, then runs the tests of their arrays
# make docs    installs into .venv-docs, then builds docs/_build/html; a warning, a broken link or a lost search word is an error
# make site-check  looks at the built pages in Chromium, which apt installs, and writes screenshots to build/site
# make release builds dist/ for the tag at HEAD, checks it and writes its notes; uploads nothing
# make soak    draws examples for SECONDS, 600 by default, and adds the shares of their bounds to experiments/results/soak.csv
# make types lint cover clean
# Needs make, python3 (3.11 or newer, with venv) and g++. PYTHON=python3.13 picks another Python;
# CUDA=cuda13, CUDA=cuda12 or CUDA= (none) overrides what the NVIDIA driver says. Tests run on all cores at once, but one
# by one where there is a GPU, whose memory some of them measure.

PYTHON ?= python3
VENV   ?= .venv
RUN     = $(VENV)/bin/python
DOCS    = $(VENV)-docs
INTEROP = $(VENV)-interop

ifeq ($(origin CUDA),undefined)
CUDA := $(shell $(PYTHON) -c 'import ctypes; version = ctypes.c_int(); \
  ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)); \
  print("cuda13" if version.value >= 13000 else "cuda12" if version.value >= 12000 else "")' 2>/dev/null)
endif

comma := ,
extra  = $(if $(CUDA),$(comma)$(CUDA))
# The name of the stamp holds the choice of CUDA: another driver, another install.
stamp  = $(VENV)/.installed-$(1)$(if $(CUDA),-$(CUDA))

.PHONY: demo gallery soak test interop docs site-check release types lint cover clean
demo: $(call stamp,experiments)
	$(RUN) -m experiments block_sparsity --speed-seqlens 4096 --repeats 3

GALLERY = selector_shootout chosen_recall nsa_layer crossover pattern_zoo flash_ladder flashattention1_tables \
  memory_traffic numerical_error train_language_model long_range
gallery: $(call stamp,experiments)
	for name in $(GALLERY); do $(RUN) -m experiments $$name || exit; done

SECONDS  ?= 600
EXECUTORS = cpu$(if $(CUDA),$(comma)gpu)
soak: $(call stamp,experiments)
	$(RUN) -m experiments soak --publish --seconds $(SECONDS) --executors $(EXECUTORS)

# Bytecode is kept in the environment: tests start many processes, each of which would compile the library anew.
test: $(call stamp,test)
	PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX='$(abspath $(VENV))/bytecode' $(RUN) -m pytest $(if $(CUDA),,--numprocesses=auto --dist=worksteal)

interop: $(INTEROP)/.installed
	$(INTEROP)/bin/python -m pytest -k 'jax or torch or compiled_step'

# Pages of names and files that are gone would stay otherwise.
docs: $(DOCS)/.installed
	rm -rf docs/generated docs/_build/html
	$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	$(DOCS)/bin/python docs/check_site.py docs/_build/html
	@echo "open docs/_build/html/index.html"

site-check: docs
	$(DOCS)/bin/python -m pip install --disable-pip-version-check --quiet '.[site-check]'
	$(DOCS)/bin/python docs/check_site.py docs/_build/html --browser

release: | $(RUN)
	$(RUN) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --disable-pip-version-check --quiet build twine
	$(VENV)-release/bin/python .ci/release.py

types: $(call stamp,test)
	$(RUN) -m mypy

lint: $(call stamp,test)
	$(RUN) -m flake8 cuflash tests experiments
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(RUN) tests/repository/plain_english.py

cover: $(call stamp,test)
	$(RUN) -m coverage run -m pytest
	$(RUN) -m coverage report

$(call stamp,experiments): setup.cfg pyproject.toml | $(RUN)
	$(RUN) -m pip install --disable-pip-version-check --quiet --editable '.[experiments$(extra)]'
	@touch $@

# Tests run the experiments too, and those of BLAS's threads with the oldest threadpoolctl that setup.cfg allows.
$(call stamp,test): setup.cfg pyproject.toml Makefile | $(RUN)
	$(RUN) -m pip install --disable-pip-version-check --quiet --editable '.[test,experiments$(extra)]'
	$(RUN) -m pip install --disable-pip-version-check --quiet --upgrade --target $(VENV)/threadpoolctl-3.5.0 threadpoolctl==3.5.0
	@touch $@ $(call stamp,experiments)

# Sphinx and its packages stay out of the environment of the tests.
$(DOCS)/.installed: setup.cfg pyproject.toml | $(RUN)
	$(RUN) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[docs]'
	@touch $@

# JAX and PyTorch stay out of it too: `make test` is the same with and without them. setup.cfg says how to
# get PyTorch without CUDA.
$(INTEROP)/.installed: setup.cfg pyproject.toml | $(RUN)
	$(RUN) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[testing,interop,experiments]' 'pytest>=9'
	@touch $@

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cuflash needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.13 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "$(PYTHON) has no venv. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) $(DOCS) $(INTEROP) $(VENV)-release docs/_build docs/generated docs/gallery docs/sg_execution_times.rst build dist *.egg-info .mypy_cache .pytest_cache .hypothesis
