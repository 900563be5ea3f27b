"""The command line: python -m maskpack inspect | doctor | demo.

cli.py         the commands                           files.py, verl_files.py  batches in files
doctor.py      what a registry is missing             suggest.py               specs for fields without one
demo.py, demo_rollout.py   rollouts of a tiny model through two workers
"""
