"""What observes and advises: the doctor, forecasts and the report's page; only commands and the public door import it.

Open ``doctor/doctor`` first.
"""
