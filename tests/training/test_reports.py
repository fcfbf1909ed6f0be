"""What a run says about itself."""

from vanilla_transformer.training.arguments import parse_arguments
from vanilla_transformer.training.reports import describe_run


def test_languages_of_all_training_files_are_reported(accelerator):
    argv = ["--train_file", "x", "y", "--train_file_langs"]
    for directions, source, target in [("en-de en-fr", "en", "de, fr"), ("de-en fr-en", "de, fr", "en")]:
        results = describe_run(parse_arguments([*argv, *directions.split()]), {}, accelerator)
        assert (results["source_lang"], results["target_lang"]) == (source, target)
