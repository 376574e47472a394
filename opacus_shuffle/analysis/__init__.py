"""Pure mathematics on floats and arrays, one idea per file.

There is no torch and no training. Long proofs are in docs/proofs/.

======================  ==========================================================================
gaussian                the Gaussian mechanism without any shuffler
mean_ratio              Rényi moments of the papers' pair: the mean ratio R of shuffled reports
subsampling             what the paper prints for sampled rounds; composition turns RDP into (ε, δ)
ratio_distribution      the distribution of R from above and from below
opposite_reports        the same for a record that becomes its opposite
discretization          distributions on grids, which both are made of
privacy_loss            composes such distributions over rounds
shuffled_rounds         ε of rounds: the pair's, without the shuffler, and DP-SGD's
gaussian_clones         proved for every data set: reports that look alike hide each other
merge                   few kinds of rounds in the place of many
fenton_wilkinson        the estimate for weight shuffling
advanced_composition    adds its steps up as that paper does
permuted_gaussian       the exact value of a pair under weight shuffling
binomial_sums           sums under binomial noise; sampled_sums adds secret samples of fixed size
======================  ==========================================================================

>>> from opacus_shuffle.analysis import mean_ratio
>>> round(mean_ratio.compute_rdp(noise_multiplier=1.0, num_users=1, orders=4), 12)
2.0
"""
