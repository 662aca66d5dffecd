"""What MkDocs does beside its own work: pages of the repository outside docs/ are pages of the site too.

README.md and the others at the top, and the pages of bench/results, appear below repository/. Links between
them and docs/ are those that work in a checkout; here each is turned into the one that works on the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "repository/"
TARGET = re.compile(r"(\]\(|(?:src|srcset|href)=\"|^\[[\w-]+\]: )([^)\"\s#]+)", re.MULTILINE)


def outside_files() -> list[str]:
    """Return the pages and pictures outside docs/ that the site shows, as paths of the repository."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "bench" / "results").glob("*.md"),
        *(ROOT / "bench" / "results").glob("*.svg"),
    ]
    return sorted(file.relative_to(ROOT).as_posix() for file in found)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add those pages to the files of the site."""
    for path in outside_files():
        files.append(File.generated(config, OUTSIDE + path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each link that leaves or enters docs/ into one of the site."""
    here = page.file.src_uri
    source = here.removeprefix(OUTSIDE) if here.startswith(OUTSIDE) else f"docs/{here}"

    def linked(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path
        if files.get_file_from_path(on_site) is None:
            return match[0]
        return match[1] + posixpath.relpath(on_site, posixpath.dirname(here))

    return TARGET.sub(linked, markdown)
