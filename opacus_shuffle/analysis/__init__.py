"""Pure mathematics on floats and arrays, one idea per file; no torch, no training.

>>> from opacus_shuffle.analysis import mean_ratio
>>> round(mean_ratio.compute_rdp(noise_multiplier=1.0, num_users=1, orders=4), 12)
2.0
"""
