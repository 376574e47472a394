"""One step of a private run: clipping, sums, noise, and the permutation of the weights.

Start with :meth:`~opacus_shuffle.engine.step.private_optimizer.PrivateOptimizer.pre_step`.
"""
