"""Packs what `vanilla-transformer new` copies into the wheel; an editable install has it in the checkout."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ("train.py", "push_to_hub.py", "recipes/**/*.yaml", "sample_dataset/*.jsonl")


class ProjectFiles(BuildHookInterface):
    def initialize(self, version: str, build_data: dict):
        if version != "editable":
            root = Path(self.root)
            files = [file.relative_to(root).as_posix() for pattern in FILES for file in root.glob(pattern)]
            build_data["force_include"] = {file: f"vanilla_transformer/project/{file}" for file in files}
