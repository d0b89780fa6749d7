"""What a package index shows of the project: the README, whose links and pictures there have no tree beside them.

`FLASHWRIGHT_PROJECT_URL` names the project's page and `FLASHWRIGHT_FILES_URL` the address below which the files of the
tree are, both as of the build. Links and pictures then lead there; without, links are plain text and a picture is its
description.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PROJECT_URL, FILES_URL = "FLASHWRIGHT_PROJECT_URL", "FLASHWRIGHT_FILES_URL"
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<place>[^)\s]+)\)")


def index_readme(text: str, files_url: str | None) -> str:
    """The README with nothing in it that refers to files beside it; sections of its own stay links."""

    def adapted(link: re.Match[str]) -> str:
        picture, label, place = link.group("picture", "text", "place")
        if place.startswith(("#", "https://", "http://")):
            return link[0]
        if files_url is None:
            return f"*{label}*" if picture else label
        return f"{picture}[{label}]({files_url.rstrip('/')}/{place})"

    return _LINK.sub(adapted, text)


class IndexMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        files_url, project_url = (os.environ.get(name) or None for name in (FILES_URL, PROJECT_URL))
        readme = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_readme(readme, files_url)}
        if project_url is not None:
            metadata["urls"] = {"Homepage": project_url}
            if files_url is not None:
                metadata["urls"]["Changelog"] = f"{files_url.rstrip('/')}/CHANGELOG.md"
