.PHONY: style quality test bench

style:    ## rewrite the code in the project's format
	ruff check --fix .
	ruff format .

quality:  ## check the format, the code and the sample dataset
	ruff check .
	ruff format --check .
	python sample_dataset/make_sample_dataset.py --check

test:     ## the tests that take minutes at most
	pytest

bench:    ## the speed against others, a page of results each
	@ls benchmarks/*.py >/dev/null 2>&1 || { echo "There are no benchmarks yet."; exit 1; }
	for script in benchmarks/*.py; do python $$script; done
