"""Runs in, pages out: a summary as plain data first (summary.py), then the same numbers as text, as one HTML file and as a Chrome trace."""

from .html import render
from .inputs import read_runs
from .summary import RunSummary, Summary, summarize
from .terminal import lines
from .trace import chrome_trace

__all__ = ["RunSummary", "Summary", "chrome_trace", "lines", "read_runs", "render", "summarize"]
