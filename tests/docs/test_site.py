"""mkdocs.yml: the site is built strictly, every link on it leads somewhere, and it loads nothing from elsewhere."""

import re
import time
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from helpers import ROOT, python_output, served

pytestmark = pytest.mark.slow
REPOSITORY = "https://github.com/you/vanilla-transformer"


class Links(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, page: Path):
        super().__init__()
        self.links, self.loaded, self.anchors = set(), set(), set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        elif given.get("rel") not in ("next", "prev"):
            self.loaded |= {given[name] for name in ("href", "src", "srcset", "poster", "data") if given.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as by `make docs`."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    environment = {"REPOSITORY_URL": REPOSITORY, "NO_MKDOCS_2_WARNING": "1"}
    python_output("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT, env=environment)
    return folder


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    read, dead = cache(Links), []
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 30
    for page in pages:
        for link in read(page).links | read(page).loaded:
            url = urlsplit(link)
            if link in read(page).loaded and (url.scheme or url.netloc):
                is_alive = url.scheme == "data"
            elif link.startswith(REPOSITORY):
                _, path = re.fullmatch(rf"{REPOSITORY}(?:/(blob|tree)/main/([^#]+).*)?/?", link).groups()
                is_alive = path is None or (ROOT / path).exists()
            elif url.scheme or url.netloc:
                is_alive = True
            else:
                target = (page.parent / unquote(url.path)).resolve() if url.path else page
                target = target / "index.html" if target.is_dir() else target
                is_alive = target.exists() and (not url.fragment or unquote(url.fragment) in read(target).anchors)
            if not is_alive:
                dead.append(f"{page.relative_to(site)}: {link}")
    for sheet in [*site.rglob("*.css"), *site.rglob("*.svg")]:  # what they load is inside them
        text = sheet.read_text(encoding="utf-8")
        found = re.findall(r"""@import[^;]+|url\((?!["']?(?:data:|#))[^)]+|\shref=["'](?!#)[^"']+""", text)
        dead += [f"{sheet.relative_to(site)}: {link}" for link in found]
    assert dead == []


def test_a_browser_asks_no_other_server(site, browser):
    """Whatever the scripts do."""
    with served(site) as here:
        for page in ("", "404.html", "explorer/", "paper_to_code/", "walkthrough/01_attention/", "commands/"):
            browser.get(here + page)
            browser.execute_script("sessionStorage.clear()")
            time.sleep(1)  # for what is asked after the page is there
            asked = browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
            assert asked and [url for url in asked if not url.startswith((here, "data:"))] == [], page


def test_names_of_code_and_tests_are_linked_to_their_lines(site):
    text = (site / "paper_to_code" / "index.html").read_text(encoding="utf-8")
    places = re.findall(rf'href="{REPOSITORY}/blob/main/([^"]+)#L(\d+)"[^>]*><code>([\w.]+)</code>', text)
    assert len(places) > 100
    for path, line, name in places:
        assert name.rpartition(".")[2] in (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1], name
