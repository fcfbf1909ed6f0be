# /// script
# requires-python = ">=3.11"
# dependencies = ["vanilla-transformer"]
# tool.uv.sources.vanilla-transformer = {path = ".", editable = true}
# ///
"""Push a trained model to the Hugging Face Hub.

Model, tokenizer, code, card, results and recipe go up in one commit; checkpoints, optimizer state and other files of
the directory never do. A missing model card (README.md) is written from the results of the run. What goes up is
checked first: model and tokenizer are loaded in a fresh process, as a visitor of the Hub loads them, and translate a
sentence. The code is this package's, whatever is in the directory, unless --trust_remote_code is given. Log in with
`hf auth login`, or set HF_TOKEN.

With --native the model goes up as a Marian, Pegasus or Blenderbot model of transformers, which computes the same and
loads without remote code. Its card is written from the results of the run.

examples:
  python push_to_hub.py outputs/sample --repo_id you/model --dry_run      what would be pushed; needs no network
  python push_to_hub.py outputs/sample                                    to sample in your own namespace
  python push_to_hub.py outputs/sample --repo_id you/model --private
  python push_to_hub.py outputs/sample --repo_id you/model --revision v2  to a branch
  python push_to_hub.py outputs/sample --repo_id team/model --create_pr   as a pull request
  python push_to_hub.py outputs/sample --repo_id you/model-native --native
  python push_to_hub.py outputs/sample --repo_id you/model --space you/demo
                                      also a Space: the page of `vanilla-transformer demo`, for the pushed model
"""

import argparse
import sys
from pathlib import Path

from vanilla_transformer.errors import UserError, configure_messages
from vanilla_transformer.hub.space import push_space, space_files
from vanilla_transformer.hub.upload import check_push, push, staged, translate_in_fresh_process
from vanilla_transformer.sentences_vanilla_transformer import InputError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="push_to_hub.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="the --output_dir of a finished training run")
    parser.add_argument("--repo_id", help="the repository (default: the name of the directory, in your namespace)")
    parser.add_argument("--private", action="store_true", help="create a private repository; a public one is refused")
    parser.add_argument("--revision", help="the branch to push to, created if needed (default: main)")
    parser.add_argument("--commit_message", help="the first line of the commit")
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead")
    parser.add_argument("--space", help="also upload a Space that shows the model in a browser")
    parser.add_argument("--native", action="store_true", help="push it in a form that loads without remote code")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run and push the code of the directory, not this package's"
    )
    parser.add_argument("--dry_run", action="store_true", help="check, write a missing card, list files; push nothing")
    return parser


def main(argv: list[str] | None = None):
    options = vars(make_parser().parse_args(argv))
    model_dir, space = options.pop("model_dir"), options.pop("space")
    if space and options["create_pr"]:
        raise UserError("--space cannot show a model that is still in a pull request; drop --space or --create_pr.")
    if space and options["native"]:
        raise UserError("--space shows a model in the form of this package; drop --native.")
    if options.pop("dry_run"):
        names = ("repo_id", "revision", "native", "trust_remote_code")
        return dry_run(model_dir, space, **{name: options[name] for name in names})
    if space:
        space = check_push(space, private=options["private"], repo_type="space")
        options["repo_id"] = check_push(options["repo_id"], model_dir, private=options["private"])
    commit = push(model_dir, **options)
    print(f"The model is at {commit.pr_url or commit.commit_url}")
    if space:
        page = push_space(space, options["repo_id"], options["revision"], options["private"])
        print(f"The Space is at {page.repo_url}")
        if options["private"]:
            print("Its settings need a secret HF_TOKEN that may read the private model.")


def dry_run(model_dir: str, space: str | None, repo_id: str | None, **options):
    with staged(model_dir, repo_id, **options) as folder:
        trusted = options["trust_remote_code"]
        print(f"It loads in a fresh process, and translates: {translate_in_fresh_process(folder, trusted)}")
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    list_files(sizes, repo_id or "a repository named after the directory")
    for link in filter(Path.is_symlink, (Path(model_dir, name) for name in sorted(sizes))):
        print(f"{link} is a link to {link.resolve()}, which would be sent.")
    if space:
        files = space_files(repo_id or model_dir)
        list_files({path: len(content) for path, content in files.items()}, f"the Space {space}")


def list_files(sizes: dict[str, int], repository: str):
    print(f"A push would send, in one commit to {repository}:")
    for path, size in sorted(sizes.items()):
        print(f"{size:>15,}  {path}")
    print(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")


if __name__ == "__main__":
    configure_messages()
    try:
        main()
    except InputError as error:
        print(f"push_to_hub.py: error: {error}", file=sys.stderr)
        sys.exit(2)
