"""All rows of the matrix."""

from __future__ import annotations

from . import rows_cli, rows_edits, rows_files, rows_many, rows_poison, rows_proxies, rows_refusals, rows_upstream

ROWS = (
    *rows_files.ROWS,
    *rows_cli.ROWS,
    *rows_upstream.ROWS,
    *rows_many.ROWS,
    *rows_proxies.ROWS,
    *rows_upstream.TEXT_ROWS,
    *rows_upstream.MODEL_ROWS,
    *rows_poison.ROWS,
    *rows_edits.ROWS,
    *rows_refusals.ROWS,
)
