.PHONY: style quality test mutants docs bench

style:    ## rewrite the code in the project's format, the map in CONTRIBUTING.md, and the kept help
	ruff check --fix .
	ruff format .
	python docs/make_map.py
	python docs/make_help.py

quality:  ## check the format, the code, the kept help and the sample dataset
	ruff check .
	ruff format --check .
	python -c "from vanilla_transformer_command import HELP, options_digest as digest; exit((HELP / 'made_for.txt').read_text() != digest() and 'The kept --help is out of date; run make style.')"
	python sample_dataset/make_sample_dataset.py --check

test:     ## the tests that take minutes at most, of the code and then of the documentation
	pytest
	pytest -m "docs and not slow"

mutants:  ## what the tests let through: changes of the code, one at a time; takes minutes
	python tests/mutants.py

docs:     ## the website, into site/
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build

bench:    ## the speed against others; DATA is a directory like Multi30k, MODEL a model that was trained on it
	@test -n "$(DATA)" -a -n "$(MODEL)" || { echo "give both: make bench DATA=... MODEL=..."; exit 2; }
	python benchmarks/train_step.py --data $(DATA)
	python benchmarks/input.py --data $(DATA)
	python benchmarks/end_to_end.py --data $(DATA)
	python benchmarks/decode.py --data $(DATA) --model $(MODEL)
	python benchmarks/scale.py
