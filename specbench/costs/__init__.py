"""Step-cost tables: fit, validate, keep, import and export."""

from specbench.costs.check import MeasuredStep, PolicyCheck, check_table
from specbench.costs.fit import CostSample, fit_cost_table
from specbench.costs.interop import TableFormat, export_table, import_table
from specbench.costs.store import (
    cached_tables,
    check_fingerprint,
    explain_mismatch,
    find_table,
    read_table,
    save_table,
    table_path,
    tables_dir,
    write_table,
)
from specbench.costs.table import ContextCosts, CostCurve, CostTable, validate

__all__ = [
    "ContextCosts",
    "CostCurve",
    "CostSample",
    "CostTable",
    "MeasuredStep",
    "PolicyCheck",
    "TableFormat",
    "cached_tables",
    "check_fingerprint",
    "check_table",
    "explain_mismatch",
    "export_table",
    "find_table",
    "fit_cost_table",
    "import_table",
    "read_table",
    "save_table",
    "table_path",
    "tables_dir",
    "validate",
    "write_table",
]
