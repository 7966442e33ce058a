"""The page about settings is the one that the code makes."""

from __future__ import annotations

from pathlib import Path

from service.cli.reference import reference


def test_the_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text() == reference()
