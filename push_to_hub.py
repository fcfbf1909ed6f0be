"""Push a trained model to the Hugging Face Hub.

python push_to_hub.py outputs/sample --repo_id you/model --dry_run     # what would go up; needs no token, no network
python push_to_hub.py outputs/sample --repo_id you/model --private
"""

import argparse
import sys

from vanilla_transformer.errors import UserError
from vanilla_transformer.hub.model_card import write_model_card
from vanilla_transformer.hub.upload import check_model_directory, check_repo_id, files_to_upload, push

DESCRIPTION = """\
Push a trained model to the Hugging Face Hub.

The directory is checked first: its model and tokenizer are loaded in a fresh process by the code that lies beside
them, as a visitor of the Hub will do, and translate a sentence. A model card, README.md, is written from the run's
results if there is none. Then model, tokenizer, code, card, results and recipe go up in one commit; checkpoints and
optimiser state never do. Log in before by `hf auth login`, or set HF_TOKEN."""

EXAMPLES = """\
examples:
  python push_to_hub.py outputs/sample --repo_id you/model --dry_run      what would go up, without a network
  python push_to_hub.py outputs/sample                                    to sample in your own namespace
  python push_to_hub.py outputs/sample --repo_id you/model --private
  python push_to_hub.py outputs/sample --repo_id you/model --revision v2  to a branch
  python push_to_hub.py outputs/sample --repo_id team/model --create_pr   propose it to others"""


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="push_to_hub.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="the --output_dir of a finished training run")
    parser.add_argument("--repo_id", help="the repository, like you/model (default: the directory's name, yours)")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", help="the branch to push to, made if need be (default: main)")
    parser.add_argument("--commit_message", help="the first line of the commit")
    parser.add_argument("--create_pr", action="store_true", help="propose the commit as a pull request")
    parser.add_argument(
        "--dry_run", action="store_true", help="check, write the card and list the files; send nothing"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None):
    options = vars(parse_options(argv))
    model_dir, is_dry_run = options.pop("model_dir"), options.pop("dry_run")
    if is_dry_run:
        dry_run(model_dir, options["repo_id"])
        return
    commit = push(model_dir, **options)
    print(f"The model is at {commit.pr_url or commit.commit_url}")


def dry_run(model_dir: str, repo_id: str | None):
    """All of a push but the sending."""
    if repo_id is not None:
        check_repo_id(repo_id)
    print(f"It loads in a fresh process, and translates: {check_model_directory(model_dir)}")
    files = files_to_upload(model_dir, repo_id)
    if "README.md" not in files:
        print(f"Wrote the model card {write_model_card(model_dir)}.")
        files = files_to_upload(model_dir, repo_id)
    sizes = {path: len(file) if isinstance(file, bytes) else file.stat().st_size for path, file in files.items()}
    print(f"A push would send, in one commit to {repo_id or 'a repository of the name of the directory'}:")
    for path, size in sizes.items():
        print(f"{size:>15,}  {path}")
    print(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"push_to_hub.py: error: {error}", file=sys.stderr)
        sys.exit(2)
