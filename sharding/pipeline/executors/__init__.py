"""Execution of a schedule: one XLA program (`one_program`) or one program per task and device (`per_stage`).

In: the user's stage functions, parameters and a schedule. Out: loss and gradients. Both executors run the forward and
backward programs of a stage (`stage_programs`), partitioned from the equations of its traced function
(`graph/straight_line.py`).
"""
