"""What a run says about itself."""

from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.pairs import Splits
from vanilla_transformer.training.reports import describe_run


def test_languages_of_all_training_files_are_reported(accelerator):
    for directions, source, target in [("en-de en-fr", "en", "de, fr"), ("de-en fr-en", "de, fr", "en")]:
        data = DataOptions(train_file=["x", "y"], train_file_langs=directions.split())
        results = describe_run(data, Splits(), {})
        assert (results["source_lang"], results["target_lang"]) == (source, target)


def test_dataset_is_a_hub_id_or_a_name_without_the_way_there(accelerator):
    """What is published with the results has neither folders nor the password in a URL."""
    files = ["/home/me/a.tsv", "https://me:hunter2@example.org/private/b.csv", "hf://datasets/me/pairs/c.jsonl"]
    files.append("https://example.org/d.csv?token=hunter2&file=secret.csv")
    results = describe_run(DataOptions(train_file=files), Splits(), {})
    assert results["dataset"] == "a.tsv, b.csv, hf://datasets/me/pairs/c.jsonl, d.csv"
