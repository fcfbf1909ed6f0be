"""What mkdocs.yml cannot say: pages from outside docs, notebooks, the command reference, links to code, formulas.

On GitHub the pages link to files of the repository, and they stay as they are. For the site, a link to a file that is
a page there becomes a link to that page, and any other a link to the repository.
"""

import argparse
import os
import re
import runpy
from functools import cache
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import TagRemovePreprocessor

ROOT = Path(__file__).parents[2]

# Pages and pictures of the site that lie outside docs: where they are in the site and in the repository.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "examples.md": "examples/README.md",
}
RESULTS = [path.name for kind in ("md", "png") for path in ROOT.glob(f"benchmarks/results/*.{kind}")]
OUTSIDE |= {f"results/{name}": f"benchmarks/results/{name}" for name in RESULTS}
NOTEBOOKS = [path.relative_to(ROOT / "docs") for path in sorted(ROOT.glob("docs/walkthrough/[0-9]*.ipynb"))]
ORIGINS = OUTSIDE | {str(path.with_suffix(".md")): f"docs/{path}" for path in NOTEBOOKS}


# The page to play with fills a window of its own; this page shows and links it.
EXPLORER = """---
hide: [navigation, toc]
---

# Explorer

[Open it in a window of its own](explorer.html).

<iframe src="../explorer.html" title="Explorer" style="width: 100%; height: 80vh; border: 1px solid #cccccc"></iframe>
"""
HAS_EXPLORER = (ROOT / "docs" / "explorer.html").exists()


def on_config(config):
    """Lists the notebooks and the explorer in the navigation."""
    sections = [name for entry in config.nav for name in entry]
    place = sections.index("Walkthrough")
    config.nav[place]["Walkthrough"][1:1] = [str(path.with_suffix(".md")) for path in NOTEBOOKS]
    if HAS_EXPLORER:
        config.nav.insert(place + 1, "explorer.md")


def on_files(files, config):
    """Adds the pages that are not Markdown files in docs."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_bytes()))
    files.append(File.generated(config, "commands.md", content="\n".join(command_reference())))
    if HAS_EXPLORER:
        files.append(File.generated(config, "explorer.md", content=EXPLORER))
    for path in NOTEBOOKS:
        names = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
        exporter = MarkdownExporter()
        exporter.register_preprocessor(TagRemovePreprocessor(remove_cell_tags={"setup"}), enabled=True)
        text, resources = exporter.from_filename(ROOT / "docs" / path, names)
        text = re.sub(
            r"(?m)^\[(\S+)\]: data:\S+$", r"[\1]: \1", text
        )  # the pictures themselves, not their copies as PNG
        files.append(File.generated(config, str(path.with_suffix(".md")), content=text))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, str(path.parent / name), content=content))


# ------------------------------------------------------------------------------------------------------------- links


def on_page_markdown(markdown, page, config, files):
    """Turns links to files of the repository into links of the site."""
    here = page.file.src_uri
    origin = ORIGINS.get(here, f"docs/{here}")
    pages = {ORIGINS.get(file.src_uri, f"docs/{file.src_uri}"): file.src_uri for file in files if is_in_site(file)}

    def link_to(match: re.Match) -> str:
        before, link, after = match.groups()
        path, separator, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(origin), path))
        if ":" in link or not path or not (ROOT / target).exists():  # a picture of a notebook exists on the site only
            return match[0]
        if found := pages.get(target) or pages.get(f"{target}/README.md"):
            path = os.path.relpath(found, os.path.dirname(here))
        else:
            path = f"{config.repo_url}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"
        return f"{before}{path}{separator}{anchor}{after}"

    def link_to_test(match: re.Match) -> str:
        place = tests().get(match[1])
        return f"[`{match[1]}`]({config.repo_url}/blob/main/{place})" if place else match[0]

    def link_to_code(match: re.Match) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(origin), labels[match[1]]))
        names = re.findall(r"`([\w.]+)`", match[2])
        links = [f"[`{name}`]({config.repo_url}/blob/main/{path}#L{line_of(path, name)})" for name in names]
        return f"[{match[1]}]: {', '.join(links)}"

    labels = dict(re.findall(r"(?m)^\[([\w.]+)\]: (\S+)$", markdown))
    parts = re.split(r"(?ms)(^```.*?^```$)", markdown)  # every other one is a block of code
    for number in range(0, len(parts), 2):
        for pattern in (r"(\]\()([^)\s]+)(\))", r"(?m)(^\[[^\]]+\]: )(\S+)($)", r'((?:src|srcset|href)=")([^"]+)(")'):
            parts[number] = re.sub(pattern, link_to, parts[number])
        parts[number] = re.sub(r"\[?`(test_\w+)`(?:\]\([^)]+\))?", link_to_test, parts[number])
        parts[number] = re.sub(r"\[([\w.]+)\]: (`[\w.]+`(?:,\s+`[\w.]+`)*)", link_to_code, parts[number])
    return "".join(parts)


def is_in_site(file) -> bool:
    return file.inclusion.is_included() and not file.src_uri.endswith((".py", ".ipynb"))


@cache
def tests() -> dict[str, str]:
    """Where each test is: file#Lline."""
    found = {}
    for path in (ROOT / "tests").glob("**/test_*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if match := re.match(r"def (test_\w+)", line):
                found[match[1]] = f"{path.relative_to(ROOT).as_posix()}#L{number}"
    return found


def line_of(path: str, name: str) -> int:
    """The line of a file that defines a name, or Class.name; 1 if it is inherited from elsewhere."""
    text = (ROOT / path).read_text(encoding="utf-8")
    owner, _, member = name.rpartition(".")
    start = re.search(rf"(?m)^class {owner}\b", text).start() if owner else 0
    found = re.compile(rf"(?m)(?:^ *(?:def |class )?|self\.){member}\b(?=[(:, =])").search(text, start)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def on_page_content(html, page, config, files):
    """Draws formulas without a script, and takes the brackets from names that docstrings write as [`Name`]."""

    def formula(match: re.Match) -> str:
        inline, block = match.groups()
        latex = re.sub(r"&(lt|gt|amp);", lambda entity: {"lt": "<", "gt": ">", "amp": "&"}[entity[1]], inline or block)
        if inline:
            return convert(latex, display="inline")
        return f'<div class="formula">{convert(latex, display="block")}</div>'  # wider than a phone, it scrolls

    html = re.sub(r'<\w+ class="arithmatex">\s*(?:\\\((.*?)\\\)|\\\[(.*?)\\\])\s*</\w+>', formula, html)
    return re.sub(r"\[(<code>\w+</code>)\]", r"\1", html)


def on_post_page(output, page, config):
    """Keeps the theme's script from asking GitHub about the repository, which would tell GitHub of each visitor."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content, template_name, config):
    return on_post_page(output_content, None, config)  # of 404.html


# ------------------------------------------------------------------------------------------------- command reference


def command_reference():
    """The lines of a page with every option of every command, from their parsers."""
    from vanilla_transformer.__main__ import VERBS, load_verb
    from vanilla_transformer.training.recipe import make_parser

    yield "# Commands\n\nWritten from the parsers when the site is built; `--help` prints the same.\n"
    push_to_hub = runpy.run_path(str(ROOT / "push_to_hub.py"))
    parsers = {"train.py": make_parser(), "push_to_hub.py": push_to_hub["make_parser"]()}
    for verb in VERBS:
        _, parser = load_verb(verb)
        subcommands = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers |= {f"{parser.prog} {name}": one for choices in subcommands for name, one in choices.items()} or {
            parser.prog: parser
        }
    for name, parser in parsers.items():
        paragraph = re.split(r"\n\nexamples?:", parser.description)[0].strip()
        yield f"## {name}\n\n{paragraph}\n\n```text\n{parser.format_usage().strip()}\n```\n"
        for group in parser._action_groups:
            rows = [row(parser, action) for action in group._group_actions if action.help != argparse.SUPPRESS]
            rows = [line for line in rows if line]
            if rows:
                if len(parser._action_groups) > 3:
                    yield f"### {name}: {group.title}\n"
                yield "\n".join(["| option | meaning |", "|---|---|", *rows, ""])


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str | None:
    """A row of the table of options."""
    if isinstance(action, argparse._HelpAction):
        return None
    spellings = [one for one in action.option_strings if "-" not in one.lstrip("-")] or [action.metavar or action.dest]
    formatter = argparse.HelpFormatter(parser.prog)
    text = formatter._expand_help(action) if action.help else ""
    if action.default not in (None, False, argparse.SUPPRESS, []) and "default" not in text:
        text += f" (default: {action.default})"
    if action.choices is not None and not all(str(choice) in text for choice in action.choices):
        text += f": {', '.join(map(str, action.choices))}"
    cells = [f"`{', '.join(spellings)}`", " ".join(text.split()).replace("<", "&lt;")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
