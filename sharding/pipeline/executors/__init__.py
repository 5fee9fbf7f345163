"""How a pipeline's gradients are computed: in one XLA program (`one_program`), or by a program per task (`per_stage`).

Both run a stage's parts (`stage`), cut out of the equations of its traced function (`equations`, `products`).
"""
