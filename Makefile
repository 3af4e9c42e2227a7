# Needs Python 3.11+ and Java 17+; everything else goes into .venv and the user's cache folder.
#   make demo    read a Kafka group into a Delta table on this machine, with kills and a check of the result
#   make test    the tests            make unit    the tests that need neither Kafka nor Spark
#   make test-all   also slow tests: notebooks, submitted jobs, Spark Connect, three brokers
#   make prove G=3   the tests of one guarantee, here G3, at each level
#   make check   style and types      make soak    the long tests
#   make bench   this source next to Spark's own connector; ARGS="report --quick", or the name of another benchmark
#   make docs    the site of docs/, into build/site
#   make matrix  the tests on each version of Spark and Kafka that is supported; hours; ARGS="--cell 'Spark 4.0.0'"
#   make structure   files, import levels, cycles, files with one importer, duplicate class names
#   make mutants SEED=1 COUNT=200   random changes of the product's decisions, and which of them no test finds
#   make clean   remove everything that the other targets created here
#   MEMBER_HOST=executor make test   the tests with members beside executors, unless a test sets memberHost

VENV := .venv
STAMP := .stamps/venv
LOCAL := .stamps/local
BIN := $(VENV)/bin
export PYTHON
# Containers often set this. Tests start hundreds of Python processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Test processes: twice the number of cores of a small machine, because many tests wait. With ARGS one process, in which
# -s and --pdb work.
WORKERS ?= $(if $(ARGS),0,4)

.PHONY: demo test test-all prove unit check structure bench matrix soak mutants docs clean tools
.DEFAULT_GOAL := test

demo: $(LOCAL)
	@$(BIN)/python jobs/demo.py

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --durations 20 --durations-min 5 $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --durations 20 --durations-min 5 -m "not soak" $(ARGS)

prove: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not soak" --prove G$(or $(G),$(error which? make prove G=3)) $(ARGS)

unit: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not jvm and not slow and not soak and not full" $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --python-version 3.14 spark_group_source pyspark_kafka_group
	@$(BIN)/vermin --quiet --no-tips --violations --target=3.11- spark_group_source pyspark_kafka_group

structure: $(STAMP)
	@$(BIN)/python -m tests.structure

bench: $(STAMP)
	@$(BIN)/python -m tests.bench $(or $(ARGS),report)

matrix: $(STAMP)
	@$(BIN)/python -m tests.matrix $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m pytest -m soak -o timeout=7200 -o faulthandler_timeout=7190 $(ARGS)

mutants: $(STAMP)
	@$(BIN)/python -m tests.random_mutants map >/dev/null
	@$(BIN)/python -m tests.random_mutants run --seed $(or $(SEED),1) --count $(or $(COUNT),200)
	@$(BIN)/python -m tests.random_mutants show --seed $(or $(SEED),1)

docs: $(STAMP)
	@$(BIN)/python -m sphinx -q -W --keep-going -E -d build/doctrees -c conf/site docs build/site
	@echo "build/site/index.html"

# Checked every time: a machine can lose its Java. Order-only, so that it does not install again.
tools:
	@.ci/setup check

$(STAMP): pyproject.toml | tools
	@.ci/setup venv dev
	@touch $(LOCAL) $@

# What users install; the demo needs no more.
$(LOCAL): pyproject.toml | tools
	@.ci/setup venv local
	@touch $@

clean:
	@rm -rf $(VENV) .stamps .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@rm -rf spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
