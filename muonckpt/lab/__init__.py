"""What observes and advises: checks, forecasts and the report's page; only commands and the public door import it.

Open ``preflight/preflight`` first.
"""
