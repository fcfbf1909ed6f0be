"""Sentence pairs from the help of LibreOffice: its paragraphs have the same ids in every language.

apt-get download libreoffice-help-en-us libreoffice-help-es
for package in libreoffice-help-*.deb; do dpkg -x $package help; done
python examples/libreoffice_help.py help en-US es > pairs.txt
"""

import html
import re
import sys
from pathlib import Path

PARAGRAPH = re.compile(r'<(p|h\d|td|li)[^>]* id="([^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)


def paragraphs(folder: Path) -> dict[tuple[str, str], str]:
    """The text of each paragraph, by its file and its id."""
    found = {}
    for page in sorted(folder.rglob("*.html")):
        for _, key, text in PARAGRAPH.findall(page.read_text(encoding="utf-8")):
            found[str(page.relative_to(folder)), key] = " ".join(html.unescape(re.sub("<[^>]+>", "", text)).split())
    return found


def main(folder: str, source: str, target: str):
    """Prints a line for each paragraph: its text in the source language, a tab, its text in the target language."""
    sources, targets = (
        paragraphs(Path(folder, "usr/share/libreoffice/help", name, "text")) for name in (source, target)
    )
    for key, text in sources.items():
        if text and targets.get(key):
            print(text, targets[key], sep="\t")


if __name__ == "__main__":
    main(*sys.argv[1:])
