"""A run on one page: what is in its folder, and the page made of it."""

from lightrl.report.page import write_report
from lightrl.report.run_folder import Run, read_rollouts, read_run, read_scalars

__all__ = ["Run", "read_rollouts", "read_run", "read_scalars", "write_report"]
