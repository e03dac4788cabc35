"""A run: verifying its steps, the record of its resumes, and the series that saves and restores.

Open ``step_folder`` first.
"""
